"""What can be kept in float32, in groups, and as few of them as meet a bound."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import numpy as np

from mpx._policy import Policy
from mpx.tools.advise.study import Candidate, Errors, Study

_F32 = np.dtype(np.float32)
_FEW_LEAVES = 24
_DIGITS = "[0-9]+"

Groups = Literal["leaves", "patterns"] | Callable[[str], str]


def candidates_of(study: Study, policy: Policy, groups: Groups | None) -> list[Candidate]:
    """What the policy lowers, by what keeps it in float32."""
    given = study.contractions
    found, patterns = [], []
    for name, (pattern, positions) in grouped(study.paths, groups).items():
        wide = study.contractions_with(((pattern, _F32), *policy.overrides))
        used = frozenset(i for i, c in enumerate(wide) if given[i].is_lowered and not c.is_lowered)
        size = _extra_bytes(study, positions, policy)
        if used or size:
            flops = sum(given[i].flops for i in used)
            found.append(Candidate(name or "(the array)", pattern, positions, used, flops, size))
            patterns.append((pattern, _F32))
    by_line = defaultdict(list)
    for i, c in enumerate(study.contractions_with((*patterns, *policy.overrides))):
        if c.is_lowered:
            by_line[c.where].append(i)
    for where, numbers in by_line.items():
        flops = sum(given[i].flops for i in numbers)
        found.append(Candidate(where, None, (), frozenset(numbers), flops, 0))
    if not found:
        raise ValueError(
            f"`advise`: nothing is lowered by the policy {str(policy)!r}: parameters stay float32, and so do all "
            f"{len(given)} contractions of the loss. `explain` says why; a policy such as 'params=bf16,compute=bf16' "
            "lowers both."
        )
    return found


def grouped(paths: list[str], groups: Groups | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The groups of leaves: by name a regular expression that is found in their paths only, and their positions."""
    if groups is None:
        groups = "patterns" if len(paths) > _FEW_LEAVES else "leaves"
    members = defaultdict(list)
    for i, path in enumerate(paths):
        members[_group_of(path, groups)].append(i)
    result = {}
    for name, positions in members.items():
        own = dict.fromkeys(paths[i] for i in positions)
        if groups == "patterns":  # parts between numbers hold no digits, so the numbers are told apart
            own = dict.fromkeys(_DIGITS.join(map(re.escape, re.split(_DIGITS, path))) for path in own)
        else:
            own = dict.fromkeys(map(re.escape, own))
        alternatives = "|".join(own)
        result[name] = f"^(?:{alternatives})$" if len(own) > 1 else f"^{alternatives}$", tuple(positions)
    return result


def _group_of(path: str, groups: Groups) -> str:
    if groups == "leaves":
        return path
    name = re.sub(_DIGITS, "*", path) if groups == "patterns" else groups(path)  # type: ignore[operator]
    if not isinstance(name, str):
        raise TypeError(
            f"`advise`: `groups` must return the name of a group, a string, but gave {name!r} for {path!r}."
        )
    return name


def _extra_bytes(study: Study, positions: tuple[int, ...], policy: Policy) -> int:
    """The bytes that leaves take more in float32; an array that stands in the tree twice counts once."""
    sizes, leaves = {}, jax.tree.leaves(study.params)
    for i in positions:
        stored = np.dtype(policy.override_at(study.paths[i]) or policy.param_dtype)
        sizes[id(leaves[study.floating[i]])] = study.wide[i].size * max(_F32.itemsize - stored.itemsize, 0)
    return sum(sizes.values())


def with_overrides(policy: Policy, kept: Sequence[Candidate]) -> Policy:
    """Put the kept candidates in front of the overrides of a policy."""
    own = [(candidate.pattern, _F32) for candidate in kept if candidate.pattern is not None]
    return dataclasses.replace(policy, overrides=(*own, *policy.overrides))


def lines_of(kept: Sequence[Candidate]) -> tuple[str, ...]:
    """Name the lines that are kept in float32."""
    return tuple(candidate.name for candidate in kept if candidate.pattern is None)


def fewest(study: Study, policy: Policy, ranked: list[Candidate], before: Errors, bound: float) -> list[Candidate]:
    """As few of the first candidates as meet the bound: of the leaves if those can, else of all; all if nothing can."""
    if before.worst <= bound:
        return []
    for order in dict.fromkeys([tuple(c for c in ranked if c.pattern is not None), tuple(ranked)]):

        def is_enough(count: int, order: tuple[Candidate, ...] = order) -> bool:
            kept = order[:count]
            return study.errors_with(with_overrides(policy, kept), lines_of(kept)).worst <= bound

        if order and is_enough(len(order)):
            too_few, enough = 0, len(order)
            while enough - too_few > 1:
                middle = (too_few + enough) // 2
                too_few, enough = (too_few, middle) if is_enough(middle) else (middle, enough)
            return list(order[:enough])
    return ranked
