"""`params_ema`: an average of the weights in float32, for evaluation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpx import _checks, _trees
from mpx._transforms.upcast import settled, widen
from mpx._writeback import landed


class ParamsEmaState(NamedTuple):
    """State of `params_ema`.

    Attributes:
        weight: float32 scalar, the sum of the weights of all averaged steps, by which a plain average would have to be
            divided.
        ema: a tree like the parameters; the average of each floating leaf, float32 (or wider, as the leaf);
            `optax.MaskedNode` for all others.
    """

    weight: jax.Array
    ema: Any


def params_ema(decay: float, *, debias: bool = True) -> optax.GradientTransformationExtraArgs:
    """Keeps an exponential moving average of the parameters in float32, and changes no update.

    The last element *inside* `master_weights`, where parameters are the float32 masters:

        master_weights(optax.chain(optax.adamw(1e-3), params_ema(0.999)))

    With `p` the parameters after the step and `d` the decay,

        weight = d * weight + (1 - d)
        ema    = ema + (1 - d) / weight * (p - ema)

    where `weight` starts at 0 (debiased: the first average is the first parameters, as in Adam) or at 1 (the average
    starts with the initial parameters). `ema_params` returns the average. A skipped step does not change it.

    A bfloat16 average stands still where `(1 - d) * (p - ema)` is less than half the distance to its next number: with
    a decay of 0.999 on its way from 0 to 1 it stops at 0.5. In float32 what is lost like that is less than
    `6e-8 / (1 - d)` of the weight. Outside of masters, the last element of the chain, it averages 16-bit parameters as
    they are stored.

    Args:
        decay: at least 0 and below 1. The average reaches back about `1 / (1 - decay)` steps.
        debias: whether the initial parameters have no weight.

    Returns:
        A transformation with state `ParamsEmaState`, of 4 bytes a parameter.

    Raises:
        ValueError: if `decay` is out of range; at `update`, without parameters, or with updates of other shapes.

    Example:
        >>> tx = optax.chain(optax.sgd(1.0), params_ema(0.5))
        >>> params = jnp.zeros(())
        >>> state = tx.init(params)
        >>> for _ in range(2):  # to -1 and -2
        ...     updates, state = tx.update(jnp.ones(()), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> print(ema_params(state))  # (0.25 * -1 + 0.5 * -2) / 0.75
        -1.6666667

    References:
        Polyak and Juditsky 1992; the correction is that of Kingma and Ba 2015, Adam (arXiv 1412.6980).
    """
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
        raise ValueError(f"`params_ema`: `decay` must be a number from 0 to below 1, but got {decay!r}.")

    def init_fn(params):
        kept = jax.tree.map(lambda p: p if _trees.is_floating(p) else optax.MaskedNode(), params)
        ema = settled(widen(kept, np.dtype(np.float32)), params)
        return ParamsEmaState(jnp.full((), 0.0 if debias else 1.0, np.float32), ema)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        _checks.require_params(params, "params_ema")
        _checks.require_state(state, ParamsEmaState, "params_ema")
        _checks.require_same_shapes(updates, params, "params_ema")
        # The step is taken from 1 - decay as the caller wrote it: in float32, 1 - 0.9999 has an error of 2e-4.
        weight = np.float32(decay) * state.weight + np.float32(1 - decay)
        step = np.float32(1 - decay) / weight
        average = lambda p, ema, update: ema if _trees.is_masked(ema) else _averaged(p, ema, update, step)
        return updates, ParamsEmaState(weight, jax.tree.map(average, params, state.ema, updates))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _averaged(p: jax.Array, ema: jax.Array, update: jax.Array, step: jax.Array) -> jax.Array:
    """The average after `optax.apply_updates`."""
    narrow = _trees.is_narrower(p, np.dtype(np.float32))
    new = landed(p, update.astype(np.float32)) if narrow else (p + update.astype(p.dtype)).astype(ema.dtype)
    return jnp.where(step == 1, new, ema + step.astype(ema.dtype) * (new - ema))
