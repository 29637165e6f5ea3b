"""How fast this machine is: products of matrices in each precision, and copies; and the peaks that makers publish."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._autocast.transform import autocast
from mpx._policy import get_policy

_SIZES = (256, 512, 1024, 2048, 4096, 8192)
LARGEST_COPY = 2**30  # bytes: more than the last cache of any processor


@dataclasses.dataclass(frozen=True)
class MatmulRate:
    """How fast products of square matrices are in one precision.

    Attributes:
        name: the precision.
        size: rows and columns of the matrices; None where it does not run.
        teraflops: 10^12 floating-point operations a second, in the fastest of several calls; None where it does not
            run.
        ratio_to_f32: how many times the rate of float32 that is.
        share_of_peak: of what the maker publishes for this device; None where that is not known.
        refusal: why it does not run.
    """

    name: str
    size: int | None = None
    teraflops: float | None = None
    ratio_to_f32: float | None = None
    share_of_peak: float | None = None
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class CopyRate:
    """How fast memory is read and written.

    Attributes:
        gigabytes_per_second: 10^9 bytes a second, read and written bytes together, in the fastest of several passes.
        bytes: of the array that was read and written.
        flops_per_byte: how many operations of the fastest product there is time for while one byte is copied.
        share_of_peak: of what the maker publishes for this device; None where that is not known.
    """

    gigabytes_per_second: float
    bytes: int
    flops_per_byte: float | None = None
    share_of_peak: float | None = None


@dataclasses.dataclass(frozen=True)
class Peak:
    """What a maker publishes: dense products, without sparsity.

    Attributes:
        teraflops: of each precision, as `MatmulRate` names it.
        gigabytes_per_second: of the device's memory; None where the maker's own pages disagree.
    """

    teraflops: Mapping[str, float]
    gigabytes_per_second: float | None


def _tensor_cores(f32: float, tf32: float, half: float) -> dict[str, float]:
    return {"f32": f32, "tf32": tf32, "bf16": half, "f16": half}


# By `device_kind`, letter by letter: a slice of a device (MIG) has another kind, and no peak. From NVIDIA's data sheets
# of V100, T4, A100, L4, H100 and H200 (numbers "with sparsity" halved) and Google Cloud's pages on TPU v4, v5e and v6e.
PEAKS: dict[str, Peak] = {
    "Tesla V100-SXM2-16GB": Peak({"f32": 15.7, "f16": 125}, 900),
    "Tesla V100-SXM2-32GB": Peak({"f32": 15.7, "f16": 125}, 900),
    "Tesla T4": Peak({"f32": 8.1, "f16": 65}, None),
    "NVIDIA A100-SXM4-40GB": Peak(_tensor_cores(19.5, 156, 312), 1555),
    "NVIDIA A100-SXM4-80GB": Peak(_tensor_cores(19.5, 156, 312), 2039),
    "NVIDIA A100-PCIE-40GB": Peak(_tensor_cores(19.5, 156, 312), 1555),
    "NVIDIA A100 80GB PCIe": Peak(_tensor_cores(19.5, 156, 312), 1935),
    "NVIDIA L4": Peak(_tensor_cores(30.3, 60, 121), 300),
    "NVIDIA H100 PCIe": Peak(_tensor_cores(51, 378, 756), 2000),
    "NVIDIA H100 80GB HBM3": Peak(_tensor_cores(67, 494, 989), 3350),
    "NVIDIA H200": Peak(_tensor_cores(67, 494, 989), 4800),
    "TPU v4": Peak({"bf16": 275}, None),
    "TPU v5 lite": Peak({"bf16": 197}, None),
    "TPU v6 lite": Peak({"bf16": 918}, None),
}

# The same product through autocast, which should cost nothing.
_CAST_PRODUCT = autocast(jnp.matmul, get_policy("params=bf16,compute=bf16,output=bf16"))

_WAYS: dict[str, tuple[Any, Callable[..., jax.Array]]] = {
    "f32": (jnp.float32, functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)),
    "f32 by default": (jnp.float32, jnp.matmul),
    "tf32": (jnp.float32, functools.partial(lax.dot, precision=lax.DotAlgorithmPreset.TF32_TF32_F32)),
    "bf16": (jnp.bfloat16, jnp.matmul),
    "bf16 by autocast": (jnp.bfloat16, _CAST_PRODUCT),
    "f16": (jnp.float16, jnp.matmul),
}


def matmul_rates(
    device_kind: str, *, seconds: float = 0.6, sizes: Iterable[int] = _SIZES, names: Iterable[str] = tuple(_WAYS)
) -> tuple[MatmulRate, ...]:
    """Measures products of square matrices in each precision, on the default device.

    Args:
        device_kind: of that device, for the share of its peak.
        seconds: how long each precision is measured, about.
        sizes: of the matrices, in rising order. The largest is taken of which several products fit into the time.
        names: which precisions.

    Returns:
        A rate for each, with its ratio to that of float32.

    Example:
        >>> [rate] = matmul_rates("cpu", seconds=0.01, sizes=[8], names=["bf16"])
        >>> rate.size, rate.teraflops > 0
        (8, True)
    """
    rates = [_matmul_rate(name, seconds, tuple(sizes)) for name in names]
    return with_ratios(rates, PEAKS.get(device_kind))


def with_ratios(rates: Iterable[MatmulRate], peak: Peak | None) -> tuple[MatmulRate, ...]:
    """The same rates with what they are of that of float32 and of the published peak."""
    rates = tuple(rates)
    f32 = next((rate.teraflops for rate in rates if rate.name == "f32"), None)
    published = {} if peak is None else peak.teraflops
    return tuple(
        dataclasses.replace(
            rate,
            ratio_to_f32=_quotient(rate.teraflops, f32),
            share_of_peak=_quotient(rate.teraflops, published.get(rate.name.removesuffix(" by autocast"))),
        )
        for rate in rates
    )


def copy_rate(
    device_kind: str, rates: Iterable[MatmulRate] = (), *, seconds: float = 0.6, size: int = LARGEST_COPY
) -> CopyRate:
    """Measures how fast the default device reads and writes its memory: one pass that adds 1 to an array in place.

    In place, since a CPU would spend more time on getting new pages from the operating system than on copying.

    Args:
        device_kind: of that device, for the share of its peak.
        rates: of the products there, to set against it.
        seconds: how long it is measured, about.
        size: bytes of the array.

    Example:
        >>> copied = copy_rate("cpu", seconds=0.01, size=4096)
        >>> copied.bytes, copied.gigabytes_per_second > 0
        (4096, True)
    """
    increment = jax.jit(lambda x: x + np.float32(1), donate_argnums=0)
    x = jnp.zeros(max(size // 4, 1), jnp.float32)
    fastest, start = math.inf, time.perf_counter()
    for turn in range(10_000):
        began = time.perf_counter()
        x = jax.block_until_ready(increment(x))
        if turn:  # the first one compiles
            fastest = min(fastest, time.perf_counter() - began)
        if turn > 2 and time.perf_counter() - start > seconds:
            break
    speed = 2 * x.nbytes / fastest / 1e9
    peak = PEAKS.get(device_kind)
    best = max((rate.teraflops for rate in rates if rate.teraflops is not None), default=None)
    return CopyRate(
        speed,
        x.nbytes,
        None if best is None else best * 1e3 / speed,
        _quotient(speed, None if peak is None else peak.gigabytes_per_second),
    )


def _matmul_rate(name: str, seconds: float, sizes: tuple[int, ...]) -> MatmulRate:
    dtype, function = _WAYS[name]
    multiply = jax.jit(function)
    size = sizes[0]
    try:
        while True:
            operands = _operands(size, dtype)
            time_taken = _fastest(multiply, operands, seconds / 8)
            fits = [larger for larger in sizes if time_taken * (larger / size) ** 3 < seconds / 4]
            if max(fits, default=size) <= size:
                break
            size = max(fits)
        time_taken = min(time_taken, _fastest(multiply, operands, seconds))
    except Exception as error:  # whatever the compiler or the device raises is the finding
        return MatmulRate(name, refusal=first_line(error))
    return MatmulRate(name, size, 2 * size**3 / time_taken / 1e12)


def _operands(size: int, dtype: Any) -> list[jax.Array]:
    """Two matrices of ordinary numbers: a GPU draws less power, and is faster, on zeros."""
    return [jax.random.normal(jax.random.key(seed), (size, size), jnp.float32).astype(dtype) for seed in (0, 1)]


def _fastest(function: Callable[..., Any], operands: list[jax.Array], seconds: float) -> float:
    """Seconds of a call: several are enqueued and waited for once, and the fastest of such turns counts."""
    jax.block_until_ready(function(*operands))  # compiles
    calls, fastest, start = 1, math.inf, time.perf_counter()
    while True:
        began = time.perf_counter()
        result = None
        for _ in range(calls):
            result = function(*operands)
        jax.block_until_ready(result)
        fastest = min(fastest, (time.perf_counter() - began) / calls)
        calls = max(1, min(16, int(0.02 / fastest)))
        if time.perf_counter() - start > seconds:
            return fastest


def first_line(error: BaseException) -> str:
    """What an error says, on one line of at most 160 characters."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 160 else line[:157] + "..."


def _quotient(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None
