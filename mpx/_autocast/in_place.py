"""Arguments that a function changes in place, such as a Flax NNX model with batch statistics.

Autocast runs a function on copies of its arguments, with float32 arrays instead of 16-bit ones. What the function
changes in the copies is written back to the originals.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn, Var
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from mpx import _trees
from mpx._jaxprs import called_jaxpr, dtype_of, propagate, scan_counts
from mpx._primitives import facts_of


class Object(NamedTuple):
    """A pytree node of a user's own type, as it is before the function changes it."""

    name: str  # in errors
    node: Any
    position: int  # the index of its first leaf among all leaves of the arguments
    leaves: list[Any]
    treedef: Any


class Change(NamedTuple):
    """A leaf of an object that is a different array after the function."""

    name: str  # where the leaf is, in errors
    position: int  # its index among all leaves of the arguments
    before: Any  # the array that the function got
    after: Any  # the array that it left
    is_returned: bool = False  # whether the function returns that one too
    result: int = -1  # its index among the results of the traced function


# Nobody expects changes of these to come back: `jax.jit` copies them too.
_PLAIN = (dict, list, tuple, type(None))


def copy_with(tree: Any, leaves: Iterable[Any]) -> Any:
    """Return a copy of a pytree with new leaves. An object that occurs twice stays one object.

    Two Flax NNX modules can share a variable, or a stream of random keys. A shared object takes the first leaves.
    """
    # `is_leaf` is called on every node, so it can collect them all (`append` returns None: no node is a leaf).
    nodes: list[Any] = []
    jax.tree.leaves(tree, is_leaf=lambda node: bool(nodes.append(node)))
    counts = Counter(id(node) for node in nodes if not jax.tree_util.all_leaves([node]))
    copies: dict[int, Any] = {}
    rest = iter(leaves)

    def copy_of(node):
        if id(node) not in counts:
            return next(rest)
        if id(node) in copies:
            for _ in jax.tree.leaves(node):
                next(rest)
        else:
            copies[id(node)] = jax.tree.map(copy_of, node, is_leaf=lambda x: x is not node and counts[id(x)] > 1)
        return copies[id(node)]

    return copy_of(tree) if counts[id(tree)] else next(rest)


def objects_of(arguments: Any) -> list[Object]:
    """Return the objects among the arguments: no dictionaries, lists or tuples."""
    objects, position = [], 0
    for path, node in jax.tree.leaves_with_path(arguments, is_leaf=lambda x: not isinstance(x, _PLAIN)):
        leaves, treedef = jax.tree.flatten(node)
        if not _trees.is_array(node):
            name = f"the {type(node).__name__} at {_trees.path_string(path[1:])}"
            objects.append(Object(name, node, position, leaves, treedef))
        position += len(leaves)
    return objects


def changes_of(objects: list[Object]) -> list[Change]:
    """Return the leaves of the objects that are different arrays now.

    Raises:
        ValueError: if the structure of an object has changed, or a leaf that is not an array.
    """
    changes = []
    for name, node, position, leaves, treedef in objects:
        after, treedef_after = jax.tree.flatten_with_path(node)
        if treedef != treedef_after:
            raise _error([f"the structure of {name}"])
        for i, (before, (path, leaf)) in enumerate(zip(leaves, after, strict=True)):
            where = f"{_trees.path_string(path, node)} of {name}"
            if leaf is not before and not _trees.is_array(leaf):
                raise _error([where])
            if leaf is not before:
                changes.append(Change(where, position + i, before, leaf))
    return changes


def among_results(changes: Iterable[Change], results: list[Any]) -> list[Change]:
    """Return the changes with the indices of their new arrays among `results`; missing arrays are appended to it."""
    returned = {id(leaf): i for i, leaf in enumerate(results)}
    found = []
    for change in changes:
        is_returned = id(change.after) in returned
        found.append(change._replace(is_returned=is_returned, result=returned.get(id(change.after), len(results))))
        results += [] if is_returned else [change.after]
    return found


def real_changes(program: jex_core.Jaxpr, inputs: Mapping[int, Var], changes: Sequence[Change]) -> list[Change]:
    """Return the changes that gave a leaf another value than it had.

    A `jit` or `remat` of Flax NNX replaces all arrays of a module, most of them by equal ones. `inputs` maps the
    position of a leaf to its input of the traced program.
    """
    sources = propagate(program, program.invars, _sources_of_results, lambda v: v) if changes else []
    return [change for change in changes if sources[change.result] is not inputs.get(change.position)]


def hand_back(arguments: Any, changes: Sequence[Change]) -> None:
    """Write what a function changed in a copy of the arguments into the arguments, in the dtypes of their arrays.

    Raises:
        ValueError: if an array cannot be written into its object, and the function does not return it either.
    """
    leaves = jax.tree.leaves_with_path(arguments) if changes else []
    for change in changes:
        (path, stored), after = leaves[change.position], change.after
        if _trees.is_narrower(stored, after.dtype) and _trees.is_floating(after):
            after = after.astype(stored.dtype)
        try:
            _set(arguments, path, after)
        except Exception as error:  # Flax has its own for a variable of an outer trace
            if not change.is_returned:
                raise _error([change.name]) from error


def _set(tree: Any, path: Sequence[Any], value: Any) -> None:
    *parents, last = path
    for key in parents:
        tree = tree[_index(key)] if isinstance(key, (DictKey, SequenceKey)) else _attribute(tree, key)
    if hasattr(tree, "set_raw_value"):  # a Flax NNX variable, which refuses values of another trace otherwise
        tree.set_raw_value(value)
    elif isinstance(last, GetAttrKey):
        setattr(tree, last.name, value)
    else:
        tree[_index(last)] = value


def _index(key: Any) -> Any:
    return key.idx if isinstance(key, SequenceKey) else key.key


def _attribute(node: Any, key: Any) -> Any:
    return node.get_raw_value() if hasattr(node, "get_raw_value") else getattr(node, key.name)


def has_variables(arguments: Any) -> bool:
    """Return whether there are variables of Flax NNX, which can hold other arrays, among the arguments."""
    return bool(_variables_of(arguments))


def _variables_of(arguments: Any) -> list[Any]:
    is_variable = lambda node: hasattr(node, "set_raw_value")
    found = filter(is_variable, jax.tree.leaves(arguments, is_leaf=is_variable))
    return list({id(variable): variable for variable in found}.values())


@contextlib.contextmanager
def holding(arguments: Any, old: Iterable[Any], new: Iterable[Any]) -> Iterator[None]:
    """Let variables of Flax NNX models hold other arrays inside; what replaces those there stays, in the old dtype.

    Unlike a copy the models may get new variables inside.
    """
    others = {id(before): after for before, after in zip(old, new, strict=True) if before is not after}
    held = [(variable, variable.get_raw_value()) for variable in _variables_of(arguments)]
    held = [(variable, before) for variable, before in held if id(before) in others]
    for variable, before in held:
        variable.set_raw_value(others[id(before)])
    try:
        yield
    finally:
        for variable, before in held:
            now = variable.get_raw_value()
            variable.set_raw_value(before if now is others[id(before)] else now.astype(before.dtype))


def require_unchanged(objects: list[Object], results: Any, remedy: str) -> None:
    """Raise if a function changed arrays in objects and does not return the new ones."""
    returned = {id(leaf) for leaf in jax.tree.leaves(results)}
    names = [change.name for change in changes_of(objects) if id(change.after) not in returned]
    if names:
        raise _error(names, remedy)


_MERGE = (
    "Return the new values. With Flax NNX: `graphdef, params, rest = nnx.split(model, nnx.Param, ...)` outside, and "
    "inside `model = nnx.merge(graphdef, params, rest, copy=True)`, with `nnx.state(model, nnx.Not(nnx.Param))` among "
    "the results."
)


def _error(names: Sequence[str], remedy: str = _MERGE) -> ValueError:
    return ValueError(
        f"`autocast`: the function changes an argument in place, and the change would be lost. {remedy} Changed: "
        f"{', '.join(names)}."
    )


def _sources_of_results(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """Return for each result the operand that the equation hands on, or the result itself if it is a new value."""
    name = eqn.primitive.name
    if name == "convert_element_type" and dtype_of(eqn.invars[0]).itemsize < dtype_of(eqn.outvars[0]).itemsize:
        return operands  # a view
    if name != "scan" and facts_of(eqn).runs != "call":
        return eqn.outvars
    inside = propagate(called_jaxpr(eqn), operands, _sources_of_results, lambda v: v)
    if name != "scan":
        return inside
    # A carried value must keep its place; slices of a stack make a stack.
    consts, carry = scan_counts(eqn)
    stays = [v is operands[consts + i] if i < carry else v in operands[consts + carry :] for i, v in enumerate(inside)]
    return [v if is_same else new for v, is_same, new in zip(inside, stays, eqn.outvars, strict=True)]
