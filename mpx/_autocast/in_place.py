"""Find arguments that a function changes in place: under `autocast` it changes copies, and the change would be lost."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx import _trees
from mpx._jaxprs import CALLS, called_jaxpr, dtype_of, open_jaxpr, propagate, scan_counts


class Object(NamedTuple):
    """A pytree node of a user's own type, which can be changed in place, as the function got it."""

    name: str
    node: Any
    leaves: list[Any]
    treedef: Any


class Change(NamedTuple):
    """A leaf of an object that is another array after the function than before.

    Attributes:
        name: of the object.
        path: of the leaf in it.
        before: the array that the function got.
        after: the one that it left.
    """

    name: str
    path: str
    before: Any
    after: Any


def objects_of(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Object]:
    """Return the objects among the arguments, but for dictionaries and lists: users expect copies, as of `jax.jit`."""
    is_object = lambda x: not isinstance(x, (dict, list, tuple, type(None)))
    return [
        Object(f"the {type(node).__name__} at {_trees.path_string(path[1:])}", node, *jax.tree.flatten(node))
        for path, node in jax.tree.leaves_with_path(arguments, is_leaf=is_object)
        if not _trees.is_array(node)
    ]


def changes_of(objects: list[Object], results: list[Any]) -> list[Change]:
    """Return which arrays of the objects are others now, but for those that the function returns.

    Raises:
        ValueError: if an object has another structure now, or a leaf that is no array has changed.
    """
    returned, changes = {id(leaf) for leaf in results}, []
    for name, node, leaves, treedef in objects:
        after, treedef_after = jax.tree.flatten_with_path(node)
        if treedef != treedef_after:
            _refuse([Change(name, "the structure", node, node)])
        for before, (path, leaf) in zip(leaves, after, strict=True):
            if leaf is before or id(leaf) in returned:
                continue
            if not _trees.is_array(leaf):
                _refuse([Change(name, _trees.path_string(path, node), before, leaf)])
            changes.append(Change(name, _trees.path_string(path, node), before, leaf))
    return changes


def check_unchanged(program: jex_core.Jaxpr, changes: Sequence[Change]) -> None:
    """Raise if an array that a function left in an object is not the one that it got.

    A `jit` or `remat` of Flax NNX gives a module all its arrays anew; most are those that went into it.

    Args:
        program: the traced function; its last results are the arrays of each change, before and after.
        changes: those that `changes_of` found.
    """
    if changes:
        sources = _sources(program)[-2 * len(changes) :]
        pairs = zip(changes, sources[::2], sources[1::2], strict=True)
        _refuse([change for change, before, after in pairs if before is not after])


def require_unchanged(objects: list[Object], result: Any) -> None:
    """Raise if a function has left other arrays in objects than it got, but for those that it returns."""
    _refuse(changes_of(objects, jax.tree.leaves(result)))


def _refuse(changes: Sequence[Change]) -> None:
    """Raise if there are any changes; name all of them, and the remedy."""
    lost = defaultdict(list)
    for change in changes:
        lost[change.name].append(change.path)
    if not lost:
        return
    remedy = (
        "Return the new values. With Flax NNX: `graphdef, params, rest = nnx.split(model, nnx.Param, ...)` outside, "
        "and inside `model = nnx.merge(graphdef, params, rest)`, with `nnx.state(model, nnx.Not(nnx.Param))` among "
        "the results."
    )
    if any(name.startswith("the State at ") for name in lost):
        remedy = (
            "A Flax NNX model that is merged from it shares its variables. Merge a copy, `model = nnx.merge(graphdef, "
            "state, copy=True)`, and return what shall be kept, such as `nnx.state(model, nnx.Not(nnx.Param))`."
        )
    which = "; ".join(f"{', '.join(paths)} of {name}" for name, paths in lost.items())
    raise ValueError(
        "`autocast`: the function changes an argument in place, which would be lost, as under `jax.jit`: "
        f"{which}. {remedy}"
    )


def _sources(program: jex_core.Jaxpr) -> list[Any]:
    """Return for each result of a program the variable that it is, perhaps under other names on the way."""
    return propagate(program, program.invars, _handed_on, lambda v: v)


def _handed_on(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """Return for each result the variable that the equation hands on, or the result itself if it is a new value."""
    name = eqn.primitive.name
    if name == "convert_element_type" and dtype_of(eqn.invars[0]).itemsize < dtype_of(eqn.outvars[0]).itemsize:
        return operands  # a view
    if name not in CALLS | {"scan"}:
        return eqn.outvars
    inner = open_jaxpr(called_jaxpr(eqn))
    positions = {id(v): position for position, v in enumerate(inner.invars)}
    results = list(eqn.outvars)
    for result, source in enumerate(_sources(inner)):
        operand = positions.get(id(source))
        if operand is not None and _stays(eqn, operand, result):
            results[result] = operands[operand]
    return results


def _stays(eqn: JaxprEqn, operand: int, result: int) -> bool:
    """Return whether an operand of the program inside, which is its result, makes a result of the whole."""
    if eqn.primitive.name != "scan":
        return True
    consts, carry = scan_counts(eqn)
    # A carried value has to stay where it is; slices of a stack make a stack.
    return operand == consts + result if result < carry else operand >= consts + carry
