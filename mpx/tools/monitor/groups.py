"""Measure the floating leaves of trees, all together or in groups."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import optax

from mpx import _errors, _trees
from mpx.tools.monitor.barrier import behind_barrier

Groups = Literal["leaf"] | Mapping[str, str] | None


@dataclasses.dataclass(frozen=True)
class Measure:
    """A measure of gradients or updates, for `optax.snapshot` and `watch`: a function of a tree.

    Attributes:
        caller: the name of the public function that made it.
        of_leaves: a function of a list with a tuple for each leaf: the update, and the weight if it needs one.
        groups: None, `"leaf"` or patterns by name.
    """

    caller: str
    of_leaves: Callable[[Sequence[Any]], Any]
    groups: Groups

    def __post_init__(self) -> None:
        """Raise if the groups are not of one of the three forms."""
        _check_groups(self.groups, self.caller)

    def __call__(self, *trees: Any) -> Any:
        """Measure the leaves that are floating in every tree, from behind a barrier."""
        leaves, *rest = [_trees.leaves_by_path(tree) for tree in trees]
        columns = {path: (x, *[other.get(path) for other in rest]) for path, x in leaves.items()}
        columns = {path: column for path, column in columns.items() if all(map(_trees.is_floating, column))}
        hidden = behind_barrier(list(columns.values()))
        if self.groups is None:
            return self.of_leaves(hidden)
        names = _trees.path_names(trees[0])
        members = self._grouped([(names[path], x) for path, x in zip(columns, hidden, strict=True)])
        return {name: self.of_leaves(leaves) for name, leaves in members.items()}

    def _grouped(self, columns: list[tuple[str, Any]]) -> dict[str, list[Any]]:
        """Return the members of each group; raise if one has none."""
        patterns = self.groups if isinstance(self.groups, Mapping) else {}
        grouped: dict[str, list[Any]] = {name: [] for name in patterns}
        for path, column in columns:
            matches = (name for name, pattern in patterns.items() if re.search(pattern, path))
            name = path if self.groups == "leaf" else next(matches, None)
            if name is not None:
                grouped.setdefault(name, []).append(column)
        empty = ", ".join(f"{name!r}: {patterns[name]!r}" for name, members in grouped.items() if not members)
        if empty:
            raise ValueError(
                f"`{self.caller}`: no leaf is in the group {empty}. A pattern is a regular expression searched in the "
                "paths of the floating leaves, and the first group that matches has the leaf: "
                f"{', '.join(path for path, _ in columns) or '(none)'}."
            )
        return grouped


class WeightMeasure(optax.GradientTransformationExtraArgs):
    """A measure of updates and weights, for `watch`: a transformation whose `update` returns the measurement."""


def with_weights(measure: Measure) -> WeightMeasure:
    """Return a measure of the pairs of update and weight, in the form that `optax.monitor` calls."""

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(f"`{measure.caller}` needs the parameters: call `update(grads, state, params)`.")
        return measure(updates, params), state

    return WeightMeasure(lambda params: optax.EmptyState(), update_fn)


def _check_groups(groups: Any, caller: str) -> None:
    if groups is None or groups == "leaf":
        return
    if not isinstance(groups, Mapping) or not all(isinstance(x, str) for pair in groups.items() for x in pair):
        raise ValueError(
            f"`{caller}`: `groups` must be None, 'leaf' or a dictionary from names to patterns, but got {groups!r}."
        )
    for name, pattern in groups.items():
        _errors.require_pattern(pattern, f"`{caller}`: the pattern of the group {name!r}, {pattern!r},")
