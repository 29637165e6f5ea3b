"""Run parts of a step as kernels of Pallas: one in its own, small ones together.

Triton compiles them. Its division and square root of float32 are the approximate ones (`div.full`, `sqrt.approx`) that
XLA takes too, as the programs for an H200 show. Pallas' other compiler, Mosaic GPU, cannot take its place yet: that of
jax 0.10.2 compiled momentum, in rows of 256 elements, but not AdamW, and it copies the scales of blocks only where a
row of them is a multiple of 16 bytes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx._fused.partition import TILE, Part
from mpx._fused.tile import columns, run_part

Arrays = Sequence[jax.Array]

_ELEMENTS_OF_A_WARP = 256
_MOST_ARGUMENTS = 110  # pointers of a kernel; more than 4 kB of them do not fit everywhere


def in_one_kernel(
    part: Part, in_place: dict[int, int], interpret: bool, arrays: Arrays, scalars: Arrays
) -> list[jax.Array]:
    """Run a part by Pallas on its rows, a few in each program; `in_place`: which outputs are written over arrays."""
    from jax.experimental import pallas as pl  # here, because importing it takes longer than the rest of mpx

    rows = arrays[0].shape[0]  # of what a device has
    together = math.gcd(rows, max(1, TILE // part.width))

    def body(read: Sequence[Any], scalars: Arrays, written: Sequence[Any]) -> None:
        for ref, x in zip(written, run_part(part, [ref[...] for ref in read], scalars), strict=True):
            ref[...] = x

    block = lambda v: pl.BlockSpec((together, columns(v, part)), lambda i: (i, 0))
    specs = [*map(block, part.arrays)], [*map(block, part.outputs)]
    shapes = [_type((rows, columns(v, part)), v) for v in part.outputs]
    return _call(body, rows // together, arrays, scalars, specs, shapes, in_place, interpret, together * part.width)


def in_a_kernel_together(
    parts: Sequence[Part], in_place: dict[int, int], interpret: bool, arrays: Sequence[Arrays], scalars: Arrays
) -> list[list[jax.Array]]:
    """Run parts that differ in nothing but their size, for which a kernel each would take long to start.

    Each program works on a tile of one of them. Which one, its number says: what it does not read of the others costs
    an instruction each.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    part, width = parts[0], math.gcd(*[part.width for part in parts])
    ends = np.cumsum([part.size // width for part in parts]).tolist()
    starts = [0, *ends[:-1]]

    def body(read: Sequence[Any], scalars: Arrays, written: Sequence[Any]) -> None:
        program = pl.program_id(0)
        tiles = [jnp.clip(program - start, 0, end - start - 1) for start, end in zip(starts, ends, strict=True)]
        here = [(program >= start) & (program < end) for start, end in zip(starts, ends, strict=True)]
        at = lambda refs, i, k: refs[i * len(refs) // len(parts) + k].at[pl.ds(0, 1), pl.ds(tiles[i] * width, width)]
        mask = lambda i: jnp.broadcast_to(here[i], (1, width))
        chosen = []
        for k, v in enumerate(part.arrays):
            x = jnp.zeros((1, width), v.aval.dtype)
            for i in range(len(parts)):
                x = jnp.where(mask(i), triton.load(at(read, i, k), mask=mask(i), other=jnp.zeros_like(x)), x)
            chosen.append(x)
        for k, x in enumerate(run_part(part._replace(width=width), chosen, scalars)):
            for i in range(len(parts)):
                triton.store(at(written, i, k), x, mask=mask(i))

    flat = [x.reshape(1, -1) for of_part in arrays for x in of_part]
    shapes = [_type((1, one.size), v) for one in parts for v in one.outputs]
    whole = lambda xs: [pl.BlockSpec(memory_space=pl.ANY)] * len(xs)
    aliases = {
        i * len(part.arrays) + array: i * len(part.outputs) + output
        for i in range(len(parts))
        for array, output in in_place.items()
    }
    results = _call(body, ends[-1], flat, scalars, (whole(flat), whole(shapes)), shapes, aliases, interpret, width)
    count = len(part.outputs)
    return [[x.reshape(-1, one.width) for x in results[i * count :][:count]] for i, one in enumerate(parts)]


def _call(
    body: Callable[[Sequence[Any], Arrays, Sequence[Any]], None],
    programs: int,
    arrays: Arrays,
    scalars: Arrays,
    specs: tuple[list[Any], list[Any]],
    shapes: list[jax.ShapeDtypeStruct],
    in_place: dict[int, int],
    interpret: bool,
    tile: int,
) -> list[jax.Array]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    vectors, places = _packed(scalars)

    def kernel(*refs):
        read, packed, written = refs[: len(arrays)], refs[len(arrays) : -len(shapes)], refs[-len(shapes) :]
        unpacked = [packed[vector][i].astype(x.dtype) for (vector, i), x in zip(places, scalars, strict=True)]
        body(read, unpacked, written)

    call = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(programs,),
        in_specs=[*specs[0], *[pl.BlockSpec(memory_space=pl.ANY) for _ in vectors]],
        out_specs=specs[1],
        input_output_aliases=in_place,
        compiler_params=triton.CompilerParams(num_warps=max(1, tile // _ELEMENTS_OF_A_WARP)),
        interpret=interpret,
        name="mpx_fused_update",
    )
    return list(call(*arrays, *vectors))


def _type(shape: tuple[int, int], v: Any) -> jax.ShapeDtypeStruct:
    """Return the type of an output; inside of `jax.shard_map` it says among which devices the output differs."""
    return jax.ShapeDtypeStruct(shape, v.aval.dtype, manual_axis_type=v.aval.manual_axis_type)


def most_together(part: Part) -> int:
    """Return how many parts one kernel can take."""
    return max(1, _MOST_ARGUMENTS // (len(part.arrays) + len(part.outputs)))


def _packed(scalars: Arrays) -> tuple[list[jax.Array], list[tuple[int, int]]]:
    """Return a vector of the scalars of each dtype, and where each scalar is in them: one array to read, not many."""
    numbers = [x.astype(np.int32) if x.dtype == bool else x for x in scalars]
    groups = [
        [i for i, x in enumerate(numbers) if x.dtype == dtype] for dtype in dict.fromkeys(x.dtype for x in numbers)
    ]
    places = {i: (vector, place) for vector, group in enumerate(groups) for place, i in enumerate(group)}
    return [jnp.stack([numbers[i] for i in group]) for group in groups], [places[i] for i in range(len(numbers))]
