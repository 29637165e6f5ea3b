"""Random bits for rounding: the key that a state keeps, and noise from a key and the
numbers themselves.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def kept_key(key: jax.Array | None) -> Any:
    """Return the raw data (uint32) of a key, `jax.random.key(0)` for None, for a state
    to keep.

    It is a copy, so that donating the state does not delete the key.
    """
    # Made here: a transformation is made before JAX starts its devices.
    key = jax.random.key(0) if key is None else key
    return jnp.array(jax.random.key_data(key), copy=True)


def keys_of_step(
    kept: Any, first: jax.Array | None, count: int, caller: str
) -> tuple[jax.Array, Any]:
    """Return keys for the parts of a step, and what the state keeps for the next one.

    `first` is the key that made the state.
    """
    if isinstance(kept, optax.MaskedNode):
        raise ValueError(
            f"`{caller}`: this state has no key, since it was made where everything is"
            " rounded to nearest, and now some is rounded at random. Convert it:"
            " `mpx.convert_state(params, state, old_tx, tx)`."
        )
    impl = None if first is None else jax.random.key_impl(first)
    # Together: XLA for GPUs makes a kernel for each call, and compiles a second.
    keys = jax.random.split(jax.random.wrap_key_data(kept, impl=impl), count + 1)
    return keys[1:], jax.random.key_data(keys[0])


def noise_for(key: jax.Array, x: jax.Array) -> jax.Array:
    """Return 32 random bits (uint32) for each number of a float32 array: a hash of the
    key and of the number. The highest bits are the most random.

    The data of the key are random themselves, as those of `jax.random.split` are: to
    draw others would be a kernel more for each leaf.

    For each number they are uniform over keys, and for two numbers independent: the
    variance of a sum is that of independent noise. Equal numbers get equal bits. So
    results do not depend on how an array is sharded or cut into tiles, and a kernel can
    make the bits: it need not know where an element stands.

    It is a product and a sum, since the step of a leaf takes a GPU as long as its
    instructions do. What it lacks: in one step of some hundreds, hundreds of
    neighbouring numbers go up or down together.
    """
    first, second = jax.random.key_data(key)[:2]
    # Leave out the last 4 bits: numbers that differ by an error of rounding, on other
    # devices say, get the same noise.
    return (x.view(np.uint32) >> 4) * (first | 1) + second


def uniform_for(key: jax.Array, x: jax.Array) -> jax.Array:
    """Return a random number between 0 and 2 for each number of an array: from 1/4096
    to 2 - 1/4096, in steps of 1/2048.
    """
    # As the last bits of a number from 4,096 to 4,098, which lie 1/2048 apart.
    bits = (noise_for(key, x) >> 20) | np.uint32(0x4580_0000)
    return bits.view(np.float32) - np.float32(4096 - 1 / 4096)
