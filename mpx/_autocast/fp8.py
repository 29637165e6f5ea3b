"""Matrix products of 8-bit floats: which contractions run so, and how one runs, with those of its gradients.

Operands are rounded to 8 bits, these codes are multiplied as they are, and the result is multiplied by the inverses of
both scales. An operand that is not in memory yet is rounded to bfloat16 first: it has to be read twice, for its largest
magnitude and to be rounded to 8 bits.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from mpx._fp8 import FORMATS, RESULTS, Fp8, power_of_two, scale_exponents

_MULTIPLE = 16  # of sizes, that cuBLAS asks for


def why_not(eqn: JaxprEqn, fp8: Fp8) -> str | None:
    """Return why a contraction runs in 16 bits, or None."""
    if eqn.primitive.name != "dot_general":
        return f"there is no {eqn.primitive.name} of 8-bit floats"
    (lhs_contracting, _), (lhs_batch, _) = eqn.params["dimension_numbers"]
    if lhs_batch:
        return "a product with a batch, such as logits of attention"
    if eqn.params.get("out_sharding") is not None:
        return "its result is placed on a mesh"
    lhs, rhs = ([*_shape(v)] for v in eqn.invars[:2])
    if not all(isinstance(size, int) for size in (*lhs, *rhs)):
        return "a size is not known"
    k = math.prod(lhs[axis] for axis in lhs_contracting)
    m, n = math.prod(lhs) // k, math.prod(rhs) // k
    if not m * n or any(size % _MULTIPLE for size in (m, n, k)):
        return f"{m} x {k} by {k} x {n}: not all sizes are multiples of {_MULTIPLE}"
    if 1 / (1 / m + 1 / n + 1 / k) < fp8.min_size:
        return f"{m} x {k} by {k} x {n}: too small to gain"
    return None


def _shape(v: Any) -> tuple[int, ...]:
    return v.aval.shape


@dataclasses.dataclass(frozen=True)
class Observed(Fp8):
    """Shows all operands to a function, scaled and not yet rounded."""

    # From the product, the operand's name, its numbers and the format to which they are to be rounded.
    observe: Callable[[JaxprEqn, str, jax.Array, np.dtype], None] = lambda *shown: None


class Operand(NamedTuple):
    """An operand as it lies in memory."""

    numbers: jax.Array
    measured: jax.Array  # numbers with the same largest magnitude, that the kernel which writes the operand has


class Codes(NamedTuple):
    """An operand in 8 bits: its numbers are `codes * inverse_scale`."""

    codes: jax.Array
    inverse_scale: jax.Array  # float32, a scalar, or of size 1 along the axes that share a scale


def run(
    eqn: JaxprEqn,
    operands: Sequence[jax.Array],
    fp8: Fp8,
    wide: tuple[bool, bool],
    in_memory: tuple[np.dtype, np.dtype],
) -> jax.Array:
    """Return the product of two float32 operands, in bfloat16.

    `wide` says for which operand the gradient is to be float32, and `in_memory` in which dtype each operand lies in
    memory, or is to be written.
    """
    (lhs_contracting, rhs_contracting), _ = eqn.params["dimension_numbers"]
    lhs_outer, rhs_outer = (
        _others(x.ndim, axes) for x, axes in zip(operands, (lhs_contracting, rhs_contracting), strict=True)
    )
    from_lhs = range(len(lhs_outer))  # axes of the result
    from_rhs = range(len(lhs_outer), len(lhs_outer) + len(rhs_outer))
    forward, backward = FORMATS[fp8.forward], FORMATS[fp8.backward]

    def encoded(name: str, operand: Operand, dtype: np.dtype, contracted: Sequence[int]) -> Codes:
        show = functools.partial(fp8.observe, eqn, name) if isinstance(fp8, Observed) else None
        return _encoded(fp8, operand, dtype, contracted, show)

    def forward_pass(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Any]:
        left, right = (_written(x, dtype) for x, dtype in zip((lhs, rhs), in_memory, strict=True))
        codes = encoded("left", left, forward, lhs_contracting), encoded("right", right, forward, rhs_contracting)
        # The products of the gradients contract other axes, and ask for scales of other rows.
        kept = codes if fp8.scaling == "tensor" else (left.numbers, right.numbers)
        typed = [lax.full((0,), 0, x.dtype) for x in (lhs, rhs)]
        return _product(fp8, *codes, (lhs_contracting, rhs_contracting)), (kept, typed)

    def backward_pass(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        ((left, right), typed), cotangent = _differentiated_once((residuals, cotangent))
        written = _written(cotangent, RESULTS)
        if fp8.scaling == "tensor":  # in the kernel, maybe, that adds up columns: the gradient of a bias
            written = Operand(written.numbers, lax.optimization_barrier(_largest(cotangent, range(cotangent.ndim - 1))))
        of_cotangent = functools.partial(encoded, "cotangent", written, backward)
        g_for_lhs = g_for_rhs = of_cotangent(from_rhs)
        if fp8.scaling == "row":
            g_for_rhs = of_cotangent(from_lhs)
            left = encoded("left", Operand(left, left), forward, lhs_outer)
            right = encoded("right", Operand(right, right), forward, rhs_outer)
        of_lhs = _product(fp8, g_for_lhs, right, (from_rhs, rhs_outer), _wide(wide[0]))
        of_rhs = _product(fp8, left, g_for_rhs, (lhs_outer, from_lhs), _wide(wide[1]))
        # Axes that were contracted come out in the order of the other operand's.
        gradients = (
            lax.transpose(of_lhs, _places((*lhs_outer, *_in_order_of(rhs_contracting, lhs_contracting)))),
            lax.transpose(of_rhs, _places((*_in_order_of(lhs_contracting, rhs_contracting), *rhs_outer))),
        )
        for_lhs, for_rhs = (g.astype(like.dtype) for g, like in zip(gradients, typed, strict=True))
        return for_lhs, for_rhs

    product = jax.custom_vjp(lambda lhs, rhs: forward_pass(lhs, rhs)[0])
    product.defvjp(forward_pass, backward_pass)
    return product(*operands)


@jax.custom_jvp
def _differentiated_once(values: Any) -> Any:
    """Return values as they are, and refuse to differentiate what is computed from them.

    JAX would go through the roundings, with cotangents in 8 bits that nothing has scaled.
    """
    return values


@_differentiated_once.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "`autocast`: the gradient of a product of 8-bit floats has no derivative. For a second derivative put autocast "
        "around the inner gradient, `mpx.autocast(jax.grad(...), 'fp8')`, or use 'bf16'."
    )


def _written(x: jax.Array, dtype: np.dtype) -> Operand:
    """Return an operand that is written to memory in a dtype, if it is not there.

    Without the barrier XLA would write it in float32, between the passes that read it, and give to all else that has
    to do with a weight the layout that the product wants.
    """
    narrow = lax.convert_element_type(x, dtype)
    return Operand(lax.optimization_barrier(narrow), narrow)


def _product(
    fp8: Fp8, a: Codes, b: Codes, contracted: tuple[Sequence[int], Sequence[int]], dtype: Any = RESULTS
) -> jax.Array:
    """Multiply codes, and the result by the inverses of the scales.

    In this form XLA for a GPU multiplies 8-bit floats, by Triton and by cuBLAS. Where operands are scaled before the
    product, it does so for cuBLAS alone: for Triton, its default, it leaves the rounding out and multiplies bfloat16.
    """
    product = lax.dot_general(a.codes, b.codes, (contracted, ((), ())), preferred_element_type=dtype)
    inverses = a.inverse_scale, b.inverse_scale
    is_by_row = bool(inverses[0].ndim)
    if is_by_row:  # they stand along the axes of the product
        of_a, of_b = (lax.squeeze(x, tuple(axes)) for x, axes in zip(inverses, contracted, strict=True))
        inverses = (
            lax.expand_dims(of_a, range(of_a.ndim, product.ndim)),
            lax.expand_dims(of_b, range(of_a.ndim)),
        )
    # Powers of two are exact in any dtype, but for subnormal results: XLA multiplies by two in the product's kernel.
    between = dtype if fp8.power_of_two and not is_by_row else np.float32
    # The smaller one first, or what lies between might overflow.
    small, large = (lax.convert_element_type(f(*inverses), between) for f in (jnp.minimum, jnp.maximum))
    return lax.convert_element_type(lax.convert_element_type(product, between) * small * large, dtype)


def _wide(is_wide: bool) -> Any:
    return np.dtype(np.float32) if is_wide else RESULTS


def _in_order_of(other: Sequence[int], axes: Sequence[int]) -> list[int]:
    """Return axes in the order of those of the other operand with which they were contracted."""
    return [axis for _, axis in sorted(zip(other, axes, strict=True))]


def _places(axes: Sequence[int]) -> list[int]:
    """Return the permutation that brings axes in this order into their own."""
    return sorted(range(len(axes)), key=axes.__getitem__)


def _encoded(
    fp8: Fp8,
    operand: Operand,
    dtype: np.dtype,
    contracted: Sequence[int],
    show: Callable[[jax.Array, np.dtype], None] | None,
) -> Codes:
    """Round an operand of a product that contracts some of its axes to 8 bits."""
    largest = _largest(operand.measured, contracted if fp8.scaling == "row" else None)
    axes = tuple(sorted(jax.typeof(largest).manual_axis_type.varying))  # of the mesh, inside of a shard map
    largest = lax.pmax(largest, axes) if axes else largest
    scale, inverse = _scales(largest, dtype, fp8)
    scaled = lax.convert_element_type(operand.numbers, np.float32) * scale
    if show is not None:
        show(scaled, dtype)
    return Codes(lax.convert_element_type(scaled, dtype), inverse)


def _largest(x: jax.Array, axes: Sequence[int] | None) -> jax.Array:
    """Return the largest finite magnitude, float32, along some axes, which stay with size 1; or of all, a scalar.

    What is infinite or NaN stays so in 8 bits, and in the rows that it belongs to. Other rows keep their numbers.
    """
    magnitude = jnp.abs(lax.stop_gradient(x)).astype(np.float32)
    magnitude = jnp.where(magnitude < np.inf, magnitude, 0)
    if axes is not None:
        return jnp.max(magnitude, axis=tuple(axes), keepdims=True)
    return jnp.max(magnitude)


def _scales(largest: jax.Array, dtype: np.dtype, fp8: Fp8) -> tuple[jax.Array, jax.Array]:
    """Return the scales that bring these magnitudes near the largest number of a format, and their inverses.

    That of zero is 1. The others and their inverses are normal numbers.
    """
    if fp8.power_of_two:
        exponent = scale_exponents(lax.bitcast_convert_type(largest, np.int32), dtype)
        return power_of_two(exponent), power_of_two(-exponent)
    limit = np.float32(jnp.finfo(dtype).max)
    largest = jnp.where(largest == 0, limit, jnp.maximum(largest, limit * np.float32(2.0**-126)))
    return limit / largest, largest / limit


def _others(count: int, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(count) if axis not in axes)
