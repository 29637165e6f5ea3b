"""How fast matrix products can be on this device, and how much of its memory is in use: measured, not looked up."""

import statistics
import time

import jax
import jax.numpy as jnp

# Rows of the matrices that are multiplied. On a GPU they fill it; a CPU is busy for a few milliseconds.
SIZES = {"cpu": 1024}
SIZE_ON_ACCELERATORS = 8192
ROUNDS, PRODUCTS = 5, 4


def matmul_rate(dtype: str) -> float:
    """Operations a second of one device in square matrix products of a dtype, two for a multiplication and addition.

    Float32 products run in what JAX takes by default, TF32 where there is such a thing. Numbers are random: products of
    zeros draw less power and can be faster.

    Args:
        dtype: of both matrices and of the result.
    """
    size = SIZES.get(jax.default_backend(), SIZE_ON_ACCELERATORS)
    keys = jax.random.split(jax.random.key(0))
    # Scaled, so that products of products stay of size 1.
    a, b = (jax.random.normal(key, (size, size)).astype(dtype) for key in keys)
    b = (b * jnp.asarray(size**-0.5, dtype)).astype(dtype)
    multiply = jax.jit(lambda a, b: a @ b)
    a = jax.block_until_ready(multiply(a, b))
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(PRODUCTS):
            a = multiply(a, b)
        jax.block_until_ready(a)
        seconds.append((time.perf_counter() - start) / PRODUCTS)
    return 2 * size**3 / statistics.median(seconds)


def device_memory() -> tuple[int | None, int | None]:
    """Bytes in use on the first device of this process, and the most there ever were; None where nothing counts them.

    XLA counts on GPUs and not on CPUs. The peak is that of the process: it cannot be set back.
    """
    counts = jax.local_devices()[0].memory_stats() or {}
    return counts.get("bytes_in_use"), counts.get("peak_bytes_in_use")
