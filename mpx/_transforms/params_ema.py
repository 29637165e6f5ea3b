"""`params_ema`: average the weights in float32, for evaluation."""

import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpx import _errors, _trees
from mpx._stored.roles import register_state
from mpx._transforms.float32_world import stable_state, upcast_tree
from mpx._writeback import applied_value


@register_state(averaged_steps="count", ema="average")
class ParamsEmaState(NamedTuple):
    """State of `params_ema`.

    Attributes:
        averaged_steps: int32 scalar.
        ema: a tree like the parameters: the average of each floating leaf, float32 (or wider, as the leaf);
            `optax.MaskedNode` for all other leaves.
    """

    averaged_steps: jax.Array
    ema: Any


def params_ema(decay: float, *, debias: bool = True) -> optax.GradientTransformationExtraArgs:
    """Keep an exponential moving average of the parameters in float32, and change no update.

    Put it last in the chain *inside* `master_weights`, where parameters are the float32 masters:

        master_weights(optax.chain(optax.adamw(1e-3), params_ema(0.999)))

    With `p` the parameters after step `t` and `d` the decay,

        ema = ema + (1 - d) / weight * (p - ema)

    where `weight` is `1 - d**t` (debiased: the first average is the first parameters, as in Adam) or 1 (the average
    starts with the initial parameters). `averaged_params` returns the average. A step that `loss_scaling` around this
    skips does not change it.

    An average stands still where `(1 - d) * (p - ema)` is less than half the distance to its next number. Float32 loses
    less than `6e-8 / (1 - d)` of the weight so. At the end of a chain without masters, this averages the stored,
    rounded 16-bit parameters.

    Args:
        decay: at least 0 and below 1. The average reaches back about `1 / (1 - decay)` steps.
        debias: whether to leave the initial parameters out of the average.

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
        >>> print(averaged_params(state))  # (0.25 * -1 + 0.5 * -2) / 0.75
        -1.6666667

    References:
        Polyak and Juditsky 1992; for the correction, Kingma and Ba 2015, Adam (arXiv 1412.6980).
    """
    if isinstance(decay, bool) or not isinstance(decay, numbers.Real) or not 0 <= decay < 1:
        raise ValueError(f"`params_ema`: `decay` must be a number from 0 to below 1, but got {decay!r}.")
    decay = float(decay)
    log_decay = math.log(decay) if decay else -math.inf

    def init_fn(params):
        kept = jax.tree.map(lambda p: p if _trees.is_floating(p) else optax.MaskedNode(), params)
        ema = stable_state(upcast_tree(kept, np.dtype(np.float32)), params)
        return ParamsEmaState(jnp.zeros((), np.int32), ema)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        _errors.require_step("params_ema", ParamsEmaState, state, params, updates)
        steps = jnp.asarray(optax.safe_increment(state.averaged_steps))
        # From logarithms: in float32, 0.9999 has an error of a hundredth of a percent of its distance to 1.
        weight = -jnp.expm1(steps.astype(np.float32) * np.float32(log_decay)) if debias else jnp.ones((), np.float32)
        step = jnp.where(debias & (steps == 1), np.float32(1), np.float32(1 - decay) / weight)
        average = lambda p, ema, update: ema if _trees.is_masked(ema) else _averaged(p, ema, update, step)
        return updates, ParamsEmaState(steps, jax.tree.map(average, params, state.ema, updates))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _averaged(p: jax.Array, ema: jax.Array, update: jax.Array, step: jax.Array) -> jax.Array:
    """Return the average after `optax.apply_updates`."""
    narrow = _trees.is_narrower(p)
    new = applied_value(p, update.astype(np.float32)) if narrow else (p + update.astype(p.dtype)).astype(ema.dtype)
    is_new = (step == 1) | (new == ema)  # an infinite weight stays: inf - inf is NaN
    return jnp.where(is_new, new, ema + step.astype(ema.dtype) * (new - ema))
