"""`loss_scaling`: unscale, skip what is not finite, adapt the scale."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mpx import _errors, _flax, _trees
from mpx._chain import element
from mpx._finite import finite_flags, select_tree
from mpx._loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    require_powers_of_two,
    require_within_bounds,
    with_leaves_of,
    with_number,
)
from mpx._stored.leaves import is_state, require_types
from mpx._stored.roles import register_state
from mpx._transforms.upcast import keep_types, stable_state, with_measurements_of

# The names of incoming gradients and of updates, for `check_chain`; strings as `MARK`
# is.
SCALED, UNSCALED = "mpx.scaled_gradients", "mpx.gradients_of_scale_one"
SKIPPED = "mpx.skipped_updates"


@register_state(
    loss_scale="loss scale",
    scale_state="loss scale",
    skipped_steps="count",
    stuck_steps="loss scale",
    first_nonfinite="loss scale",
    inner_state="inner",
)
class LossScalingState(NamedTuple):
    """State of `loss_scaling`.

    Attributes:
        loss_scale: float32 scalar, the factor of the next loss.
        scale_state: the `LossScale` without its number: counters are its leaves, and
            settings belong to its structure.
        skipped_steps: int32 scalar, skipped steps in all.
        stuck_steps: int32 scalar, skipped steps in a row at which the scale could not
            shrink any further: it was at its minimum before the step, or does not
            adapt. 0 after a good step; see `check_health`.
        first_nonfinite: int32 scalar, the position of the first gradient, in the order
            of `jax.tree.leaves`, that had an infinity or NaN in the last skipped step;
            -1 before one. A good step keeps it.
        inner_state: state of the wrapped rule.
    """

    loss_scale: jax.Array
    scale_state: Any
    skipped_steps: jax.Array
    stuck_steps: jax.Array
    first_nonfinite: jax.Array
    inner_state: optax.OptState


@element
def loss_scaling(
    inner: optax.GradientTransformation,
    loss_scale: LossScale | None = None,
    *,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run a rule on the gradients of a scaled loss, and skip the steps whose gradients
    are not finite.

    It takes gradients of the loss times `state.loss_scale` (see `mpx.value_and_grad`),
    and divides them by the scale in float32. The scale is a power of two, so this is
    exact: clipping and every other rule inside see true gradients. So do line searches,
    whose extra argument `grad` is divided too. If a gradient is infinite or NaN, the
    step changes only the scale, the counters and the position of that gradient; the
    update is -0.0. Everything runs on the device. A training run that only skips goes
    on in silence; `check_health` raises for it.

    Clipping, `optax.MultiSteps` and whatever else is not linear in the gradients
    belongs inside; `check_chain` finds it. `inner` sees the parameters in their own
    dtype: put `upcast` or `master_weights` between this and an Optax rule, or the rule
    keeps the moments of 16-bit parameters in 16 bits.

    Args:
        inner: any Optax transformation or chain. Without it this is an element of
            `chain`.
        loss_scale: `DynamicLossScale()` if None; or a `StaticLossScale`, a
            `NoOpLossScale` to skip bad steps only, or a `LossScale` of your own. Its
            settings that are numbers hold for a state that was saved under other
            settings too; the scale itself goes on from the state. (To change a static
            scale, use `convert_state`.)
        axis_name: inside `jax.shard_map` or `jax.pmap`, where gradients or states
            differ from device to device: the mapped axes over which all devices must
            agree that a step is good.

    Returns:
        A transformation with state `LossScalingState`. Its updates are float32 or
        wider.

    Raises:
        ValueError: if scale, factor or bounds are not powers of two, or the scale is
            not within the bounds.

    Example:
        >>> tx = loss_scaling(optax.sgd(1.0), DynamicLossScale(2.0**15))
        >>> state = tx.init({"w": jnp.ones(2)})
        >>> updates, state = tx.update({"w": jnp.array([2.0**15, jnp.inf])}, state)
        >>> updates["w"], float(state.loss_scale), int(state.skipped_steps)
        (Array([-0., -0.], dtype=float32), 16384.0, 1)

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740);
        `torch.amp.GradScaler`.
    """
    inner = _errors.with_checked_shapes(
        _errors.as_transformation(inner, "loss_scaling"), "loss_scaling"
    )
    start = DynamicLossScale() if loss_scale is None else loss_scale
    require_powers_of_two(start, "loss_scaling")
    require_within_bounds(start)
    at_rest = with_number(start, None)  # whose number stands beside it in the state
    _require_stable_structure(start)

    def init_fn(params):
        _flax.let_serialize(type(start))
        # Copies, a buffer each: donation deletes them, and refuses one that is given
        # twice.
        return LossScalingState(
            loss_scale=jnp.array(start.loss_scale, np.float32, copy=True),
            scale_state=stable_state(
                jax.tree.map(lambda x: jnp.array(x, copy=True), at_rest), params
            ),
            skipped_steps=jnp.zeros((), np.int32),
            stuck_steps=jnp.zeros((), np.int32),
            first_nonfinite=jnp.full((), -1, np.int32),
            inner_state=stable_state(inner.init(params), params),
        )

    def update_fn(updates, state, params=None, **extra_args):
        _errors.require_state(state, LossScalingState, "loss_scaling")
        _errors.require_state(state.scale_state, type(start), "loss_scaling")
        _errors.require_differentiable(updates, "loss_scaling")

        def mark(x, name=UNSCALED if start.is_always_one else SCALED):
            return checkpoint_name(x, name)

        updates = jax.tree.map(mark, updates)
        first_nonfinite = _first_nonfinite(updates, axis_name)
        finite = first_nonfinite < 0
        scale_state = with_leaves_of(at_rest, state.scale_state)
        state = state._replace(scale_state=scale_state)
        now = with_number(scale_state, state.loss_scale)

        def unscaled(tree):
            return now.unscale(jax.tree.map(_trees.at_least_float32, tree))

        grads = unscaled(updates)
        if "grad" in extra_args:  # a line search gets the gradients twice
            extra_args["grad"] = unscaled(jax.tree.map(mark, extra_args["grad"]))
        updates, inner_state = inner.update(
            grads, state.inner_state, params, **extra_args
        )
        then = now.adjust(finite)
        new_state = LossScalingState(
            loss_scale=jnp.asarray(then.loss_scale, np.float32),
            scale_state=with_number(then, None),
            skipped_steps=jnp.where(
                finite, state.skipped_steps, optax.safe_increment(state.skipped_steps)
            ),
            # Of the scale before this step: a step that takes it to its minimum is not
            # stuck yet.
            stuck_steps=jnp.where(
                finite | now.can_shrink, 0, optax.safe_increment(state.stuck_steps)
            ),
            first_nonfinite=jnp.where(finite, state.first_nonfinite, first_nonfinite),
            inner_state=inner_state,
        )
        # A bare rule may return other dtypes than it was given, and no select takes
        # both.
        state = with_measurements_of(new_state, state)
        new_state = keep_types(state, new_state)
        # Selected, not by `lax.cond`, around which XLA fuses nothing: 63 bytes moved a
        # parameter, not 32 (AdamW, H200).
        inner_state = select_tree(finite, new_state.inner_state, state.inner_state)
        updates = select_tree(finite, updates, jax.tree.map(_minus_zero, updates))
        updates = jax.tree.map(lambda u: mark(u, SKIPPED), updates)
        return updates, new_state._replace(inner_state=inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _require_stable_structure(start: LossScale) -> None:
    """Raise if `adjust` makes arrays of numbers: a state has one structure."""
    after = with_number(jax.eval_shape(start.adjust, True), None)
    before = with_number(start, None)
    if jax.tree.structure(after) != jax.tree.structure(before):
        kind = type(start).__name__
        raise TypeError(
            f"`loss_scaling`: `{kind}.adjust` returns {after}, of another structure"
            f" than {before}. Fields that it changes must be arrays from the start, as"
            " in `np.int32(0)`, and it must return the others as they are."
        )


def get_loss_scale(opt_state: optax.OptState) -> LossScale:
    """Return the loss scale for the next step, found anywhere in the state of any
    transformation.

    Returns:
        The loss scale that `loss_scaling` was given, with the scale and counters of the
        state. Pass it to `value_and_grad`. `NoOpLossScale()` if nothing in the state
        scales losses.

    Raises:
        ValueError: if the state holds several loss scales.

    Example:
        >>> tx = optax.chain(
        ...     optax.identity(),
        ...     loss_scaling(optax.sgd(0.1), DynamicLossScale(period=100)),
        ... )
        >>> scale = get_loss_scale(tx.init(jnp.ones(2)))
        >>> type(scale).__name__, scale.loss_scale, scale.period
        ('DynamicLossScale', Array(32768., dtype=float32), 100)
    """
    state = loss_scaling_state(opt_state, "get_loss_scale")
    if state is None:
        return NoOpLossScale(skips_bad_steps=False)
    return with_number(state.scale_state, state.loss_scale)


def skipped_steps(opt_state: optax.OptState) -> jax.Array:
    """Return how many steps were skipped because of infinite or NaN gradients: an int32
    scalar, 0 without loss scaling.

    Example:
        >>> print(skipped_steps(loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))))
        0
    """
    state = loss_scaling_state(opt_state, "skipped_steps")
    return jnp.zeros((), np.int32) if state is None else state.skipped_steps


def loss_scaling_state(opt_state: Any, caller: str) -> LossScalingState | None:
    """Return the state of `loss_scaling` in an optimizer state, or None; raise if there
    are several.
    """
    require_types(opt_state, caller)
    states = _trees.find_states(opt_state, LossScalingState)
    if len(states) > 1:
        raise ValueError(
            f"`{caller}`: the optimizer state holds {len(states)} loss scales, but one"
            " loss has one scale. Put a single `loss_scaling` around everything else,"
            " `optax.partition` included."
        )
    if not states and not is_state(opt_state):
        got = "None" if opt_state is None else f"a {type(opt_state).__name__}"
        raise TypeError(
            f"`{caller}` needs the state of an optimizer, but got {got}: there is no"
            " optimizer state in it. Pass what `tx.init(params)` returned (of a"
            " `flax.nnx.Optimizer` its `opt_state`). If that is a bare dictionary,"
            " which nothing tells from parameters, make the rule an element of a"
            " chain, as in `optax.chain(rule, optax.identity())`."
        )
    if not states:
        return None
    own = states[0]._replace(inner_state=())
    # `flax.nnx.Optimizer` puts each array into a variable.
    return _flax.without_boxes(own)._replace(inner_state=states[0].inner_state)


def _minus_zero(update: jax.Array) -> jax.Array:
    """Return an update that changes no bit when it is added: +0.0 would turn -0.0 into
    +0.0.
    """
    return jnp.full_like(
        update, complex(-0.0, -0.0) if jnp.iscomplexobj(update) else -0.0
    )


def _first_nonfinite(grads: Any, axis_name: Any) -> jax.Array:
    """Return the position of the first leaf with an infinity or NaN in it, on any of
    the mapped devices; -1 if none.
    """
    # Without the barrier XLA fuses the sums over all gradients into the choice of every
    # leaf: a program for a CPU with 150 leaves takes five times as long to compile.
    flags = lax.optimization_barrier(finite_flags(grads))
    nowhere = np.int32(flags.size)
    places = jnp.where(flags, nowhere, np.arange(flags.size, dtype=np.int32))
    first = places.min(initial=nowhere)
    if axis_name is not None:
        # Else one device skips the step and another takes it, and their weights part.
        first = lax.pmin(first, axis_name)
    return jnp.where(first == nowhere, np.int32(-1), first)
