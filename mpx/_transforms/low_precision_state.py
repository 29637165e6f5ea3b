"""`low_precision_state`: compute a rule in float32 and keep its moments in 16 or 8 bits between steps."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._jaxprs import BLOCKS
from mpx._stored.assignment import (
    Assignment,
    assign,
    checked_patterns,
    require_every_pattern_used,
    require_sound_formats,
    require_stored_as_assigned,
)
from mpx._stored.roles import register_state
from mpx._stored.state_format import FLOAT32, StateFormat
from mpx._transforms.computed_again import computed_again
from mpx._transforms.float32_world import in_world, world

Rounding = Literal["nearest", "stochastic"]
_F32 = np.dtype(np.float32)


@register_state(inner_state="inner", block_scales="scales", key="key")
class LowPrecisionState(NamedTuple):
    """State of `low_precision_state`.

    Attributes:
        inner_state: state of the wrapped rule, in which the chosen leaves are arrays of the same shape in few bits:
            bfloat16, float16, or the codes of a `StateFormat` (uint8 for `Blockwise8bit`).
        block_scales: for each leaf of codes the scales that belong to it (float32, one a block, for `Blockwise8bit`).
            They go by the leaf's position among those of the rule's state and its format.
        key: the raw data (uint32) of the PRNG key for the next step; `optax.MaskedNode` if rounding is to nearest.
    """

    inner_state: optax.OptState
    block_scales: dict[str, jax.Array]
    key: Any


def low_precision_state(
    inner: optax.GradientTransformation,
    formats: Mapping[str, DTypeLike | StateFormat],
    *,
    min_size: int = 4096,
    rounding: Rounding = "nearest",
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Keep chosen leaves of any rule's state in 16 or 8 bits between steps; the rule computes in float32.

    Adam keeps 8 bytes a parameter. With both moments in 8 bits it keeps 2; with split masters around it and bfloat16
    weights and gradients a training run takes 8 bytes a parameter in all, and its masters are float32:

        adamw = optax.adamw(1e-3)
        moments = {"mu": Blockwise8bit(), "nu": Blockwise8bit()}
        master_weights(low_precision_state(adamw, moments), storage="split")

    The rule sees float32 parameters, gradients and state, as in `upcast`; its new state is rounded once, when it is
    stored. Rounding to nearest can make a slow average stand still: a bfloat16 second moment with a decay of 0.999
    never falls, because a step of a thousandth is less than half the distance to the next number. In `"e4m3"` all
    stands still that changes by less than a thirty-second in a step. (For other 8 bits see `Blockwise8bit`.) Stochastic
    rounding follows it in the mean.

    Wrap the rule with this, and this with `master_weights` or `loss_scaling`, or put it in front of `kahan_summation`.

    Args:
        inner: any Optax transformation or chain.
        formats: regular expressions, each with the format of the leaves it matches: bfloat16, float16, float32 (for
            exceptions), by name or dtype; `"e4m3"` or `"e5m2"`, 8-bit floats with a power of two for each block of 256;
            or a `StateFormat` such as `Blockwise8bit()`. An expression is searched in the "/"-joined path of a leaf of
            the rule's state, such as `0/mu/layers/kernel`, and matches whole components only: `mu` does not match
            `accumulator`. The first that matches wins, so exceptions come first. If a layer is called `mu`, say
            `^0/mu`, or `mu` matches `0/nu/mu/kernel` too.
        min_size: leaves with fewer elements stay float32: they cost little, and biases and gains need their precision.
        rounding: `"nearest"`, or `"stochastic"`: up or down at random such that the mean is right. (In 8 bits two cases
            are not random: a second moment below the smallest code is rounded up to it; a signed number between 0.993
            and 1 of its scale, with the opposite sign, is rounded down.)
        key: a PRNG key, for stochastic rounding. It is kept in the state and changes with every update, but for a step
            that `loss_scaling`, `optax.apply_if_finite` or `optax.MultiSteps` *around* this skips.

    Returns:
        A transformation with state `LowPrecisionState`. Its updates are float32. Integers, booleans and scalars in the
        state are never touched.

    Raises:
        TypeError: if `inner` is not a transformation, `formats` no mapping, or `key` not a PRNG key.
        ValueError: if a pattern is not a regular expression, a format unknown, or an argument would do nothing; at
            `init`, if a pattern decides about no leaf, or about one that must not be rounded so (float64 leaves,
            masters, compensations, averages of weights, second moments in float16), or if one `low_precision_state`
            stands in another; at `update`, if the state was stored in other formats.

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
    inner = in_world(inner, _F32, "low_precision_state")
    patterns = checked_patterns(formats)
    if not _errors.is_integer(min_size) or min_size < 0:
        raise ValueError(f"`low_precision_state`: `min_size` must be a number of elements, but got {min_size!r}.")
    _require_sound_rounding(rounding, key, patterns)
    if key is not None:
        key, implementation = _errors.one_key(key, "low_precision_state")

    def init_fn(params):
        state = inner.init(params)
        if _trees.find_states(state, LowPrecisionState):
            raise ValueError(
                "`low_precision_state`: the rule inside stores its state in few bits already. Give all formats to one "
                "of the two."
            )
        assignment = assign(state, {}, patterns, min_size)
        if any(_trees.is_floating(p) and np.shape(p) for p in jax.tree.leaves(params)):  # else there is no state at all
            require_every_pattern_used(state, patterns, assignment)
        require_sound_formats(state, patterns, assignment)
        first_key = optax.MaskedNode() if key is None else jnp.array(jax.random.key_data(key), copy=True)
        return LowPrecisionState(*_store(state, assignment, None), first_key)

    def update_fn(updates, state, params=None, **extra_args):
        _errors.require_state(state, LowPrecisionState, "low_precision_state")
        assignment = assign(state.inner_state, state.block_scales, patterns, min_size)
        as_made = lambda: state.inner_state if params is None else jax.eval_shape(inner.init, params)
        require_stored_as_assigned(state.inner_state, state.block_scales, assignment, as_made)
        computed = lambda stored: inner.update(
            updates, _load(stored, state.block_scales, assignment), params, **extra_args
        )
        new_updates, wide, again = _computed(computed, state.inner_state, assignment, state.block_scales)
        this_step, next_key = None, state.key
        if key is not None:
            this_step, next_step = jax.random.split(jax.random.wrap_key_data(state.key, impl=implementation))
            next_key = jax.random.key_data(next_step)
        return new_updates, LowPrecisionState(*_store(wide, assignment, this_step, again), next_key)

    return world(init_fn, update_fn, _F32)


def _load(state: Any, scales: Mapping[str, jax.Array], assignment: Assignment) -> Any:
    """Return the rule's state in float32."""

    def load(path, leaf):
        stored = assignment.get(path)
        if stored is None or stored.format == FLOAT32:
            return leaf
        return _decoded(leaf, scales.get(stored.scales), stored.format)

    return jax.tree.map_with_path(load, state)


def _computed(
    update: Callable[[Any], Any], state: Any, assignment: Assignment, scales: Mapping[str, jax.Array]
) -> tuple[Any, Any, Any | None]:
    """Return updates and new state of the rule, and that state once more if there are scales to compute from it."""
    has_scales = lambda path: path in assignment and assignment[path].scales in scales
    where = jax.tree.map_with_path(lambda path, _: has_scales(path), state)
    return computed_again(update, state, where) if any(jax.tree.leaves(where)) else (*update(state), None)


def _store(
    state: Any, assignment: Assignment, key: jax.Array | None, again: Any | None = None
) -> tuple[Any, dict[str, jax.Array]]:
    """Return the rule's state as it is kept between steps, and the scales; with a key, rounded at random.

    Scales are those of `again`, the state computed a second time, if it is given.
    """
    keys = itertools.repeat(None) if key is None else iter(jax.random.split(key, max(len(assignment), 1)))
    scales = {}

    def store(path, leaf, same):
        stored = assignment.get(path)
        if stored is None or stored.format == FLOAT32:
            return leaf
        codes, of_codes = _encoded(leaf, same, next(keys), stored.format)
        if of_codes is not None:
            scales[stored.scales] = of_codes
        return codes

    return jax.tree.map_with_path(store, state, state if again is None else again), scales


@functools.partial(jax.jit, inline=True, static_argnums=2)
def _decoded(codes: jax.Array, scales: Any, format: StateFormat) -> jax.Array:
    with jax.named_scope(_scope(scales)):
        return format.decode(codes, scales).astype(_F32)


@functools.partial(jax.jit, inline=True, static_argnums=3)
def _encoded(x: jax.Array, same: jax.Array, key: jax.Array | None, format: StateFormat) -> tuple[jax.Array, Any]:
    with jax.named_scope(BLOCKS):
        scales = format.scales_of(same.astype(_F32))
    with jax.named_scope(_scope(scales)):
        codes = format.encode(x.astype(_F32), scales, key)
    if codes.shape != x.shape or (scales is None and not _trees.is_floating(codes)):
        name, got = type(format).__name__, "no scales" if scales is None else "scales"
        raise TypeError(
            f"`low_precision_state`: `{name}.encode` must return codes in the shape of its argument, and "
            f"`{name}.scales_of` one array of scales, or None for codes that are floating numbers; but for "
            f"{_trees.dtype_and_shape(x)} they returned {_trees.dtype_and_shape(codes)} and {got}."
        )
    return codes, scales


def _scope(scales: Any) -> str:
    """Return the name of what a format does; `zero1` must know what works on whole blocks of elements."""
    return "mpx:cast" if scales is None else BLOCKS


def _require_sound_rounding(rounding: Any, key: Any, patterns: Mapping[str, StateFormat]) -> None:
    """Raise unless rounding is known and has the key that it needs, and only that."""
    if rounding not in get_args(Rounding):
        raise ValueError(
            f"`low_precision_state`: `rounding` must be one of {get_args(Rounding)}, but got {rounding!r}."
        )
    if rounding == "nearest" and key is not None:
        raise ValueError(
            "`low_precision_state`: a `key` was given, but rounding to nearest has no use for it. Add "
            '`rounding="stochastic"`, or leave the key out.'
        )
    if rounding == "stochastic" and key is None:
        raise ValueError(
            '`low_precision_state`: `rounding="stochastic"` needs a PRNG key; add `key=jax.random.key(0)`.'
        )
    if rounding == "stochastic" and all(chosen == FLOAT32 for chosen in patterns.values()):
        raise ValueError("`low_precision_state`: every format is float32, so stochastic rounding would do nothing.")
