"""Check whether a training run still trains."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from mpx import _errors, _trees
from mpx._transforms.loss_scaling import loss_scaling_state


class StuckError(RuntimeError):
    """A training run does nothing but skip steps; `check_health` raises this and says where to look."""


def check_health(opt_state: optax.OptState, *, params: Any = None, max_stuck_steps: int = 10) -> None:
    """Raise `StuckError` once a training run skips step after step, and name the gradient at fault.

    A skipped step is no fault as long as the loss scale can shrink. But when gradients stay infinite or NaN at its
    minimum (or under a scale that does not adapt), no scale helps. Call this outside of `jax.jit`, such as where the
    loop prints the loss. The counter stays until a step is good, so a check now and then misses nothing.

    Args:
        opt_state: the state of any transformation with a `loss_scaling` in it.
        params: the parameters, or any tree like the gradients, to name the first bad gradient by its path.
        max_stuck_steps: the number of steps, skipped in a row at the smallest scale, that is too many.

    Example:
        >>> tx = loss_scaling(optax.sgd(0.1), DynamicLossScale(2.0))
        >>> params = {"embed": jnp.ones(2), "head": jnp.ones(2)}
        >>> state = tx.init(params)
        >>> bad = {"embed": jnp.ones(2), "head": jnp.array([1.0, jnp.inf])}
        >>> for _ in range(3):
        ...     _, state = tx.update(bad, state)  # the scale is 2, 1, 1
        >>> check_health(state, params=params)
    """
    if not _errors.is_integer(max_stuck_steps) or max_stuck_steps < 1:
        raise ValueError(f"`check_health`: `max_stuck_steps` must be an integer above 0, but got {max_stuck_steps!r}.")
    state = loss_scaling_state(opt_state, "check_health")
    if state is None:
        raise ValueError(
            "`check_health`: nothing in this optimizer state watches gradients. Put `loss_scaling` around the rule; "
            "`loss_scaling(inner, NoOpLossScale())` does it without scaling."
        )
    if isinstance(state.stuck_steps, Tracer):
        raise TypeError(
            "`check_health` reads numbers: call it outside of `jax.jit`, on the state that a step returned."
        )
    if np.ndim(state.stuck_steps):
        raise ValueError(
            f"`check_health` needs the state of one training run, but `stuck_steps` has shape "
            f"{np.shape(state.stuck_steps)}. Check each: `jax.tree.map(lambda x: x[i], opt_state)`."
        )
    if state.stuck_steps < max_stuck_steps:
        return
    stuck, scale, skipped = int(state.stuck_steps), float(state.loss_scale), int(state.skipped_steps)
    smaller = f"\nA smaller loss scale may be enough too: allow the scale to go below {scale:g}." if scale > 1 else ""
    raise StuckError(
        f"`check_health`: {stuck} steps in a row were skipped at a loss scale of {scale:g}, which does not shrink any "
        f"further ({skipped} skipped in all). In the last one, the first gradient that was infinite or NaN was "
        f"{_named(int(state.first_nonfinite), params)}.\nLook for infinities and NaN in the batch, in the parameters "
        "and in that layer. (If the loss is infinite or NaN, so are all gradients, and the first one says nothing of "
        f"its layer.) If there are none, go back to the last checkpoint and lower the learning rate.{smaller}"
    )


def _named(position: int, params: Any) -> str:
    """Name a gradient by its position, and by its path if a tree is given."""
    number = f"number {position} (from 0, in the order of `jax.tree.leaves`)"
    if params is None:
        return f"{number}; `check_health(opt_state, params=params)` tells its name"
    leaves = zip(_trees.path_names(params).values(), jax.tree.leaves(params), strict=True)
    names = [name for name, x in leaves if _trees.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)]
    if position >= len(names):
        return f"{number}, but `params` has {len(names)} floating leaves: give a tree like the gradients"
    return repr(names[position])
