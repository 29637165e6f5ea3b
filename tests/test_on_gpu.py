"""Smoke tests of the command for the day a GPU is there. Sizes are tiny, and what needs
a GPU is made up.
"""

import json
import math

import jax
import pytest

from benchmarks import on_gpu, workers
from benchmarks.on_gpu_units import SIZES, all_units

pytestmark = pytest.mark.optax_promotion

DEVICE = dict.fromkeys(("jaxlib", "flax", "optax", "numpy", "mpx"), "1.0")
DEVICE |= {
    "device": "NVIDIA H200",
    "driver": "580",
    "jax": "0.11.2",
    "date": "2026-11-22 12:00",
}
DEVICE |= {"backend": "gpu", "FLOP/s": 8e14}


def run(function, arguments, *, timeout):
    """Answer as a worker would with what its arguments say."""
    return list(arguments["answer"])


def measure(folder, units, run=run):
    book = on_gpu.Book(folder)
    book.check(DEVICE)
    return on_gpu.measure_units(units, book, lambda: math.inf, run=run)


def measured(folder, *names):
    """Measure units in this process, at the smallest size, and return the report."""
    call = lambda function, arguments, *, timeout: json.loads(
        json.dumps(workers.call(function, arguments))
    )
    units = {unit.name: unit for unit in all_units(SIZES["smallest"])}
    with jax.numpy_rank_promotion("allow"):  # as in a process of its own
        measure(folder, [units[name] for name in names], run=call)
    return on_gpu.Book(folder).report()


def test_an_optimizer_step_is_measured_and_reported(tmp_path):
    printed = measured(tmp_path, "optimizer: one, f32", "optimizer: one, full")
    assert "one: 1 tensor, 262,144 parameters" in printed
    assert (
        "| recipe | by hand, ms | mpx, ms | mpx / by hand | 95% | target | moved by"
        " hand, mpx, GB |" in printed
    )
    assert "at most 1.03: " in printed
    assert "Nothing differs." in printed
