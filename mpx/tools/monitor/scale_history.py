"""`scale_history`: the loss scales of the last steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from mpx import _errors, _trees
from mpx._stored.roles import register_state
from mpx._transforms.loss_scaling import get_loss_scale, loss_scaling_state, skipped_steps


@register_state(scales="measure", skips="measure", recorded_steps="measure", inner_state="inner")
class ScaleHistoryState(NamedTuple):
    """State of `scale_history`.

    Attributes:
        scales: float32 vector, the loss scales of the last steps: that of step `i` at `i % length`.
        skips: boolean vector, True for the steps that were skipped.
        recorded_steps: int32 scalar, the number of steps so far.
        inner_state: state of the wrapped transformation.
    """

    scales: jax.Array
    skips: jax.Array
    recorded_steps: jax.Array
    inner_state: optax.OptState


class ScaleHistory(NamedTuple):
    """Loss scales as `read_scale_history` returns them, the oldest step first.

    Attributes:
        steps: int64 vector, the number of each step, from 0.
        scales: float32 vector, the scale that its loss was multiplied by.
        skipped: boolean vector, True if its gradients were infinite or NaN.
    """

    steps: np.ndarray
    scales: np.ndarray
    skipped: np.ndarray


def scale_history(inner: optax.GradientTransformation, length: int = 1000) -> optax.GradientTransformationExtraArgs:
    """Remember the loss scales of the last steps, and which of them were skipped.

    Both stay on the device, 5 bytes a step; `read_scale_history` reads them. Updates are those of `inner`.

    Args:
        inner: a transformation with one `mpx.loss_scaling` in it.
        length: how many steps to remember.

    Returns:
        A transformation with state `ScaleHistoryState`.

    Raises:
        TypeError: if `inner` is not a transformation.
        ValueError: if `length` is not an integer above 0; at `init`, if not exactly one thing in `inner` scales losses.

    Example:
        >>> tx = scale_history(mpx.loss_scaling(optax.sgd(0.1)), length=3)
        >>> state = tx.init(jnp.ones(2))
        >>> for gradient in (1.0, jnp.inf, jnp.inf, 1.0):
        ...     _, state = tx.update(jnp.full(2, gradient), state)
        >>> history = read_scale_history(state)
        >>> print(history.steps, history.scales, history.skipped)
        [1 2 3] [32768. 16384.  8192.] [ True  True False]
    """
    inner = _errors.as_transformation(inner, "scale_history")
    if not _errors.is_integer(length) or length < 1:
        raise ValueError(f"`scale_history`: `length` must be an integer above 0, but got {length!r}.")

    def init_fn(params):
        inner_state = inner.init(params)
        if loss_scaling_state(inner_state, "scale_history") is None:
            raise ValueError(
                "`scale_history`: nothing in this optimizer scales losses, so there is no scale to remember. Wrap a "
                "transformation with `mpx.loss_scaling` in it."
            )
        return ScaleHistoryState(
            jnp.zeros(length, np.float32), jnp.zeros(length, bool), jnp.zeros((), np.int32), inner_state
        )

    def update_fn(updates, state, params=None, **extra_args):
        _errors.require_state(state, ScaleHistoryState, "scale_history")
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        position = state.recorded_steps % length
        skipped = skipped_steps(inner_state) != skipped_steps(state.inner_state)
        return updates, ScaleHistoryState(
            scales=state.scales.at[position].set(jnp.asarray(get_loss_scale(state.inner_state).loss_scale)),
            skips=state.skips.at[position].set(skipped),
            recorded_steps=jnp.asarray(optax.safe_increment(state.recorded_steps)),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def read_scale_history(opt_state: optax.OptState) -> ScaleHistory:
    """Return the loss scales of the last steps as NumPy arrays, from the state of an optimizer with `scale_history`.

    Raises:
        TypeError: inside `jax.jit`.
        ValueError: if the state holds no history, or several.

    Example:
        >>> tx = scale_history(mpx.loss_scaling(optax.sgd(0.1)))
        >>> _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
        >>> read_scale_history(state).scales
        array([32768.], dtype=float32)
    """
    states = _trees.find_states(opt_state, ScaleHistoryState)
    if len(states) != 1:
        raise ValueError(
            f"`read_scale_history`: the optimizer state holds {len(states)} histories, but one is to be read. Put a "
            "single `scale_history` around the transformation with `mpx.loss_scaling` in it."
        )
    # Leaves, since `flax.nnx.Optimizer` puts each array into a variable.
    arrays = jax.tree.leaves((states[0].scales, states[0].skips, states[0].recorded_steps))
    if any(isinstance(x, Tracer) for x in arrays):
        raise TypeError("`read_scale_history` reads numbers: call it outside of `jax.jit`, on the returned state.")
    scales, skips, recorded = jax.device_get(arrays)
    steps = np.arange(max(0, int(recorded) - len(scales)), int(recorded))
    return ScaleHistory(steps, scales[steps % len(scales)], skips[steps % len(scales)])
