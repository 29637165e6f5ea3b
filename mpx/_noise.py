"""Random bits for rounding, from a key and the numbers themselves."""

import jax
import numpy as np
from jax import lax


def noise_for(key: jax.Array, x: jax.Array) -> jax.Array:
    """Return 32 random bits for each float32 number: a hash of the key and of the number.

    For each number they are uniform over keys. Equal numbers get equal bits. So results do not depend on how an array
    is sharded or cut into tiles, and a kernel can make the bits: it need not know where an element stands.

    Args:
        key: a JAX PRNG key.
        x: float32 array of any shape.

    Returns:
        uint32 array of the shape of `x`.

    References:
        Chris Wellons 2018, "Prospecting for Hash Functions", for the constants (lowbias32).
    """
    first, second = jax.random.bits(key, (2,), np.uint32)
    # Leave out the last 4 bits: numbers that differ by an error of rounding, on other devices say, get the same noise.
    return _mixed(_mixed((lax.bitcast_convert_type(x, np.uint32) >> 4) ^ first) ^ second)


def uniform_for(key: jax.Array, x: jax.Array) -> jax.Array:
    """Return random numbers from 0 to below 1 in the shape of an array: equal ones for equal numbers."""
    return (noise_for(key, x) >> 8).astype(np.float32) * np.float32(2.0**-24)


def _mixed(h: jax.Array) -> jax.Array:
    """Map 32 bits one to one to others, of which each depends on all."""
    h = (h ^ (h >> 16)) * np.uint32(0x7FEB_352D)
    h = (h ^ (h >> 15)) * np.uint32(0x846C_A68B)
    return h ^ (h >> 16)
