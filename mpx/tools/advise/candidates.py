"""Find what can be kept in float32, in groups, and as few of them as meet a bound."""

import bisect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np

from mpx.tools.advise.advice import AdviceRow
from mpx.tools.advise.study import Study

_FEW_LEAVES = 24
_DIGITS = "[0-9]+"

Groups = Literal["leaves", "patterns"] | Callable[[str], str]


def rows_of(study: Study, groups: Groups | None) -> Iterator[AdviceRow]:
    """Yield what the policy narrows: groups of leaves with their contractions, then lines that no leaf reaches."""
    patterns, by_line = [], defaultdict(set)
    for name, (pattern, positions) in grouped(study.paths, groups).items():
        pairs = enumerate(zip(study.contractions, study.contractions_keeping([pattern]), strict=True))
        used = frozenset(i for i, (given, alone) in pairs if given.is_narrowed and not alone.is_narrowed)
        size = _extra_bytes(study, positions)
        if used or size:
            patterns.append(pattern)
            yield _row(study, name or "(the array)", pattern, size, positions, used)
    for i, contraction in enumerate(study.contractions_keeping(patterns)):
        if contraction.is_narrowed:
            by_line[contraction.where].add(i)
    for where, numbers in by_line.items():
        yield _row(study, where, "", 0, (), frozenset(numbers))
    if not patterns and not by_line:
        raise ValueError(
            f"`advise`: the policy {str(study.policy)!r} narrows nothing: parameters stay float32, and so do all "
            f"{len(study.contractions)} contractions of the loss. `explain` says why; a policy such as "
            "'params=bf16,compute=bf16' narrows both."
        )


def _row(
    study: Study, name: str, pattern: str, size: int, positions: tuple[int, ...], numbers: frozenset[int]
) -> AdviceRow:
    errors, flops = study.errors_of_narrowing(positions, numbers), sum(study.contractions[i].flops for i in numbers)
    return AdviceRow(name, "leaf" if pattern else "contraction", pattern, size, flops, errors.loss, errors.gradient)


def grouped(paths: list[str], groups: Groups | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the groups of leaves by name: a regular expression that finds their paths only, and their positions."""
    if groups is None:
        groups = "patterns" if len(paths) > _FEW_LEAVES else "leaves"
    members = defaultdict(list)
    for i, path in enumerate(paths):
        members[_group_of(path, groups)].append(i)
    # The text between two numbers has no digits, so the numbers of a path are told apart.
    split = (lambda path: re.split(_DIGITS, path)) if groups == "patterns" else (lambda path: [path])
    pattern_of = lambda path: _DIGITS.join(map(re.escape, split(path)))
    found = {}
    for name, positions in members.items():
        own = "|".join(dict.fromkeys(pattern_of(paths[i]) for i in positions))
        found[name] = f"^(?:{own})$" if "|" in own else f"^{own}$", tuple(positions)
    return found


def _group_of(path: str, groups: Groups) -> str:
    if not callable(groups):
        return path if groups == "leaves" else re.sub(_DIGITS, "*", path)
    name = groups(path)
    if not isinstance(name, str):
        raise TypeError(
            f"`advise`: `groups` must return the name of a group, a string, but gave {name!r} for {path!r}."
        )
    return name


def _extra_bytes(study: Study, positions: tuple[int, ...]) -> int:
    """Return the bytes that leaves take more in float32; an array that stands in the tree twice counts once."""
    sizes, leaves = {}, jax.tree.leaves(study.params)
    for i in positions:
        stored = np.dtype(study.policy.override_at(study.paths[i]) or study.policy.param_dtype)
        sizes[id(leaves[study.floating[i]])] = study.wide[i].size * max(4 - stored.itemsize, 0)
    return sum(sizes.values())


def fewest(study: Study, ranked: Sequence[AdviceRow], bound: float) -> Sequence[AdviceRow]:
    """Return as few of the first rows as meet the bound: leaves if those suffice, else any; all if nothing does."""
    is_enough = lambda rows: study.errors_keeping(rows).worst <= bound
    if is_enough([]):
        return []
    for order in ([row for row in ranked if row.kind == "leaf"], ranked):
        if is_enough(order):
            count = bisect.bisect_left(range(len(order)), True, lo=1, key=lambda n: is_enough(order[:n]))
            return order[:count]
    return ranked
