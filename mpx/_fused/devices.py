"""Divide the work on a leaf among the devices that have parts of its arrays.

XLA divides what it knows. A kernel it does not know: it would gather whole arrays for it. Nor does it divide rows of
blocks along the last axis of a matrix. So it is told how: an axis of an array may be divided where the axes before it
are the same in all arrays of the leaf, as for a matrix `[a, b]` and its scales `[a, b / 256]`, if each device then has
as many elements, and whole blocks. What is divided otherwise is gathered.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mpx._fused.partition import Part, Var


def divided(parts: Sequence[Part], compute: Callable[..., list[jax.Array]], *operands: jax.Array) -> list[jax.Array]:
    """Return the outputs of parts, computed on each device from what it has of the arrays.

    Args:
        parts: that have no scalars but those of the first.
        compute: from the shapes of outputs, arrays and scalars to outputs.
        operands: the arrays of all parts, then the scalars.
    """
    from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning

    read = [v for part in parts for v in part.arrays]
    written = [v for part in parts for v in part.outputs]
    factor = {v: name for i, part in enumerate(parts) for v, name in _factors(part, f"leaf{i}").items()}

    def partition(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        arrays = [*zip(read, operands, strict=False), *zip(written, results, strict=True)]
        axes = _axes(mesh, [(factor[v], x) for v, x in arrays])
        sharding_of = lambda v: NamedSharding(mesh, PartitionSpec(*[axes.get(name, ()) or None for name in factor[v]]))
        everywhere = [NamedSharding(mesh, PartitionSpec())] * len(parts[0].scalars)
        of_results = [sharding_of(v) for v in written]
        shapes = [sharding.shard_shape(v.aval.shape) for v, sharding in zip(written, of_results, strict=True)]

        def local(*operands):
            # What a device has is divided no further: a mesh that is set around the compilation says nothing of it.
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update_axis_types(automatic)):
                return compute(shapes, *operands)

        automatic = {name: AxisType.Auto for name in mesh.axis_names}
        return mesh, local, of_results, (*map(sharding_of, read), *everywhere)

    whole = functools.partial(compute, [v.aval.shape for v in written])
    run = custom_partitioning(whole)
    names = lambda variables: tuple(ArrayMapping(*factor[v]) for v in variables)
    alone = tuple(name for v in (*read, *written) for name in factor[v] if name.startswith("alone"))
    scalars = (ArrayMapping(),) * len(parts[0].scalars)
    rule = SdyShardingRule((*names(read), *scalars), names(written), need_replication_factors=alone)
    run.def_partition(partition, sharding_rule=rule)
    return _with_vmap(run, whole)(*operands)


def _factors(part: Part, leaf: str) -> dict[Var, list[str]]:
    """Return a name for each axis of each array: the same for axes that are divided together."""
    variables = (*part.arrays, *part.outputs)
    before = {v: [math.prod(v.aval.shape[:i]) for i in range(v.aval.ndim)] for v in variables}
    starts = [{before[v][i] for i, size in enumerate(v.aval.shape) if size > 1} for v in variables]
    common = set.intersection(*starts)
    return {
        v: [
            f"{leaf}_{before[v][i]}" if size > 1 and before[v][i] in common else f"alone_{leaf}_{number}_{i}"
            for i, size in enumerate(v.aval.shape)
        ]
        for number, v in enumerate(variables)
    }


def _axes(mesh: Mesh, arrays: Sequence[tuple[list[str], Any]]) -> dict[str, tuple[str, ...]]:
    """Return the axes of the mesh along which each factor is divided, from the factors and shardings of arrays."""
    found: dict[str, tuple[str, ...]] = {}
    for names, x in arrays:
        for name, axes in zip(names, x.sharding.spec, strict=False):
            found.setdefault(name, axes if isinstance(axes, tuple) else (axes,)) if axes and name[:5] != "alone" else ()
    sizes = [(name, size) for names, x in arrays for name, size in zip(names, x.shape, strict=True)]
    count = lambda name: math.prod(mesh.shape[axis] for axis in found[name])
    even = {name: found[name] for name in found if all(size % count(name) == 0 for n, size in sizes if n == name)}
    taken: dict[str, set[str]] = defaultdict(set)  # by the factors of a leaf, each of which takes axes of its own
    for name, axes in list(even.items()):
        leaf = name.rpartition("_")[0]
        if taken[leaf] & {*axes}:
            even[name] = ()
        taken[leaf] |= {*axes}
    return even


def _with_vmap(run: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a way to map it over a new axis, for which it is not divided."""
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap
    def _(axis_size: int, is_mapped: Sequence[bool], *operands: jax.Array) -> Any:
        results = jax.vmap(whole, in_axes=[0 if yes else None for yes in is_mapped], axis_size=axis_size)(*operands)
        return results, [True] * len(results)

    return mapped
