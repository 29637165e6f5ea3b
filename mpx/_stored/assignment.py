"""Choose the format of each leaf of an optimizer's state by patterns, and refuse
unsound choices.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from mpx import _errors, _flax, _trees
from mpx._dtypes import UP_TO_FLOAT32, dtype_or_none
from mpx._shardings import explicit_sharding
from mpx._stored.blocks import BlockFormat
from mpx._stored.leaves import StateLeaf, leaves_of
from mpx._stored.roles import EXACT, Role
from mpx._stored.state_format import (
    FLOAT32,
    Cast,
    StateFormat,
    is_stored,
    store,
)

_LISTED_PATHS = 20


class Assigned(NamedTuple):
    """The format of a leaf, and the pattern that says so."""

    format: StateFormat
    pattern: str


Assignment = dict[int, Assigned]  # by the position of the leaf in the state


def assign(
    state: Any, patterns: Mapping[str, StateFormat], min_size: int
) -> Assignment:
    """Return the format of each leaf that a pattern matches; the state may be in
    float32 or stored.
    """
    chosen: Assignment = {}
    names, boxes = _trees.path_names(state, is_stored), _flax.boxes_of(state)
    for i, found in enumerate(leaves_of(state)):
        leaf = found.leaf
        if not (is_stored(leaf) or _trees.is_inexact(leaf)) or not leaf.shape:
            continue
        pattern = next(
            (
                pattern
                for pattern in patterns
                if _matches(pattern, names[found.path], found.role)
            ),
            None,
        )
        if pattern is not None:
            # A small leaf is assigned too, to float32: else its pattern would seem to
            # match nothing.
            format = (
                patterns[pattern].for_role(found.role)
                if math.prod(leaf.shape) >= min_size
                else FLOAT32
            )
            chosen[i] = Assigned(
                _with_blocks_of(leaf, format, boxes.get(found.path)), pattern
            )
    return chosen


def _with_blocks_of(leaf: Any, format: StateFormat, box: Any = None) -> StateFormat:
    """Keep a stored leaf's block size; otherwise choose one that fits a shard."""
    if is_stored(leaf):
        kept: Any = leaf.format
        if not isinstance(format, BlockFormat) or type(kept) is not type(format):
            return format
        as_kept: Any = format  # a dataclass, as every class of blocks is
        is_alike = kept == dataclasses.replace(as_kept, block_size=kept.block_size)
        # Blocks that `init` made smaller, for shards, stay: an update decodes what the
        # state has.
        return kept if is_alike and kept.block_size < format.block_size else format
    sharding = explicit_sharding(leaf)
    if sharding is None and _flax.is_last_axis_named(box, leaf.ndim):
        # No mesh is known: XLA divides rows, if blocks do not cross them.
        return format.for_shards(leaf.shape[-1])
    if sharding is None or sharding.is_fully_replicated:
        return format
    # Else a block may reach over two devices, which gathers the leaf at each step.
    rows, *columns = sharding.shard_shape(leaf.shape)
    # Of memory, whose blocks may reach over the ends of rows.
    is_one_run = columns == [*leaf.shape[1:]]
    return format.for_shards(rows * math.prod(columns) if is_one_run else columns[-1])


def _matches(pattern: str, path: str, role: Role) -> bool:
    """Return whether a pattern is the role of a leaf, or is found in its path.

    Only roles of several words count: a layer may be called `key` or `weights`.
    """
    return (pattern == role and " " in role) or re.search(
        whole_components(pattern), path
    ) is not None


def whole_components(pattern: str) -> str:
    """Return the expression that matches whole components of a path."""
    return rf"(?:^|/)(?:{pattern})(?:/|$)"


def checked_patterns(given: Any) -> dict[str, StateFormat]:
    """Check the argument `formats`, and replace dtypes and names by formats."""
    if not isinstance(given, Mapping):
        raise TypeError(
            "`low_precision_state`: `formats` must map patterns to formats, as in"
            f" {{'mu': 'bf16'}}, but got {given!r}."
        )
    if not given:
        raise ValueError(
            "`low_precision_state`: `formats` is empty, so nothing would be done. Use"
            " `upcast`."
        )
    for pattern in given:
        if not isinstance(pattern, str):
            raise ValueError(
                f"`low_precision_state`: the pattern {pattern!r} is not a regular"
                " expression."
            )
        _errors.require_pattern(
            whole_components(pattern), f"`low_precision_state`: the pattern {pattern!r}"
        )
    return {
        pattern: _checked_format(pattern, chosen) for pattern, chosen in given.items()
    }


def _checked_format(pattern: str, chosen: Any) -> StateFormat:
    found = chosen
    if (dtype := dtype_or_none(chosen)) is not None and dtype in UP_TO_FLOAT32:
        found = Cast(dtype.name)
    if not isinstance(found, StateFormat):
        hint = ""
        if isinstance(chosen, type) and issubclass(chosen, StateFormat):
            hint = f" Make one: `{chosen.__name__}()`."
        raise ValueError(
            f"`low_precision_state`: `formats[{pattern!r}]` must be bfloat16, float16,"
            " float32 or a `StateFormat` such as `Blockwise8bit()`, but got"
            f" {chosen!r}.{hint}"
        )
    try:
        hash(found)
    except TypeError as error:
        raise TypeError(
            f"`low_precision_state`: the format {chosen!r} must be a frozen dataclass"
            " whose fields can be hashed."
        ) from error
    return found


def require_every_pattern_used(
    state: Any, patterns: Mapping[str, StateFormat], assignment: Assignment
) -> None:
    """Raise if a pattern decides about no leaf of a state.

    A role may, if another pattern decides: formats by role stand around any rule.
    """
    used = {assigned.pattern for assigned in assignment.values()}
    unused = [
        pattern
        for pattern in patterns
        if pattern not in used and not (used and pattern in get_args(Role))
    ]
    if not unused:
        return
    names = _trees.path_names(state)
    arrays = [
        found
        for found in leaves_of(state)
        if _trees.is_inexact(found.leaf) and np.shape(found.leaf)
    ]

    def is_met(pattern):
        return any(_matches(pattern, names[found.path], found.role) for found in arrays)

    shadowed = next(filter(is_met, unused), None)
    if shadowed is not None:
        raise ValueError(
            f"`low_precision_state`: the pattern {shadowed!r} decides about no leaf,"
            " because others before it match all of its leaves, and the first one"
            " wins. Put exceptions in front."
        )
    listed = (
        _errors.listed([names[found.path] for found in arrays], _LISTED_PATHS)
        or "(none)"
    )
    raise ValueError(
        f"`low_precision_state`: the pattern {unused[0]!r} matches no floating-point"
        " array in the state of this rule. A pattern matches whole components of a"
        f" path. The paths are: {listed}."
    )


def require_sound_formats(
    state: Any, patterns: Mapping[str, StateFormat], assignment: Assignment
) -> None:
    """Raise if a leaf would be kept in a format that it must not have, or that cannot
    hold it.

    A leaf that is small stays in float32: its format is not asked about it.
    """
    wrong: dict[str, dict[_trees.Path, str]] = {}
    for i, found in enumerate(leaves_of(state)):
        if i not in assignment:
            continue
        format, pattern = assignment[i]
        text = f"{_trees.dtype_and_shape(found.leaf)}, by the pattern {pattern!r}"
        reason = _unsound(found.leaf, found.role, patterns[pattern])
        if not reason and format != FLOAT32:
            reason = patterns[pattern].why_unsuitable(found.role, found.leaf.shape)
        if reason:
            wrong.setdefault(reason, {})[found.path] = text
        elif format != FLOAT32:
            _try(format, found, text)
    for reason, leaves in wrong.items():
        what = (
            "`low_precision_state`: leaves would be kept in a format that they must not"
            " have"
        )
        _errors.refuse(leaves, what, f"These leaves {reason}")


def _unsound(leaf: Any, role: Role, chosen: StateFormat) -> str | None:
    """Return why a leaf cannot be kept in a format, whatever its size; None if it
    can.
    """
    if chosen == FLOAT32:
        return _DOUBLED if leaf.dtype.itemsize < 4 else None
    if not _trees.is_floating(leaf):
        return _COMPLEX
    if leaf.dtype.itemsize > 4:
        return _FLOAT64
    return _EXACT if role in EXACT else None


def _try(format: StateFormat, found: StateLeaf, text: str) -> None:
    """Encode the shape of a leaf, and decode it; say which leaf it is if a format does
    not hold it.
    """
    try:
        kept = _shapes_kept(format, found.leaf.shape)
        _ = is_stored(kept) and kept.shape
    except Exception as error:  # of a class that mpx does not know
        path = _trees.path_string(found.path)
        error.add_note(
            f"`low_precision_state`: {format} does not hold the leaf {path!r}, {text}."
            " Give it another format, in front of this pattern. (The method"
            " `why_unsuitable` of a format can say which shapes it holds.)"
        )
        raise


_DOUBLED = (
    "are stored in 16 bits by the rule itself, so that the format 'f32' would do"
    " nothing. Leave out the rule's own setting, such as `mu_dtype`."
)
_COMPLEX = (
    "are complex, and formats hold real numbers. Wrap the rule in"
    " `optax.contrib.split_real_and_imaginary`, or give these leaves 'f32' in front of"
    " the other patterns."
)
_FLOAT64 = (
    "are float64, as the parameters are: a training run in float64 has no use for 16 or"
    " 8 bits. Cast the parameters, or give these leaves 'f32' in front of the other"
    " patterns."
)
_EXACT = (
    "are masters, compensations or copies of weights, kept so that nothing is lost. Put"
    " `low_precision_state` inside `master_weights` and in front of `kahan_summation`,"
    " or give these leaves 'f32' in front of the other patterns."
)


def require_stored_as_assigned(
    state: Any, assignment: Assignment, as_made: Callable[[], Any]
) -> None:
    """Raise if a state is kept in other formats than it should be.

    `as_made` returns the shapes of the rule's own state. They tell which leaves the
    rule itself makes in 16 bits.
    """
    wrong, edited = {}, {}

    def kind(leaf):
        return leaf.format if is_stored(leaf) else leaf.dtype

    for i, (path, leaf) in enumerate(_trees.leaves_by_path(state, is_stored).items()):
        if is_stored(leaf) and _is_edited(leaf):
            edited[path] = f"codes of {jax.tree.leaves(leaf.codes)[0].dtype}"
            continue
        assigned = assignment.get(i)
        if assigned is not None and assigned.format != FLOAT32:
            wanted = _shapes_kept(assigned.format, leaf.shape)
        elif is_stored(leaf) or _trees.is_narrower(leaf):
            # The rule itself may keep 16 bits (`mu_dtype`); what another recipe left in
            # them is an error.
            wanted = jax.tree.leaves(as_made())[i]
        else:
            continue
        if kind(leaf) != kind(wanted):
            named = "the rule's own" if assigned is None else assigned.format
            wrong[path] = f"stored as {kind(leaf)}, but the format is {named}"
    _errors.refuse(
        edited,
        "`low_precision_state`: codes were changed as if they were the numbers",
        "Decode, edit, encode each `mpx.states.StoredLeaf`:"
        " `leaf.encode(0.1 * leaf.decode())`",
    )
    what = (
        "`low_precision_state`: the state was made with other `formats` or another"
        " `min_size`"
    )
    remedy = "Use those, or call `init` and start with new moments."
    _errors.refuse(wrong, what, remedy)


def _is_edited(leaf: Any) -> bool:
    """Return whether codes have another dtype than their format makes."""
    try:
        return _shapes_kept(leaf.format, leaf.shape).codes.dtype != (
            jax.tree.leaves(leaf.codes)[0].dtype
        )
    except TypeError:  # such as bits of a float
        return True


@functools.lru_cache(maxsize=4096)
def _shapes_kept(format: StateFormat, shape: tuple[int, ...]) -> Any:
    """Return the shapes that a format keeps for an array of this shape."""
    # Without a key said as `init` says it, so that both share a trace.
    return jax.eval_shape(
        lambda x: store(x, format, None), jax.ShapeDtypeStruct(shape, np.float32)
    )
