"""Check states in 8-bit floats: all 256 codes, what is between two of them, scales, what cannot be held, wrappers.

Oracle: ml_dtypes, which rounds to nearest, ties to even.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpx._stored.blockwise_fp8 import BlockwiseFp8
from tests.helpers import assert_same_bits, assert_same_bits_everywhere

DTYPES = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}
by_format = pytest.mark.parametrize("name", DTYPES)
BLOCK = 256


def round_trip(x, name, signed=True, key=None):
    kept = BlockwiseFp8(name, BLOCK, signed)
    x = jnp.asarray(x, jnp.float32)
    return np.asarray(kept.decode(*kept.encode(x, key)))


def all_numbers(name):
    """Return the finite numbers of a format, ascending."""
    numbers = np.arange(256, dtype=np.uint8).view(DTYPES[name]).astype(np.float64)
    return np.unique(numbers[np.isfinite(numbers)])


def with_the_largest(v, name):
    """Return numbers in blocks whose scale is 1."""
    per_block = BLOCK - 1
    v = np.pad(np.asarray(v, np.float32), (0, -len(v) % per_block)).reshape(-1, per_block)
    return np.pad(v, ((0, 0), (1, 0)), constant_values=all_numbers(name)[-1]).reshape(-1)


def numbers(seed, decades, blocks=64):
    rng = np.random.default_rng(seed)
    x = 10 ** rng.uniform(-decades, 0, (blocks, BLOCK)) * 10 ** rng.uniform(-20, 20, (blocks, 1))
    return (x * rng.choice([-1, 1], x.shape)).astype(np.float32)


@by_format
def test_codes_are_the_bits_of_the_format(name):
    x = with_the_largest(all_numbers(name), name)
    codes, scales = BlockwiseFp8(name, BLOCK, True).encode(jnp.asarray(x))
    assert (np.asarray(scales) == 1).all()
    np.testing.assert_array_equal(np.asarray(codes).view(DTYPES[name]).astype(np.float32), x)


@by_format
@pytest.mark.parametrize("power", [-100, 0, 60])
def test_every_number_of_the_format_times_a_power_of_two_is_kept(name, power):
    x = np.ldexp(with_the_largest(all_numbers(name), name), power)
    assert_same_bits(np.abs(round_trip(x, name)), np.abs(x))


@by_format
def test_numbers_between_two_of_the_format_become_the_nearest_and_ties_the_even_one(name):
    """Between each two: a quarter, half, and three quarters of the way, and a hair beside half of it."""
    found = all_numbers(name)
    between = [found[:-1] + part * np.diff(found) for part in (0.25, 0.4999, 0.5, 0.5001, 0.75)]
    x = with_the_largest(np.concatenate(between), name)
    np.testing.assert_array_equal(round_trip(x, name), x.astype(DTYPES[name]).astype(np.float32))


@by_format
def test_a_positive_second_moment_never_becomes_zero_and_other_small_numbers_do(name):
    x = np.full(BLOCK, 1e-12, np.float32)
    x[0], x[1] = 1, 0
    assert (round_trip(x, name, signed=False) > 0).tolist() == (x > 0).tolist()
    assert (round_trip(x, name, signed=True)[1:] == 0).all()


@by_format
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(name, value):
    x = numbers(2, 3)
    x[3, 7] = value
    for signed, given in ((True, x), (False, np.where(np.isfinite(x), np.abs(x), x))):
        bad = np.isnan(round_trip(given, name, signed))
        assert bad[3].all()
        assert not np.delete(bad, 3, axis=0).any()


@by_format
def test_a_negative_second_moment_makes_its_block_nan(name):
    x = np.abs(numbers(3, 3))
    x[5, 0] *= -1
    assert np.isnan(round_trip(x, name, signed=False)).all(axis=1).nonzero()[0].tolist() == [5]


@by_format
def test_zeros_and_blocks_below_all_normal_numbers_become_zeros(name):
    for value in (0.0, -0.0, 1e-40):
        for signed in (True, False):
            assert (round_trip(np.full(BLOCK, value), name, signed) == 0).all()


@pytest.mark.parametrize("largest", [2.0**-126, 2.0**-119, 3e38])
@by_format
def test_scales_at_both_ends_of_float32_keep_the_largest_magnitude(name, largest):
    x = np.full(BLOCK, largest, np.float32)
    assert (np.abs(round_trip(x, name) / x.astype(np.float64) - 1) <= 2.0**-3).all()


@by_format
def test_at_random_the_mean_is_the_number_and_each_result_is_one_of_its_two_neighbours(name):
    """Below the smallest normal number too. The bound is 6 standard deviations."""
    count, found, kept = 20_000, all_numbers(name), BlockwiseFp8(name, BLOCK, True)
    decoded = jax.jit(jax.vmap(lambda key, x: kept.decode(*kept.encode(x, key)), (0, None)))
    keys = jax.random.split(jax.random.key(0), count)
    for number in (1.3, 300.0, 0.3 * found[found > 0][0], 2.6 * found[found > 0][0]):
        x = with_the_largest(np.full(1, number), name)
        rounded = np.asarray(decoded(keys, x))[:, np.isclose(x, number).argmax()]
        step = np.ptp(rounded)
        assert len(np.unique(rounded)) == 2
        assert rounded.min() < number < rounded.max()
        assert abs(rounded.mean(dtype=np.float64) - number) < 6 * step / 2 / np.sqrt(len(rounded))
        assert len(np.unique(round_trip(x, name)[np.isclose(x, number)])) == 1  # to nearest: negative control


@by_format
def test_the_bits_are_the_same_everywhere(name):
    rows = jnp.asarray(numbers(4, 6).reshape(2, -1))
    assert_same_bits_everywhere(BlockwiseFp8(name, BLOCK, True).encode, rows, ways=("jit", "scan", "vmap", "64 bits"))
