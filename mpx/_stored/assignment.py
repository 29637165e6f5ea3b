"""Choose the format in which each leaf of an optimizer's state is kept: by patterns, and with what is refused."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mpx import _errors, _trees
from mpx._stored.leaves import leaves_of
from mpx._stored.roles import EXACT, Role
from mpx._stored.state_format import FLOAT32, StateFormat, as_format, position_of, require_nameable, scales_name

_LISTED_PATHS = 20


class Stored(NamedTuple):
    """How a leaf is kept.

    Attributes:
        format: the format in which it is kept.
        pattern: the pattern that says so.
        scales: the name of its scales, if the format has any.
    """

    format: StateFormat
    pattern: str
    scales: str


Assignment = dict[_trees.Path, Stored]


def assign(state: Any, scales: Mapping[str, Any], patterns: Mapping[str, StateFormat], min_size: int) -> Assignment:
    """Return how the leaves of a rule's state are kept that a pattern matches.

    Args:
        state: the state of the rule, in float32 or as it is kept.
        scales: the scales of the leaves that are kept in few bits; empty for a state in float32.
        patterns: the format for each pattern.
        min_size: leaves of fewer elements are kept in float32.
    """
    chosen: Assignment = {}
    coded = {position_of(name) for name in scales}
    names = _trees.path_names(state)
    for i, found in enumerate(leaves_of(state)):
        leaf = found.leaf
        if not np.shape(leaf) or not (i in coded or _trees.is_floating(leaf)):
            continue
        text = names[found.path]
        pattern = next((pattern for pattern in patterns if _matches(pattern, text)), None)
        if pattern is not None:
            format = patterns[pattern].for_role(found.role) if np.size(leaf) >= min_size else FLOAT32
            chosen[found.path] = Stored(format, pattern, scales_name(i, format))
    return chosen


def _matches(pattern: str, path: str) -> bool:
    return re.search(_whole(pattern), path) is not None


def _whole(pattern: str) -> str:
    """Return the expression that matches whole components of a path."""
    return rf"(?:^|/)(?:{pattern})(?:/|$)"


def checked_patterns(given: Any) -> dict[str, StateFormat]:
    """Return the argument `formats`, with formats for dtypes and names."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"`low_precision_state`: `formats` must map patterns to formats, as in {{'mu': 'bf16'}}, but got {given!r}."
        )
    if not given:
        raise ValueError("`low_precision_state`: `formats` is empty, so nothing would be done. Use `upcast`.")
    return {_checked_pattern(pattern): _checked_format(pattern, chosen) for pattern, chosen in given.items()}


def _checked_pattern(pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise ValueError(f"`low_precision_state`: the pattern {pattern!r} is not a regular expression.")
    _errors.require_pattern(_whole(pattern), f"`low_precision_state`: the pattern {pattern!r}")
    return pattern


def _checked_format(pattern: str, chosen: Any) -> StateFormat:
    found = as_format(chosen)
    if found is None:
        hint = ""
        if isinstance(chosen, type) and issubclass(chosen, StateFormat):
            hint = f" Make one: `{chosen.__name__}()`."
        raise ValueError(
            f"`low_precision_state`: `formats[{pattern!r}]` must be bfloat16, float16, float32 or a `StateFormat` such "
            f"as `Blockwise8bit()`, but got {chosen!r}.{hint}"
        )
    require_nameable(found, "low_precision_state")
    return found


def require_every_pattern_used(state: Any, patterns: Mapping[str, StateFormat], assignment: Assignment) -> None:
    """Raise if a pattern decides about no leaf of a state."""
    leaves, names = _trees.leaves_by_path(state), _trees.path_names(state)
    paths = [names[path] for path, leaf in leaves.items() if _trees.is_floating(leaf) and np.shape(leaf)]
    used = {stored.pattern for stored in assignment.values()}
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


def require_sound_formats(state: Any, patterns: Mapping[str, StateFormat], assignment: Assignment) -> None:
    """Raise if a leaf would be kept in a format that it must not have, whatever its size."""
    wrong: dict[str, dict[_trees.Path, str]] = {}
    for found in leaves_of(state):
        stored = assignment.get(found.path)
        if stored is None:
            continue
        reason = _unsound(found.leaf, found.role, patterns[stored.pattern])
        if reason is not None:
            text = f"{_trees.dtype_and_shape(found.leaf)}, by the pattern {stored.pattern!r}"
            wrong.setdefault(reason, {})[found.path] = text
    for reason, leaves in wrong.items():
        raise _errors.leaves_error(ValueError, "`low_precision_state`: these leaves", leaves, reason)


def _unsound(leaf: Any, role: Role, chosen: StateFormat) -> str | None:
    """Return why a leaf cannot be kept in a format; None if it can."""
    if chosen == FLOAT32:
        return _DOUBLED if leaf.dtype.itemsize < 4 else None
    if leaf.dtype.itemsize > 4:
        return _FLOAT64
    return _EXACT if role in EXACT else chosen.refuses(role)


_DOUBLED = (
    "are stored in 16 bits by the rule itself, so that the format 'f32' would do nothing. Leave out the rule's own "
    "setting, such as `mu_dtype`."
)
_FLOAT64 = (
    "are float64, as the parameters are: a training run in float64 has no use for 16 or 8 bits. Cast the parameters, "
    "or give these leaves 'f32' in front of the other patterns."
)
_EXACT = (
    "are masters, compensations, averages or copies of weights, kept so that nothing is lost. Put "
    "`low_precision_state` inside `master_weights` and in front of `kahan_summation`, or give these leaves 'f32' in "
    "front of the other patterns."
)


def require_stored_as_assigned(
    state: Any, scales: Mapping[str, Any], assignment: Assignment, as_made: Callable[[], Any]
) -> None:
    """Raise if a state is kept in other formats than those of this transformation.

    Args:
        state: the state of the rule, as it is kept.
        scales: the scales of its leaves that are kept in few bits.
        assignment: how its leaves should be kept.
        as_made: returns the shapes of the rule's own state, to tell its own 16-bit leaves.
    """
    wrong = {}
    kept = {position_of(name): name for name in scales}
    expected = set()
    for i, (path, leaf) in enumerate(_trees.leaves_by_path(state).items()):
        stored, name = assignment.get(path), kept.get(i)
        if stored is None or stored.format == FLOAT32:
            is_narrow = _trees.is_narrower(leaf, np.dtype(np.float32))
            fits = name is None and (not is_narrow or leaf.dtype == jax.tree.leaves(as_made())[i].dtype)
            wanted: Any = "the rule's own" if stored is None else stored.format
        else:
            wanted, fits = stored.format, _is_encoded_in(stored, leaf, name, scales)
            expected |= {stored.scales} if stored.format.has_scales else set()
        if not fits:
            got = leaf.dtype if name is None else name.partition(".")[2]
            wrong[path] = f"stored as {got}, but the format is {wanted}"
    if wrong or set(scales) != expected:
        what = "`low_precision_state`: the state was made with other `formats` or another `min_size`"
        remedy = "Use those, or call `init` and start with new moments."
        raise _errors.leaves_error(ValueError, what, wrong, remedy)


def _is_encoded_in(stored: Stored, leaf: Any, name: str | None, scales: Mapping[str, Any]) -> bool:
    """Return whether a leaf, and its scales of this name, are what a format makes of an array of this shape."""
    codes, of_codes = jax.eval_shape(stored.format.encode, jax.ShapeDtypeStruct(leaf.shape, np.float32))
    if leaf.dtype != codes.dtype:
        return False
    if of_codes is None or name is None:
        return of_codes is None and name is None
    return name == stored.scales and scales[name].shape == of_codes.shape
