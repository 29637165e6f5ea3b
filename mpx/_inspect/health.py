"""Looking at the health of a training run: its loss scale, its skipped steps, whether it still trains."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from mpx import _errors, _trees
from mpx._inspect.masters import require_types
from mpx._loss_scale import LossScale, NoOpLossScale, StaticLossScale
from mpx._transforms.loss_scaling import LossScalingState


def get_loss_scale(opt_state: optax.OptState) -> LossScale:
    """The scale for the next loss, wherever in an optimizer state it is.

    Args:
        opt_state: the state of any transformation.

    Returns:
        A loss scale value for `value_and_grad`; `NoOpLossScale()` if nothing in the state scales losses.

    Raises:
        TypeError: if this is no state but a transformation, or a state restored without its types.
        ValueError: if the state holds several loss scales.

    Example:
        >>> tx = optax.chain(optax.identity(), loss_scaling(optax.sgd(0.1)))
        >>> get_loss_scale(tx.init(jnp.ones(2)))
        StaticLossScale(loss_scale=Array(32768., dtype=float32))
    """
    state = loss_scaling_state(opt_state, "get_loss_scale")
    return NoOpLossScale() if state is None else StaticLossScale(_array(state.loss_scale))


def skipped_steps(opt_state: optax.OptState) -> jax.Array:
    """How many steps were skipped because of infinite or NaN gradients: an int32 scalar, 0 without loss scaling.

    Raises:
        ValueError: if the state holds several loss scales.

    Example:
        >>> print(skipped_steps(loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))))
        0
    """
    state = loss_scaling_state(opt_state, "skipped_steps")
    return jnp.zeros((), np.int32) if state is None else _array(state.skipped_steps)


class DivergedError(RuntimeError):
    """A training does nothing any more but skip steps; `check_health` raises it and says where to look.

    Example:
        >>> tx = loss_scaling(optax.sgd(0.1), NoOpLossScale())
        >>> state = tx.init({"w": jnp.ones(2)})
        >>> _, state = tx.update({"w": jnp.array([0.0, jnp.nan])}, state)
        >>> try:
        ...     check_health(state, max_stuck_steps=1)
        ... except DivergedError:
        ...     print("back to the last checkpoint")
        back to the last checkpoint
    """


def check_health(opt_state: optax.OptState, *, max_stuck_steps: int = 10) -> None:
    """Raises once a training skips step after step at the smallest loss scale, and names the gradients at fault.

    Skipped steps are no fault as long as the scale can shrink: that is how it finds its range. But when gradients stay
    infinite or NaN at its minimum (or under a scale that does not adapt), no scale helps, and the training would go
    through its data without a change and without a word. Call this where the loop waits for the device anyway, such as
    where it prints the loss, outside of `jax.jit`: it reads three numbers from the device, and the notes about the
    gradients only when it raises. The counter stays until a step is good, so a check now and then misses nothing.

    Args:
        opt_state: the state of any transformation with a `loss_scaling` in it.
        max_stuck_steps: how many steps skipped in a row at the smallest scale are too many.

    Raises:
        DivergedError: if there were that many. It names the gradients that were not finite in the last of them.
        TypeError: inside `jax.jit`; if this is no state but a transformation, or a state restored without its types.
        ValueError: if nothing in the state watches gradients, or it holds several loss scales, or those of several
            models; if `max_stuck_steps` is not an integer above 0.

    Example:
        >>> tx = loss_scaling(optax.sgd(0.1), DynamicLossScale(2.0))
        >>> state = tx.init({"embed": jnp.ones(2), "head": jnp.ones(2)})
        >>> bad = {"embed": jnp.ones(2), "head": jnp.array([1.0, jnp.inf])}
        >>> for _ in range(3):
        ...     _, state = tx.update(bad, state)  # the scale is 2, 1, 1
        >>> check_health(state)
        >>> try:
        ...     check_health(state, max_stuck_steps=2)
        ... except DivergedError as error:
        ...     print(str(error).splitlines()[0])
        `check_health`: 2 steps in a row were skipped at a loss scale of 1, which does not shrink any further \
(3 skipped in all). In the last one, 1 of 2 gradients were infinite or NaN:
    """
    if not _errors.is_integer(max_stuck_steps) or max_stuck_steps < 1:
        raise ValueError(f"`check_health`: `max_stuck_steps` must be an integer above 0, but got {max_stuck_steps!r}.")
    state = loss_scaling_state(opt_state, "check_health")
    if state is None:
        raise ValueError(
            "`check_health`: nothing in this optimizer state watches gradients. Put `loss_scaling` around the rule; "
            "`loss_scaling(inner, NoOpLossScale())` does it without scaling."
        )
    numbers = [_array(number) for number in (state.stuck_steps, state.skipped_steps, state.loss_scale)]
    if any(isinstance(number, Tracer) for number in numbers):
        raise TypeError(
            "`check_health` reads numbers and may raise, which a traced program cannot: call it outside of `jax.jit`, "
            "on the state that a step has returned."
        )
    if np.ndim(numbers[0]):
        raise ValueError(
            f"`check_health` needs the state of one training, but `stuck_steps` has shape {np.shape(numbers[0])}. "
            "Check each: `jax.tree.map(lambda x: x[i], opt_state)`."
        )
    stuck, skipped, scale = jax.device_get(numbers)
    if stuck >= max_stuck_steps:
        raise DivergedError(_diagnosis(int(stuck), int(skipped), float(scale), state.nonfinite))


_NAMED = 10  # gradients, in a message


def _diagnosis(stuck: int, skipped: int, scale: float, nonfinite: Any) -> str:
    """What has happened, in which gradients, and what to do."""
    flags = _trees.leaves_by_path(jax.device_get(nonfinite))
    bad = [f"  {_trees.path_string(path)!r}" for path, flag in flags.items() if flag]
    more = [f"  and {len(bad) - _NAMED} more"] if len(bad) > _NAMED else []
    if len(bad) == len(flags):
        place = "All of them were, so look at what they share: the batch, the loss, the last layers."
    else:
        place = "The others were finite, so look at these layers: what they compute, and what their weights are."
    lines = [
        f"`check_health`: {stuck} steps in a row were skipped at a loss scale of {scale:g}, which does not shrink any "
        f"further ({skipped} skipped in all). In the last one, {len(bad)} of {len(flags)} gradients were infinite or "
        "NaN:",
        *bad[:_NAMED],
        *more,
        f"{place} Look for infinities and NaN in the batch and in the parameters; if there are none, go back to the "
        "last checkpoint and lower the learning rate.",
    ]
    if scale > 1:
        lines.append(f"A smaller loss scale may be enough too: allow the scale to go below {scale:g}.")
    return "\n".join(lines)


def loss_scaling_state(opt_state: Any, caller: str) -> LossScalingState | None:
    require_types(opt_state, caller)
    states = _trees.find_states(opt_state, LossScalingState)
    if len(states) > 1:
        raise ValueError(
            f"`{caller}`: the optimizer state holds {len(states)} loss scales, but one loss has one scale. Put a "
            "single `loss_scaling` around everything else, `optax.partition` included."
        )
    return states[0] if states else None


def _array(leaf: Any) -> jax.Array:
    """The array in a leaf of a state: `flax.nnx.Optimizer` puts each into a variable."""
    (array,) = jax.tree.leaves(leaf)
    return array
