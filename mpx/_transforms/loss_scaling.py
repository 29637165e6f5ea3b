"""`loss_scaling`: unscale, skip what is not finite, adapt the scale."""

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from mpx import _errors, _trees
from mpx._loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    is_finite,
    require_powers_of_two,
    saturating_increment,
    select_tree,
)
from mpx._stored.roles import register_state
from mpx._transforms.float32_world import keep_types, stable_state

# Names that incoming gradients have in a traced program, for `check_chain` to find: of a loss that is scaled, or not.
SCALED = "mpx.scaled_gradients"
UNSCALED = "mpx.unscaled_gradients"


@register_state(
    loss_scale="loss scale",
    good_steps="loss scale",
    bad_steps="loss scale",
    skipped_steps="count",
    stuck_steps="loss scale",
    nonfinite="loss scale",
    inner_state="inner",
)
class LossScalingState(NamedTuple):
    """State of `loss_scaling`.

    Attributes:
        loss_scale: float32 scalar, by which the next loss is to be multiplied.
        good_steps: int32 scalar, good steps in a row since the scale last changed (0 unless it is dynamic).
        bad_steps: int32 scalar, skipped steps since the scale last grew (0 unless it is dynamic).
        skipped_steps: int32 scalar, skipped steps in all.
        stuck_steps: int32 scalar, skipped steps in a row at which the scale could not shrink any further: it was at its
            minimum before the step, or does not adapt. 0 after a good step; see `check_health`.
        nonfinite: a tree like the parameters with a boolean scalar for each gradient: whether there was an infinity
            or NaN in it in the last skipped step. All False before one; a good step keeps it.
        inner_state: state of the wrapped rule.
    """

    loss_scale: jax.Array
    good_steps: jax.Array
    bad_steps: jax.Array
    skipped_steps: jax.Array
    stuck_steps: jax.Array
    nonfinite: Any
    inner_state: optax.OptState


def loss_scaling(
    inner: optax.GradientTransformation,
    loss_scale: LossScale | None = None,
    *,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs a rule on the gradients of a scaled loss, and skips the steps whose gradients are not finite.

    Gradients that come in are those of the loss times `state.loss_scale` (see `mpx.value_and_grad`). They are
    divided by it in float32, exactly, since it is a power of two; clipping and every other rule inside see true
    gradients. If any number in them is infinite or NaN, the step changes nothing but the scale, the counters and the
    notes of which gradients they were: parameters, inner state, schedules, step counts and keys keep their bits, and
    the update is -0.0. Everything runs on the device: no callback, no wait. A training that only skips goes on
    without a word; `check_health` raises for it.

    Clipping and whatever else is not linear belongs inside: in front of this it would see scaled gradients. So does
    `optax.MultiSteps`: around this, its mean never loses a NaN, and every later step is skipped. `inner` sees the
    parameters as they are. Around a bare Optax rule for 16-bit parameters put `upcast` or `master_weights` between the
    two, or the rule keeps its moments in 16 bits.

    Args:
        inner: any Optax transformation or chain.
        loss_scale: `DynamicLossScale()` if None; or a `StaticLossScale`, or a `NoOpLossScale` to skip bad steps
            only.
        axis_name: inside `jax.shard_map` or `jax.pmap` whose gradients are not yet reduced (or whose states differ
            from device to device), the mapped axes over which all devices must agree that a step is good.

    Returns:
        A transformation with state `LossScalingState`.

    Raises:
        TypeError: if `inner` is not a transformation, or `loss_scale` not a loss scale; at `update`, if a gradient
            is not floating.
        ValueError: if scale, factor or bounds are not powers of two, or the scale is not within the bounds.

    Example:
        >>> tx = loss_scaling(optax.sgd(1.0), DynamicLossScale(2.0**15))
        >>> state = tx.init({"w": jnp.ones(2)})
        >>> updates, state = tx.update({"w": jnp.array([2.0**15, jnp.inf])}, state)
        >>> updates["w"], float(state.loss_scale), int(state.skipped_steps)
        (Array([-0., -0.], dtype=float32), 16384.0, 1)

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740); `torch.amp.GradScaler`.
    """
    inner = _errors.as_transformation(inner, "loss_scaling")
    settings = DynamicLossScale() if loss_scale is None else loss_scale
    _check_settings(settings)
    name = UNSCALED if isinstance(settings, NoOpLossScale) else SCALED

    def init_fn(params):
        # Copies, a buffer each: donation deletes them, and refuses one that is given twice.
        return LossScalingState(
            loss_scale=jnp.array(settings.loss_scale, np.float32, copy=True),
            good_steps=jnp.array(getattr(settings, "counter", 0), np.int32, copy=True),
            bad_steps=jnp.array(getattr(settings, "bad_steps", None) or 0, np.int32, copy=True),
            skipped_steps=jnp.zeros((), np.int32),
            stuck_steps=jnp.zeros((), np.int32),
            nonfinite=_no_flags(params),
            inner_state=stable_state(inner.init(params), params),
        )

    def update_fn(updates, state, params=None, **extra_args):
        _errors.require_state(state, LossScalingState, "loss_scaling")
        _errors.require_differentiable(updates, "loss_scaling")
        updates = jax.tree.map(lambda g: checkpoint_name(g, name), updates)
        finite, nonfinite = _watched(updates, axis_name)
        grads = StaticLossScale(state.loss_scale).unscale(updates)
        updates, inner_state = inner.update(grads, state.inner_state, params, **extra_args)
        inner_state = keep_types(state.inner_state, inner_state)
        unchanged = jax.tree.map(_minus_zero, updates)
        return select_tree(finite, updates, unchanged), LossScalingState(
            *_adapted(settings, state, finite),
            skipped_steps=jnp.where(finite, state.skipped_steps, saturating_increment(state.skipped_steps)),
            stuck_steps=_stuck_steps(settings, state, finite),
            nonfinite=select_tree(finite, state.nonfinite, _like(state.nonfinite, nonfinite)),
            inner_state=select_tree(finite, inner_state, state.inner_state),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _minus_zero(update: jax.Array) -> jax.Array:
    """What changes no bit when it is added: +0.0 would turn -0.0 into +0.0."""
    if jnp.iscomplexobj(update):
        return jnp.full_like(update, complex(-0.0, -0.0))
    return jnp.full_like(update, -0.0)


_BOXED = jax.tree_util.GetAttrKey("value")


def _no_flags(params: Any) -> Any:
    """A tree like the parameters with a False for each, in a buffer of its own.

    Without the boxes that Flax keeps an array in, and with a single False for a tree without leaves: the sharding of
    a parameter is written on its box, and Optax's `tree_map_params` gives it to whatever it finds to be like the
    parameters, by a placeholder without leaves. A scalar cannot be sharded so.
    """
    trained = params.fast if isinstance(params, optax.LookaheadParams) else params
    if not jax.tree.leaves(trained):
        return jnp.zeros((), bool)
    is_box = lambda node: [path for path, _ in jax.tree.leaves_with_path(node)] == [(_BOXED,)]
    return jax.tree.map(lambda _: jnp.zeros((), bool), trained, is_leaf=is_box)


def _watched(grads: Any, axis_name: Any) -> tuple[jax.Array, dict[_trees.Path, jax.Array]]:
    """Whether all gradients are finite, and for each path whether its is not, on any of the mapped devices."""
    bad = {_unboxed(path): ~is_finite(leaf) for path, leaf in _trees.leaves_by_path(grads).items()}
    if not bad:
        return jnp.asarray(True), bad
    flags = jnp.stack(list(bad.values()))
    if axis_name is not None:
        flags = lax.pmax(flags.astype(np.int32), axis_name) == 1
    # Without the barrier XLA fuses the sums over all gradients into the choice of every leaf: a program for a CPU with
    # 150 leaves takes five times as long to compile.
    flags = lax.optimization_barrier(flags)
    return ~flags.any(), dict(zip(bad, jnp.unstack(flags), strict=True))


def _like(flags: Any, by_path: dict[_trees.Path, jax.Array]) -> Any:
    """New flags in the tree of the old ones; False for a parameter without a gradient."""
    # (Of a box in a box the outer one is dropped: its flag stands where the inner one was.)
    new = lambda path, old: by_path.get(path, by_path.get(_unboxed(path), jnp.zeros_like(old)))
    return jax.tree.map_with_path(new, flags)


def _unboxed(path: _trees.Path) -> _trees.Path:
    return path[:-1] if path and path[-1] == _BOXED else path


def _stuck_steps(settings: LossScale, state: LossScalingState, finite: jax.Array) -> jax.Array:
    """Skipped steps in a row at the smallest scale, after a step."""
    stuck = ~finite
    if isinstance(settings, DynamicLossScale):
        stuck &= state.loss_scale <= settings.min_loss_scale
    return jnp.where(stuck, saturating_increment(state.stuck_steps), 0)


def _adapted(settings: LossScale, state: LossScalingState, finite: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scale, good steps and bad steps after a step."""
    if not isinstance(settings, DynamicLossScale):
        return state.loss_scale, state.good_steps, state.bad_steps
    now = dataclasses.replace(
        settings, loss_scale=state.loss_scale, counter=state.good_steps, bad_steps=state.bad_steps
    )
    then = now.adjust(finite)
    return jnp.asarray(then.loss_scale), jnp.asarray(then.counter), jnp.asarray(then.bad_steps)


def _check_settings(settings: Any) -> None:
    require_powers_of_two(settings, "loss_scaling")
    if isinstance(settings, DynamicLossScale) and not isinstance(settings.loss_scale, Tracer):
        scale = np.asarray(settings.loss_scale).item()
        if not settings.min_loss_scale <= scale <= settings.max_loss_scale:
            raise ValueError(
                f"`loss_scaling`: the scale must lie between `min_loss_scale` and `max_loss_scale`, but got {scale} "
                f"and [{settings.min_loss_scale}, {settings.max_loss_scale}]."
            )
