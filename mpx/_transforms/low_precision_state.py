"""`low_precision_state`: a rule that computes in float32 and keeps its moments in 16 or 8 bits between steps."""

import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from mpx import _checks, _trees, formats
from mpx._blockwise import Blockwise8bit, BlockwiseArray, decode, encode
from mpx._policy import DTYPE_NAMES
from mpx._state_fields import holds_second_moment, must_stay_exact
from mpx._transforms.upcast import UpcastState, upcast

Rounding = Literal["nearest", "stochastic"]
Format = np.dtype | Blockwise8bit

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
_LISTED_PATHS = 20


class LowPrecisionState(NamedTuple):
    """State of `low_precision_state`.

    Attributes:
        inner_state: `UpcastState` of the wrapped rule, in which the chosen leaves are bfloat16 or float16 arrays or
            `BlockwiseArray`s.
        key: the raw data (uint32) of the PRNG key for the next step; `optax.MaskedNode` if rounding is to nearest.
    """

    inner_state: optax.OptState
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
    never falls, because a step of a thousandth is less than half the distance to the next number. Stochastic rounding
    follows it in the mean. An 8-bit second moment needs none: its block's largest member is stored in float32.

    Wrap the rule with this, and this with `master_weights` or `loss_scaling`, or put it in front of `kahan_summation`.

    Args:
        inner: any Optax transformation or chain.
        formats: regular expressions, each with the format of the leaves it matches: bfloat16, float16, float32 (for
            exceptions), by name or dtype, or a `Blockwise8bit`. An expression is searched in the "/"-joined path of a
            leaf of the rule's state, such as `0/mu/layers/kernel`, and matches whole components only: `mu` does not
            match `accumulator`. The first that matches wins, so exceptions come first.
        min_size: leaves with fewer elements stay float32: they cost little, and biases and gains need their precision.
        rounding: `"nearest"`, or `"stochastic"`: up or down at random such that the mean is right.
        key: a PRNG key, for stochastic rounding. It is kept in the state and changes with each step that counts; one
            that `loss_scaling` around this skips does not change it.

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
        >>> optax.tree.get(state, "nu")["w"].codes.dtype, updates["w"].dtype
        (dtype('uint8'), dtype('float32'))

    References:
        Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861); for stochastic rounding
        of a bfloat16 state, Zamirai et al. 2020 (arXiv 2010.06192).
    """
    inner = upcast(_checks.as_transformation(inner, "low_precision_state"))
    patterns = _checked_patterns(formats)
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0:
        raise ValueError(f"`low_precision_state`: `min_size` must be a number of elements, but got {min_size!r}.")
    stored_key, implementation = _checked_key(rounding, key, patterns)

    def init_fn(params):
        upcast_state: Any = inner.init(params)
        state = upcast_state.inner_state
        _require_not_nested(state)
        plan = _plan(state, patterns, min_size)
        if any(_trees.is_floating(p) and np.shape(p) for p in jax.tree.leaves(params)):  # of nothing there is no state
            _require_every_pattern_used(state, patterns, plan)
        _require_sound_formats(state, patterns, plan)
        first_key = optax.MaskedNode() if stored_key is None else jnp.array(stored_key, copy=True)
        return LowPrecisionState(UpcastState(_store(state, plan, None)), first_key)

    def update_fn(updates, state, params=None, **extra_args):
        _checks.require_state(state, LowPrecisionState, "low_precision_state")
        stored = state.inner_state.inner_state
        plan = _plan(stored, patterns, min_size)
        _require_stored_as_planned(stored, plan)
        wide: Any = UpcastState(_load(stored, plan))
        updates, wide = inner.update(updates, wide, params, **extra_args)
        this_step, next_key = None, state.key
        if stored_key is not None:
            this_step, next_step = jax.random.split(jax.random.wrap_key_data(state.key, impl=implementation))
            next_key = jax.random.key_data(next_step)
        return updates, LowPrecisionState(UpcastState(_store(wide.inner_state, plan, this_step)), next_key)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Stored(NamedTuple):
    """How a leaf is stored: its format, and whether it may be negative; and the pattern that says so."""

    format: Format
    signed: bool
    pattern: str


Plan = dict[_trees.Path, _Stored]


def _plan(state: Any, patterns: Mapping[str, Format], min_size: int) -> Plan:
    """How the leaves of a rule's state are stored that a pattern matches, from the state, stored or wide."""
    plan: Plan = {}
    for path, leaf in _trees.leaves_by_path(state, _is_blockwise).items():
        codes = leaf.codes if isinstance(leaf, BlockwiseArray) else leaf
        if not np.shape(codes) or not (_is_blockwise(leaf) or _trees.is_floating(leaf)):
            continue
        text = _trees.path_string(path)
        pattern = next((pattern for pattern in patterns if _matches(pattern, text)), None)
        if pattern is None:
            continue
        chosen = patterns[pattern] if np.size(codes) >= min_size else np.dtype(np.float32)
        signed = chosen.signed if isinstance(chosen, Blockwise8bit) else None
        plan[path] = _Stored(chosen, not holds_second_moment(state, path) if signed is None else signed, pattern)
    return plan


def _matches(pattern: str, path: str) -> bool:
    return re.search(rf"(?:^|/)(?:{pattern})(?:/|$)", path) is not None


def _is_blockwise(leaf: Any) -> bool:
    return isinstance(leaf, BlockwiseArray)


def _load(state: Any, plan: Plan) -> Any:
    """The rule's state in float32."""

    def load(path, leaf):
        stored = plan.get(path)
        return leaf if stored is None else _decoded(leaf, stored.format, stored.signed)

    return jax.tree.map_with_path(load, state, is_leaf=_is_blockwise)


def _store(state: Any, plan: Plan, key: jax.Array | None) -> Any:
    """The rule's state as it is kept between steps; with a key, rounded at random."""
    keys = iter(jax.random.split(key, len(plan))) if key is not None and plan else itertools.repeat(None)

    def store(path, leaf):
        stored = plan.get(path)
        return leaf if stored is None else _encoded(leaf, next(keys), stored.format, stored.signed)

    return jax.tree.map_with_path(store, state)


@functools.partial(jax.jit, inline=True, static_argnums=(1, 2))
def _decoded(leaf: Any, format: Format, signed: bool) -> jax.Array:
    if isinstance(format, Blockwise8bit):
        return decode(leaf, format.block_size, signed)
    return leaf.astype(np.float32) if format != np.float32 else leaf


@functools.partial(jax.jit, inline=True, static_argnums=(2, 3))
def _encoded(x: jax.Array, key: jax.Array | None, format: Format, signed: bool) -> Any:
    if isinstance(format, Blockwise8bit):
        return encode(x.astype(np.float32), format.block_size, signed, key)
    if format == np.float32:
        return x
    if key is None:
        return formats.round_to(x.astype(np.float32), format).astype(format)
    return formats.stochastic_round(key, x.astype(np.float32), format)


# What is checked.


def _checked_patterns(given: Any) -> dict[str, Format]:
    """The argument `formats`, with dtypes for names."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"`low_precision_state`: `formats` must map patterns to formats, as in {{'mu': 'bf16'}}, but got {given!r}."
        )
    if not given:
        raise ValueError("`low_precision_state`: `formats` is empty, so nothing would be done. Use `upcast`.")
    patterns = {}
    for pattern, chosen in given.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"`low_precision_state`: the pattern {pattern!r} is not a regular expression: {error}."
            ) from error
        patterns[pattern] = _checked_format(pattern, chosen)
    return patterns


def _checked_format(pattern: str, chosen: Any) -> Format:
    if isinstance(chosen, Blockwise8bit):
        return chosen
    try:
        dtype = DTYPE_NAMES[chosen] if isinstance(chosen, str) else np.dtype(chosen)
    except (KeyError, TypeError):
        dtype = None
    if chosen is None or dtype is None or dtype not in _DTYPES:  # (NumPy reads None as float64.)
        hint = " Make one: `Blockwise8bit()`." if chosen is Blockwise8bit else ""
        raise ValueError(
            f"`low_precision_state`: `formats[{pattern!r}]` must be bfloat16, float16, float32 or a `Blockwise8bit`, "
            f"but got {chosen!r}.{hint}"
        )
    return dtype


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
    typed, implementation = _checks.one_key(key, "low_precision_state")
    return jax.random.key_data(typed), implementation


def _require_not_nested(state: Any) -> None:
    if _trees.find_states(state, LowPrecisionState):
        raise ValueError(
            "`low_precision_state`: the rule inside stores its state in few bits already. Give all formats to one of "
            "the two."
        )


def _require_every_pattern_used(state: Any, patterns: Mapping[str, Format], plan: Plan) -> None:
    """Raises if a pattern decides about no leaf of a state."""
    leaves = _trees.leaves_by_path(state)
    paths = [_trees.path_string(path) for path, leaf in leaves.items() if _trees.is_floating(leaf) and np.shape(leaf)]
    used = {stored.pattern for stored in plan.values()}
    unused = [pattern for pattern in patterns if pattern not in used]
    if not unused:
        return
    shadowed = [pattern for pattern in unused if any(_matches(pattern, path) for path in paths)]
    if shadowed:
        raise ValueError(
            f"`low_precision_state`: the pattern {shadowed[0]!r} decides about no leaf, because others before it match "
            "all of its leaves, and the first one wins. Put exceptions in front."
        )
    listed = "\n".join(f"  {path}" for path in paths[:_LISTED_PATHS])
    more = f"\n  and {len(paths) - _LISTED_PATHS} more" if len(paths) > _LISTED_PATHS else ""
    raise ValueError(
        f"`low_precision_state`: the pattern {unused[0]!r} matches no floating-point array in the state of this rule. "
        + (f"There are:\n{listed}{more}" if paths else "There is none.")
        + "\nA pattern matches whole components of a path."
    )


def _require_sound_formats(state: Any, patterns: Mapping[str, Format], plan: Plan) -> None:
    """Raises if a leaf would be stored in a format that it must not have, whatever its size."""
    float64, exact, second_moments = [], [], []
    for path, leaf in _trees.leaves_by_path(state).items():
        stored = plan.get(path)
        if stored is None or patterns[stored.pattern] == np.float32:
            continue
        shown = f"  {_trees.path_string(path)!r}: {_trees.dtype_and_shape(leaf)}, by the pattern {stored.pattern!r}"
        if leaf.dtype.itemsize > 4:
            float64.append(shown)
        if must_stay_exact(state, path):
            exact.append(shown)
        if patterns[stored.pattern] == np.float16 and holds_second_moment(state, path):
            second_moments.append(shown)
    for wrong, what in (
        (float64, "are float64, of which nothing is to be lost, it seems. Leave them out, or give float32 parameters."),
        (
            exact,
            "are masters, compensations or averages of weights, kept because they lose nothing. Put "
            "`low_precision_state` inside `master_weights` and in front of `kahan_summation`, or give these leaves "
            "'f32' in front of the other patterns.",
        ),
        (
            second_moments,
            "are second moments, which float16 cannot hold: squares of gradients below 2.4e-4 become less than 6e-8, "
            "its smallest number, and updates are divided by their root. Use 'bf16' or `Blockwise8bit()`.",
        ),
    ):
        if wrong:
            listed = "\n".join(wrong)
            raise ValueError(f"`low_precision_state`: these leaves\n{listed}\n{what}")


def _require_stored_as_planned(state: Any, plan: Plan) -> None:
    """Raises if a state was stored in other formats than those of this transformation."""
    wrong = []
    for path, leaf in _trees.leaves_by_path(state, _is_blockwise).items():
        stored = plan.get(path)
        wanted = np.float32 if stored is None else stored.format
        if isinstance(leaf, BlockwiseArray):
            blocks = -(-leaf.codes.size // wanted.block_size) if isinstance(wanted, Blockwise8bit) else None
            fits = leaf.scale.shape == (blocks,)
        else:
            fits = stored is None or wanted == np.float32 or leaf.dtype == wanted
        if not fits:
            got = "8 bits" if isinstance(leaf, BlockwiseArray) else leaf.dtype
            wrong.append(f"  {_trees.path_string(path)!r}: stored as {got}, but the format is {wanted}")
    if wrong:
        listed = "\n".join(wrong)
        raise ValueError(
            f"`low_precision_state`: the state was made with other `formats` or another `min_size`:\n{listed}\n"
            "Use those, or call `init` and start with new moments."
        )
