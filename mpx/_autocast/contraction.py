"""Contractions: which can be narrowed, how one runs in the compute dtype, and how many
FLOPs it takes.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from mpx._autocast import fp8, rounding
from mpx._autocast import wide_gradients as wide
from mpx._autocast.plan import Settings, Step
from mpx._autocast.precision import ContractionPrecision
from mpx._autocast.tags import UNKNOWN, Tag
from mpx._jaxprs import dtype_of, is_f32, is_half
from mpx._primitives import facts_of

_PRECISE = (lax.Precision.HIGH, lax.Precision.HIGHEST)
_VECTOR = "an operand is a vector, or one for each channel"
_FEWEST = 8  # numbers in a sum that a tensor core takes at once


def contracted_size(eqn: JaxprEqn) -> int:
    """Return how many products each element of the result adds up."""
    if eqn.primitive.name == "conv_general_dilated":
        kernel, dimensions = _aval(eqn.invars[1]), eqn.params["dimension_numbers"]
        return kernel.size // max(kernel.shape[dimensions.rhs_spec[0]], 1)
    (lhs_contracting, _), _ = _dot_numbers(eqn)
    return math.prod(_aval(eqn.invars[0]).shape[axis] for axis in lhs_contracting)


def flops(eqn: JaxprEqn) -> int:
    """Return the number of floating-point operations: two for each product, which is
    computed and added up.
    """
    if eqn.primitive.name == "conv_general_dilated":
        return 2 * _products_of_convolution(eqn)
    count = 2 * _aval(eqn.outvars[0]).size * contracted_size(eqn)
    if eqn.primitive.name == "ragged_dot_general":
        # Each row belongs to one group, so there are as many products as without
        # groups.
        (contracting, _), _ = _dot_numbers(eqn)
        if set(eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions) & set(
            contracting
        ):
            return count // max(_aval(eqn.invars[2]).shape[-1], 1)
    return count


def _dot_numbers(eqn: JaxprEqn) -> Any:
    """Return the contracted axes and the batch axes of a product, of both operands
    each.
    """
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    return (
        eqn.params["dimension_numbers"]
        if ragged is None
        else ragged.dot_dimension_numbers
    )


def _products_of_convolution(eqn: JaxprEqn) -> int:
    """Count products of pixels and taps, except with padding and with the zeros between
    dilated pixels.
    """
    # Along an axis, place `o` of the result and tap `t` of the kernel meet the input at
    #
    #     at = o * stride + t * rhs_dilation - padding
    #
    # which is a pixel if it is a multiple of the input's dilation, not before the first
    # pixel and not behind the last one. Axes are independent, so their counts multiply.
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    lhs, rhs, out = (_aval(v).shape for v in (*eqn.invars, *eqn.outvars))
    pairs = 1
    for d in range(len(numbers.lhs_spec) - 2):
        size, taps, places = (
            s[spec[2 + d]] for s, spec in zip((lhs, rhs, out), numbers, strict=True)
        )
        at = (
            np.arange(places)[:, None] * params["window_strides"][d]
            + np.arange(taps)[None] * params["rhs_dilation"][d]
            - params["padding"][d][0]
        )
        step = params["lhs_dilation"][d]
        pairs *= int(((at >= 0) & (at % step == 0) & (at // step < size)).sum())
    return (
        pairs
        * out[numbers.out_spec[0]]
        * out[numbers.out_spec[1]]
        * rhs[numbers.rhs_spec[1]]
    )


def why_kept(
    eqn: JaxprEqn, precision: ContractionPrecision, tags: Sequence[Tag]
) -> str | None:
    """Return why a contraction, of operands with these tags, cannot be narrowed, or
    None.
    """
    operands = eqn.invars[:2]
    if not any(map(is_f32, operands)) or not all(
        is_f32(v) or is_half(v) for v in operands
    ):
        dtypes = sorted({str(dtype_of(v)) for v in operands})
        return f"operands are {' and '.join(dtypes)}"
    result = dtype_of(eqn.outvars[0])
    if result not in (np.float32, precision.dtype):  # the result would be rounded twice
        return f"its result is to be {result}"
    asked = asked_precision(eqn)
    if asked is not None:
        return f"precision {asked} is asked for"
    if precision.algorithm is not None and eqn.primitive.name != "dot_general":
        return f"there is no {precision.name} algorithm for it"
    return why_no_gain(eqn, *tags[:2])


def why_no_gain(eqn: JaxprEqn, lhs: Tag = UNKNOWN, rhs: Tag = UNKNOWN) -> str | None:
    """Return why narrowing a contraction, of operands with these tags, gains nothing,
    or None.

    People use such contractions to add up, to count and to look up, and they take no
    longer in float32. Two kinds of layer would, since XLA would write their float32
    operands: a convolution with a learned kernel, and one row or vector times a weight
    that is stored in 16 bits, or a cache. These gain.
    """
    size = contracted_size(eqn)
    if eqn.primitive.name == "conv_general_dilated":
        kernel, (outputs, inputs, *_) = (
            _aval(eqn.invars[1]).shape,
            eqn.params["dimension_numbers"].rhs_spec,
        )
        groups = eqn.params["feature_group_count"]
        # A layer: a learned kernel for each group, or one on what the program computes.
        # What is left is a filter of given data, such as a blur.
        if rhs.is_argument and (groups > 1 or not lhs.is_argument):
            return None
        is_vector = kernel[inputs] == 1 and kernel[outputs] == groups
    else:
        is_row, is_column = _are_vectors(eqn)
        _, (batch, _) = _dot_numbers(eqn)

        def is_narrow(tag):
            # A weight, or a head's part of a cache.
            return tag.representable_in is not None and (
                tag.is_argument or (tag.is_cast and len(batch) > 0)
            )

        is_vector = (is_row and (is_column or not is_narrow(rhs))) or (
            is_column and not is_narrow(lhs)
        )
    # A symbolic size (`jax.export`) counts as large.
    if isinstance(size, int) and size < _FEWEST:
        return (
            f"only {size} numbers are summed"
            if size > 1
            else "nothing is summed: an outer product"
        )
    return _VECTOR if is_vector else None


def may_be_mapped(eqn: JaxprEqn, reason: str | None, tags: Sequence[Tag]) -> bool:
    """Return whether a contraction is kept because it multiplies a vector by an
    argument: one example by a weight.
    """
    if eqn.primitive.name != "dot_general" or reason != _VECTOR:
        return False
    return any(
        tag.is_argument and not is_vector
        for tag, is_vector in zip(tags, _are_vectors(eqn), strict=True)
    )


def _are_vectors(eqn: JaxprEqn) -> tuple[bool, bool]:
    """Return for both operands of a product whether it has no axis of its own, of more
    than one element.
    """
    lhs, rhs = (
        all(n == 1 or i in (*summed, *batch) for i, n in enumerate(_aval(v).shape))
        for v, summed, batch in zip(eqn.invars[:2], *_dot_numbers(eqn), strict=True)
    )
    return lhs, rhs


def asked_precision(eqn: JaxprEqn) -> Any:
    """Return the algorithm or the high precision that the program asks for, or None."""
    precision = eqn.params.get("precision")
    if isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return precision
    of_operands = precision if isinstance(precision, tuple) else (precision,)
    return next((p for p in of_operands if p in _PRECISE), None)


def run_narrowed(
    step: Step, settings: Settings, eqn: JaxprEqn, operands: list[Any]
) -> jax.Array:
    """Run a contraction of float32 operands in the precision of a step: its own
    equation, or what a `jax.vmap` around has made of it.

    A gradient that is to be float32 is still computed from operands in the compute
    dtype.
    """
    precision = step.precision
    if precision.algorithm is not None:
        params = eqn.params | {"precision": precision.algorithm}
        return eqn.primitive.bind(*operands, **params)
    tags = step.in_tags[:2]
    wants_wide = [
        settings.has_wide_gradients and tag.is_argument and is_f32(v)
        for v, tag in zip(step.eqn.invars[:2], tags, strict=True)
    ]
    if precision.fp8 is not None:
        # What the program computes is written in the compute dtype.
        in_memory = [
            tag.representable_in
            or (np.dtype(np.float32) if tag.is_argument else precision.dtype)
            for tag in tags
        ]
        return fp8.run_in_8_bits(eqn, operands, precision.fp8, wants_wide, in_memory)
    operands = [*(rounding.kept(x, precision) for x in operands[:2]), *operands[2:]]
    return wide.contract(eqn, operands, precision.dtype, wants_wide)


def transferred(step: Step, settings: Settings, x: jax.Array) -> jax.Array:
    """Send a float32 value to other devices in 16 bits, and its cotangent back in
    float32 or in 16 bits too.
    """
    # Devices add up the cotangents of what they all hold. So that of a weight goes back
    # in float32, as tangents go forth. That of a product is rounded by the product, and
    # that of what one device gets is one number, which no sum over devices has yet.
    transfer = functools.partial(step.eqn.primitive.bind, **step.eqn.params)
    mesh, now = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
    if not mesh.empty and not now.empty and mesh != now:
        # Into `jax.sharding.auto_axes`: outside its axes are explicit, and nothing can
        # cast here.
        return transfer(x)

    def in_16_bits(x):
        narrow = lax.convert_element_type(x, step.precision.dtype)
        sharding = step.eqn.params.get("sharding")
        # Of a constraint, which XLA would move in front of the cast.
        if isinstance(sharding, NamedSharding):
            free = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim)
            narrow = lax.with_sharding_constraint(
                narrow, NamedSharding(sharding.mesh, free)
            )
        return lax.convert_element_type(transfer(narrow), x.dtype)

    tag, facts = step.in_tags[0], facts_of(step.eqn)
    is_sent_once = facts.moves == "received" and facts.copies_of_operand == "one"
    rounds_cotangent = tag.is_product or (is_sent_once and not tag.is_argument)
    if rounds_cotangent or not settings.has_wide_gradients:
        return in_16_bits(x)
    differentiable = jax.custom_jvp(in_16_bits)
    differentiable.defjvp(
        lambda primals, tangents: (in_16_bits(*primals), transfer(*tangents))
    )
    return differentiable(x)


def with_rounded_cotangent(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return a float32 array unchanged, and round its cotangent to 16 bits before
    anything uses it.

    The barrier makes XLA write the rounded cotangent to memory instead of the float32
    one.
    """

    def round_trip(tangent):
        return lax.convert_element_type(
            lax.optimization_barrier(lax.convert_element_type(tangent, dtype)),
            np.float32,
        )

    identity = jax.custom_jvp(lambda x: x)
    identity.defjvp(lambda primals, tangents: (primals[0], round_trip(tangents[0])))
    return identity(x)


def _aval(v: Any) -> Any:
    """Return the type of an operand; jax annotates it too generally."""
    return v.aval
