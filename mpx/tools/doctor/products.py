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
LARGE = {"cpu": 512, "gpu": 4096, "tpu": 4096}  # rows and columns of the timed ones, by backend


@dataclasses.dataclass(frozen=True)
class Product:
    """One way to multiply matrices, tried on the default device.

    Attributes:
        name: the dtype or the algorithm.
        works: whether the product ran, with the precision that its name promises.
        error: the largest error, divided by the largest sum of the products' magnitudes; None if it did not run.
        bits: the number of significant bits of an operand that reach the result; None if it did not run.
        refusal: why it does not work.
        teraflops: 10^12 floating-point operations a second, in the fastest of several calls; None if not timed.
        times_f32: the rate divided by the rate of `"f32 by default"`; None if not timed.
    """

    name: str
    works: bool
    error: float | None = None
    bits: int | None = None
    refusal: str = ""
    teraflops: float | None = None
    times_f32: float | None = None


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
    """Time a product of square matrices in each way that works, about as many seconds each.

    They take turns, so that a machine that does something else for a while slows down all of them.
    """
    size = LARGE.get(jax.default_backend(), 4096)
    turns = {p.name: _turn(WAYS[p.name], size) for p in products if p.works}
    fastest = dict.fromkeys(turns, math.inf)
    start = time.perf_counter()
    while math.inf in fastest.values() or time.perf_counter() - start < seconds * len(turns):
        fastest = {name: min(fastest[name], turn(fastest[name])) for name, turn in turns.items()}
    rates = {name: 2e-12 * size**3 / duration for name, duration in fastest.items()}
    ratio = lambda name: rates[name] / rates["f32 by default"] if "f32 by default" in rates else None
    rated = lambda p: dataclasses.replace(p, teraflops=rates[p.name], times_f32=ratio(p.name))
    return tuple(rated(product) if product.name in rates else product for product in products)


def first_line(error: BaseException) -> str:
    """Return what an error says, on one line of at most 160 characters."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 160 else line[:157] + "..."


def _turn(way: Way, size: int) -> Callable[[float], float]:
    """Return a function that takes the seconds of a product and times some more, which are enqueued together."""
    # Ordinary numbers: a GPU draws less power on zeros, and is faster.
    operands = np.random.default_rng(0).normal(size=(2, size, size)).astype(np.float32).astype(way.dtype)
    operands, multiply = jax.device_put(list(operands)), jax.jit(way.multiply)
    jax.block_until_ready(multiply(*operands))  # compiles

    def turn(known: float) -> float:
        calls = max(1, min(16, int(0.02 / known)))
        began = time.perf_counter()
        jax.block_until_ready([multiply(*operands) for _ in range(calls)])
        return (time.perf_counter() - began) / calls

    return turn
