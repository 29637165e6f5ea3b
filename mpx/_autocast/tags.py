"""Follow what is known about values: which 16-bit dtype has them, where they come from,
what was asked for them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx._autocast import precision as precisions
from mpx._autocast.precision import ContractionPrecision
from mpx._jaxprs import dtype_of, is_f32, is_half, is_literal
from mpx._primitives import facts_of


class Tag(NamedTuple):
    """Holds what is known about a value."""

    # a 16-bit dtype that has this float32 value
    representable_in: np.dtype | None = None
    # what an override of the policy asks for in contractions with it
    precision: ContractionPrecision | None = None
    # whether it has elements of the function's arguments, whose gradients a user gets
    is_argument: bool = False
    # whether an element may occur twice, so that cotangents have yet to be added up
    is_copied: bool = False
    # the dtype that its gradient, of one use, may be rounded to once it is a sum
    gradient_in: np.dtype | None = None
    # whether an element is cast to 16 bits by the program, or of a named argument
    is_cast: bool = False
    # whether it is a narrowed contraction's result: that contraction rounds its
    # cotangent
    is_product: bool = False


UNKNOWN = Tag()


def tags_of_results(
    eqn: JaxprEqn, tags: tuple[Tag, ...], constants_in: np.dtype | None
) -> tuple[Tag, ...]:
    """Return the tags of results whose elements are elements of the operands.

    `constants_in` is the 16-bit dtype that contractions want, for results of constants
    alone.
    """
    if any(jex_core.jaxprs_in_params(eqn.params)):  # a scatter that applies a function
        return (UNKNOWN,) * len(eqn.outvars)
    pairs = list(zip(eqn.invars, tags, strict=True))
    # Several arrays at once: each result has its operand.
    are_several = len(eqn.invars) == len(eqn.outvars) > 1
    return tuple(
        tag_of_elements(eqn, [pairs[i]] if are_several else pairs, v, constants_in)
        for i, v in enumerate(eqn.outvars)
    )


def tag_of_elements(
    eqn: JaxprEqn,
    pairs: Sequence[tuple[Any, Tag]],
    result: Any,
    constants_in: np.dtype | None,
) -> Tag:
    """Return the tag of a result that has elements of these operands."""
    floats = [(v, tag) for v, tag in pairs if jnp.issubdtype(dtype_of(v), jnp.floating)]
    arrays = [(v, tag) for v, tag in floats if not is_literal(v)]
    facts = facts_of(eqn)
    is_broadcast = facts.elementwise and any(is_smaller(v, result) for v, _ in arrays)
    of_any = common([tag for _, tag in arrays])
    return of_any._replace(
        representable_in=_common_dtype(eqn, floats, result, constants_in),
        precision=precisions.widest(tag.precision for _, tag in arrays),
        is_copied=of_any.is_copied or is_broadcast or facts.copies_of_operand == "many",
        is_cast=of_any.is_cast or is_cast_to_16_bits(eqn),
        is_product=facts.copies_of_operand == "one"
        and all(tag.is_product for _, tag in arrays),
    )


def _common_dtype(
    eqn: JaxprEqn,
    floats: list[tuple[Any, Tag]],
    result: Any,
    constants_in: np.dtype | None,
) -> np.dtype | None:
    """Return the 16-bit dtype that has all elements of a result made of these operands'
    elements.
    """
    dtypes = {
        np.dtype(dtype_of(v)) if dtype_of(v).itemsize == 2 else tag.representable_in
        for v, tag in floats
        if not is_literal(v)
    }
    constants = [v.val for v, _ in floats if is_literal(v)]
    if eqn.params.get("fill_value") is not None:
        constants.append(eqn.params["fill_value"])
    if (
        eqn.primitive.name == "convert_element_type"
        and dtype_of(eqn.invars[0]) == np.bool_
    ):
        constants = [0.0, 1.0]
    # Constants alone, as in `jnp.where(mask, 0.0, 1.0)`, take the dtype that
    # contractions want.
    if not dtypes and constants and constants_in is not None:
        dtypes = {constants_in}
    dtype = shared(dtypes) if is_f32(result) else None
    has_all = dtype is not None and all(_has(dtype, value) for value in constants)
    return dtype if has_all else None


def common(tags: Sequence[Tag]) -> Tag:
    """Return the tag of a value that is one of several."""
    return Tag(
        shared({tag.representable_in for tag in tags}),
        shared({tag.precision for tag in tags}),
        is_argument=any(tag.is_argument for tag in tags),
        is_copied=any(tag.is_copied for tag in tags),
        is_cast=any(tag.is_cast for tag in tags),
        # `is_product` stays false: the contraction of one branch does not round the
        # cotangent of the other's.
    )


def shared(found: set[Any]) -> Any:
    """Return the one element of a set, or None."""
    return found.pop() if len(found) == 1 else None


def is_cast_to_16_bits(eqn: JaxprEqn) -> bool:
    """Return whether an equation rounds a value to 16 bits, as the program asks."""
    return eqn.primitive.name == "convert_element_type" and is_half(eqn.outvars[0])


def is_smaller(v: Any, result: Any) -> bool:
    """Return whether an operand has fewer axes, or shorter ones, than a result."""
    return v.aval.shape != result.aval.shape


def _has(dtype: np.dtype, value: Any) -> bool:
    """Return whether a 16-bit dtype has a number, or all of an array. All of them have
    NaN.
    """
    value = np.asarray(value, np.float32)
    with np.errstate(over="ignore"):
        return bool(
            (np.isnan(value) | (value.astype(dtype).astype(np.float32) == value)).all()
        )
