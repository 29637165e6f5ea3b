"""Multiply matrices in each dtype: which products are right on this machine, and how fast they are."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIZE = 64  # rows and columns of the matrices whose product is compared with NumPy's
SIZES = {"cpu": (512, 1)}  # by backend: rows and columns of the timed ones, and the calls enqueued together


@dataclasses.dataclass(frozen=True)
class Product:
    """One way to multiply matrices, tried on the default device; None for what was not found out."""

    name: str  # the dtype or the algorithm
    works: bool  # whether the product ran, with the precision that its name promises
    error: float | None = None  # the largest one, divided by the largest sum of the products' magnitudes
    bits: int | None = None  # the number of significant bits of an operand that reach the result
    refusal: str = ""  # why it does not work
    teraflops: float | None = None  # 10^12 floating-point operations a second, in the fastest of several calls
    times_f32: float | None = None  # the rate divided by that of "f32 by default"


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


def try_product(name: str, way: Way) -> Product:
    """Multiply once and compare with the product in float64."""
    operands = np.random.default_rng(0).uniform(-1, 1, (2, SIZE, SIZE)).astype(np.float32).astype(way.dtype)
    a, b = operands.astype(np.float64)
    two_bits = 1 + 0.5 ** np.arange(1, SIZE + 1)  # two bits in each number, further and further apart
    multiply = jax.jit(way.multiply)
    try:
        result = np.asarray(multiply(*operands)).astype(np.float64)
        copied = multiply(np.diag(two_bits).astype(way.dtype), np.eye(SIZE).astype(way.dtype))
    except Exception as error:  # whatever the compiler or the device raises is the finding
        return Product(name, False, refusal=first_line(error))
    numbers = np.diag(np.asarray(copied).astype(np.float64))
    bits = 1 + int(np.argmax((numbers != two_bits) | (numbers == 1)))  # the first that lost its second bit
    error = float(np.max(np.abs(result - a @ b)) / np.max(np.abs(a) @ np.abs(b)))
    is_right = error <= way.limit  # False for NaN
    return Product(name, is_right, error, bits, "" if is_right else f"its error is above {way.limit:.1e}")


def with_rates(products: Iterable[Product], *, seconds: float) -> tuple[Product, ...]:
    """Time a product of square matrices in each way that works, about as many seconds each."""
    size, calls = SIZES.get(jax.default_backend(), (4096, 16))
    rates = {p.name: 2e-12 * size**3 / _fastest(WAYS[p.name], size, calls, seconds) for p in products if p.works}
    f32 = rates.get("f32 by default")
    ratios = {name: rate / f32 for name, rate in rates.items()} if f32 else {}
    rated = lambda p: dataclasses.replace(p, teraflops=rates.get(p.name), times_f32=ratios.get(p.name))
    return tuple(map(rated, products))


def first_line(error: BaseException) -> str:
    """Return what an error says, on one line of at most 160 characters."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 160 else line[:157] + "..."


def _fastest(way: Way, size: int, calls: int, seconds: float) -> float:
    """Return the duration of a product, of the fastest calls that were enqueued together."""
    # Ordinary numbers: a GPU draws less power on zeros, and is faster.
    operands = np.random.default_rng(0).normal(size=(2, size, size)).astype(np.float32).astype(way.dtype)
    operands, multiply = jax.device_put(list(operands)), jax.jit(way.multiply)
    jax.block_until_ready(multiply(*operands))  # compiles
    fastest, start = math.inf, time.perf_counter()
    while fastest == math.inf or time.perf_counter() - start < seconds:
        began = time.perf_counter()
        jax.block_until_ready([multiply(*operands) for _ in range(calls)])
        fastest = min(fastest, (time.perf_counter() - began) / calls)
    return fastest
