"""Which leaf of an optimizer's state is stored in which format: patterns, the plan that follows, what is refused."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpx import _trees
from mpx._dtypes import dtype_or_none
from mpx._stored.blockwise import Blockwise8bit, scale_shape
from mpx._stored.roles import kind_of

Format = np.dtype | Blockwise8bit

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
_LISTED_PATHS = 20


class Stored(NamedTuple):
    """How a leaf is stored."""

    format: Format
    signed: bool
    pattern: str  # that says so
    scales: str  # the name of its scales in `block_scales`, if it is coded


Plan = dict[_trees.Path, Stored]


def make_plan(state: Any, scales: Mapping[str, Any], patterns: Mapping[str, Format], min_size: int) -> Plan:
    """How the leaves of a rule's state are stored that a pattern matches, from the state, stored or wide."""
    plan: Plan = {}
    coded = {name.partition(".")[0] for name in scales}
    for i, (path, leaf) in enumerate(_trees.leaves_by_path(state).items()):
        if not np.shape(leaf) or not (str(i) in coded or _trees.is_floating(leaf)):
            continue
        text = _trees.path_string(path)
        pattern = next((pattern for pattern in patterns if _matches(pattern, text)), None)
        if pattern is None:
            continue
        chosen = patterns[pattern] if np.size(leaf) >= min_size else np.dtype(np.float32)
        signed = chosen.signed if isinstance(chosen, Blockwise8bit) else None
        if signed is None:
            signed = kind_of(state, path) != "second moment"
        plan[path] = Stored(chosen, signed, pattern, f"{i}.{'signed' if signed else 'unsigned'}")
    return plan


def _matches(pattern: str, path: str) -> bool:
    return re.search(_whole(pattern), path) is not None


def _whole(pattern: str) -> str:
    """The pattern that matches whole components of a path."""
    return rf"(?:^|/)(?:{pattern})(?:/|$)"


def checked_patterns(given: Any) -> dict[str, Format]:
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
            re.compile(_whole(pattern) if isinstance(pattern, str) else pattern)
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"`low_precision_state`: the pattern {pattern!r} is not a regular expression: {error}."
            ) from error
        patterns[pattern] = _checked_format(pattern, chosen)
    return patterns


def _checked_format(pattern: str, chosen: Any) -> Format:
    if isinstance(chosen, Blockwise8bit):
        return chosen
    dtype = dtype_or_none(chosen)
    if dtype is None or dtype not in _DTYPES:
        hint = " Make one: `Blockwise8bit()`." if chosen is Blockwise8bit else ""
        raise ValueError(
            f"`low_precision_state`: `formats[{pattern!r}]` must be bfloat16, float16, float32 or a `Blockwise8bit`, "
            f"but got {chosen!r}.{hint}"
        )
    return dtype


def require_every_pattern_used(state: Any, patterns: Mapping[str, Format], plan: Plan) -> None:
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


def require_sound_formats(state: Any, patterns: Mapping[str, Format], plan: Plan) -> None:
    """Raises if a leaf would be stored in a format that it must not have, whatever its size."""
    wrong: dict[str, list[str]] = {what: [] for what in _UNSOUND}
    for path, leaf in _trees.leaves_by_path(state).items():
        stored = plan.get(path)
        if stored is None:
            continue
        chosen, kind = patterns[stored.pattern], kind_of(state, path)
        unsound = {
            "doubled": chosen == np.float32 and leaf.dtype.itemsize < 4,
            "float64": chosen != np.float32 and leaf.dtype.itemsize > 4,
            "exact": chosen != np.float32 and kind == "exact",
            "second moment": chosen == np.float16 and kind == "second moment",
            "unknown": isinstance(chosen, Blockwise8bit) and chosen.signed is None and kind == "unknown",
        }
        for what, is_so in unsound.items():
            if is_so:
                shape = _trees.dtype_and_shape(leaf)
                wrong[what].append(f"  {_trees.path_string(path)!r}: {shape}, by the pattern {stored.pattern!r}")
    for what, leaves in wrong.items():
        if leaves:
            listed = "\n".join(leaves)
            raise ValueError(f"`low_precision_state`: these leaves\n{listed}\n{_UNSOUND[what]}")


_UNSOUND = {
    "doubled": "are stored in 16 bits by the rule itself, so that the format 'f32' would do nothing. Leave out the "
    "rule's own setting, such as `mu_dtype`.",
    "float64": "are float64, as the parameters are: whoever trains in float64 has no use for 16 or 8 bits. Cast the "
    "parameters, or give these leaves 'f32' in front of the other patterns.",
    "exact": "are masters, compensations, averages or copies of weights, kept so that nothing is lost. Put "
    "`low_precision_state` inside `master_weights` and in front of `kahan_summation`, or give these leaves 'f32' in "
    "front of the other patterns.",
    "second moment": "are second moments, which float16 cannot hold: squares of gradients below 2.4e-4 become less "
    "than 6e-8, its smallest number, and updates are divided by their root. Use 'bf16' or `Blockwise8bit()`.",
    "unknown": "are in fields of which it is not known whether they can be negative, which decides about their code. "
    "Say so: `Blockwise8bit(signed=False)` for second moments, `Blockwise8bit(signed=True)` for others.",
}


def require_stored_as_planned(
    state: Any, scales: Mapping[str, jax.Array], plan: Plan, as_made: Callable[[], Any]
) -> None:
    """Raises if a state was stored in other formats than those of this transformation.

    Args:
        state: of the rule.
        scales: of its blocks.
        plan: how its leaves are stored.
        as_made: gives the shapes of the rule's own `UpcastState`, to tell its own 16-bit leaves.
    """
    wrong = []
    expected = {stored.scales for stored in plan.values() if isinstance(stored.format, Blockwise8bit)}
    for i, (path, leaf) in enumerate(_trees.leaves_by_path(state).items()):
        stored = plan.get(path)
        wanted: Any = "the rule's own" if stored is None else stored.format
        coded = [name for name in scales if name.partition(".")[0] == str(i)]
        if stored is not None and isinstance(wanted, Blockwise8bit):
            shape = scale_shape(leaf.shape, wanted.block_size)
            fits = coded == [stored.scales] and leaf.dtype == np.uint8 and scales[coded[0]].shape == shape
        elif coded:
            fits = False
        elif stored is not None and wanted != np.float32:
            fits = leaf.dtype == wanted
        elif _trees.is_narrower(leaf, np.dtype(np.float32)):
            fits = leaf.dtype == jax.tree.leaves(as_made())[i].dtype
        else:
            fits = True
        if not fits:
            got = f"8 bits ({coded[0].partition('.')[2]})" if coded else leaf.dtype
            wrong.append(f"  {_trees.path_string(path)!r}: stored as {got}, but the format is {wanted}")
    if wrong or set(scales) != expected:
        listed = "\n".join(wrong)
        raise ValueError(
            f"`low_precision_state`: the state was made with other `formats` or another `min_size`:\n{listed}\n"
            "Use those, or call `init` and start with new moments."
        )
