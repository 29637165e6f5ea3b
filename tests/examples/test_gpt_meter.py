"""The measured rate of matrix products, against a clock that is not real."""

import itertools
from types import SimpleNamespace

import jax
import pytest

from examples.gpt import meter

SIZE = 32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_rate_is_two_operations_for_each_multiplication(dtype, monkeypatch):
    """A clock that moves on by a second at every look: a round of products takes one."""
    clock = itertools.count()
    monkeypatch.setitem(meter.SIZES, jax.default_backend(), SIZE)
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert meter.matmul_rate(dtype) == 2 * SIZE**3 * meter.PRODUCTS


def test_a_slow_round_does_not_change_the_rate(monkeypatch):
    seconds = iter([0, 1, 1, 2, 2, 900, 900, 901, 901, 902])
    monkeypatch.setitem(meter.SIZES, jax.default_backend(), SIZE)
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    assert meter.matmul_rate("float32") == 2 * SIZE**3 * meter.PRODUCTS


def test_memory_is_counted_where_something_counts_it():
    in_use, peak = meter.device_memory()
    if jax.devices()[0].memory_stats() is None:
        assert (in_use, peak) == (None, None)
    else:
        assert 0 < in_use <= peak
