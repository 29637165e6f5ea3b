"""Matrix products of 8-bit floats: which contractions use them, and how one runs forward and backward.

Operands are rounded to 8 bits, the codes are multiplied, and the result is multiplied by the inverses of both scales.
An operand that the program computes is rounded to bfloat16 first, because it is read twice: once for its largest
magnitude, once to be rounded to 8 bits.
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
from jax.sharding import NamedSharding, PartitionSpec

from mpx._errors import not_differentiable
from mpx._fp8 import FORMATS, RESULTS, Fp8, power_of_two, scale_exponents
from mpx._shardings import entries_of, explicit_sharding, in_auto

_MULTIPLE = 16  # cuBLAS asks for sizes that are multiples of it
_NO_SECOND_DERIVATIVE = (
    "`autocast`: the gradient of a product of 8-bit floats has no derivative. For a second derivative put autocast "
    "around the inner gradient, `mpx.autocast(jax.grad(...), 'fp8')`, or use 'bf16'."
)


def why_not(eqn: JaxprEqn, fp8: Fp8) -> str | None:
    """Return why a contraction runs in 16 bits, or None."""
    if eqn.primitive.name != "dot_general":
        return f"there is no {eqn.primitive.name} of 8-bit floats"
    (lhs_contracting, _), (lhs_batch, _) = eqn.params["dimension_numbers"]
    if lhs_batch:
        return "a product with a batch, such as logits of attention"
    avals: list[Any] = [v.aval for v in eqn.invars[:2]]
    lhs, rhs = (aval.shape for aval in avals)
    if not all(isinstance(size, int) for size in (*lhs, *rhs)):
        return "a size is not known"
    k = math.prod(lhs[axis] for axis in lhs_contracting)
    m, n = math.prod(lhs) // k, math.prod(rhs) // k
    if not m * n or any(size % _MULTIPLE for size in (m, n, k)):
        return f"{m} x {k} by {k} x {n}: not all sizes are multiples of {_MULTIPLE}"
    if 1 / (1 / m + 1 / n + 1 / k) < fp8.min_extent:
        return f"{m} x {k} by {k} x {n}: too small to gain"
    return None


@dataclasses.dataclass(frozen=True)
class Observed(Fp8):
    """Shows all operands to a function, scaled and not yet rounded."""

    # Gets the product, the operand's name, its numbers and the format that they will be rounded to.
    observe: Callable[[JaxprEqn, str, jax.Array, np.dtype], None] = lambda *shown: None


class Operand(NamedTuple):
    """An operand in memory."""

    numbers: jax.Array
    # Same absolute maximum as `numbers`, read where they are computed, so that XLA can fuse the reduction.
    measured: jax.Array


class Codes(NamedTuple):
    """An operand in 8 bits, worth `codes * inverse_scale`."""

    codes: jax.Array
    inverse_scale: jax.Array  # float32; a scalar, or of size 1 along the axes that share a scale


def run(
    eqn: JaxprEqn,
    operands: Sequence[jax.Array],
    fp8: Fp8,
    wide: tuple[bool, bool],
    in_memory: tuple[np.dtype, np.dtype],
) -> jax.Array:
    """Return the bfloat16 product of two float32 operands.

    `wide` says which operands get a float32 gradient. `in_memory` has the dtype that each operand has in memory, or is
    written in.
    """
    (lhs_contracting, rhs_contracting), _ = eqn.params["dimension_numbers"]
    lhs_outer, rhs_outer = (
        _others(x.ndim, axes) for x, axes in zip(operands, (lhs_contracting, rhs_contracting), strict=True)
    )
    from_lhs = range(len(lhs_outer))  # axes of the result
    from_rhs = range(len(lhs_outer), len(lhs_outer) + len(rhs_outer))
    forward, backward = FORMATS[fp8.forward], FORMATS[fp8.backward]
    on_mesh = explicit_sharding(operands[0]) or explicit_sharding(operands[1])
    result: Any = eqn.outvars[0].aval
    specs = [entries_of(x.sharding.spec, x.ndim) for x in (*map(jax.typeof, operands), result)]

    def product(a: Codes, b: Codes, contracted: Any, spec: Sequence[Any], dtype: Any = RESULTS) -> jax.Array:
        multiply = functools.partial(_product, fp8, contracted=contracted, dtype=dtype)
        if on_mesh is not None:  # sums over devices have no type yet: XLA places what is inside
            multiply = in_auto(multiply, on_mesh.mesh, NamedSharding(on_mesh.mesh, PartitionSpec(*spec)))
        return multiply(a, b)

    def encoded(name: str, operand: Operand, dtype: np.dtype, contracted: Sequence[int]) -> Codes:
        show = functools.partial(fp8.observe, eqn, name) if isinstance(fp8, Observed) else None
        return _encoded(fp8, operand, dtype, contracted, show)

    def forward_pass(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Any]:
        left, right = (_written(x, dtype) for x, dtype in zip((lhs, rhs), in_memory, strict=True))
        codes = encoded("left", left, forward, lhs_contracting), encoded("right", right, forward, rhs_contracting)
        # The products of the gradients contract other axes, so they need scales of other rows.
        kept = codes if fp8.scaling == "tensor" else (left.numbers, right.numbers)
        typed = [lax.full((0,), 0, x.dtype) for x in (lhs, rhs)]
        return product(*codes, (lhs_contracting, rhs_contracting), specs[2]), (kept, typed)

    def backward_pass(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        # JAX would differentiate the roundings, with 8-bit cotangents that have no scale.
        ((left, right), typed), cotangent = not_differentiable((residuals, cotangent), _NO_SECOND_DERIVATIVE)
        written = _written(cotangent, RESULTS)
        if fp8.scaling == "tensor":  # perhaps in the kernel that adds up columns for a bias's gradient
            written = Operand(written.numbers, lax.optimization_barrier(_largest(cotangent, range(cotangent.ndim - 1))))
        of_cotangent = functools.partial(encoded, "cotangent", written, backward)
        g_for_lhs = g_for_rhs = of_cotangent(from_rhs)
        if fp8.scaling == "row":
            g_for_rhs = of_cotangent(from_lhs)
            left = encoded("left", Operand(left, left), forward, lhs_outer)
            right = encoded("right", Operand(right, right), forward, rhs_outer)
        # Contracted axes come out in the order of the other operand.
        lhs_axes = (*lhs_outer, *_in_order_of(rhs_contracting, lhs_contracting))
        rhs_axes = (*_in_order_of(lhs_contracting, rhs_contracting), *rhs_outer)
        lhs_spec, rhs_spec = (
            [spec[axis] for axis in axes] for spec, axes in zip(specs, (lhs_axes, rhs_axes), strict=False)
        )
        of_lhs = product(g_for_lhs, right, (from_rhs, rhs_outer), lhs_spec, _wide(wide[0]))
        of_rhs = product(left, g_for_rhs, (lhs_outer, from_lhs), rhs_spec, _wide(wide[1]))
        gradients = lax.transpose(of_lhs, _places(lhs_axes)), lax.transpose(of_rhs, _places(rhs_axes))
        for_lhs, for_rhs = (g.astype(like.dtype) for g, like in zip(gradients, typed, strict=True))
        return for_lhs, for_rhs

    differentiable = jax.custom_vjp(lambda lhs, rhs: forward_pass(lhs, rhs)[0])
    differentiable.defvjp(forward_pass, backward_pass)
    return differentiable(*operands)


def _written(x: jax.Array, dtype: np.dtype) -> Operand:
    """Write an operand to memory in a dtype, if it is not there yet.

    Without the barrier XLA would write it in float32 between the two passes that read it, and would give everything
    around a weight the layout that the product wants.
    """
    narrow = lax.convert_element_type(x, dtype)
    return Operand(lax.optimization_barrier(narrow), narrow)


def _product(
    fp8: Fp8, a: Codes, b: Codes, contracted: tuple[Sequence[int], Sequence[int]], dtype: Any = RESULTS
) -> jax.Array:
    """Multiply codes, then multiply the result by the inverses of the scales.

    In this form XLA multiplies 8-bit floats on a GPU, with Triton and with cuBLAS. If the operands were scaled before
    the product, Triton (the default) would skip the rounding and multiply bfloat16.
    """
    product = lax.dot_general(a.codes, b.codes, (contracted, ((), ())), preferred_element_type=dtype)
    inverses = a.inverse_scale, b.inverse_scale
    is_by_row = bool(inverses[0].ndim)
    if is_by_row:  # move the scales to the axes of the product
        of_a, of_b = (lax.squeeze(x, tuple(axes)) for x, axes in zip(inverses, contracted, strict=True))
        inverses = (
            lax.expand_dims(of_a, range(of_a.ndim, product.ndim)),
            lax.expand_dims(of_b, range(of_a.ndim)),
        )
    # Powers of two are exact in any dtype, except for subnormal results; XLA multiplies in the product's kernel.
    between = dtype if fp8.power_of_two and not is_by_row else np.float32
    # The smaller factor first, or the intermediate result might overflow.
    small, large = (lax.convert_element_type(f(*inverses), between) for f in (jnp.minimum, jnp.maximum))
    return lax.convert_element_type(lax.convert_element_type(product, between) * small * large, dtype)


def _wide(is_wide: bool) -> Any:
    return np.dtype(np.float32) if is_wide else RESULTS


def _in_order_of(other: Sequence[int], axes: Sequence[int]) -> list[int]:
    """Return contracted axes in the order of their partners, the axes `other` of the other operand."""
    return [axis for _, axis in sorted(zip(other, axes, strict=True))]


def _places(axes: Sequence[int]) -> list[int]:
    """Return the permutation that sorts axes."""
    return sorted(range(len(axes)), key=axes.__getitem__)


def _encoded(
    fp8: Fp8,
    operand: Operand,
    dtype: np.dtype,
    contracted: Sequence[int],
    show: Callable[[jax.Array, np.dtype], None] | None,
) -> Codes:
    """Round an operand to 8 bits, for a product that contracts the axes `contracted`."""
    largest = _largest(operand.measured, contracted if fp8.scaling == "row" else None)
    axes = tuple(sorted(jax.typeof(largest).manual_axis_type.varying))  # of the mesh, inside a shard map
    largest = lax.pmax(largest, axes) if axes else largest
    scale, inverse = _scales(largest, dtype, fp8)
    scaled = lax.convert_element_type(operand.numbers, np.float32) * scale
    if show is not None:
        show(scaled, dtype)
    return Codes(lax.convert_element_type(scaled, dtype), inverse)


def _largest(x: jax.Array, axes: Sequence[int] | None) -> jax.Array:
    """Return the largest finite magnitude, in float32: along `axes`, which stay with size 1, or of the whole array.

    Infinities and NaN stay in 8 bits and spoil only their own rows: other rows keep their numbers.
    """
    magnitude = jnp.abs(lax.stop_gradient(x)).astype(np.float32)
    magnitude = jnp.where(magnitude < np.inf, magnitude, 0)
    if axes is not None:
        return jnp.max(magnitude, axis=tuple(axes), keepdims=True)
    return jnp.max(magnitude)


def _scales(largest: jax.Array, dtype: np.dtype, fp8: Fp8) -> tuple[jax.Array, jax.Array]:
    """Return the scales that bring these magnitudes near the largest number of a format, and their inverses.

    The scale of zero is 1. All scales and their inverses are normal numbers.
    """
    if fp8.power_of_two:
        exponent = scale_exponents(lax.bitcast_convert_type(largest, np.int32), dtype)
        return power_of_two(exponent), power_of_two(-exponent)
    limit = np.float32(jnp.finfo(dtype).max)
    largest = jnp.where(largest == 0, limit, jnp.maximum(largest, limit * np.float32(2.0**-126)))
    return limit / largest, largest / limit


def _others(count: int, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(count) if axis not in axes)
