"""Run a part of a step as a kernel of Pallas.

Triton compiles them. Its division and square root of float32 are the approximate ones
(`div.full`, `sqrt.approx`) that XLA takes too, as the programs for an H200 show. Both
are an instruction and others for rare operands, which are left out where none occurs:
a kernel takes as long as its instructions do.

Pallas' Triton compiler is deprecated since jax 0.11, and works in 0.12. Only this file
knows of it: `run_part` is the body, for any compiler. Two others were tried with jax
0.12.0, for an H200. Mosaic GPU, in a `plgpu.kernel` with explicit layouts, has no
`floor` and no integer powers, and converts no pairs of booleans. jax-triton 0.4.1 takes
source code in Triton's language, into which a step would have to be translated. Without
a compiler `fused_update` is the plain step.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._fused.partition import TILE, Part
from mpx._fused.tile import columns, run_part
from mpx._stored.blocks import packed, unpacked

Arrays = Sequence[jax.Array]

_ELEMENTS_OF_A_WARP = 256  # 8 for each of its 32 threads
# Up to 2**32 bytes Pallas counts elements in int32, and it would wrap around for more
# than 2**31 single bytes: those go in pairs.
_COUNTED = 2**31
# How a kernel is called that steps one of so many layers: a reader of its program sees
# whole stacks.
ONE_OF = "mpx_fused_update_1_of_"


class Layer(NamedTuple):
    """Says which of how many layers a kernel steps."""

    index: jax.Array
    depth: int


def in_a_kernel(
    part: Part,
    in_place: Mapping[int, int],
    interpret: bool,
    arrays: Arrays,
    scalars: Arrays,
    layer: Layer | None = None,
) -> list[jax.Array]:
    """Run a part as a Pallas kernel, some rows a program; `in_place` maps an array to
    the output written over it.

    With a layer, arrays that are written over are stacks of layers, and so are all
    outputs. Arrays after those of the part are only written.
    """
    # Here, because importing it takes longer than the rest of mpx.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    depth = layer.depth if layer else 1
    depths = [depth if i in in_place else 1 for i in range(len(arrays))]
    rows = arrays[0].shape[0] // depths[0]  # on this device
    # A divisor of the rows: then no program of the kernel has fewer than others.
    together = math.gcd(rows, max(1, TILE // part.width))
    vectors, places = _vectors([*scalars, *([layer.index] if layer else [])])

    def stored(v, depth):
        """Return how many numbers a row has in memory, their dtype, and whether they
        are pairs.
        """
        count, dtype = columns(v, part), v.aval.dtype
        if dtype.itemsize == 1 and depth * rows * count > _COUNTED:
            return count // 2, np.dtype(np.uint16), True
        return count, dtype, False

    over = [part.outputs[i] for k, i in in_place.items() if k >= len(part.arrays)]
    given = [stored(*x) for x in zip((*part.arrays, *over), depths, strict=True)]
    made = [stored(v, depth) for v in part.outputs]

    def kernel(*refs):
        vectors, written = refs[len(arrays) : -len(made)], refs[-len(made) :]
        numbers = [vectors[vector][i] for vector, i in places]
        at: Any = ...
        if layer:
            start = numbers.pop() * rows + pl.program_id(0) * together
            at = pl.ds(start, together), slice(None)
        tiles = [
            _apart(ref[at if i in in_place else ...], v.aval.dtype, given[i][2])
            for i, (ref, v) in enumerate(zip(refs, part.arrays, strict=False))
        ]
        numbers = [i.astype(x.dtype) for i, x in zip(numbers, scalars, strict=True)]
        results = run_part(part, tiles, numbers, {} if interpret else _CHEAPER)
        for ref, x, (*_, in_pairs) in zip(written, results, made, strict=True):
            ref[at] = packed(x.astype(np.int32), 8, np.uint16) if in_pairs else x

    def block(count, is_stack):
        if layer and is_stack:
            return anywhere
        return pl.BlockSpec((together, count), lambda i: (i, 0))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    # inside of `jax.shard_map` a type says among which devices an output differs
    shapes = [
        jax.ShapeDtypeStruct(
            (depth * rows, count), dtype, manual_axis_type=v.aval.manual_axis_type
        )
        for v, (count, dtype, _) in zip(part.outputs, made, strict=True)
    ]
    call = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(rows // together,),
        in_specs=[
            *(block(count, i in in_place) for i, (count, *_) in enumerate(given)),
            *[anywhere] * len(vectors),
        ],
        out_specs=[block(count, True) for count, *_ in made],
        input_output_aliases=dict(in_place),
        compiler_params=triton.CompilerParams(
            num_warps=max(1, together * part.width // _ELEMENTS_OF_A_WARP)
        ),
        interpret=interpret,
        name=f"{ONE_OF}{depth}" if layer else "mpx_fused_update",
    )
    views = [_viewed(x, dtype) for x, (_, dtype, _) in zip(arrays, given, strict=True)]
    return [
        _viewed(x, v.aval.dtype)
        for x, v in zip(call(*views, *vectors), part.outputs, strict=True)
    ]


def _apart(x: jax.Array, dtype: np.dtype, in_pairs: bool) -> jax.Array:
    return unpacked(x, 8).astype(dtype) if in_pairs else x


# Fewer instructions than Triton has for a primitive, for one that is ordinary (see
# `Known`) or not; None where there are no fewer.


def _sum(is_ordinary: bool, x: Any, y: Any) -> Any:
    # XLA adds no zero, either.
    return x if isinstance(y, np.ndarray) and not y.ndim and y == 0 else None


def _quotient(is_ordinary: bool, x: Any, y: Any) -> Any:
    # `div.full` multiplies by this inverse, after it has scaled divisors that are below
    # 2**-126 or beyond 2**126.
    if isinstance(y, jax.Array) and y.dtype == np.float32 and not y.ndim:
        return x * _instruction("rcp.approx.f32", jnp.full((1, 1), y))
    if is_ordinary and np.shape(x) == np.shape(y):
        return x * _instruction("rcp.approx.ftz.f32", y)
    return None


def _root(is_ordinary: bool, x: Any) -> Any:
    return _instruction("sqrt.approx.ftz.f32", x) if is_ordinary else None


def _integer(is_ordinary: bool, x: Any) -> Any:
    if not is_ordinary:
        return None
    # The last bits of a sum that is an integer.
    where = np.float32(1.5 * 2**23)
    return (x + where).view(np.int32) - where.view(np.int32)


def _instruction(name: str, x: jax.Array) -> jax.Array:
    from jax.experimental.pallas import triton

    (result,) = triton.elementwise_inline_asm(
        f"{name} $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


_CHEAPER = {
    "add": _sum,
    "convert_element_type": _integer,
    "div": _quotient,
    "sqrt": _root,
}


def _viewed(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """View rows of bytes as pairs (uint16), or pairs as bytes: XLA copies nothing for
    it.
    """
    if x.dtype.itemsize == dtype.itemsize:
        return x
    x = x.reshape(len(x), -1, 2) if x.dtype.itemsize == 1 else x
    return lax.bitcast_convert_type(x, dtype).reshape(len(x), -1)


def _vectors(scalars: Arrays) -> tuple[list[jax.Array], list[tuple[int, int]]]:
    """Pack scalars into a vector for each dtype: fewer arrays to read. Return these and
    the place of each scalar.
    """
    numbers = [x.astype(np.int32) if x.dtype == bool else x for x in scalars]
    groups = [
        [i for i, x in enumerate(numbers) if x.dtype == dtype]
        for dtype in dict.fromkeys(x.dtype for x in numbers)
    ]
    places = {
        i: (vector, place)
        for vector, group in enumerate(groups)
        for place, i in enumerate(group)
    }
    return [jnp.stack([numbers[i] for i in group]) for group in groups], [
        places[i] for i in range(len(numbers))
    ]
