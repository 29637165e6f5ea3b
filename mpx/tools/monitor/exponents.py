"""Magnitudes as integers: the exponents of numbers, and where the range of a format ends.

All of it compares integer bits. CPU arithmetic and comparisons take float32 subnormals for zero, and subnormals are
what a gradient passes through before it vanishes.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from mpx._dtypes import dtype_or_none

# floor(log2(|x|)) of float32 numbers: from the smallest subnormal to the largest number.
EXPONENTS = range(-149, 128)

_FORMATS = tuple(
    np.dtype(kind)
    for kind in (np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
)
_COUNTED = 2**32  # a uint32 counts fewer
_PLACES = len(EXPONENTS) + 2  # of a histogram: zeros come first, infinities and NaN last


class ExponentHistogram(NamedTuple):
    """How many numbers there are of each power of two.

    Attributes:
        counts: `counts[i]` numbers have a magnitude of at least `2**e` and below `2**(e + 1)`, with
            `e = i - 149`: from float32's smallest subnormal (-149) to its largest numbers (127). float64 numbers
            beyond are counted in the outermost of these.
        zeros: how many are zero.
        nonfinite: how many are infinite or NaN.
    """

    counts: Any
    zeros: Any
    nonfinite: Any


@dataclasses.dataclass(frozen=True)
class Range:
    """Which magnitudes a format keeps when they are rounded to nearest, ties to even.

    Attributes:
        dtype: the format.
        zero_up_to: magnitudes up to this one become zero.
        normal_from: magnitudes from this one on become normal numbers.
        infinite_from: magnitudes from this one on have no finite number: they become infinite, or NaN in a format
            without infinities.
    """

    dtype: np.dtype
    zero_up_to: float
    normal_from: float
    infinite_from: float

    def scaled(self, scale: float) -> "Range":
        """The range for numbers that are multiplied by a power of two before they are rounded."""
        thresholds = (self.zero_up_to, self.normal_from, self.infinite_from)
        return Range(self.dtype, *[threshold / scale for threshold in thresholds])

    def underflows(self, magnitudes: jax.Array) -> jax.Array:
        """Which of the nonzero ones become zero; magnitudes are those of `magnitudes_of`."""
        return is_nonzero(magnitudes) & (magnitudes <= _bits(self.zero_up_to, magnitudes.dtype, "down"))

    def becomes_subnormal(self, magnitudes: jax.Array) -> jax.Array:
        """Which become subnormal numbers of the format, with less than its precision."""
        above = magnitudes > _bits(self.zero_up_to, magnitudes.dtype, "down")
        return above & (magnitudes < _bits(self.normal_from, magnitudes.dtype, "up"))

    def overflows(self, magnitudes: jax.Array) -> jax.Array:
        """Which of the finite ones have no finite number in the format."""
        return is_finite(magnitudes) & (magnitudes >= _bits(self.infinite_from, magnitudes.dtype, "up"))


def range_of(dtype: Any, caller: str) -> Range:
    """The range of float16, bfloat16, float32, float8_e4m3fn or float8_e5m2; raises for anything else."""
    found = dtype_or_none(dtype)
    if found is None or found not in _FORMATS:
        names = ", ".join(str(known) for known in _FORMATS)
        raise ValueError(f"`{caller}`: `dtype` must be one of f16, bf16, f32, {names}, but got {found or repr(dtype)}.")
    return _range_of(found)


@functools.cache
def _range_of(dtype: np.dtype) -> Range:
    info = ml_dtypes.finfo(dtype)
    largest, smallest = float(info.max), float(info.smallest_subnormal)
    step = math.ldexp(1.0, math.frexp(largest)[1] - 1 - info.nmant)
    # A tie goes to the even neighbour: beyond the largest number if that is odd, as it is where infinity follows it.
    beyond = largest + step / 2 if int(largest / step) % 2 else math.nextafter(largest + step / 2, math.inf)
    # Between the subnormals and the smallest normal number the even neighbour is the normal one.
    return Range(dtype, smallest / 2, float(info.smallest_normal) - smallest / 2, beyond)


def magnitudes_of(x: Any) -> jax.Array:
    """The bits of |x| as float32, uint32 (of float64 numbers as float64, uint64): in the order of the magnitudes."""
    x = jnp.asarray(x)
    if x.dtype == np.float64:
        return lax.bitcast_convert_type(x, np.uint64) & np.uint64(0x7FFF_FFFF_FFFF_FFFF)
    if x.dtype == ml_dtypes.bfloat16:  # a conversion may flush its subnormals
        bits = lax.bitcast_convert_type(x, np.uint16).astype(np.uint32) << 16
    else:
        bits = lax.bitcast_convert_type(x.astype(np.float32), np.uint32)
    return bits & np.uint32(0x7FFF_FFFF)


def is_nonzero(magnitudes: jax.Array) -> jax.Array:
    """Which numbers are not zero."""
    return magnitudes > magnitudes.dtype.type(0)


def is_finite(magnitudes: jax.Array) -> jax.Array:
    """Which numbers are neither infinite nor NaN."""
    return magnitudes < _bits(math.inf, magnitudes.dtype, "down")


def exponents_of(magnitudes: jax.Array) -> jax.Array:
    """floor(log2(|x|)) of nonzero finite numbers, int32, within `EXPONENTS`; of others no number of use."""
    if magnitudes.dtype == np.uint64:
        exponents = (magnitudes >> np.uint64(52)).astype(np.int32) - 1023
        return jnp.clip(exponents, EXPONENTS[0], EXPONENTS[-1])
    normal = (magnitudes >> 23).astype(np.int32) - 127
    subnormal = EXPONENTS[0] + 31 - lax.clz(magnitudes).astype(np.int32)
    return jnp.where(magnitudes < np.uint32(1 << 23), subnormal, normal)


def partial_counts(mask: jax.Array) -> jax.Array:
    """How many are true, uint32: of the whole array or, where that could be too many to count, of each row or block."""
    kept = _axes_to_keep(mask.shape)
    return jnp.sum(mask, axis=tuple(range(kept, mask.ndim)), dtype=np.uint32)


def count(mask: jax.Array) -> jax.Array:
    """How many are true, a float32 scalar: exact up to 2**24, then rounded, and never too many to count."""
    return jnp.sum(partial_counts(mask).astype(np.float32))


def partial_histograms(magnitudes: jax.Array) -> jax.Array:
    """How many zeros, numbers of each exponent, and others there are, uint32 along the last axis; see `partial_counts`.

    By a scatter of integers, whose sums are the same in any order.
    """

    def histogram(magnitudes):
        places = exponents_of(magnitudes) - EXPONENTS.start + 1
        places = jnp.where(is_finite(magnitudes), places, _PLACES - 1)
        places = jnp.where(is_nonzero(magnitudes), places, 0)
        return jnp.zeros(_PLACES, np.uint32).at[places].add(np.uint32(1))

    for _ in range(_axes_to_keep(magnitudes.shape)):
        histogram = jax.vmap(histogram)
    return histogram(magnitudes)


def histogram_of(magnitudes: jax.Array) -> ExponentHistogram:
    """The numbers of each power of two, as float32; see `count`."""
    counts = jnp.sum(partial_histograms(magnitudes).astype(np.float32).reshape(-1, _PLACES), axis=0)
    return ExponentHistogram(counts[1:-1], counts[0], counts[-1])


def _axes_to_keep(shape: tuple[int, ...]) -> int:
    """Over how many leading axes not to count, so that no count is too large for a uint32."""
    return next(kept for kept in range(len(shape) + 1) if math.prod(shape[kept:]) < _COUNTED)


def _bits(threshold: float, dtype: Any, towards: str) -> Any:
    """The bits of a magnitude, rounded up or down to one that there is among those bits."""
    floats = np.float64 if dtype == np.uint64 else np.float32
    with np.errstate(over="ignore", under="ignore"):
        nearest = floats(threshold)
    if towards == "down" and float(nearest) > threshold:
        nearest = np.nextafter(nearest, floats(0))
    if towards == "up" and float(nearest) < threshold:
        nearest = np.nextafter(nearest, floats(np.inf))
    return nearest.view(dtype)
