"""Arguments that a function changes in place: under `autocast` it changes copies, and what it wrote would be lost."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core

from mpx import _trees
from mpx._autocast.jaxprs import dtype_of, open_jaxpr, scan_counts


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
    """The objects among the arguments. Dictionaries and lists are copies as under `jax.jit`, which users expect."""
    is_object = lambda x: not isinstance(x, (dict, list, tuple, type(None)))
    return [
        Object(f"the {type(node).__name__} at {_trees.path_string(path[1:])}", node, *jax.tree.flatten(node))
        for path, node in jax.tree.leaves_with_path(arguments, is_leaf=is_object)
        if not _trees.is_array(node)
    ]


def changes_of(objects: list[Object], results: list[Any]) -> list[Change]:
    """Which arrays of the objects are others now, but for those that the function returns.

    Raises:
        ValueError: if an object has another structure now, or a leaf that is no array has changed.
    """
    returned, changes = {id(leaf) for leaf in results}, []
    for name, node, leaves, treedef in objects:
        after, treedef_after = jax.tree.flatten_with_path(node)
        if treedef != treedef_after:
            raise _lost({name: ["the structure"]})
        for before, (path, leaf) in zip(leaves, after, strict=True):
            if leaf is before or id(leaf) in returned:
                continue
            if not _trees.is_array(leaf):
                raise _lost({name: [_trees.path_string(path)]})
            changes.append(Change(name, _trees.path_string(path), before, leaf))
    return changes


def check_unchanged(program: jex_core.Jaxpr, changes: Sequence[Change]) -> None:
    """Raises if what a function left in an object is not what it got.

    A `jit` or `remat` of Flax NNX gives a module all its arrays anew; most are those that went into it.

    Args:
        program: the traced function; its last results are the arrays of each change, before and after.
        changes: those that `changes_of` found.

    Raises:
        ValueError: if there are any; it names all of them, and the remedy.
    """
    pairs = iter(program.outvars[len(program.outvars) - 2 * len(changes) :])
    _refuse([change for change in changes if _source(program, next(pairs)) != _source(program, next(pairs))])


def require_unchanged(objects: list[Object], result: Any) -> None:
    """Raises if a function has left other arrays in objects than it got, but for those that it returns."""
    _refuse(changes_of(objects, jax.tree.leaves(result)))


def _refuse(changes: Sequence[Change]) -> None:
    lost = defaultdict(list)
    for change in changes:
        lost[change.name].append(change.path)
    if lost:
        raise _lost(lost)


def _lost(changes: dict[str, list[str]]) -> ValueError:
    which = "; ".join(f"{', '.join(paths)} of {name}" for name, paths in changes.items())
    return ValueError(
        f"`autocast`: the function changes an argument in place, which would be lost, as under `jax.jit`: {which}. "
        "Return the new values. With Flax NNX: `graphdef, params, rest = nnx.split(model, nnx.Param, ...)` outside, "
        "and inside `model = nnx.merge(graphdef, params, rest)`, with `nnx.state(model, nnx.Not(nnx.Param))` among "
        "the results."
    )


def _source(program: jex_core.Jaxpr, v: Any) -> Any:
    """The value that operations inside of a program hand on under another name."""
    for eqn in program.eqns:
        if v not in eqn.outvars:
            continue
        name, out = eqn.primitive.name, eqn.outvars.index(v)
        is_view = name == "convert_element_type" and dtype_of(eqn.invars[0]).itemsize < dtype_of(v).itemsize
        if is_view:
            return _source(program, eqn.invars[0])
        if name in ("jit", "remat2", "scan"):
            inner = open_jaxpr(eqn.params["jaxpr"])
            source = _source(inner, inner.outvars[out])
            if source in inner.invars and _is_handed_on(eqn, inner.invars.index(source), out):
                return _source(program, eqn.invars[inner.invars.index(source)])
    return v


def _is_handed_on(eqn: jex_core.JaxprEqn, operand: int, result: int) -> bool:
    """Whether an operand of the program inside, which is its result, makes a result of the whole."""
    if eqn.primitive.name != "scan":
        return True
    consts, carry = scan_counts(eqn)
    # What is carried has to stay where it is; slices of a stack make a stack.
    return operand == consts + result if result < carry else operand >= consts + carry
