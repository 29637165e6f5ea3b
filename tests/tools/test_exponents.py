import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mpx.tools.monitor import exponents
from tests.helpers import eight_cpu_devices

FORMATS = [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
every_format = pytest.mark.parametrize("dtype", FORMATS, ids=lambda kind: np.dtype(kind).name)


def floats_around_every_number(dtype):
    """All bit patterns of a format in float32, the float32 neighbours of each, and the same of all midpoints."""
    width = np.dtype(dtype).itemsize * 8
    numbers = np.arange(2**width, dtype=np.uint64).astype(f"u{width // 8}").view(dtype).astype(np.float32)
    ordered = np.unique(np.abs(numbers[np.isfinite(numbers)]))
    beyond = 2 * ordered[-1].astype(np.float64) - ordered[-2]  # where the next number would be
    middles = (np.append(ordered, beyond).astype(np.float64)[1:] + ordered) / 2
    points = np.concatenate([numbers, ordered, middles.astype(np.float32), np.float32([2.0**-149, 3e38])])
    bits = points.view(np.uint32)
    return np.concatenate([bits, bits + np.uint32(1), bits - np.uint32(1)]).view(np.float32)


@every_format
def test_what_becomes_of_a_number_is_what_a_cast_on_the_host_makes_of_it(dtype):
    x = floats_around_every_number(dtype)
    with np.errstate(all="ignore"):
        cast = np.abs(x.astype(dtype).astype(np.float64))
    counted = np.isfinite(x) & (x != 0)
    magnitudes = exponents.magnitudes_of(x)
    span = exponents.range_of(dtype, "test")
    smallest_normal = float(ml_dtypes.finfo(dtype).smallest_normal)
    np.testing.assert_array_equal(span.underflows(magnitudes), counted & (cast == 0))
    np.testing.assert_array_equal(span.becomes_subnormal(magnitudes), (cast > 0) & (cast < smallest_normal))
    np.testing.assert_array_equal(span.overflows(magnitudes), counted & ~np.isfinite(cast))


def test_arithmetic_that_flushes_would_miss_the_numbers_below_bfloat16():
    """The negative control: compared as numbers, float32 subnormals are zero on a CPU."""
    x = jnp.asarray(np.float32([2.0**-140]))
    flushed = jax.jit(lambda x: (x != 0) & (x <= 2.0**-134))(x)
    assert exponents.range_of(ml_dtypes.bfloat16, "test").underflows(exponents.magnitudes_of(x)).all()
    if jax.default_backend() == "cpu":
        assert not flushed.any()


def test_in_float32_no_float32_number_vanishes_or_overflows():
    x = np.float32([2.0**-149, 1.0, 3.4028235e38, 0.0, np.inf, np.nan])
    magnitudes, span = exponents.magnitudes_of(x), exponents.range_of(np.float32, "test")
    assert not span.underflows(magnitudes).any()
    assert not span.overflows(magnitudes).any()
    np.testing.assert_array_equal(span.becomes_subnormal(magnitudes), [True] + [False] * 5)


@pytest.mark.parametrize("scale", [2.0**-30, 0.5, 2.0, 2.0**24, 2.0**100])
@every_format
def test_a_scaled_range_is_that_of_scaled_numbers(dtype, scale):
    """Exactly scaled in float64, and rounded once more than float32 can hold: the oracle rounds the exact product."""
    x = np.abs(floats_around_every_number(np.float16))[::97]
    x = x[np.isfinite(x) & (x != 0)]
    span = exponents.range_of(dtype, "test")
    product = [Fraction(float(number)) * Fraction(scale) for number in x]
    magnitudes, scaled = exponents.magnitudes_of(x), span.scaled(scale)
    np.testing.assert_array_equal(scaled.underflows(magnitudes), [p <= Fraction(span.zero_up_to) for p in product])
    np.testing.assert_array_equal(scaled.overflows(magnitudes), [p >= Fraction(span.infinite_from) for p in product])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_the_exponent_of_every_16_bit_number_is_that_of_frexp(dtype):
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):  # of NaN
        wide = x.astype(np.float64)
    used = np.isfinite(wide) & (wide != 0)
    found = np.asarray(exponents.exponents_of(exponents.magnitudes_of(jnp.asarray(x))))
    np.testing.assert_array_equal(found[used], np.frexp(wide[used])[1] - 1)


def test_the_exponent_of_every_power_of_two_of_float32_and_of_its_neighbours_is_right():
    powers = np.ldexp(1.0, np.arange(-149, 128)).astype(np.float32)
    below = (powers.view(np.uint32)[1:] - np.uint32(1)).view(np.float32)
    exponents = lambda x: exponents.exponents_of(exponents.magnitudes_of(x))
    np.testing.assert_array_equal(exponents(-powers), np.arange(-149, 128))
    np.testing.assert_array_equal(exponents(below), np.arange(-149, 127))


def test_a_histogram_counts_every_number_once():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, (40, 500), dtype=np.uint32).view(np.float32)
    x[0, :3] = 0.0, -0.0, np.inf
    used = np.isfinite(x) & (x != 0)
    expected = np.bincount(np.frexp(x[used].astype(np.float64))[1] - 1 + 149, minlength=277)
    histogram = jax.jit(exponents.histogram_of)(exponents.magnitudes_of(x))
    np.testing.assert_array_equal(histogram.counts, expected)
    assert histogram.counts.dtype == np.float32
    assert float(histogram.zeros) == (x == 0).sum()
    assert float(histogram.nonfinite) == (~np.isfinite(x)).sum()


@pytest.mark.parametrize("limit", [10, 50, 400])
def test_more_numbers_than_can_be_counted_are_counted_by_rows(monkeypatch, limit):
    """The limit is lowered: an array of 2**32 numbers is too large for a test."""
    monkeypatch.setattr(exponents, "_COUNTED", limit)
    x = np.exp2(np.random.default_rng(0).integers(-3, 3, (6, 3, 20))).astype(np.float32)
    parts = exponents.partial_counts(jnp.asarray(x > 1))
    assert parts.shape == {10: (6, 3, 20), 50: (6, 3), 400: ()}[limit]
    np.testing.assert_array_equal(parts, (x > 1).sum(axis=tuple(range(parts.ndim, 3))))
    assert float(exponents.count(jnp.asarray(x > 1))) == (x > 1).sum()
    counts = exponents.histogram_of(exponents.magnitudes_of(x)).counts
    assert [int(counts[149 + e]) for e in range(-3, 3)] == [(x == 2.0**e).sum() for e in range(-3, 3)]


def test_a_sum_of_ones_in_float32_would_stop_at_2_to_the_24():
    """The negative control, and what is counted instead; for a mask of 2**24 + 3 numbers."""
    naive = np.float32(2**24) + np.float32(1)
    assert naive == 2**24
    assert int(exponents.partial_counts(jnp.ones(2**24 + 3, bool))) == 2**24 + 3


def test_an_array_that_is_divided_among_devices_is_counted_where_it_lies():
    mesh = eight_cpu_devices()
    x = np.exp2(np.arange(64.0) - 32).astype(np.float32).reshape(16, 4)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    counted = jax.jit(lambda x: exponents.histogram_of(exponents.magnitudes_of(x))).lower(sharded).compile()
    np.testing.assert_array_equal(counted(sharded).counts, [float(-32 <= e < 32) for e in exponents.EXPONENTS])
    assert "all-gather" not in counted.as_text()


@pytest.mark.parametrize("given", ["int32", np.float64, None, "bf17"])
def test_a_format_without_a_known_range_is_refused(given):
    with pytest.raises(ValueError, match=r"`caller`: `dtype` must be one of f16, bf16, f32, .*float8_e5m2, but got"):
        exponents.range_of(given, "caller")


def test_float64_numbers_keep_their_own_bits():
    with jax.enable_x64(True):
        x = jnp.asarray(np.float64([2.0**-200, 2.0**-26, 2.0**-25 * (1 + 2.0**-50), 1.0, 1e300]))
        magnitudes = exponents.magnitudes_of(x)
        span = exponents.range_of(np.float16, "test")
        np.testing.assert_array_equal(span.underflows(magnitudes), [True, True, False, False, False])
        np.testing.assert_array_equal(span.overflows(magnitudes), [False] * 4 + [True])
        np.testing.assert_array_equal(exponents.exponents_of(magnitudes), [-149, -26, -25, 0, 127])


def test_thresholds_are_where_ieee_754_has_them():
    span = exponents.range_of(np.float16, "test")
    assert (span.zero_up_to, span.normal_from, span.infinite_from) == (2.0**-25, 2.0**-14 - 2.0**-25, 65520.0)
    assert exponents.range_of(ml_dtypes.float8_e4m3fn, "test").infinite_from == math.nextafter(464.0, math.inf)
