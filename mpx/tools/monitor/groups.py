"""Measure the floating leaves of trees, all together or in groups, and leave no trace in the measured program."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from mpx import _errors, _trees

T = TypeVar("T")
Groups = Literal["leaf"] | Mapping[str, str] | None
Column = tuple[Any, ...]  # a leaf of each measured tree: the update, and the weight if a measure needs it


def measure(caller: str, of_leaves: Callable[[Sequence[Column]], Any], groups: Groups) -> Callable[..., Any]:
    """Return a measure for `optax.snapshot` and `watch`: a function of gradients or updates, and perhaps of weights."""
    _check_groups(groups, caller)

    def measured(*trees: Any) -> Any:
        leaves = [_trees.leaves_by_path(tree) for tree in trees]
        columns = {path: tuple(tree.get(path) for tree in leaves) for path in leaves[0]}
        columns = {path: column for path, column in columns.items() if all(map(_trees.is_floating, column))}
        hidden = behind_barrier(list(columns.values()))
        if groups is None:
            return of_leaves(hidden)
        names = _trees.path_names(trees[0])
        members = _grouped([(names[path], x) for path, x in zip(columns, hidden, strict=True)], groups, caller)
        return {name: of_leaves(leaves) for name, leaves in members.items()}

    return measured


def behind_barrier(tree: T) -> T:
    """Return the same numbers, but hide from the compiler that the training run reads them too.

    Otherwise it fuses a measure with the step, and may round the step's numbers in another place because they have two
    readers. Bits pass through the barrier, not floating-point numbers: with those, XLA on CPU moves the reshaping of a
    gradient of one column, and LLVM contracts another product of the optimizer.
    """
    leaves, treedef = jax.tree.flatten(tree)
    floats = {i: jnp.asarray(x) for i, x in enumerate(leaves) if _trees.is_floating(x)}
    bits = {i: lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for i, x in floats.items()}
    bits = lax.optimization_barrier(bits)
    hidden = {i: lax.bitcast_convert_type(x, floats[i].dtype) for i, x in bits.items()}
    return treedef.unflatten([hidden.get(i, x) for i, x in enumerate(leaves)])


def with_weights(caller: str, measured: Callable[[Any, Any], Any]) -> optax.GradientTransformationExtraArgs:
    """Return a measure of updates and weights as the transformation that `optax.monitor` calls."""

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(f"`{caller}` needs the parameters: call `update(grads, state, params)`.")
        return measured(updates, params), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def _grouped(columns: list[tuple[str, Column]], groups: Groups, caller: str) -> dict[str, list[Column]]:
    """Return the members of each group; raise if one has none."""
    patterns = groups if isinstance(groups, Mapping) else {}
    grouped: dict[str, list[Column]] = {name: [] for name in patterns}
    for path, column in columns:
        matches = (name for name, pattern in patterns.items() if re.search(pattern, path))
        name = path if groups == "leaf" else next(matches, None)
        if name is not None:
            grouped.setdefault(name, []).append(column)
    empty = ", ".join(f"{name!r}: {patterns[name]!r}" for name, members in grouped.items() if not members)
    if empty:
        raise ValueError(
            f"`{caller}`: no leaf is in the group {empty}. A pattern is a regular expression searched in the paths of "
            "the floating leaves, and the first group that matches has the leaf: "
            f"{', '.join(path for path, _ in columns) or '(none)'}."
        )
    return grouped


def _check_groups(groups: Groups, caller: str) -> None:
    if groups is None or groups == "leaf":
        return
    if not isinstance(groups, Mapping) or not all(isinstance(x, str) for pair in groups.items() for x in pair):
        raise ValueError(
            f"`{caller}`: `groups` must be None, 'leaf' or a dictionary from names to patterns, but got {groups!r}."
        )
    for name, pattern in groups.items():
        _errors.require_pattern(pattern, f"`{caller}`: the pattern of the group {name!r}, {pattern!r},")
