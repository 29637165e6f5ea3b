"""`BlockwiseFp8`: keep a state in 8-bit floats, with a scale for each block.

Codes are the bits of the format. They are made of integers and powers of two: nothing depends on how a compiler
converts to 8 bits, and kernels for GPUs that have no such type compute them too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._fp8 import BIAS, FORMATS, MANTISSA, power_of_two, scale_exponents
from mpx._noise import uniform_for
from mpx._stored.blocks import BlockFormat, largest_of_blocks, spread

_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_INFINITY_BITS = np.int32(0x7F80_0000)
_NEGATIVE = 128  # the bit of the sign


@dataclasses.dataclass(frozen=True)
class BlockwiseFp8(BlockFormat):
    """Keeps a state in e4m3 or e5m2, with a float32 scale for each block, a power of two.

    A scale brings the largest magnitude of its block to between half of the format's largest number and that number.
    Rounded to nearest, a normal number is off by at most 2**-4 of itself in e4m3, 2**-3 in e5m2. Numbers below about
    2**-18 of the largest in their block (e5m2: 2**-32) become zero. A positive second moment becomes the smallest
    number instead, since the next step divides by its root. A block with an infinity or a NaN becomes NaN, as does a
    block of second moments with a negative number. Decoding and encoding again changes nothing.

    Attributes:
        format: `"e4m3"` or `"e5m2"`.
        block_size: as in `Blockwise8bit`.
        signed: whether numbers may be negative, and small ones become zero. None: the field of the state decides.
    """

    format: str
    block_size: int = 256
    signed: bool | None = None

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Return the bits of 8-bit floats (uint8) in the shape of a float32 array, and the scales of their blocks."""
        x = lax.stop_gradient(x)  # the derivative of a rounding is zero
        scales = self._scales(x)
        mantissa, least = self._mantissa_and_least_exponent()
        of_element = spread(scales, x.shape, self.block_size)
        v = jnp.where(of_element > 0, x * _inverse(of_element), np.float32(0))  # beside NaN codes do not count
        exponent = ((v.view(np.int32) & np.int32(_MAGNITUDE)) >> MANTISSA) - BIAS
        exponent = jnp.maximum(exponent, least)
        n = jnp.abs(v) * power_of_two(mantissa - exponent)
        if key is None:
            n = jnp.round(n)  # ties to even
        else:
            below = jnp.floor(n)
            n = below + (uniform_for(key, x) < n - below).astype(np.float32)
        if self.signed is False:
            n = jnp.where(v > 0, jnp.maximum(n, np.float32(1)), n)
        # The first bit of the mantissa, which is not stored, adds one to the exponent; so does what is rounded up.
        code = ((exponent - least) << mantissa) + n.astype(np.int32)
        return jnp.where((v < 0) & (code > 0), code + _NEGATIVE, code).astype(np.uint8), scales

    def _scales(self, x: jax.Array) -> jax.Array:
        """Return the power of two of each block that its codes are to be multiplied by."""
        bits = x.view(np.uint32)
        # In the order of unsigned integers negative numbers come after NaN.
        bits = bits & _MAGNITUDE if self.signed is not False else jnp.where(bits == ~_MAGNITUDE, np.uint32(0), bits)
        bits = largest_of_blocks(bits, self.block_size)
        is_number = bits < _INFINITY_BITS.view(np.uint32)
        exponent = scale_exponents(bits.view(np.int32), FORMATS[self.format])
        return jnp.where(is_number, power_of_two(-exponent), np.float32(np.nan))

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        mantissa, least = self._mantissa_and_least_exponent()
        code = codes.astype(np.int32) & np.int32(_NEGATIVE - 1)
        exponent = jnp.maximum((code >> mantissa) - 1, 0)
        n = (code - (exponent << mantissa)).astype(np.float32)
        value = n * power_of_two(exponent + (least - mantissa))
        return jnp.where(codes >= np.uint8(_NEGATIVE), -value, value) * spread(scales, codes.shape, self.block_size)

    def _mantissa_and_least_exponent(self) -> tuple[int, int]:
        """Return the bits of the format's mantissa, and the exponent of its smallest normal number."""
        info = jnp.finfo(FORMATS[self.format])
        return int(info.nmant), int(info.minexp)

    def __str__(self) -> str:
        return self.format


def _inverse(power: jax.Array) -> jax.Array:
    """Return the inverse of powers of two from 2**-126 to 2**126, exactly on every device; NaN may give anything."""
    bits = power.view(np.int32)
    return (np.int32((2 * BIAS) << MANTISSA) - bits).view(np.float32)
