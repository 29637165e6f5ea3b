"""Know the classes of Flax and Haliax in a user's trees, which need not be installed:
boxes around arrays with names of their axes, statistics, serialization.
"""

import dataclasses
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from mpx._shardings import dividing_devices, explicit_sharding, names_at, part_sharding

# The latter: scales and histories of Flax's FP8 layers.
_MEASURED = {
    "batch_stats",
    "_overwrite_with_gradient",
}


def is_box(node: Any) -> bool:
    """Return whether a node is a box around one array: a variable of NNX, a box of
    Linen, a named array of Haliax.
    """
    return _is_of_library(node, "Variable", "AxisMetadata", "NamedArray")


def _is_of_library(node: Any, *names: str) -> bool:
    """Return whether a node is of one of these classes."""
    return any(
        kind.__module__.startswith(("flax.", "haliax.")) and kind.__name__ in names
        for kind in type(node).__mro__
    )


def boxes_of(tree: Any) -> dict[tuple[Any, ...], Any]:
    """Return the boxes in a tree by the paths of their arrays, which have the box's own
    path and one key more.
    """
    return {
        path + rest: node
        for path, node in jax.tree.leaves_with_path(tree, is_leaf=is_box)
        if is_box(node)
        for rest, _ in jax.tree.leaves_with_path(node)
    }


def variables_of(tree: Any) -> list[Any]:
    """Return the variables of NNX in a tree, in their order."""
    nodes = jax.tree.leaves(tree, is_leaf=is_box)
    return [node for node in nodes if hasattr(node, "set_value")]


def without_boxes(tree: Any) -> Any:
    """Return a tree with arrays where it has boxes."""

    def opened(node):
        # A variable may have no array: Optax's placeholder.
        return next(iter(jax.tree.leaves(node)), None) if is_box(node) else node

    return jax.tree.map(opened, tree, is_leaf=is_box)


def in_box_of(x: Any, part: Any) -> Any:
    """Put codes or scales into a box like that of their array, if it has one, with
    those names of axes that fit.
    """
    if part is None or not is_box(x):
        return part
    (array,), box = jax.tree.flatten(x)
    boxed = box.unflatten([part])
    if part.shape == array.shape:
        return boxed
    fitting = {
        key: _fitting(names, part.shape, array)
        for key, names in _names_of_axes(boxed).items()
    }
    if "axis_names" in fitting:  # of Haliax, which has no axis without a name
        names = itertools.zip_longest(fitting["axis_names"], range(part.ndim))
        return dataclasses.replace(
            boxed, axis_names=tuple(name or f"axis {i}" for name, i in names)
        )
    if fitting:
        return boxed.replace(**fitting)
    # A user's own box without names fits its array only.
    return boxed if hasattr(boxed, "get_metadata") else part


def is_last_axis_named(box: Any, ndim: int) -> bool:
    """Return whether the box of an array (None: it has no box) names the last axis,
    which may then be divided.
    """
    every = _names_of_axes(box).values()
    return any(
        isinstance(names, Iterable) and any(tuple(names)[ndim - 1 :]) for names in every
    )


def _names_of_axes(box: Any) -> dict[str, Any]:
    """Return what a box says about the axes of its array: names of each, under all keys
    that have them.

    Trainers read other keys than Flax: MaxText takes `sharding_names` where
    `out_sharding` names nothing.
    """
    if not hasattr(box, "get_metadata"):
        return {
            key: getattr(box, key)
            for key in ("names", "axis_names")
            if hasattr(box, key)
        }
    metadata = box.get_metadata()
    keys = ("out_sharding", "optimizer_sharding", "sharding_names")
    return {key: metadata[key] for key in keys if metadata.get(key)}


def _fitting(names: Any, part: tuple[int, ...], array: jax.Array) -> tuple[Any, ...]:
    """Return the names of the axes that codes or scales have in common with their
    array.
    """
    if not isinstance(names, Iterable) or len(part) not in (1, array.ndim):
        return ()
    sharding, devices = explicit_sharding(array), dividing_devices()

    def fits(i):
        if sharding is not None:
            return names_at(part_sharding(sharding, array.shape, part).spec, i)
        # No mesh is known. A multiple of 64 can be divided by that many devices, or 32,
        # 16, 8...
        is_divisible = part[i] % 64 == 0 or (devices > 1 and part[i] % devices == 0)
        return is_divisible or (part[i] == array.shape[i] and len(part) == array.ndim)

    # Blocks that cross the ends of rows lie in one row of their own, divided as the
    # first axis is.
    return tuple(
        name if fits(i) else None for i, name in enumerate(tuple(names)[: len(part)])
    )


def statistics(tree: Any) -> set[tuple[Any, ...]]:
    """Return the paths of what Flax measures: an `nnx.BatchStat`; of Linen's variables
    these collections.
    """
    nodes = jax.tree.leaves_with_path(
        tree, is_leaf=lambda node: _measured(node) is not None
    )
    return {
        path + rest
        for path, node in nodes
        for rest, _ in jax.tree.leaves_with_path(_measured(node))
    }


def _measured(node: Any) -> Any:
    """Return a statistic, or those in what Linen's `init` returns; None for other
    nodes.
    """
    if _is_of_library(node, "BatchStat"):
        return node
    if not isinstance(node, Mapping) or "params" not in node:
        return None
    return {name: node[name] for name in _MEASURED & set(node)} or None


@functools.cache
def let_serialize(kind: type) -> None:
    """Let `flax.serialization` take nodes of a class, if Flax is installed: mpx does
    not depend on it.

    Call it when the first is made: at import it would load Flax for all who have it.
    """
    if importlib.util.find_spec("flax") is None:
        return
    serialization = importlib.import_module("flax.serialization")

    def opened(node):
        children, structure = jax.tree.flatten_with_path(
            node, is_leaf=lambda x: x is not node
        )
        return {path[0].name: child for path, child in children}, structure

    def as_dict(node):
        return serialization.to_state_dict(opened(node)[0])

    def from_dict(node, parts):
        children, structure = opened(node)
        return structure.unflatten(
            serialization.from_state_dict(children, parts).values()
        )

    serialization.register_serialization_state(kind, as_dict, from_dict, override=True)
