"""`Blockwise8bit` and `Blockwise4bit`: keep a state in few bits an element, by a map of
squares, scaled by block.

Invariants of what is stored:

- A scale is the largest magnitude of its block, exactly. What has that magnitude is
  decoded exactly.
- The magnitude over the scale is `(c / top) ** 2` for a code `c`. In 8 bits `c` goes
  from -127 to 127 (int8) if numbers may be negative, and up to 255 (uint8) if not; in 4
  bits from -7 to 7, two codes in a byte.
- To decode and encode again changes no code and no scale.

Encoding is `top * sqrt(|x| / scale)`. A root spends more codes on small numbers than on
large ones. Decoding needs no division: XLA would not compute that twice, once for the
scales and once for the codes, but write moments in float32.

No product on the way to a code is followed by an addition, so that no compiler can
contract the two: equal numbers get equal codes in every program.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mpx._noise import uniform_for
from mpx._stored.blocks import (
    BlockFormat,
    largest_of_blocks,
    mpx_integer,
    mpx_root,
    packed,
    spread,
    unpacked,
)
from mpx._stored.roles import Role

_SIGN, _INFINITY_BITS, _SMALLEST_NORMAL_BITS = (
    np.uint32(0x8000_0000),
    np.uint32(0x7F80_0000),
    np.uint32(0x0080_0000),
)
_SMALLEST_NORMAL = np.float32(2.0**-126)
_LARGE = np.float32(2.0**64)
_TOP_OF_4_BITS = np.float32(7)


@dataclasses.dataclass(frozen=True)
class Blockwise8bit(BlockFormat):
    """Keep a state in 8 bits an element: a map of squares, with one float32 scale for
    each block.

    The largest magnitude of a block is exact. A signed number close to it is off by
    0.8% at most, one of a tenth of it by 2.5%, one of a hundredth by 8%; below 1.6e-5
    of it a number becomes zero. Unsigned, for second moments, these errors are half as
    large, and no positive number becomes zero. A block with a NaN or an infinity
    becomes NaN, and so does a block with a negative number under the unsigned map.
    Blocks whose largest magnitude is below 1.2e-38 become zero.

    `low_precision_state` rounds codes up or down at random, so that each member of a
    block is followed in the mean. Rounded to nearest, a member stands still if a step
    changes it by less than half the distance to the next code. Then a first moment
    without gradients stops falling at code 9 (for a decay of 0.9), and its weight
    moves for ever.

    Each device codes its own shard of an array if whole blocks lie in the shard. On a
    mesh of explicit axes `low_precision_state` makes the blocks of a leaf smaller where
    they would not. On automatic axes nothing says how an array is divided, and blocks
    have the borders of one device. Where a block reaches over devices, GPUs send the
    largest of each 8 numbers or more, if so many divide the columns of a device. Else
    they send the array, as TPUs do. Blocks lie in rows where a box of Flax names the
    last axis; otherwise choose a `block_size` that divides the columns.

    Args:
        block_size: numbers that share a scale, a power of two from 16 to 65,536. A leaf
            is cut into blocks in the order of its elements in memory; the last block
            may be shorter.
        signed: whether numbers may be negative. None: the field of the optimizer's
            state decides. mpx knows the fields of Optax, and the usual names in other
            states (`mu`, `nu`, `exp_avg`, `exp_avg_sq`...).

    Example:
        >>> tx = low_precision_state(
        ...     optax.adam(1e-3), {"mu": Blockwise8bit(), "nu": Blockwise8bit()}
        ... )
        >>> mu = optax.tree.get(tx.init({"w": jnp.ones((64, 100))}), "mu")["w"]
        >>> mu.codes.dtype, mu.codes.shape, mu.scales.shape, mu.decode().dtype
        (dtype('int8'), (64, 100), (25,), dtype('float32'))

    References:
        Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization" (arXiv
        2110.02861), for blocks; FlashOptim, 2026 (arXiv 2602.23349), for companded
        codes, and for the root of second moments.
    """

    block_size: int = 256
    signed: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.signed is not None and not isinstance(self.signed, bool):
            raise TypeError(
                "`Blockwise8bit`: `signed` must be True, False or None, but got"
                f" {self.signed!r}."
            )

    def encode(
        self, x: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return codes in the shape of a float32 array, and a float32 scale for each
        block.

        The scales are `[..., columns / block_size]` if rows are whole blocks, so that
        an array and its scales can be sharded alike. Otherwise they are `[blocks]`.
        """
        signed, top, dtype = self._map()
        code, scales = _encoded(x, self.block_size, signed, top, key)
        return code.astype(dtype), scales

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        return _decoded(codes.astype(np.int32), scales, self.block_size, self._map()[1])

    def _map(self) -> tuple[bool, np.float32, type]:
        """Return whether codes have a sign, the code of the largest magnitude, and the
        dtype of codes.
        """
        return (
            (False, np.float32(255), np.uint8)
            if self.signed is False
            else (True, np.float32(127), np.int8)
        )

    def why_unsuitable(self, role: Role, shape: tuple[int, ...]) -> str | None:
        if self.signed is not None or role != "unknown":
            return None
        return (
            "are in fields of unknown sign, and the right map depends on the sign. Say"
            " `Blockwise8bit(signed=False)` for second moments,"
            " `Blockwise8bit(signed=True)` for others."
        )


@dataclasses.dataclass(frozen=True)
class Blockwise4bit(BlockFormat):
    """Keep a first moment in 4 bits an element, rounded at random: the same map, with
    codes from -7 to 7.

    The largest magnitude of a block is exact. The others are rounded up or down between
    (c / 7)**2 and ((c + 1) / 7)**2 of it. Their mean is within 0.5% of them down to a
    thousandth of the largest; below 4.9e-9 of it a number becomes zero. Rounded to
    nearest, a training run fails (a small GPT ended 23 to 34 standard deviations from
    float32): most of a moment would stand still or be zero. So `low_precision_state`
    refuses that. Infinities and NaN are as in `Blockwise8bit`.

    Second moments are refused: many would be zero, and updates are divided by their
    root. Keep them in `Blockwise8bit()`: then AdamW with masters of 24 bits takes 4.55
    bytes a parameter between two steps.

    Two codes share a byte, if the last axis has an even size. Otherwise a code takes a
    byte.

    Args:
        block_size: numbers that share a float32 scale, as in `Blockwise8bit`.

    Example:
        >>> formats = {"mu": Blockwise4bit(), "nu": Blockwise8bit()}
        >>> tx = low_precision_state(optax.adam(1e-3), formats)
        >>> mu = optax.tree.get(tx.init({"w": jnp.ones((64, 128))}), "mu")["w"]
        >>> mu.codes.dtype, mu.codes.shape, mu.scales.shape, mu.shape
        (dtype('uint8'), (64, 64), (64, 1), (64, 128))

    References:
        Li et al. 2023, "Memory Efficient Optimizers with 4-bit States" (arXiv
        2309.01507), for blocks of 128 and for what a zero does in a second moment.
    """

    block_size: int = 128

    def encode(
        self, x: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the codes of a float32 array, and a float32 scale for each block;
        without a key round to nearest.

        Codes are uint8 `[..., columns / 2]`, or int8 in the shape of the array if it
        has an odd number of columns.
        """
        codes, scales = _encoded(x, self.block_size, True, _TOP_OF_4_BITS, key)
        is_even = codes.ndim and codes.shape[-1] % 2 == 0
        return packed(codes) if is_even else codes.astype(np.int8), scales

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        codes = unpacked(codes) if codes.dtype == np.uint8 else codes.astype(np.int32)
        return _decoded(codes, scales, self.block_size, _TOP_OF_4_BITS)

    def why_unsuitable(self, role: Role, shape: tuple[int, ...]) -> str | None:
        if role == "second moment":
            return (
                "are second moments, of which many would be zero in 4 bits. Use"
                " `Blockwise8bit()`."
            )
        if role == "unknown":
            return (
                "may be second moments, which 4 bits cannot hold: mpx does not know the"
                " field. Declare the state by `register_state`, or use"
                " `Blockwise8bit(signed=...)`."
            )
        return None


def _encoded(
    x: jax.Array, block_size: int, signed: bool, top: np.float32, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return codes (int32) in the shape of an array, and a scale for each block."""
    scales = _scales(x, block_size, signed)
    place = mpx_root(jnp.abs(x)) * spread(
        _inverse_roots(scales, top), x.shape, block_size
    )
    code = place if key is None else _one_of_two(place, uniform_for(key, x))
    if signed:
        sign = x.view(np.uint32) & _SIGN
        code = (code.view(np.uint32) | sign).view(np.float32)
    else:  # a positive number never becomes zero
        code = jnp.maximum(code, (place > 0).astype(np.float32))
    return mpx_integer(code if key is not None else jnp.round(code)), scales


def _decoded(
    codes: jax.Array, scales: jax.Array, block_size: int, top: np.float32
) -> jax.Array:
    """Return the float32 array of codes (int32)."""
    code = codes.astype(np.float32)
    # The square is exact, and that of `top` becomes 1. Multiply by the inverse: XLA
    # does that with a division by a constant, but not always.
    size = code * code * np.float32(1 / top**2)
    # The sign as a bit: XLA for CPUs would multiply the scales by the inverse instead,
    # and return the largest float32 as 3.4028233e38.
    value = (size.view(np.uint32) | (code.view(np.uint32) & _SIGN)).view(np.float32)
    return value * spread(scales, codes.shape, block_size)


def _scales(x: jax.Array, block_size: int, signed: bool) -> jax.Array:
    """Return the largest magnitude of each block; 0 if it is subnormal, NaN beside an
    infinity, a NaN or a negative number without a sign.

    The maximum is one of unsigned integers. In their order infinity stands above finite
    numbers, NaN above infinity, and negative numbers above NaN. Negative zero is zero.
    """
    bits = x.view(np.uint32)
    # As integers with a sign, negative zero and subnormal numbers are the smallest.
    is_zero = x.view(np.int32) < (_SIGN | _SMALLEST_NORMAL_BITS).view(np.int32)
    bits = bits & ~_SIGN if signed else jnp.where(is_zero, np.uint32(0), bits)
    bits = largest_of_blocks(bits, block_size)
    scales = jnp.where(
        bits >= _SMALLEST_NORMAL_BITS, bits.view(np.float32), np.float32(0)
    )
    return jnp.where(bits >= _INFINITY_BITS, np.float32(np.nan), scales)


def _inverse_roots(scales: jax.Array, top: np.float32) -> jax.Array:
    """Return `top / sqrt(scale)`; 0 for a scale of zero or NaN."""
    ordinary = scales > 0
    # The inverse of a large scale would be subnormal.
    shrink, grow = (
        jnp.where(scales >= _LARGE, np.float32(y), np.float32(1))
        for y in (2.0**-64, 2.0**-32)
    )
    inverse = jnp.where(
        ordinary, 1 / jnp.where(ordinary, scales * shrink, np.float32(1)), np.float32(0)
    )
    # XLA computes `1 / sqrt` in another way, with other bits.
    return top * (grow * jnp.sqrt(inverse))


def _one_of_two(place: jax.Array, noise: jax.Array) -> jax.Array:
    """Return the code below a place or the one above, at random, so that the mean of
    what they decode to is right.

    A number that was decoded is found at its code again. Its place is off by less than
    6e-5, since roots and the division by the scale leave an error in the last bits, and
    noise is 1.2e-4 or more.
    """
    below = jnp.floor(place)
    # The odds of the code above, without a division: how far the square of the place
    # has come between the squares of the two codes. Noise goes up to 2.
    is_above = noise * (below + np.float32(0.5)) < (place - below) * (place + below)
    return below + is_above.astype(np.float32)
