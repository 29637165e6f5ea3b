"""Check whether a training run still trains."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from mpx import _errors, _trees
from mpx._inspect.check_chain import require_no_state_behind
from mpx._stored.leaves import leaves_of
from mpx._transforms.loss_scaling import loss_scaling_state


class StuckError(RuntimeError):
    """A training run does nothing but skip steps; `check_health` raises this and says
    where to look.
    """


def check_health(
    opt_state: optax.OptState, *, params: Any = None, max_stuck_steps: int = 10
) -> None:
    """Raise `StuckError` once no loss scale helps: steps are skipped in a row at the
    smallest one.

    Call this outside of `jax.jit`, such as where the loop prints the loss. The counter
    stays until a step is good, so a check now and then misses nothing. A state behind
    the loss scale, which `check_chain` refuses, is a ValueError.

    Args:
        opt_state: the state of any transformation with a `loss_scaling` in it.
        params: the parameters, or any tree like the gradients, to name the first bad
            gradient by its path.
        max_stuck_steps: the number of steps, skipped in a row at the smallest scale,
            that is too many.

    Example:
        >>> params = {"embed": jnp.ones(2), "head": jnp.ones(2)}
        >>> check_health(
        ...     loss_scaling(optax.sgd(0.1)).init(params), params=params
        ... )  # no step was skipped
    """
    if not _errors.is_integer(max_stuck_steps) or max_stuck_steps < 1:
        raise ValueError(
            "`check_health`: `max_stuck_steps` must be an integer above 0, but got"
            f" {max_stuck_steps!r}."
        )
    state = loss_scaling_state(opt_state, "check_health")
    if state is None:
        raise ValueError(
            "`check_health`: nothing in this optimizer state watches gradients. Put"
            " `loss_scaling` around the rule; `loss_scaling(inner, NoOpLossScale())`"
            " does it without scaling."
        )
    require_no_state_behind(leaves_of(opt_state), "check_health")
    if isinstance(state.stuck_steps, Tracer) or np.ndim(state.stuck_steps):
        raise TypeError(
            "`check_health` needs the state of one training run, but `stuck_steps` is"
            f" {state.stuck_steps}: call it outside of `jax.jit`, for each run of a"
            " `jax.vmap` on `jax.tree.map(lambda x: x[i], opt_state)`."
        )
    if state.stuck_steps < max_stuck_steps:
        return
    scale = float(state.loss_scale)
    smaller = (
        "\nA smaller loss scale may be enough too: allow the scale to go below"
        f" {scale:g}."
        if scale > 1
        else ""
    )
    raise StuckError(
        f"`check_health`: {state.stuck_steps} steps in a row were skipped at a loss"
        f" scale of {scale:g}, which does not shrink any further"
        f" ({state.skipped_steps} skipped in all). In the last one, the first gradient"
        " that was infinite or NaN was"
        f" {_named(int(state.first_nonfinite), params)}.\nLook for infinities and NaN"
        " in the batch, in the parameters and in that layer. (If the loss is infinite"
        " or NaN, so are all gradients, and the first one says nothing of its layer.)"
        " If there are none, go back to the last checkpoint and lower the learning"
        f" rate.{smaller}"
    )


def _named(position: int, params: Any) -> str:
    """Name a gradient by its path in a tree like the gradients, else by its number."""
    leaves = zip(
        _trees.path_names(params).values(), jax.tree.leaves(params), strict=True
    )
    names = [
        name
        for name, x in leaves
        if _trees.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if position < len(names):
        return repr(names[position])
    hint = (
        "`check_health(opt_state, params=params)` tells its name, for a tree like the"
        " gradients"
    )
    return f"number {position} (from 0, in the order of `jax.tree.leaves`); {hint}"
