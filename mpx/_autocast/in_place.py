"""Flax NNX modules among the arguments of a function, which change in place: batch
statistics, random streams.

Functions run on copies of their arguments, with float32 arrays in place of 16-bit ones.
What a copy of a module has after the function goes back to the module. Other objects
stay as they were, as under `jax.jit`.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpx import _trees
from mpx._finite import select_tree


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of arguments with other leaves. Its modules share variables and modules as
    those of the arguments do.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # Of the modules, before a function changes them; by paths.
    arrays: Mapping[Any, Any]

    def find_changes(self, are_wanted: Any = True) -> Any:
        """Return the state of what modules have now and did not have before, and the
        paths of what they lost; or None.

        If `are_wanted`, a scalar, is false, arrays are as before. A new variable, or an
        array of a new shape, stays.
        """
        now = _variables_of((self.args, self.kwargs))
        lost = self.arrays.keys() - dict(now).keys()
        new = [
            (path, leaf)
            for path, leaf in now
            if _array_of(leaf) is not self.arrays.get(path)
        ]
        if are_wanted is not True:
            new = [(path, self._selected(path, leaf, are_wanted)) for path, leaf in new]
        return (
            (_nnx().from_flat_state(new), sorted(lost, key=str))
            if new or lost
            else None
        )

    def _selected(self, path: Any, leaf: Any, is_wanted: Any) -> Any:
        before, after = self.arrays.get(path), _array_of(leaf)
        is_new = jax.tree.map(jnp.shape, before) != jax.tree.map(jnp.shape, after)
        return (
            leaf if is_new else _with_array(leaf, select_tree(is_wanted, after, before))
        )


def copy_with(
    args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
) -> Copy:
    """Return a copy of arguments with these leaves. A variable that occurs twice takes
    the first of its leaves.
    """
    # A shared variable is two variables in it, since a tree knows no sharing. NNX does:
    # it copies the modules once more, with the structure of the caller's own and with
    # arrays from the tree.
    copied = jax.tree.unflatten(jax.tree.structure((args, kwargs)), leaves)
    modules = _modules_of((args, kwargs))
    if modules:
        nnx, new = _nnx(), dict(_variables_of(copied))
        graph, state = nnx.split(modules)
        state = nnx.from_flat_state(
            [(path, new[path]) for path, _ in nnx.to_flat_state(state)]
        )
        rest = iter(nnx.merge(graph, state, copy=True))
        copied = jax.tree.map(
            lambda x: next(rest) if _is_module(x) else x, copied, is_leaf=_is_module
        )
    arrays = _arrays_by_path(copied)
    new_args, new_kwargs = copied
    new_kwargs = {
        name: _own_or_new(kwargs[name], new) for name, new in new_kwargs.items()
    }
    return Copy(tuple(map(_own_or_new, args, new_args)), new_kwargs, arrays)


def _own_or_new(old: Any, new: Any) -> Any:
    """Return the caller's own object, such as a log, if its copy has no other arrays
    and no modules.
    """
    is_same = all(
        x is y for x, y in zip(*map(jax.tree.leaves, (old, new)), strict=True)
    )
    return old if is_same and not _modules_of(old) else new


def hand_back(arguments: Any, changes: Any) -> None:
    """Write the changes of a copy into the modules among the arguments, in the dtypes
    of their arrays.
    """
    if changes is None:
        return
    (changes, lost), nnx, modules = changes, _nnx(), _modules_of(arguments)
    nnx.pop(modules, lambda path, _: path in lost)  # what `nnx.pop` took from the copy
    stored = _arrays_by_path(arguments)

    def as_stored(path: Any, leaf: Any) -> Any:
        after, before = _array_of(leaf), stored.get(path)
        are_numbers = _trees.is_floating(before) and _trees.is_floating(after)
        return (
            _with_array(leaf, after.astype(jnp.result_type(before)))
            if are_numbers
            else leaf
        )

    flat = [(path, as_stored(path, leaf)) for path, leaf in nnx.to_flat_state(changes)]
    nnx.update(modules, nnx.from_flat_state(flat))


def require_unchanged(arguments: Any, changes: Any, results: Any) -> None:
    """Raise if variables changed, and the function does not return what they have now.

    Parameters may have changed: a transformation of NNX inside replaces all arrays of a
    module, most by equal ones.
    """
    if changes is None:
        return
    nnx, returned = _nnx(), {id(leaf) for leaf in jax.tree.leaves(results)}
    modules = _modules_of(arguments)
    names = [
        f"{'/'.join(map(str, path[1:]))} of the {type(modules[path[0]]).__name__}"
        for path, leaf in nnx.to_flat_state(changes[0])
        if not isinstance(leaf, nnx.Param) and id(_array_of(leaf)) not in returned
    ]
    if names:
        raise ValueError(
            "`value_and_grad`: the function changes a Flax NNX model, and"
            " `jax.value_and_grad` would lose the change. Use `mpx.value_and_grad(...,"
            " transform=nnx.value_and_grad)`, under `nnx.jit`. Changed:"
            f" {', '.join(names)}."
        )


def _nnx() -> Any:
    """Return `flax.nnx` if it is loaded: nobody else makes modules."""
    return sys.modules.get("flax.nnx")


def _is_module(node: Any) -> bool:
    return _nnx() is not None and isinstance(node, _nnx().Pytree)


def _modules_of(tree: Any) -> list[Any]:
    return list(filter(_is_module, jax.tree.leaves(tree, is_leaf=_is_module)))


def _variables_of(tree: Any) -> list[tuple[Any, Any]]:
    """Return the variables and arrays of all modules, each once, by paths."""
    modules = _modules_of(tree)
    return list(_nnx().to_flat_state(_nnx().state(modules))) if modules else []


def _arrays_by_path(tree: Any) -> dict[Any, Any]:
    return {path: _array_of(leaf) for path, leaf in _variables_of(tree)}


def _array_of(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, _nnx().Variable) else leaf


def _with_array(leaf: Any, array: Any) -> Any:
    return leaf.replace(array) if isinstance(leaf, _nnx().Variable) else array
