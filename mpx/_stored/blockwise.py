"""`Blockwise8bit`: keep a state in eight bits an element, scaled by block.

A block of numbers is divided by its member of largest magnitude, and each quotient becomes the nearest member of the
dynamic map of Dettmers et al. 2021. The map has seven decades, from 1e-7 to 1. Decade `i` is cut into `w` equal
intervals, of which it holds the middles:

    value(i, j) = 10**(i - 6) * (0.1 + 0.9 * (j + 1/2) / w),    w = 2**i (signed) or 2**(i + 1) (unsigned),  0 <= j < w

together with 0 and 1. With `q = w + j` both directions have a closed form: the exponent of `q` as a float is the
decade, its mantissa the place in the decade. Codes are 8 bits: `q` up to 128, which stands for 1, and 128 more than `q`
for the negative of a number (signed); or `q - 1` up to 255, which stands for 1 (unsigned).

Three choices are ours:

- The scale has the sign of the member of largest magnitude, which is therefore always exact. (With a positive scale a
  signed map has no code for -1: -1 would become -0.993, and smaller with every further coding.) Coding what has been
  decoded changes nothing, as long as all of it is finite and normal.
- Unsigned, a positive number never becomes zero, but the smallest member of the map: it is a second moment, and the
  next step divides by its root.
- Values that cannot be represented stay visible, as `Blockwise8bit` says.

No two operations on the way to a code can be contracted, so that equal numbers get equal codes in every program.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._stored.roles import Role
from mpx._stored.state_format import StateFormat

_DECADES = 7
_SUBLANES, _LANES = 8, 128  # of a tile in a TPU's memory
_SIGN, _INFINITY_BITS, _SMALLEST_NORMAL_BITS = np.uint32(0x8000_0000), np.uint32(0x7F80_0000), np.uint32(0x0080_0000)
_GAP = 9 * 1024  # what a distance to the next member is divided into for stochastic rounding
_SMALLEST_NORMAL = np.float32(2.0**-126)
_LARGE, _SHRINK = np.float32(2.0**64), np.float32(2.0**-64)  # the reciprocal of a large scale would be subnormal


@dataclasses.dataclass(frozen=True)
class Blockwise8bit(StateFormat):
    """Keeps a state in 8 bits an element: the dynamic map of Dettmers et al. 2021, scaled by block.

    Seven decades below the largest magnitude of a block are held. Signed, half of the codes are for negative numbers;
    the relative error of a number is at most 7% in the highest decade and about doubles with every decade below.
    Unsigned, for second moments, it is half as much, and no positive number becomes zero.

    A block with a NaN becomes NaN. An infinity stays infinite, and the finite numbers of its block become NaN. So does
    a block with a negative number under the unsigned map. Blocks whose largest magnitude is below 1.2e-38 are zero.

    Rounded to nearest, only the largest member of a block moves in small steps. The others stand still while their
    ratio to it changes by less than half the distance to the next member of the map, 2 to 4% and more. A second moment
    with a decay of 0.999 changes by a thousandth in a step: it follows the largest one of its block, and its own
    gradient in leaps only. Training works nevertheless. `rounding="stochastic"` follows each member in the mean.

    Arrays that are split over devices are coded where they are as long as each device holds rows of whole blocks.
    Otherwise all of the array is gathered on every device: choose a `block_size` that divides the columns of a shard.

    Args:
        block_size: numbers that share a scale, a power of two from 16 to 65,536. A leaf is cut into blocks in the order
            of its elements in memory; the last block may be shorter.
        signed: whether numbers may be negative. None: known by the field of the optimizer's state, for those of Optax
            and for the usual names in others (`mu`, `nu`, `exp_avg`, `exp_avg_sq`...).

    Raises:
        TypeError: if `signed` is none of True, False and None.
        ValueError: if `block_size` is not such a power of two.

    Example:
        >>> tx = low_precision_state(optax.adam(1e-3), {"mu": Blockwise8bit(), "nu": Blockwise8bit()})
        >>> state = tx.init({"w": jnp.ones((64, 100))})
        >>> codes = optax.tree.get(state, "mu")["w"]
        >>> codes.dtype, codes.shape, [scale.shape for scale in state.block_scales.values()]
        (dtype('uint8'), (64, 100), [(25,), (25,)])

    References:
        Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861).
    """

    block_size: int = 256
    signed: bool | None = None

    def __post_init__(self) -> None:
        size = self.block_size
        if type(size) is not int or not 16 <= size <= 2**16 or size & (size - 1):
            raise ValueError(
                f"`Blockwise8bit`: `block_size` must be a power of two from 16 to 65,536, but got {size!r}."
            )
        if self.signed is not None and not isinstance(self.signed, bool):
            raise TypeError(f"`Blockwise8bit`: `signed` must be True, False or None, but got {self.signed!r}.")

    def scales_of(self, x: jax.Array) -> jax.Array:
        """Return a float32 scale for each block: `[..., columns / block_size]` if rows are whole blocks.

        So an array and its scales can be sharded alike. Otherwise they are `[blocks]`.
        """
        return _scales(lax.stop_gradient(x), self.block_size, self.signed is not False)

    def encode(self, x: jax.Array, scales: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return uint8 codes in the shape of a float32 array."""
        x, scales = lax.stop_gradient((x, scales))  # as of every rounding, the derivative is zero
        noise = None if key is None else jax.random.bits(key, x.shape, np.uint32)
        return _codes(x, spread(scales, x.shape, self.block_size), self.signed is not False, noise)

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Return the float32 array that was encoded."""
        return _values(codes, self.signed is not False) * spread(scales, codes.shape, self.block_size)

    def for_role(self, role: Role) -> "Blockwise8bit":
        """Return the format with its sign decided: only second moments are unsigned."""
        signed = role != "second moment" if self.signed is None else self.signed
        return dataclasses.replace(self, signed=signed)

    def refuses(self, role: Role) -> str | None:
        """Refuse fields that may or may not be negative, for which one code or the other is wrong."""
        if self.signed is not None or role != "unknown":
            return None
        return (
            "are in fields of which it is not known whether they can be negative, which decides about their code. Say "
            "so: `Blockwise8bit(signed=False)` for second moments, `Blockwise8bit(signed=True)` for others."
        )


def _in_tiles(shape: tuple[int, ...], block_size: int) -> tuple[int, ...] | None:
    """Return the shape in which an array shows its tiles of 8 rows and 128 columns, if blocks consist of their rows.

    A TPU keeps arrays in such tiles, so that this view is free there, and one of blocks is a copy of the array. Its
    elements have the order that they have in memory elsewhere.
    """
    if not (shape and math.prod(shape)) or block_size % _LANES:
        return None
    if len(shape) == 1:
        return (-1, _SUBLANES, _LANES) if shape[0] % max(block_size, _SUBLANES * _LANES) == 0 else None
    *leading, rows, columns = shape
    if rows % _SUBLANES or columns % block_size:
        return None
    return (*leading, rows // _SUBLANES, _SUBLANES, columns // _LANES, _LANES)


def _scales_shape(shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """Return `[..., columns / block_size]` if rows are whole blocks, else `[blocks]`."""
    size = math.prod(shape)
    if shape and size and shape[-1] % block_size == 0:
        return (*shape[:-1], shape[-1] // block_size)
    return (-(-size // block_size),)


def largest_of_blocks(keys: jax.Array, block_size: int) -> jax.Array:
    """Return the largest key (uint32) of each block."""
    scales_shape = _scales_shape(keys.shape, block_size)
    if tiles := _in_tiles(keys.shape, block_size):
        keys = jnp.max(keys.reshape(tiles), axis=-1)
        return jnp.max(keys.reshape(*scales_shape, block_size // _LANES), axis=-1)
    missing = math.prod(scales_shape) * block_size - keys.size
    keys = jnp.pad(keys.reshape(-1), (0, missing)) if missing else keys
    return jnp.max(keys.reshape(*scales_shape, block_size), axis=-1)


def spread(scales: jax.Array, shape: tuple[int, ...], block_size: int) -> jax.Array:
    """Return the scale of each element of an array of this shape."""
    repeat = lambda x, times: jnp.broadcast_to(x[..., None], (*x.shape, times))
    if tiles := _in_tiles(shape, block_size):
        return repeat(repeat(scales, block_size // _LANES).reshape(tiles[:-1]), _LANES).reshape(shape)
    return repeat(scales, block_size).reshape(-1)[: math.prod(shape)].reshape(shape)


def _scales(x: jax.Array, block_size: int, signed: bool) -> jax.Array:
    """Return the member of largest magnitude of each block, 0 if it is subnormal.

    One maximum finds it, of integers in whose order it is the last one: signed, the magnitude and below it a bit that
    says whether the number is positive; unsigned, the number's own bits, where negative numbers come after NaN.
    """
    bits = lax.bitcast_convert_type(x, np.uint32)
    if signed:
        bits = bits ^ _SIGN
        largest = largest_of_blocks((bits << 1) | (bits >> 31), block_size)
        magnitude, largest = largest >> 1, ((largest >> 1) | (largest << 31)) ^ _SIGN
    else:
        magnitude = largest = largest_of_blocks(
            jnp.where(bits & ~_SIGN < _SMALLEST_NORMAL_BITS, np.uint32(0), bits), block_size
        )
    scales = jnp.where(magnitude >= _SMALLEST_NORMAL_BITS, lax.bitcast_convert_type(largest, np.float32), np.float32(0))
    return jnp.where(magnitude > _INFINITY_BITS, np.float32(np.nan), scales)


def _codes(x: jax.Array, scale: jax.Array, signed: bool, noise: jax.Array | None) -> jax.Array:
    """Return the uint8 codes of numbers, each with its scale."""
    # |x / scale|, without a subnormal reciprocal. Beside an infinite scale finite numbers become nothing.
    magnitude, largest = jnp.abs(x), jnp.abs(scale)
    shrink = jnp.where(largest >= _LARGE, _SHRINK, np.float32(1))
    ordinary = (largest > 0) & (largest < np.inf)
    reciprocal = jnp.where(ordinary, 1 / jnp.where(ordinary, largest * shrink, np.float32(1)), _SMALLEST_NORMAL)
    v = (magnitude * shrink) * reciprocal
    v = jnp.where(v <= 1, v, np.float32(1))  # an infinity, or a NaN, whose code does not count
    q = _nearest(v, signed) if noise is None else _one_of_two(v, signed, noise)
    if not signed:
        least = jnp.where(largest < np.inf, np.int32(2), np.int32(1))  # beside an infinity, zero times it: NaN
        return jnp.where(x >= _SMALLEST_NORMAL, jnp.maximum(q, least) - 1, 0).astype(np.uint8)
    negative = (x < 0) != (scale < 0)
    return jnp.where(negative & (q > 0), 128 + jnp.minimum(q, 127), q).astype(np.uint8)


def _values(codes: jax.Array, signed: bool) -> jax.Array:
    """Return the members of the map that uint8 codes stand for: float32, from -1 to 1 or from 0 to 1."""
    code = codes.astype(np.int32)
    if signed:
        q, top = jnp.where(code > 128, code - 128, code), 128
    else:
        q, top = code + 1, 256
    exact = q.astype(np.float32)
    bits = lax.bitcast_convert_type(exact, np.int32)
    w = lax.bitcast_convert_type(bits & np.int32(0x7F80_0000), np.float32)
    decade = (bits >> 23) - (127 if signed else 128)
    # 10**(i - 6) * (0.1 + 0.9 * (j + 1/2) / w), in integers that float32 holds up to the last product.
    twentieths = (18 * exact + 9) - 16 * w
    fifth_power = jnp.minimum(decade, 5)  # the sixth would be too large
    fives = jnp.full_like(exact, 1)
    for bit, factor in ((1, 5), (2, 25), (4, 625)):
        fives = jnp.where(fifth_power & bit == bit, fives * np.float32(factor), fives)
    unit = 5e-8 if signed else 2.5e-8
    value = (twentieths * fives) * jnp.where(decade == 6, np.float32(5 * unit), np.float32(unit))
    value = jnp.where(code == 0, np.float32(0), jnp.where(q == top, np.float32(1), value))
    return jnp.where(code > 128, -value, value) if signed else value


def _nearest(v: jax.Array, signed: bool) -> jax.Array:
    """Return `q` (int32) of the member of the map nearest to `v` in [0, 1]; 0 for zero under both maps."""
    map_ = _map(signed)
    w, per_unit = _of_decade(v, map_.turns, map_.widths, map_.per_unit)
    place = (v * per_unit).astype(np.int32) - w  # nine for an interval
    q = jnp.minimum(w + ((place * 7282) >> 16), 2 * w - 1)  # a division by 9, exact up to 32,767
    q = jnp.where(v >= map_.last_turn, np.int32(map_.top), q)
    return jnp.where(v >= map_.first_turn, q, np.int32(0))


def _one_of_two(v: jax.Array, signed: bool, noise: jax.Array) -> jax.Array:
    """Return `q` (int32) of the member of the map below or above `v`, at random, so that the mean is `v`.

    Odds are the nearest multiples of 1 / 9,216: coarse enough that a member of the map is found to be one, although
    the division by its scale leaves an error in its last place.
    """
    map_ = _map(signed)
    w, per_unit = _of_decade(v, map_.firsts[1:], map_.widths, map_.per_unit)
    place = jnp.round(v * (per_unit * np.float32(1024))).astype(np.int32) - (w << 10) - _GAP // 2
    below = jnp.clip(place // _GAP, 0, w - 1)
    chance = place - below * _GAP
    # Between the last member of a decade and the first of the next one the map has another slope.
    last, per_gap = _of_decade(v, map_.firsts[1:], map_.lasts, _GAP / map_.gaps)
    chance = jnp.where(below == w - 1, jnp.round((v - last) * per_gap).astype(np.int32), chance)
    below_all = v < map_.firsts[0]
    chance = jnp.where(below_all, jnp.round(v * (_GAP / map_.firsts[0])).astype(np.int32), chance)
    up = (noise >> 8).astype(np.float32) * np.float32(2.0**-24 * _GAP) < chance.astype(np.float32)
    first = np.int32(map_.widths[0])
    return jnp.where(
        below_all, jnp.where(up, first, np.int32(0)), jnp.minimum(w + below + up.astype(np.int32), map_.top)
    )


def _of_decade(v: jax.Array, begins: np.ndarray, *constants: np.ndarray) -> list[jax.Array]:
    """Return the constants of the decade in which each `v` lies; all but the first one begin at these numbers."""
    found = [jnp.full_like(v, each[0], each.dtype) for each in constants]
    for i, begin in enumerate(begins, start=1):
        above = v >= begin
        found = [jnp.where(above, each[i], now) for each, now in zip(constants, found, strict=True)]
    return found


class _Map(NamedTuple):
    """The constants of one of the two maps, for the decades 0 to 6."""

    widths: np.ndarray  # int32, intervals of a decade
    per_unit: np.ndarray  # float32, exact: makes nine of each interval
    firsts: np.ndarray  # float32, smallest member of a decade
    lasts: np.ndarray  # float32, largest member of a decade
    gaps: np.ndarray  # float32, from there to the next member
    turns: np.ndarray  # float32, half-way from a decade's last member to the first of the next
    first_turn: np.float32  # half of the smallest member
    last_turn: np.float32  # half-way from the last member to 1
    top: int  # `q` of 1


@functools.cache
def _map(signed: bool) -> _Map:
    decades = np.arange(_DECADES, dtype=np.float64)
    widths = 2.0 ** (decades + (0 if signed else 1))
    firsts = 10.0 ** (decades - 6) * (0.1 + 0.45 / widths)
    lasts = 10.0 ** (decades - 6) * (1 - 0.45 / widths)
    nexts = np.append(firsts[1:], 1.0)
    turns = ((lasts + nexts) / 2).astype(np.float32)
    return _Map(
        widths=widths.astype(np.int32),
        per_unit=(widths * 10.0 ** (7 - decades)).astype(np.float32),
        firsts=firsts.astype(np.float32),
        lasts=lasts.astype(np.float32),
        gaps=(nexts - lasts).astype(np.float32),
        turns=turns[:-1],
        first_turn=np.float32(firsts[0] / 2),
        last_turn=turns[-1],
        top=128 if signed else 256,
    )
