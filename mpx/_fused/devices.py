"""Shard the work on a leaf over the devices that hold parts of its arrays.

XLA does not know how to shard a kernel: it would gather whole arrays for it. Nor does
it shard rows of blocks along the last axis of a matrix. So this file tells it how. An
axis may be sharded if the axes before it are the same in all arrays of the leaf, as in
a matrix `[a, b]` and its scales `[a, b / 256]`, and if each device then has equally
many elements, in whole blocks. Arrays that are sharded otherwise are gathered.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mpx._fused.partition import Part, Var


class _Factor(NamedTuple):
    """A sharded axis: shared by all arrays of a part, or private to one."""

    begin: int  # product of the axes before it
    # if private: the number of the array, and of its axis
    alone: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return "_".join(["leaf", *map(str, (self.begin, *(self.alone or ())))])


def sharded(
    part: Part,
    compute: Callable[..., list[jax.Array]],
    *operands: jax.Array,
    stacks: Collection[Var] = (),
) -> list[jax.Array]:
    """Compute the outputs of a part from its arrays and then its scalars, on each
    device from its own shards.

    `compute` takes the shapes of the outputs, then such operands, and returns the
    outputs. Of arrays that are `stacks` the first axis counts layers, and is on every
    device.
    """
    from jax.experimental.custom_partitioning import (
        ArrayMapping,
        SdyShardingRule,
        custom_partitioning,
    )

    read, written, factors = part.arrays, part.outputs, _factors(part, stacks)

    def partition(
        mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]
    ) -> tuple[Any, ...]:
        arrays = [
            *zip(read, operands, strict=False),
            *zip(written, results, strict=True),
        ]
        axes = _axes(mesh, [(factors[v], x) for v, x in arrays])

        def sharding_of(v):
            return NamedSharding(
                mesh, PartitionSpec(*[axes.get(one) for one in factors[v]])
            )

        everywhere = [NamedSharding(mesh, PartitionSpec())] * len(part.scalars)
        of_results = [sharding_of(v) for v in written]
        shapes = [
            sharding.shard_shape(v.aval.shape)
            for v, sharding in zip(written, of_results, strict=True)
        ]

        def local(*operands):
            # A shard is divided no further: the mesh that is set around the compilation
            # does not apply to it.
            with jax.sharding.use_abstract_mesh(
                mesh.abstract_mesh.update_axis_types(automatic)
            ):
                return compute(shapes, *operands)

        automatic = {name: AxisType.Auto for name in mesh.axis_names}
        return mesh, local, of_results, (*map(sharding_of, read), *everywhere)

    whole = functools.partial(compute, [v.aval.shape for v in written])
    run = custom_partitioning(whole)

    def names(variables):
        return tuple(ArrayMapping(*[one.name for one in factors[v]]) for v in variables)

    alone = tuple(
        one.name for v in (*read, *written) for one in factors[v] if one.alone
    )
    scalars = (ArrayMapping(),) * len(part.scalars)
    rule = SdyShardingRule(
        (*names(read), *scalars), names(written), need_replication_factors=alone
    )
    run.def_partition(partition, sharding_rule=rule)
    return _with_vmap(run, whole)(*operands)


def _factors(part: Part, stacks: Collection[Var]) -> dict[Var, list[_Factor]]:
    """Return the factor of each axis of each array of a part."""
    variables = (*part.arrays, *part.outputs)
    # That of an axis of layers is 0, and no other array has it.
    first = {v: int(v in stacks) for v in variables}
    begins = {
        v: [0] * first[v]
        + [math.prod(v.aval.shape[first[v] : i]) for i in range(first[v], v.aval.ndim)]
        for v in variables
    }
    longer = [
        {begins[v][i] for i, size in enumerate(v.aval.shape) if size > 1}
        for v in variables
    ]
    common = set.intersection(*longer) - {0}
    return {
        v: [
            _Factor(begin, None if size > 1 and begin in common else (array, i))
            for i, (begin, size) in enumerate(zip(begins[v], v.aval.shape, strict=True))
        ]
        for array, v in enumerate(variables)
    }


def _axes(
    mesh: Mesh, arrays: Sequence[tuple[list[_Factor], Any]]
) -> dict[_Factor, tuple[str, ...]]:
    """Return the mesh axes that shard each factor, from the factors and shardings of
    arrays.
    """
    wanted: dict[_Factor, tuple[str, ...]] = {}
    sizes: dict[_Factor, list[int]] = defaultdict(list)
    for factors, x in arrays:
        for factor, axes in zip(factors, x.sharding.spec, strict=False):
            if axes and not factor.alone:
                wanted.setdefault(factor, axes if isinstance(axes, tuple) else (axes,))
        for factor, size in zip(factors, x.shape, strict=True):
            sizes[factor].append(size)
    taken: set[str] = set()  # each factor takes axes of its own
    found = {}
    for factor, axes in wanted.items():
        count = math.prod(mesh.shape[axis] for axis in axes)
        if not any(size % count for size in sizes[factor]) and not taken & {*axes}:
            found[factor] = axes
            taken |= {*axes}
    return found


def _with_vmap(
    run: Callable[..., Any], whole: Callable[..., Any]
) -> Callable[..., Any]:
    """Let `jax.vmap` map the function over a new axis; the mapped function is not
    sharded.
    """
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap
    def _(axis_size: int, is_mapped: Sequence[bool], *operands: jax.Array) -> Any:
        results = jax.vmap(
            whole,
            in_axes=[0 if yes else None for yes in is_mapped],
            axis_size=axis_size,
        )(*operands)
        return results, [True] * len(results)

    return mapped
