"""Count what becomes of numbers: they are zero, or meet one of several fates, or are not finite.

Functions give each number of an array its kind: 0 if it is zero, 1 and up for its fate, the last one if it is infinite
or NaN. `count` counts them, and `share_of` returns the share that meets one. All comparisons are of integer bits:
arithmetic and comparisons on a CPU take float32 subnormals for zero, and a gradient is subnormal before it vanishes.
"""

import math
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
FATES = ("zero", "subnormal", "normal", "infinite")  # of numbers that are rounded to a format
_COUNTED = 2**32  # the smallest number that a uint32 cannot count to
_FEW = 10  # kinds: each is counted by a pass over the array, which a GPU does faster than a scatter into few places
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
        """Return where each of `FATES` begins, then infinity: bits of float32.

        The edges are for numbers that are multiplied by `scale`, a power of two, before they are rounded.
        """
        thresholds = np.array([math.ulp(0.0), *(np.array(self[1:]) / scale), math.inf])
        with np.errstate(over="ignore", under="ignore"):
            nearest = thresholds.astype(np.float32)
        above = np.nextafter(nearest, nearest[-1])
        return np.where(nearest.astype(np.float64) < thresholds, above, nearest).view(np.uint32)


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


def fates_of(x: ArrayLike, edges: ArrayLike) -> jax.Array:
    """Return the kind of each number: its place in `FATES`, from 1, by the `edges` of a range."""
    magnitudes = magnitudes_of(x)
    is_beyond: list[jax.Array] = [magnitudes >= edge for edge in edges]  # pyright: ignore  # a vector can be iterated over
    return sum((beyond.astype(np.int32) for beyond in is_beyond[1:]), is_beyond[0].astype(np.int32))


def exponents_of(x: ArrayLike) -> jax.Array:
    """Return the kind of each number: the place of floor(log2(|x|)) in `EXPONENTS`, from 1."""
    magnitudes = magnitudes_of(x)
    is_normal = magnitudes >= np.uint32(1 << 23)
    return jnp.where(is_normal, (magnitudes >> 23) + np.uint32(23), np.uint32(32) - lax.clz(magnitudes))


def count(kinds: jax.Array, how_many: int) -> jax.Array:
    """Count the numbers of each kind: uint32[..., how_many].

    Where a count may not fit in a uint32, each row or block of the array is counted by itself.
    """

    def counted(part):
        if how_many < _FEW:
            return jnp.stack([jnp.sum(part == kind, dtype=np.uint32) for kind in range(how_many)])
        # A scatter of integers: their sums are the same in any order.
        return jnp.zeros(how_many, np.uint32).at[part].add(np.uint32(1))

    kept = next(kept for kept in range(kinds.ndim + 1) if math.prod(kinds.shape[kept:]) < _COUNTED)
    for _ in range(kept):
        counted = jax.vmap(counted)
    if sharding := explicit_sharding(kinds):
        counted = in_auto(counted, sharding.mesh, NamedSharding(sharding.mesh, PartitionSpec()))
    return counted(kinds)


def share_of(counts: Counts, fate: int) -> Counts:
    """Return the share of the nonzero finite numbers that meets a fate, by its place; 0 where there are none."""
    return counts[..., 1 + fate] / counts[..., 1:-1].sum(axis=-1).clip(1)


def sum_float32(counts: jax.Array) -> jax.Array:
    """Sum the counts of all parts, float32: exact up to 2**24, then rounded; they neither wrap around nor stop."""
    return jnp.sum(counts.astype(np.float32).reshape(-1, counts.shape[-1]), axis=0)


def sum_int64(counts: jax.Array) -> np.ndarray:
    """Sum the counts of all parts exactly, on the host."""
    return np.asarray(counts).reshape(-1, counts.shape[-1]).sum(axis=0, dtype=np.int64)
