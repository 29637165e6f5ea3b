"""`low_precision_state`: a rule that computes in float32 and keeps its moments in 16 or 8 bits between steps."""

import functools
import itertools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from mpx import _errors, _trees, formats
from mpx._stored.assignment import (
    Format,
    Plan,
    checked_patterns,
    make_plan,
    require_every_pattern_used,
    require_sound_formats,
    require_stored_as_planned,
)
from mpx._stored.blockwise import Blockwise8bit, BlockwiseArray, decode, encode
from mpx._transforms.upcast import UpcastState, upcast

Rounding = Literal["nearest", "stochastic"]


class LowPrecisionState(NamedTuple):
    """State of `low_precision_state`.

    Attributes:
        inner_state: `UpcastState` of the wrapped rule, in which the chosen leaves are bfloat16 or float16 arrays, or
            uint8 arrays of the same shape, the codes of `Blockwise8bit`.
        block_scales: for each leaf of codes the float32 scales of its blocks, by the position of the leaf among those
            of the rule's state, and whether it is signed: `{"1.signed": ..., "3.unsigned": ...}`.
        key: the raw data (uint32) of the PRNG key for the next step; `optax.MaskedNode` if rounding is to nearest.
    """

    inner_state: optax.OptState
    block_scales: dict[str, jax.Array]
    key: Any


def low_precision_state(
    inner: optax.GradientTransformation,
    formats: Mapping[str, DTypeLike | Blockwise8bit],
    *,
    min_size: int = 4096,
    rounding: Rounding = "nearest",
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Keeps chosen leaves of any rule's state in 16 or 8 bits between steps; the rule computes in float32.

    Adam keeps 8 bytes a parameter. With both moments in 8 bits it keeps 2; with split masters around it and bfloat16
    weights and gradients a training takes 8 bytes a parameter in all, and its masters are float32:

        adamw = optax.adamw(1e-3)
        moments = {"mu": Blockwise8bit(), "nu": Blockwise8bit()}
        master_weights(low_precision_state(adamw, moments), storage="split")

    The rule sees float32 parameters, gradients and state, as in `upcast`; its new state is rounded once, when it is
    stored. Rounding to nearest can make a slow average stand still: a bfloat16 second moment with a decay of 0.999
    never falls, because a step of a thousandth is less than half the distance to the next number. In 8 bits the largest
    member of each block moves freely, and the others with it, but hardly beside it (see `Blockwise8bit`). Stochastic
    rounding follows all of them in the mean.

    Wrap the rule with this, and this with `master_weights` or `loss_scaling`, or put it in front of `kahan_summation`.

    Args:
        inner: any Optax transformation or chain.
        formats: regular expressions, each with the format of the leaves it matches: bfloat16, float16, float32 (for
            exceptions), by name or dtype, or a `Blockwise8bit`. An expression is searched in the "/"-joined path of a
            leaf of the rule's state, such as `0/mu/layers/kernel`, and matches whole components only: `mu` does not
            match `accumulator`. The first that matches wins, so exceptions come first. If a layer is called `mu`, say
            `^0/mu`, or `mu` matches `0/nu/mu/kernel` too.
        min_size: leaves with fewer elements stay float32: they cost little, and biases and gains need their precision.
        rounding: `"nearest"`, or `"stochastic"`: up or down at random such that the mean is right. (In 8 bits two kinds
            of numbers are always rounded to one side: second moments below the smallest member of the map, up to it;
            and signed ones between 0.993 and 1 of their block's scale, of the other sign, down.)
        key: a PRNG key, for stochastic rounding. It is kept in the state and changes with every update. A step that
            `loss_scaling`, `optax.apply_if_finite` or `optax.MultiSteps` *around* this skips does not change it; one
            that they skip inside does.

    Returns:
        A transformation with state `LowPrecisionState`. Its updates are float32. Integers, booleans and scalars in the
        state are never touched.

    Raises:
        TypeError: if `inner` is not a transformation, `formats` no mapping, or `key` not a PRNG key.
        ValueError: if a pattern is not a regular expression, a format unknown, or an argument would do nothing; at
            `init`, if a pattern decides about no leaf, or one about float64 leaves, masters, compensations or averages
            of weights, if a second moment would be float16, which holds nothing below 6e-8, or if one
            `low_precision_state` stands in another; at `update`, if the state was stored in other formats.

    Example:
        >>> tx = low_precision_state(optax.adam(1e-3), {"mu": "bf16", "nu": Blockwise8bit()})
        >>> params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
        >>> state = tx.init(params)
        >>> {name: mu.dtype for name, mu in optax.tree.get(state, "mu").items()}
        {'b': dtype('float32'), 'w': dtype(bfloat16)}
        >>> updates, state = tx.update(params, state, params)
        >>> optax.tree.get(state, "nu")["w"].dtype, updates["w"].dtype
        (dtype('uint8'), dtype('float32'))

    References:
        Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861); for stochastic rounding
        of a bfloat16 state, Zamirai et al. 2020 (arXiv 2010.06192).
    """
    inner = upcast(_errors.as_transformation(inner, "low_precision_state"))
    patterns = checked_patterns(formats)
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0:
        raise ValueError(f"`low_precision_state`: `min_size` must be a number of elements, but got {min_size!r}.")
    stored_key, implementation = _checked_key(rounding, key, patterns)

    def init_fn(params):
        upcast_state: Any = inner.init(params)
        state = upcast_state.inner_state
        _require_not_nested(state)
        plan = make_plan(state, {}, patterns, min_size)
        if any(_trees.is_floating(p) and np.shape(p) for p in jax.tree.leaves(params)):  # of nothing there is no state
            require_every_pattern_used(state, patterns, plan)
        require_sound_formats(state, patterns, plan)
        stored, scales = _store(state, plan, None)
        first_key = optax.MaskedNode() if stored_key is None else jnp.array(stored_key, copy=True)
        return LowPrecisionState(UpcastState(stored), scales, first_key)

    def update_fn(updates, state, params=None, **extra_args):
        _errors.require_state(state, LowPrecisionState, "low_precision_state")
        stored = state.inner_state.inner_state
        plan = make_plan(stored, state.block_scales, patterns, min_size)
        as_made = lambda: stored if params is None else jax.eval_shape(inner.init, params)
        require_stored_as_planned(stored, state.block_scales, plan, as_made)
        wide: Any = UpcastState(_load(stored, state.block_scales, plan))
        updates, wide = inner.update(updates, wide, params, **extra_args)
        this_step, next_key = None, state.key
        if stored_key is not None:
            this_step, next_step = jax.random.split(jax.random.wrap_key_data(state.key, impl=implementation))
            next_key = jax.random.key_data(next_step)
        stored, scales = _store(wide.inner_state, plan, this_step)
        return updates, LowPrecisionState(UpcastState(stored), scales, next_key)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def coded_leaves(state: LowPrecisionState) -> list[tuple[str, _trees.Path, Any, Any]]:
    """What is kept in 8 bits: the name of its scales, its path in the rule's state, codes and scales."""
    inner: Any = state.inner_state
    leaves = list(_trees.leaves_by_path(inner.inner_state).items())
    return [(name, *leaves[int(name.partition(".")[0])], scale) for name, scale in state.block_scales.items()]


def _load(state: Any, scales: Mapping[str, jax.Array], plan: Plan) -> Any:
    """The rule's state in float32."""

    def load(path, leaf):
        stored = plan.get(path)
        return leaf if stored is None else _decoded(leaf, scales.get(stored.scales), stored.format, stored.signed)

    return jax.tree.map_with_path(load, state)


def _store(state: Any, plan: Plan, key: jax.Array | None) -> tuple[Any, dict[str, jax.Array]]:
    """The rule's state as it is kept between steps, and the scales of its blocks; with a key, rounded at random."""
    keys = iter(jax.random.split(key, len(plan))) if key is not None and plan else itertools.repeat(None)
    scales = {}

    def store(path, leaf):
        stored = plan.get(path)
        if stored is None:
            return leaf
        leaf, scale = _encoded(leaf, next(keys), stored.format, stored.signed)
        if scale is not None:
            scales[stored.scales] = scale
        return leaf

    return jax.tree.map_with_path(store, state), scales


@functools.partial(jax.jit, inline=True, static_argnums=(2, 3))
def _decoded(leaf: jax.Array, scale: Any, format: Format, signed: bool) -> jax.Array:
    if isinstance(format, Blockwise8bit):
        return decode(BlockwiseArray(leaf, scale), format.block_size, signed)
    return leaf.astype(np.float32) if format != np.float32 else leaf


@functools.partial(jax.jit, inline=True, static_argnums=(2, 3))
def _encoded(x: jax.Array, key: jax.Array | None, format: Format, signed: bool) -> tuple[jax.Array, jax.Array | None]:
    """What is stored of a leaf, and the scales of its blocks."""
    if isinstance(format, Blockwise8bit):
        return encode(x.astype(np.float32), format.block_size, signed, key)
    if format == np.float32:
        return x, None
    if key is None:
        return formats.round_to(x.astype(np.float32), format).astype(format), None
    return formats.stochastic_round(key, x.astype(np.float32), format), None


def _checked_key(rounding: Any, key: Any, patterns: Mapping[str, Format]) -> tuple[jax.Array | None, Any]:
    """The raw data of the key and its implementation; None for both if rounding is to nearest."""
    if rounding not in get_args(Rounding):
        raise ValueError(
            f"`low_precision_state`: `rounding` must be one of {get_args(Rounding)}, but got {rounding!r}."
        )
    if rounding == "nearest":
        if key is not None:
            raise ValueError(
                "`low_precision_state`: a `key` was given, but rounding to nearest has no use for it. Add "
                '`rounding="stochastic"`, or leave the key out.'
            )
        return None, None
    if key is None:
        raise ValueError(
            '`low_precision_state`: `rounding="stochastic"` needs a PRNG key; add `key=jax.random.key(0)`.'
        )
    if all(chosen == np.float32 for chosen in patterns.values()):
        raise ValueError("`low_precision_state`: every format is float32, so stochastic rounding would do nothing.")
    typed, implementation = _errors.one_key(key, "low_precision_state")
    return jax.random.key_data(typed), implementation


def _require_not_nested(state: Any) -> None:
    if _trees.find_states(state, LowPrecisionState):
        raise ValueError(
            "`low_precision_state`: the rule inside stores its state in few bits already. Give all formats to one of "
            "the two."
        )
