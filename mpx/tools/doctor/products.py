"""Multiply matrices in each dtype: which products are right on this machine, and how fast they are."""

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIZE = 64  # rows and columns of the matrices whose product is compared with NumPy's
LARGE = {"cpu": 512, "gpu": 4096, "tpu": 4096}  # rows and columns of the timed ones, by backend
SECONDS = 0.6  # of timing, for each way


@dataclasses.dataclass(frozen=True)
class Product:
    """One way to multiply matrices, tried on the default device.

    Attributes:
        name: the dtype or the algorithm.
        refusal: why it does not work; empty if it ran with the precision that its name promises.
        bits: the number of significant bits of an operand that reach the result; None if it did not run.
        teraflops: 10^12 floating-point operations a second, in the fastest of several calls; None if not timed.
    """

    name: str
    refusal: str = ""
    bits: int | None = None
    teraflops: float | None = None


class Way(NamedTuple):
    """A way to multiply: the operands' dtype, the function, and the largest error that its name allows."""

    dtype: Any
    multiply: Callable[..., jax.Array]
    limit: float


_algorithms = lax.DotAlgorithmPreset
_into_f32 = partial(lax.dot, preferred_element_type=np.float32)
WAYS = {
    "f32": Way(np.float32, partial(lax.dot, precision=lax.Precision.HIGHEST), 2.0**-18),
    "f32 by default": Way(np.float32, lax.dot, 2.0**-7),
    "tf32": Way(np.float32, partial(lax.dot, precision=_algorithms.TF32_TF32_F32), 2.0**-9),
    "bf16x3": Way(np.float32, partial(lax.dot, precision=_algorithms.BF16_BF16_F32_X3), 2.0**-13),
    "bf16": Way(jnp.bfloat16, lax.dot, 2.0**-7),
    "f16": Way(np.float16, lax.dot, 2.0**-8),
    # The operands are exact, but some devices keep the sums in 14 bits.
    "float8_e4m3fn": Way(jnp.float8_e4m3fn, _into_f32, 2.0**-6),
    "float8_e5m2": Way(jnp.float8_e5m2, _into_f32, 2.0**-6),
}


def try_product(name: str, way: Way, *, is_timed: bool) -> Product:
    """Multiply, compare with the product in float64, and measure the rate if the product is right."""
    operands = np.random.default_rng(0).uniform(-1, 1, (2, SIZE, SIZE)).astype(np.float32).astype(way.dtype)
    a, b = operands.astype(np.float64)
    two_bits = 1 + 0.5 ** np.arange(1, SIZE + 1)  # two bits in each number, further and further apart
    multiply = jax.jit(way.multiply)
    try:
        result = np.asarray(multiply(*operands)).astype(np.float64)
        copied = multiply(np.diag(two_bits).astype(way.dtype), np.eye(SIZE).astype(way.dtype))
    except Exception as error:  # whatever the compiler or the device raises is the finding
        return Product(name, first_line(error))
    numbers = np.diag(np.asarray(copied).astype(np.float64))
    bits = 1 + int(np.argmax((numbers != two_bits) | (numbers == 1)))  # the first that lost its second bit
    error = np.max(np.abs(result - a @ b)) / np.max(np.abs(a) @ np.abs(b))
    if not error <= way.limit:  # True for NaN
        return Product(name, f"its error of {error:.1e} is above {way.limit:.1e}", bits)
    return Product(name, "", bits, _teraflops(way) if is_timed else None)


def _teraflops(way: Way) -> float:
    size = LARGE.get(jax.default_backend(), 4096)
    # Ordinary numbers: a GPU draws less power on zeros, and is faster.
    operands = np.random.default_rng(0).normal(size=(2, size, size)).astype(np.float32).astype(way.dtype)
    operands, multiply = jax.device_put(list(operands)), jax.jit(way.multiply)
    jax.block_until_ready(multiply(*operands))  # compiles
    fastest, end = math.inf, time.perf_counter() + SECONDS
    while fastest == math.inf or time.perf_counter() < end:
        began = time.perf_counter()
        jax.block_until_ready([multiply(*operands) for _ in range(4)])  # enqueued together
        fastest = min(fastest, (time.perf_counter() - began) / 4)
    return 2e-12 * size**3 / fastest


def first_line(error: BaseException) -> str:
    """Return what an error says, on one line of at most 160 characters."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).strip()[:160]
