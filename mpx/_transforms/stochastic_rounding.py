"""`stochastic_rounding`: round 16-bit parameters at random, so that the mean of what is
added is the update.
"""

from typing import NamedTuple

import jax
import numpy as np
import optax

from mpx import _errors, _trees, formats
from mpx._chain import FinalUpdates
from mpx._noise import kept_key, keys_of_step
from mpx._stored.roles import register_state
from mpx._writeback import landing_update


@register_state(writes_back="stochastic_rounding", key="key")
class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
        key: the raw data (uint32) of the PRNG key for the next step; checkpoints hold
            it like any array.
    """

    key: jax.Array


def stochastic_rounding(
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Round 16-bit parameters up or down at random, so that the mean of what is added
    is the update.

    Put it last in a chain. An update of a hundredth of the distance to the next number
    moves one weight in a hundred all the way, instead of none. It stores nothing but a
    key, and adds noise where masters and Kahan summation add none. Inside
    `jax.shard_map` over sharded parameters every device draws the same noise for its
    part.

    Args:
        key: a PRNG key, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`);
            `jax.random.key(0)` if None. It is copied, so that donating the state does
            not delete it. Equal keys give equal training runs.

    Returns:
        A transformation with state `StochasticRoundingState`. Its updates are float32
        for 16-bit parameters. Updates of wider parameters pass through.

    Example:
        >>> tx = optax.chain(upcast(optax.sgd(1e-3)), stochastic_rounding())
        >>> params = jnp.ones(1000, jnp.bfloat16)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(jnp.ones(1000), state, params)
        >>> params = optax.apply_updates(params, updates)
        >>> (
        ...     bool(abs(params.astype(jnp.float32).mean() - 0.999) < 2e-4),
        ...     len(set(params.tolist())),
        ... )
        (True, 2)

    References:
        Gupta et al. 2015, "Deep Learning with Limited Numerical Precision"; for
        bfloat16 weights, Zamirai et al. 2020 (arXiv 2010.06192).
    """
    key = None if key is None else _errors.one_key(key, "stochastic_rounding")

    def init_fn(params):
        del params
        return StochasticRoundingState(kept_key(key))

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        _errors.require_step(
            "stochastic_rounding", StochasticRoundingState, state, params, updates
        )
        _errors.require_differentiable(updates, "stochastic_rounding")
        leaves, treedef = jax.tree.flatten(_errors.trained(params, updates))
        keys, next_key = keys_of_step(
            state.key, key, len(leaves), "stochastic_rounding"
        )
        new = map(_step, keys, leaves, treedef.flatten_up_to(updates))
        return treedef.unflatten(new), StochasticRoundingState(next_key)

    return FinalUpdates.of((init_fn, update_fn), "stochastic_rounding")


# traced once for all parameters of a shape: a step of 100 takes 0.16 s, and else 0.6
@jax.jit
def _step(key: jax.Array, p: jax.Array, update: jax.Array) -> jax.Array:
    if not _trees.is_narrower(p):
        return update
    wanted = p.astype(np.float32) + update.astype(np.float32)
    new = formats.stochastic_round(key, wanted, p.dtype).astype(np.float32)
    return landing_update(p, new, "stochastic_rounding")
