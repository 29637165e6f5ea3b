"""Devices: whether there are several, and arrays on explicit axes of a mesh, whose
types say how they are sharded.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


def are_several_in_sight() -> bool:
    """Return whether a program that is traced here may run on more than one device.

    Under `jax.set_mesh` and inside `jax.shard_map` the mesh tells. Without one a trace
    does not see how its arguments are sharded, so all devices count.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return (jax.device_count() if mesh.empty else mesh.size) > 1


def dividing_devices() -> int:
    """Return over how many devices XLA may divide an array here: inside of
    `jax.shard_map` those of other axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = [size for name, size in mesh.shape.items() if name not in mesh.manual_axes]
    return jax.device_count() if mesh.empty else math.prod(sizes)


def explicit_sharding(x: Any) -> NamedSharding | None:
    """Return how an array is sharded if its mesh has explicit axes, else None."""
    if not isinstance(x, (jax.Array, Tracer)):
        return None
    of_type = jax.typeof(x).sharding
    if AxisType.Explicit not in of_type.mesh.axis_types:
        return None
    sharding: Any = of_type if isinstance(x, Tracer) else x.sharding
    return sharding


def explicit_mesh(tree: Any) -> Any:
    """Return the mesh of explicit axes that arrays of a tree are on; None if there is
    none.
    """
    found = map(explicit_sharding, jax.tree.leaves(tree))
    return next((x.mesh for x in found if x is not None), None)


def in_auto(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, out_shardings: Any
) -> Callable[..., Any]:
    """Let XLA place the arrays inside a function, on a mesh of explicit axes too."""
    # Inside of such a function axes are automatic.
    now = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, (mesh if now.empty else now).axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    if not explicit:
        return function
    return jax.sharding.auto_axes(
        function, axes=tuple(explicit), out_sharding=out_shardings
    )


def as_in_auto(tree: Any) -> AbstractContextManager[Any]:
    """Return a context to trace in what `in_auto` runs on arrays or shapes: axes that
    are explicit are automatic.
    """
    now = jax.sharding.get_abstract_mesh()
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    meshes = [
        sharding.mesh.abstract_mesh
        for sharding in shardings
        if isinstance(sharding, NamedSharding)
    ]
    mesh = (
        now
        if not now.empty
        else next(
            (each for each in meshes if AxisType.Explicit in each.axis_types), now
        )
    )
    explicit = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    ]
    return jax.sharding.use_abstract_mesh(
        mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))
    )


def names_at(spec: PartitionSpec, i: int) -> tuple[str, ...]:
    """Return the axes of the mesh that shard an axis of an array."""
    entry = spec[i] if i < len(spec) else None
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def parts_at(mesh: Mesh | AbstractMesh, spec: PartitionSpec, i: int) -> int:
    """Return into how many parts a spec divides an axis of an array."""
    return math.prod(mesh.shape[name] for name in names_at(spec, i))


def entries_of(spec: PartitionSpec, count: int) -> list[Any]:
    """Return the entries of a spec, at least `count`: it may leave out those of the
    last axes.
    """
    return [*spec, *[None] * (count - len(spec))]


def spec_of(entries: list[Any]) -> PartitionSpec:
    """Return a spec without Nones at its end: one of the same meaning but another name
    compiles a step again.
    """
    named = [i for i, entry in enumerate(entries) if entry is not None]
    return PartitionSpec(*entries[: max(named, default=-1) + 1])


def part_sharding(
    sharding: NamedSharding, shape: tuple[int, ...], part: tuple[int, ...]
) -> NamedSharding:
    """Return the sharding of what is computed from an array, such as its codes and
    scales.

    It is sharded like the array if it has the same axes, of which the last may be
    shorter. If it has a single one, it is sharded like the first axis of an array that
    is sharded along no other. Else it is on every device.
    """
    entries = entries_of(sharding.spec, len(shape))
    if len(part) == 1 and not any(entries[1:]):
        entries = entries[:1]
    elif len(part) != len(shape) or part[:-1] != shape[:-1]:
        return NamedSharding(sharding.mesh, PartitionSpec())
    if part and part[-1] % parts_at(sharding.mesh, sharding.spec, len(entries) - 1):
        entries[-1] = None
    return NamedSharding(sharding.mesh, spec_of(entries))
