"""Random bits for rounding: the key that a state keeps, and noise from a key and the
numbers themselves.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def kept_key(key: jax.Array | None) -> Any:
    """Return the raw data (uint32) of a key, for a state to keep; `optax.MaskedNode`
    for None.

    It is a copy, so that donating the state does not delete the key.
    """
    return (
        optax.MaskedNode()
        if key is None
        else jnp.array(jax.random.key_data(key), copy=True)
    )


def key_of_step(kept: Any, first: jax.Array | None) -> tuple[Any, Any]:
    """Return the key of a step (None without a key), and what the state keeps for the
    next one.

    `first` is the key that made the state.
    """
    if first is None:
        return None, kept
    this_step, next_step = jax.random.split(
        jax.random.wrap_key_data(kept, impl=jax.random.key_impl(first))
    )
    return this_step, jax.random.key_data(next_step)


def noise_for(key: jax.Array, x: jax.Array) -> jax.Array:
    """Return 32 random bits (uint32) for each number of a float32 array: a hash of the
    key and of the number.

    For each number they are uniform over keys. Equal numbers get equal bits. So results
    do not depend on how an array is sharded or cut into tiles, and a kernel can make
    the bits: it need not know where an element stands.
    """
    first, second = jax.random.bits(key, (2,), np.uint32)
    # Leave out the last 4 bits: numbers that differ by an error of rounding, on other
    # devices say, get the same noise.
    return _mixed(_mixed((x.view(np.uint32) >> 4) ^ first) ^ second)


def uniform_for(key: jax.Array, x: jax.Array) -> jax.Array:
    """Return random numbers from 0 to below 1 in the shape of an array: equal ones for
    equal numbers.
    """
    return (noise_for(key, x) >> 8).astype(np.float32) * np.float32(2.0**-24)


def _mixed(h: jax.Array) -> jax.Array:
    """Map 32 bits one to one to others, of which each depends on all.

    The constants (lowbias32) are from Chris Wellons 2018, "Prospecting for Hash
    Functions".
    """
    h = (h ^ (h >> 16)) * np.uint32(0x7FEB_352D)
    h = (h ^ (h >> 15)) * np.uint32(0x846C_A68B)
    return h ^ (h >> 16)
