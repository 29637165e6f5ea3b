"""Read off a compiled program what a step costs: its traffic, its memory, and a bound
of its time. Nothing runs.
"""

import contextlib
import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import jax

import mpx
from benchmarks.report import Row
from mpx.tools.program import StepReport, Target, target_devices
from mpx.tools.program.step_report import report_of
from mpx.tools.program.targets import target_here

# What good kernels reach of the published figures: a copy on an H200 4.0 of 4.8 TB/s,
# products 800 of 989 TFLOP/s.
REACHED_BANDWIDTH, REACHED_RATE = 4.0 / 4.8, 800 / 989.4


def figures(report: StepReport) -> Row:
    """Return the figures that the tables have. There are bounds only for a device whose
    figures are known.
    """
    outside = report.moved_bytes - report.moved_by_kind.get("products", 0)
    found = {
        "moved GB": report.moved_bytes / 1e9,
        "outside GB": outside / 1e9,  # not moved by products
        "peak GB": report.peak_bytes / 1e9,
        "temporary GB": report.temporary_bytes / 1e9,
        "kernels": report.kernel_count,
        "flops": report.flops,
        "compile s": report.compile_seconds,
    }
    if report.target is None:
        return found
    target = reached_of(report.target)
    reached = sum(
        kernel.times * target.bound_seconds(kernel.bytes, kernel.flops)
        for kernel in report.kernels
    )
    found |= {
        "bound ms": 1e3 * (report.bound_seconds or 0),
        "reached ms": 1e3 * reached,
    }
    return found | {"reached FLOP/s": target.rates["bf16"]}


def reached_of(target: Target) -> Target:
    """Return a target with what good kernels reach instead of the published figures."""
    rates = {dtype: REACHED_RATE * rate for dtype, rate in target.rates.items()}
    return dataclasses.replace(
        target, bandwidth=REACHED_BANDWIDTH * target.bandwidth, rates=rates
    )


def compiled_figures(compiled: Any, compile_seconds: float = 0.0) -> Row:
    """Return the figures of a program that was compiled for this machine."""
    return figures(
        report_of(compiled, target=target_here(), compile_seconds=compile_seconds)
    )


def absent_figures(
    step: Callable[..., Any], *shapes: Any, target: str, donate: int | tuple[int, ...]
) -> Row:
    """Return the figures of a step that is compiled for a target."""
    with flash_attention():
        return figures(
            mpx.step_report(step, *shapes, target=target, donate_argnums=donate)
        )


def start_compiler(target: str) -> Row:
    """Let JAX start the compiler for a target, before anything else starts it without;
    return what compiles.
    """
    kind = target_devices(target)[0].device_kind
    return {"compiled for": kind, "jax": jax.__version__}


@contextlib.contextmanager
def flash_attention() -> Iterator[None]:
    """Let `jax.nn.dot_product_attention` use cuDNN's kernel although no GPU is here for
    JAX to ask.
    """
    # There is no public way to say for which GPU one lowers.
    from jax._src.cudnn import (
        fused_attention_stablehlo,
    )

    with unittest.mock.patch.object(
        fused_attention_stablehlo, "check_compute_capability", return_value=True
    ):
        yield
