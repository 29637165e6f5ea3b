"""Round exactly between float32 and the 16-bit formats.

Everything in mpx whose correctness depends on a rounding goes through this file, and
everything here works on the integer bits of the numbers. There are two reasons:

- A compiler may widen what a program narrows (`xla_allow_excess_precision`, on by
  default). XLA for an H200 turns `f32 -> bf16 -> f32` inside one program into nothing,
  in elementwise code too (seen with jax 0.10.2 and 0.12.0), and a Kahan compensation
  into float32's own rounding error. XLA for a CPU does so around products and in front
  of sums (jax 0.10 and 0.11). XLA for a TPU v5e kept it (jax 0.10.2). No compiler can
  do that to integer operations.
- CPU arithmetic flushes float32 subnormals to zero, and `jax.lax.reduce_precision`
  flushes float16 subnormals. Integer operations see every bit.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from mpx._dtypes import UP_TO_FLOAT32
from mpx._errors import require_choice, require_one_of
from mpx._straight_through import straight_through

_BFLOAT16 = np.dtype(jnp.bfloat16)
_FLOAT32 = np.dtype(np.float32)

# float32 bit patterns.
_SIGN = np.uint32(0x8000_0000)
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_INFINITY = np.uint32(0x7F80_0000)
# The mantissa's top bit: a NaN that has it survives truncation to 16 bits.
_QUIET = np.uint32(0x0040_0000)
_BF16_MAX_F32 = np.uint32(0x7F7F_0000)
# The largest whose rounding to bfloat16, ties away from zero, is finite.
_LARGEST_SPLIT = np.uint32(0x7F7F_7FFF).view(np.float32)
_F16_MAX = np.uint32(0x477F_E000)  # 65504
_F16_SMALLEST_NORMAL = np.uint32(0x3880_0000)  # 2**-14
_HALF = np.uint32(0x3F00_0000)  # 0.5

# 16-bit patterns.
_BF16_MAX = np.uint32(0x7F7F)
_F16_MAX_BITS = np.uint32(0x7BFF)

Overflow = Literal["infinite", "largest"]


def round_to(
    x: ArrayLike, dtype: DTypeLike, *, overflow: Overflow = "infinite"
) -> jax.Array:
    """Round float32 numbers to the nearest number that `dtype` can hold; the result is
    float32.

    Ties go to even, as IEEE 754 asks. Subnormals of `dtype`, infinities and the signs
    of zeros stay, and NaN stays NaN. Unlike `x.astype(dtype).astype(jnp.float32)` it is
    never removed by the compiler. Derivatives pass straight through.

    Args:
        x: float32 array of any shape.
        dtype: bfloat16, float16 or float32 (which changes nothing).
        overflow: what becomes of a finite number that is too large for `dtype`:
            `"infinite"`, as IEEE 754 has it, or the `"largest"` finite number.

    Example:
        >>> float(round_to(jnp.float32(1.001), "bfloat16"))
        1.0
        >>> [
        ...     float(round_to(jnp.float32(70_000), "f16", overflow=way))
        ...     for way in ("infinite", "largest")
        ... ]
        [inf, 65504.0]
        >>> float(
        ...     round_to(jnp.float32(2.0**-20), "float16")
        ... ) == 2.0**-20  # subnormal in float16
        True
    """
    x = _as_float32(x, "round_to")
    dtype = require_one_of(UP_TO_FLOAT32, dtype, "`round_to`: `dtype`")
    require_choice(get_args(Overflow), overflow, "`round_to`: `overflow`")
    if dtype == _FLOAT32:
        return x
    bits = x.view(np.uint32)
    magnitude = bits & _MAGNITUDE
    if dtype == _BFLOAT16:
        increment = 0x7FFF + ((bits >> 16) & 1)
        # What lies above the largest number is cut off to it, and infinity kept.
        if overflow == "largest":
            increment = jnp.where(magnitude >= _BF16_MAX_F32, np.uint32(0), increment)
        nearest = (bits + increment) & np.uint32(0xFFFF_0000)
        nearest = jnp.where(
            _is_nan(bits), (bits | _QUIET) & np.uint32(0xFFFF_0000), nearest
        )
        return straight_through(nearest.view(np.float32), x)
    nearest = (magnitude + 0xFFF + ((magnitude >> 13) & 1)) & np.uint32(0xFFFF_E000)
    beyond = _INFINITY
    if overflow == "largest":
        beyond = jnp.where(magnitude == _INFINITY, _INFINITY, _F16_MAX)
    nearest = jnp.where(nearest > _F16_MAX, beyond, nearest)
    # An addition does the rounding: from 0.5 to 1 float32 numbers lie 2**-24 apart,
    # like float16 numbers below 2**-14.
    steps = (
        (magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32) - _HALF
    ).astype(np.float32)  # at most 1024
    nearest = jnp.where(
        magnitude < _F16_SMALLEST_NORMAL,
        (steps * np.float32(2.0**-24)).view(np.uint32),
        nearest,
    )
    nearest = jnp.where(
        _is_nan(bits), (magnitude | _QUIET) & np.uint32(0xFFFF_E000), nearest
    )
    return straight_through((nearest | (bits & _SIGN)).view(np.float32), x)


def stochastic_round(key: jax.Array, x: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Round float32 numbers up or down to `dtype` at random, so that the mean is the
    number itself.

    A number between two neighbours of `dtype` becomes the upper one with the
    probability of its distance from the lower one (Croci et al. 2022, "Stochastic
    rounding: implementation, error analysis and applications"). Numbers of `dtype`,
    zeros of both signs, infinities and NaN do not change. A finite number beyond the
    largest one of `dtype` becomes that largest one, never infinite. Probabilities are
    exact for bfloat16 and for normal numbers of float16; below 2**-14 in float16 they
    are rounded down to a multiple of 2**-32.

    Args:
        key: a JAX PRNG key; equal keys give equal roundings.
        x: float32 array of any shape.
        dtype: bfloat16, float16 or float32 (which changes nothing).

    Returns:
        Array of `dtype` and the shape of `x`.

    Example:
        >>> x = jnp.full(
        ...     10_000, 1.0 + 2.0**-9, jnp.float32
        ... )  # a quarter of the way from 1 to its neighbour
        >>> rounded = stochastic_round(jax.random.key(0), x, "bfloat16")
        >>> rounded.dtype, sorted(set(rounded.tolist()))
        (dtype(bfloat16), [1.0, 1.0078125])
        >>> bool(abs((rounded > 1).mean() - 0.25) < 0.02)
        True
    """
    x = _as_float32(x, "stochastic_round")
    dtype = require_one_of(UP_TO_FLOAT32, dtype, "`stochastic_round`: `dtype`")
    if dtype == _FLOAT32:
        return x
    bits = x.view(np.uint32)
    magnitude = bits & _MAGNITUDE
    if dtype == _BFLOAT16:
        noise = jax.random.bits(key, x.shape, np.uint16).astype(np.uint32)
        rounded = jnp.minimum((magnitude + noise) >> 16, _BF16_MAX)
        special = (magnitude >> 16) | jnp.where(
            _is_nan(bits), np.uint32(0x0040), np.uint32(0)
        )
    else:
        noise = jax.random.bits(key, x.shape, np.uint32)
        rounded = _stochastic_f16(magnitude, noise)
        special = jnp.where(_is_nan(bits), np.uint32(0x7E00), np.uint32(0x7C00))
    rounded = jnp.where(magnitude >= _INFINITY, special, rounded) | (
        (bits & _SIGN) >> 16
    )
    return straight_through(rounded.astype(np.uint16).view(dtype), x)


def split_f32(
    x: ArrayLike, *, overflow: Overflow = "infinite"
) -> tuple[jax.Array, jax.Array]:
    """Split float32 numbers into bfloat16 weights and the 16 bits that bfloat16 lacks.

    The weight is `x` rounded to nearest, *ties away from zero*: `(bits + 0x8000) >>
    16`. With ties to even the 16 low bits would be ambiguous: a remainder of 0x8000
    beside an even weight fits two numbers. Transformer Engine's
    `store_param_remainders` uses the same layout.

    Args:
        x: float32 array of any shape.
        overflow: what becomes of the largest finite numbers, from 0x7F7F8000 on.
            `"infinite"`: `hi` is infinite, and `lo` still tells the numbers apart.
            `"largest"`: they are first cut off to 0x7F7F7FFF, the largest number whose
            `hi` is finite.

    Returns:
        `(hi, lo)`, bfloat16 and uint16 arrays of the shape of `x`. `join_f32` gives
        back every float32 bit pattern that is not NaN (and was not cut off). NaN
        becomes a NaN `hi` and a zero `lo`.

    Example:
        >>> hi, lo = split_f32(jnp.float32(1.001))
        >>> hi.dtype, lo.dtype, float(hi)
        (dtype(bfloat16), dtype('uint16'), 1.0)
        >>> bool(join_f32(hi, lo) == jnp.float32(1.001))
        True
    """
    x = _as_float32(x, "split_f32")
    bits = x.view(np.uint32)
    require_choice(get_args(Overflow), overflow, "`split_f32`: `overflow`")
    is_special, low = jnp.isnan(x), _QUIET
    if overflow == "largest":
        # Infinities too: no weight reaches them with low bits, see `join_f32`.
        low = jnp.where(is_special, _QUIET, np.uint32(0x7FFF))
        is_special = ~(jnp.abs(x) <= _LARGEST_SPLIT)
    # Chosen between integers: the assembler of CUDA 13.0 stores the low bits of a
    # float32 register as a number, 0 of most weights.
    bits = jnp.where(is_special, (bits & np.uint32(0xFFFF_0000)) | low, bits)
    hi = ((bits + 0x8000) >> 16).astype(np.uint16)
    return straight_through(hi.view(_BFLOAT16), x), bits.astype(np.uint16)


def join_f32(hi: ArrayLike, lo: ArrayLike) -> jax.Array:
    """Join bfloat16 weights and their 16 low bits (uint16) to float32; the inverse of
    `split_f32`.

    A weight changed from outside is respected: low bits that `hi` cannot have had are
    left out. So a pruned weight reads as (almost) zero and not as NaN, and an infinite
    `hi` that did not come from a large finite number reads as infinite. A NaN reads as
    NaN.

    Example:
        >>> float(
        ...     join_f32(jnp.bfloat16(1.0), jnp.uint16(0x8000))
        ... )  # above a half: `hi` was rounded up
        0.998046875
    """
    hi, lo = jnp.asarray(hi), jnp.asarray(lo)
    if hi.dtype != _BFLOAT16 or lo.dtype != np.uint16:
        raise TypeError(
            f"`join_f32` needs bfloat16 `hi` and uint16 `lo`, but got {hi.dtype} and"
            f" {lo.dtype}."
        )
    high = hi.view(np.uint16).astype(np.uint32) << 16
    # From 0x8000 on `hi` was rounded up: low bits are a number with a sign.
    joined = high + lo.astype(np.int16).astype(np.uint32)
    # No number becomes NaN: 0 and infinities have other low bits.
    joined = jnp.where(jnp.isnan(joined.view(np.float32)), high, joined)
    return straight_through(joined.view(np.float32), hi)


def _as_float32(x: ArrayLike, caller: str) -> jax.Array:
    x = jnp.asarray(x)
    if x.dtype != _FLOAT32:
        raise TypeError(
            f"`{caller}` needs a float32 `x`, but got {x.dtype}{list(x.shape)}."
        )
    return x


def _is_nan(bits: jax.Array) -> jax.Array:
    return (bits & _MAGNITUDE) > _INFINITY


def _stochastic_f16(magnitude: jax.Array, noise: jax.Array) -> jax.Array:
    """Return the float16 bits of a finite magnitude, rounded up with the right odds,
    and saturated at 65504.
    """
    significand = (magnitude & 0x7F_FFFF) | 0x80_0000
    # That of float16, less one; 0 for subnormals.
    exponent = jnp.maximum(magnitude >> 23, np.uint32(113)) - 113
    # Bits of the significand; below 2**-14 more than 13.
    dropped = 126 - jnp.minimum(magnitude >> 23, np.uint32(113))
    whole = significand >> jnp.minimum(dropped, np.uint32(31))
    # The dropped bits as a fraction of 2**32.
    fraction = jnp.where(
        dropped <= 24,
        significand << (32 - jnp.minimum(dropped, np.uint32(24))),
        (significand << 8)
        >> jnp.minimum(jnp.maximum(dropped, np.uint32(24)) - 24, np.uint32(31)),
    )
    fraction = jnp.where(dropped > 55, np.uint32(0), fraction)
    # The first bit of the significand, which float16 does not store, adds one to the
    # exponent.
    return jnp.minimum(
        (exponent << 10) + whole + (~noise < fraction).astype(np.uint32), _F16_MAX_BITS
    )
