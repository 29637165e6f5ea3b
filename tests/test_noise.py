"""The random bits of rounding: what they are for one number, for two, and for a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpx._noise import noise_for, uniform_for

KEYS = jax.random.split(jax.random.key(0), 4000)
ROWS = {
    "neighbours": 1 + np.arange(256) * 2.0**-19,
    "on bfloat16's grid": (1 + np.arange(256) % 128 * 2.0**-7)
    * 2.0 ** (np.arange(256) // 128),
    "random": np.random.default_rng(0).normal(size=256),
}


def uniform(row):
    """Return the random numbers of a row under each key, between 0 and 1."""
    x = jnp.asarray(ROWS[row], jnp.float32)
    return np.asarray(jax.jit(jax.vmap(lambda key: uniform_for(key, x)))(KEYS)) / 2


@pytest.mark.parametrize("row", ROWS)
def test_random_numbers_are_uniform_and_never_0_or_1(row):
    found = uniform(row) * 8192
    assert {*(found.ravel() % 2)} == {1.0}
    assert found.min() == 1
    assert found.max() == 8191
    # The mean of a number over keys, in standard errors.
    errors = (found / 8192 - 0.5).mean(0) * np.sqrt(12 * len(KEYS))
    assert np.abs(errors).max() < 5
    assert 0.7 < np.mean(errors**2) < 1.3


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("odds", [0.5, 0.1])
def test_a_sum_of_rounding_errors_has_the_variance_of_independent_ones(row, odds):
    """A few keys round a whole row alike, so the variance itself is not sharp."""
    sums = (uniform(row) < odds).sum(1)
    ratio = sums.var() / (256 * odds * (1 - odds))
    assert 0.6 < ratio < 1.6


def test_equal_numbers_have_equal_bits_and_so_have_those_that_differ_by_a_rounding():
    x = np.float32([1.5, 1.5, np.nextafter(np.float32(1.5), np.float32(2)), 1.501])
    bits = np.asarray(noise_for(KEYS[0], jnp.asarray(x)))
    assert bits[0] == bits[1] == bits[2] != bits[3]
