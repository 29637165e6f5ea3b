"""Matrix products of 8-bit floats: which contractions use them, and how one runs
forward and backward.

Operands are rounded to 8 bits, the codes are multiplied, and the result is multiplied
by the inverses of both scales. An operand that the program computes is rounded to
bfloat16 first, because it is read twice: once for its largest magnitude, once to be
rounded to 8 bits.
"""

import functools
import math
from collections.abc import Sequence
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
    "`autocast`: the gradient of a product of 8-bit floats has no derivative. For a"
    " second derivative put autocast around the inner gradient,"
    " `mpx.autocast(jax.grad(...), 'fp8')`, or use 'bf16'."
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


class Codes(NamedTuple):
    """An operand in 8 bits, worth `codes * inverse_scale`."""

    codes: jax.Array
    inverse_scale: jax.Array  # a float32 scalar, a power of two


def run_in_8_bits(
    eqn: JaxprEqn,
    operands: Sequence[jax.Array],
    fp8: Fp8,
    wide: Sequence[bool],
    in_memory: Sequence[np.dtype],
) -> jax.Array:
    """Return the bfloat16 product of two float32 operands.

    `wide` says which operands get a float32 gradient. `in_memory` has the dtype that
    each operand has in memory, or is written in.
    """
    (lhs_contracting, rhs_contracting), _ = eqn.params["dimension_numbers"]
    lhs, rhs = operands
    lhs_outer = [axis for axis in range(lhs.ndim) if axis not in lhs_contracting]
    rhs_outer = [axis for axis in range(rhs.ndim) if axis not in rhs_contracting]
    from_lhs = range(len(lhs_outer))  # axes of the result
    from_rhs = range(len(lhs_outer), len(lhs_outer) + len(rhs_outer))
    forward, backward = FORMATS[fp8.forward], FORMATS[fp8.backward]
    dtypes = [x.dtype for x in operands]
    on_mesh = explicit_sharding(lhs) or explicit_sharding(rhs)
    result: Any = eqn.outvars[0].aval
    specs = [
        entries_of(x.sharding.spec, x.ndim)
        for x in (*map(jax.typeof, operands), result)
    ]

    def product(
        a: Codes, b: Codes, contracted: Any, spec: Sequence[Any], dtype: Any
    ) -> jax.Array:
        multiply = functools.partial(
            _product_of_codes, contracted=contracted, dtype=dtype
        )
        # Sums over devices have no type yet: XLA places what is inside.
        if on_mesh is not None:
            multiply = in_auto(
                multiply,
                on_mesh.mesh,
                NamedSharding(on_mesh.mesh, PartitionSpec(*spec)),
            )
        return multiply(a, b)

    def coded(x: jax.Array, dtype: np.dtype) -> Codes:
        narrow = lax.convert_element_type(x, dtype)
        return _rounded_to_8_bits(_in_memory(narrow), narrow, forward)

    def forward_pass(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Any]:
        left, right = map(coded, (lhs, rhs), in_memory)
        contracted = lhs_contracting, rhs_contracting
        result = product(left, right, contracted, specs[2], RESULTS)
        # A `jax.checkpoint` that saves what it is given rounds floats of 8 bits by
        # `reduce_precision`, which makes NaN of 400: bits are saved.
        return result, [_as_bits(x, np.uint8) for x in (left, right)]

    def backward_pass(
        residuals: Any, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # JAX would differentiate the roundings, with 8-bit cotangents that have no
        # scale.
        (left, right), cotangent = not_differentiable(
            (residuals, cotangent), _NO_SECOND_DERIVATIVE
        )
        left, right = (_as_bits(x, forward) for x in (left, right))
        # XLA may fuse this maximum into the kernel that adds up columns for a bias's
        # gradient.
        of_columns = lax.optimization_barrier(
            _largest_magnitude(cotangent, range(cotangent.ndim - 1))
        )
        narrow = lax.convert_element_type(cotangent, RESULTS)
        g = _rounded_to_8_bits(_in_memory(narrow), of_columns, backward)

        # d_lhs = g @ rhs.T and d_rhs = lhs.T @ g, of any axes.
        def gradient(i, a, b, contracted, axes):
            """Return the one of operand `i`; the product has its axes in this order."""
            spec = [specs[i][axis] for axis in axes]
            dtype = np.dtype(np.float32) if wide[i] else RESULTS
            result = product(a, b, contracted, spec, dtype)
            return lax.transpose(result, _places(axes)).astype(dtypes[i])

        # Contracted axes come out in the order of the other operand.
        lhs_axes = (*lhs_outer, *_in_order_of(rhs_contracting, lhs_contracting))
        rhs_axes = (*_in_order_of(lhs_contracting, rhs_contracting), *rhs_outer)
        return (
            gradient(0, g, right, (from_rhs, rhs_outer), lhs_axes),
            gradient(1, left, g, (lhs_outer, from_lhs), rhs_axes),
        )

    differentiable = jax.custom_vjp(lambda lhs, rhs: forward_pass(lhs, rhs)[0])
    differentiable.defvjp(forward_pass, backward_pass)
    return differentiable(*operands)


def _as_bits(x: Codes, dtype: Any) -> Codes:
    return Codes(lax.bitcast_convert_type(x.codes, dtype), x.inverse_scale)


def _in_memory(narrow: jax.Array) -> jax.Array:
    """Write an operand to memory in its dtype, if it is not there yet.

    Without the barrier XLA would write it in float32 between the two passes that read
    it, and would give everything around a weight the layout that the product wants.
    """
    return lax.optimization_barrier(narrow)


def _product_of_codes(
    a: Codes,
    b: Codes,
    contracted: tuple[Sequence[int], Sequence[int]],
    dtype: Any,
) -> jax.Array:
    """Multiply codes, then multiply the result by the inverses of the scales.

    In this form XLA multiplies 8-bit floats on a GPU, with Triton and with cuBLAS. If
    the operands were scaled before the product, Triton (the default) would skip the
    rounding and multiply bfloat16.
    """
    product = lax.dot_general(
        a.codes, b.codes, (contracted, ((), ())), preferred_element_type=dtype
    )
    # Powers of two are exact in any dtype, except for subnormal results; XLA multiplies
    # in the product's kernel. The smaller factor first, or the intermediate result
    # might overflow.
    inverses = a.inverse_scale, b.inverse_scale
    small, large = (
        lax.convert_element_type(f(*inverses), dtype)
        for f in (jnp.minimum, jnp.maximum)
    )
    return product * small * large


def _in_order_of(other: Sequence[int], axes: Sequence[int]) -> list[int]:
    """Return contracted axes in the order of their partners, the axes `other` of the
    other operand.
    """
    return [axis for _, axis in sorted(zip(other, axes, strict=True))]


def _places(axes: Sequence[int]) -> list[int]:
    """Return the permutation that sorts axes."""
    return sorted(range(len(axes)), key=axes.__getitem__)


def _rounded_to_8_bits(x: jax.Array, measured: jax.Array, dtype: np.dtype) -> Codes:
    """Round an operand to 8 bits.

    `measured` has its absolute maximum, and is read where the operand is computed, so
    that XLA can fuse the reduction.
    """
    # codes = round(x * 2**e), where 2**e moves the largest magnitude to the top of the
    # format. A power of two rounds nothing by itself, and its inverse is exact.
    largest = _largest_magnitude(measured, range(measured.ndim))
    # Of the mesh, inside a shard map.
    axes = tuple(sorted(jax.typeof(largest).manual_axis_type.varying))
    largest = lax.pmax(largest, axes) if axes else largest
    exponent = scale_exponents(lax.bitcast_convert_type(largest, np.int32), dtype)
    scaled = lax.convert_element_type(x, np.float32) * power_of_two(exponent)
    return Codes(lax.convert_element_type(scaled, dtype), power_of_two(-exponent))


def _largest_magnitude(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Return the largest finite magnitude along `axes`, in float32.

    Infinities and NaN stay in 8 bits and spoil only their own rows: other rows keep
    their numbers.
    """
    magnitude = jnp.abs(lax.stop_gradient(x)).astype(np.float32)
    return jnp.max(jnp.where(magnitude < np.inf, magnitude, 0), axis=tuple(axes))
