"""The border of a program inside: values that 16 bits represent cross it in 16 bits,
where that costs no precision.

So there is no float32 copy of a stack of layers, and a checkpoint keeps 16 bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpx._autocast.plan import Demand, Settings
from mpx._autocast.tags import Tag


class Crossing(NamedTuple):
    """How a value crosses the border of a program inside."""

    dtype: np.dtype | None = None  # 16 bits; None for its own
    # The dtype of a weight's gradient, if a carrier beside the weight gets it.
    gradient_in: np.dtype | None = None
    # Whether the program hands it on to one inside, and so leaves it as it came.
    is_handed_on: bool = False


class Carried(NamedTuple):
    """A weight in 16 bits beside a carrier of its gradient: JAX gives a gradient its
    value's dtype.
    """

    carrier: jax.Array  # zeros that nobody reads
    weight: jax.Array


def travels_in(
    tag: Tag, cotangent_in: np.dtype | None, settings: Settings
) -> np.dtype | None:
    """Return the 16-bit dtype that a value has while it crosses the border of a program
    inside, or None for its own.

    Nothing is lost on the way in. On the way back its cotangent, the float32 sum over
    all uses inside, is rounded once. For weights and for copies of one value that is
    allowed only if the cotangent was rounded already. So the gradients that a user gets
    lose nothing, and sums of cotangents are complete before they are rounded.
    """
    if tag.is_argument and settings.has_wide_gradients:
        return None
    is_allowed = cotangent_in == tag.representable_in or not (
        tag.is_argument or tag.is_copied
    )
    return tag.representable_in if is_allowed else None


def crossing(
    tag: Tag, demand: Demand, settings: Settings, gradient_in: np.dtype | None = None
) -> Crossing:
    """Return how a value crosses: a weight that is to have a float32 gradient beside a
    carrier of that.
    """
    if tag.is_argument and settings.has_wide_gradients:
        return Crossing(tag.representable_in, gradient_in or np.dtype(np.float32))
    return Crossing(travels_in(tag, demand.cotangent_in, settings))


def at_border(values: Sequence[Any], crossings: Sequence[Crossing]) -> list[Any]:
    """Return values as they cross the border of a program."""
    return list(map(_at_border, values, crossings))


def behind_border(values: Sequence[Any], crossings: Sequence[Crossing]) -> list[Any]:
    """Return values as the program behind the border reads them, in float32."""
    return list(map(_behind_border, values, crossings))


def _at_border(x: Any, how: Crossing) -> Any:
    if how.dtype is None or isinstance(x, Carried):
        return x
    if how.gradient_in is None:
        return lax.convert_element_type(x, how.dtype)
    # `x` goes two ways. Its value goes in 16 bits, without a derivative. Its derivative
    # goes with zeros, in the dtype that the gradient is to have: JAX gives a gradient
    # the dtype of its value, and zeros cost nothing, since nobody reads them. Behind
    # the border both are one value again.
    carrier = with_derivative_of(x, lax.full_like(x, 0))
    weight = lax.stop_gradient(lax.convert_element_type(x, how.dtype))
    return Carried(lax.convert_element_type(carrier, how.gradient_in), weight)


def _behind_border(x: Any, how: Crossing) -> Any:
    if how.dtype is None or how.is_handed_on:
        return x
    if not isinstance(x, Carried):
        return lax.convert_element_type(x, np.float32)
    carrier, weight = (lax.convert_element_type(part, np.float32) for part in x)
    return with_derivative_of(carrier, weight)


def with_derivative_of(x: jax.Array, value: jax.Array) -> jax.Array:
    """Return a value of the type of `x` with the derivative of `x` in place of its own,
    of any order.

    A primitive, because JAX drops custom derivatives where it differentiates a loop or
    a checkpoint twice.
    """
    return _with_derivative.bind(value, x)


def _with_derivative_batched(
    operands: list[Any], axes: list[int | None]
) -> tuple[Any, int]:
    pairs = list(zip(operands, axes, strict=True))
    size = next(x.shape[axis] for x, axis in pairs if axis is not None)
    return _with_derivative.bind(
        *[batching.bdim_at_front(*pair, size) for pair in pairs]
    ), 0


_with_derivative = Primitive("value_with_derivative_of")
_with_derivative.def_impl(lambda value, x: value)
_with_derivative.def_abstract_eval(lambda value, x: x)
ad.primitive_jvps[_with_derivative] = lambda primals, tangents: (
    _with_derivative.bind(*primals),
    tangents[1],
)
batching.primitive_batchers[_with_derivative] = _with_derivative_batched
mlir.register_lowering(_with_derivative, lambda _, value, x: [value])
