"""Count numbers by power of two, and by what becomes of them in a format.

All comparisons are of integer bits. Arithmetic and comparisons on a CPU take float32 subnormals for zero, and a
gradient is subnormal before it vanishes.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from mpx._errors import require_one_of
from mpx._shardings import explicit_sharding, in_auto

# floor(log2(|x|)) of float32 numbers: from the smallest subnormal to the largest number.
EXPONENTS = range(-149, 128)

_FORMATS = (np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
FATES = ("zero", "subnormal", "normal", "infinite")  # of nonzero finite numbers
_COUNTED = 2**32  # the smallest number that a uint32 cannot count to
Counts = jax.Array | np.ndarray


class ExponentHistogram(NamedTuple):
    """Counts of numbers by power of two.

    Attributes:
        counts: vector of 277 counts; `counts[i]` numbers have a magnitude of at least `2**(i - 149)` and below twice
            that. It reaches from float32's smallest subnormal to its largest numbers.
        zeros: count of zeros.
        nonfinite: count of infinities and NaN.
    """

    counts: Counts
    zeros: Counts
    nonfinite: Counts


class Range(NamedTuple):
    """The smallest magnitudes that meet each fate when numbers are rounded to nearest, ties to even."""

    dtype: np.dtype
    nonzero_from: float
    normal_from: float
    infinite_from: float  # or NaN, in a format without infinities

    def edges(self, scale: float = 1.0) -> np.ndarray:
        """Return where each of `FATES` begins, then infinity, then no number: bits of float32.

        The edges are for numbers that are multiplied by `scale`, a power of two, before they are rounded.
        """
        thresholds = np.array([math.ulp(0.0), *(np.array(self[1:]) / scale), math.inf])
        with np.errstate(over="ignore", under="ignore"):
            nearest = thresholds.astype(np.float32)
        above = np.nextafter(nearest, nearest[-1])
        edges = np.where(nearest.astype(np.float64) < thresholds, above, nearest).view(np.uint32)
        return np.append(edges, np.uint32(2**32 - 1))


def range_of(dtype: DTypeLike, caller: str) -> Range:
    """Return the range of float16, bfloat16, float32, float8_e4m3fn or float8_e5m2; raise for anything else."""
    found = require_one_of(_FORMATS, dtype, f"`{caller}`: `dtype`")
    info = ml_dtypes.finfo(found)
    largest, smallest = float(info.max), float(info.smallest_subnormal)
    step = math.ldexp(1.0, math.frexp(largest)[1] - 1 - info.nmant)
    above = lambda number: math.nextafter(number, math.inf)
    # Midpoints are ties, which go to the even neighbor: to zero rather than to the smallest subnormal, to the smallest
    # normal number rather than to the largest subnormal, and beyond the largest number only if that one is odd.
    is_odd = int(largest / step) % 2 == 1
    overflow = largest + step / 2 if is_odd else above(largest + step / 2)
    return Range(found, above(smallest / 2), float(info.smallest_normal) - smallest / 2, overflow)


def magnitudes_of(x: ArrayLike) -> jax.Array:
    """Return the bits of |x| in float32 as uint32, which are ordered as |x| is."""
    x = jnp.asarray(x)
    if x.dtype == ml_dtypes.bfloat16:  # shifted, since a conversion may flush its subnormals
        bits = x.view(np.uint16).astype(np.uint32) << 16
    else:
        bits = x.astype(np.float32).view(np.uint32)
    return bits & np.uint32(0x7FFF_FFFF)


def is_number(magnitudes: jax.Array) -> jax.Array:
    """Return a mask of the numbers that are neither zero nor infinite nor NaN."""
    return (magnitudes > np.uint32(0)) & (magnitudes < np.float32(np.inf).view(np.uint32))


def count_true(*masks: jax.Array) -> jax.Array:
    """Count the true elements of masks of one shape: uint32[..., masks], for each part of `_by_parts`."""
    return jnp.stack([_by_parts(lambda part: jnp.sum(part, dtype=np.uint32), mask) for mask in masks], axis=-1)


def count_fates(x: ArrayLike, edges: ArrayLike) -> jax.Array:
    """Count the numbers that meet each of `FATES`, by the `edges` of a range, then those not finite: uint32[..., 5]."""
    magnitudes = magnitudes_of(x)
    at_least = count_true(*[magnitudes >= edge for edge in edges])  # pyright: ignore  # a vector can be iterated over
    return at_least[..., :-1] - at_least[..., 1:]


def shares_of(counts: Counts) -> Counts:
    """Return the share of the finite numbers that meets each of `FATES`, from `count_fates`; 0 where there are none."""
    fates = counts[..., : len(FATES)]
    return fates / fates.sum(axis=-1, keepdims=True).clip(1)


def count_exponents(x: ArrayLike) -> jax.Array:
    """Count the numbers of each of `EXPONENTS`, then the zeros, then infinities and NaN: uint32[..., 279]."""

    def histogram(part):
        others = jnp.where(part == np.uint32(0), len(EXPONENTS), len(EXPONENTS) + 1)
        places = jnp.where(is_number(part), _exponents(part) - EXPONENTS.start, others)
        # A scatter of integers: their sums are the same in any order.
        return jnp.zeros(len(EXPONENTS) + 2, np.uint32).at[places].add(np.uint32(1))

    return _by_parts(histogram, magnitudes_of(x))


def sum_float32(counts: jax.Array) -> jax.Array:
    """Sum the counts of all parts, float32: exact up to 2**24, then rounded; they neither wrap around nor stop."""
    return jnp.sum(counts.astype(np.float32).reshape(-1, counts.shape[-1]), axis=0)


def sum_int64(counts: jax.Array) -> np.ndarray:
    """Sum the counts of all parts exactly, on the host."""
    return np.asarray(counts).reshape(-1, counts.shape[-1]).sum(axis=0, dtype=np.int64)


def _exponents(magnitudes: jax.Array) -> jax.Array:
    """Return floor(log2(|x|)) of nonzero finite numbers, int32, within `EXPONENTS`."""
    normal = (magnitudes >> 23).astype(np.int32) - 127
    subnormal = EXPONENTS[0] + 31 - lax.clz(magnitudes).astype(np.int32)
    return jnp.where(magnitudes < np.uint32(1 << 23), subnormal, normal)


def _by_parts(count: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Count over the whole array; where a count may not fit in a uint32, over each of its rows or blocks."""
    kept = next(kept for kept in range(x.ndim + 1) if math.prod(x.shape[kept:]) < _COUNTED)
    for _ in range(kept):
        count = jax.vmap(count)
    if sharding := explicit_sharding(x):
        count = in_auto(count, sharding.mesh, NamedSharding(sharding.mesh, PartitionSpec()))
    return count(x)
