"""Measure the rate of matrix products on this device, and its memory in use."""

import statistics
import time

import jax

# Rows of the matrices that are multiplied: they fill a GPU, and a CPU is busy for a few milliseconds.
SIZES = {"cpu": 1024, "gpu": 8192, "tpu": 8192}
ROUNDS, PRODUCTS = 5, 4


def matmul_rate(dtype: str) -> float:
    """Return the operations a second of one device in square matrix products; a multiply-add counts as two.

    Float32 products run in JAX's default precision, which is TF32 where there is TF32. Numbers are random, because
    products of zeros draw less power and can be faster.
    """
    size = SIZES[jax.default_backend()]
    a, b = jax.random.normal(jax.random.key(0), (2, size, size))
    a, b = a.astype(dtype), (b * size**-0.5).astype(dtype)  # scaled, so that products of products stay of size 1
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
    """Return the bytes in use on the first device of this process, and their peak; None where nothing counts them.

    XLA counts them on GPUs and not on CPUs. The peak is the one of the whole process.
    """
    counts = jax.local_devices()[0].memory_stats() or {}
    return counts.get("bytes_in_use"), counts.get("peak_bytes_in_use")
