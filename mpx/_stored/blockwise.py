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
_GAP = 9 * 1024  # what a distance to the next member is divided into for stochastic rounding
_SMALLEST_NORMAL = np.float32(2.0**-126)
_LARGE, _SHRINK = np.float32(2.0**64), np.float32(2.0**-64)  # the reciprocal of a large scale would be subnormal


class BlockwiseArray(NamedTuple):
    """A float32 array in 8 bits a number: `n + 4 * ceil(n / block_size)` bytes."""

    codes: jax.Array  # uint8, in the shape of the array
    # float32, of each block: `[..., columns / block_size]` if rows consist of whole blocks, so that an array and its
    # scales can be sharded alike; else `[blocks]`.
    scale: jax.Array


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

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> BlockwiseArray:
        """Return uint8 codes in the shape of a float32 array, and the float32 scales of its blocks."""
        x = lax.stop_gradient(x)  # as of every rounding, the derivative is zero
        signed = self.signed is not False
        blocks = _in_blocks(x, self.block_size)
        noise = None if key is None else _in_blocks(jax.random.bits(key, x.shape, np.uint32), self.block_size)
        scale = _scale(blocks, signed)
        codes = _codes(blocks, scale, signed, noise)
        return BlockwiseArray(_out_of_blocks(codes, x.shape), scale[..., 0])

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Return the float32 array that was encoded."""
        values = _values(_in_blocks(codes, self.block_size), self.signed is not False) * scales[..., None]
        return _out_of_blocks(values, codes.shape)

    def for_role(self, role: Role) -> "Blockwise8bit":
        """Return the format with its sign decided: only second moments are unsigned."""
        signed = role != "second moment" if self.signed is None else self.signed
        return Blockwise8bit(self.block_size, signed)

    def refuses(self, role: Role) -> str | None:
        """Refuse fields that may or may not be negative, for which one code or the other is wrong."""
        if self.signed is not None or role != "unknown":
            return None
        return (
            "are in fields of which it is not known whether they can be negative, which decides about their code. Say "
            "so: `Blockwise8bit(signed=False)` for second moments, `Blockwise8bit(signed=True)` for others."
        )


def _in_blocks(x: jax.Array, block_size: int) -> jax.Array:
    """Return `[..., blocks, block_size]` if rows are whole blocks; else `[blocks, block_size]`, padded with zeros."""
    if x.ndim and x.shape[-1] % block_size == 0:
        return x.reshape(*x.shape[:-1], -1, block_size) if x.size else x.reshape(0, block_size)
    blocks = -(-x.size // block_size)
    missing = blocks * block_size - x.size
    flat = x.reshape(-1)
    return (jnp.pad(flat, (0, missing)) if missing else flat).reshape(blocks, block_size)


def _out_of_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undo `_in_blocks`."""
    size = math.prod(shape)
    return blocks.reshape(shape) if blocks.size == size else blocks.reshape(-1)[:size].reshape(shape)


def _scale(x: jax.Array, signed: bool) -> jax.Array:
    """Return the member of largest magnitude of each block, 0 if it is subnormal: float32 `[..., blocks, 1]`."""
    largest, smallest = jnp.max(x, axis=-1, keepdims=True), jnp.min(x, axis=-1, keepdims=True)  # NaN if a member is
    if signed:
        scale = jnp.where(largest >= -smallest, largest, smallest)
    else:
        scale = jnp.where(smallest <= -_SMALLEST_NORMAL, np.float32(np.nan), largest)
    return jnp.where(jnp.abs(scale) < _SMALLEST_NORMAL, np.float32(0), scale)


def _codes(x: jax.Array, scale: jax.Array, signed: bool, noise: jax.Array | None) -> jax.Array:
    """Return the uint8 codes of blocks, from them and their scales."""
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
