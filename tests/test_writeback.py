"""Check how updates land on 16-bit parameters, through the wrappers that emit them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.optax_promotion


@pytest.mark.parametrize("storage", ["full", "split"])
def test_an_infinite_parameter_with_an_infinite_master_stays_infinite(storage):
    """Infinity minus infinity is NaN: where nothing changes, nothing is subtracted."""
    tx = mpx.master_weights(optax.sgd(0.1), storage=storage)
    params = jnp.asarray([jnp.inf, -jnp.inf, 1.0], jnp.bfloat16)
    updates, _ = tx.update(jnp.zeros(3), tx.init(params), params)
    assert_same_bits(optax.apply_updates(params, updates), params)


def test_a_parameter_of_minus_zero_becomes_the_plus_zero_of_its_master():
    tx = mpx.master_weights(optax.sgd(1.0))
    params = jnp.asarray([-0.0], jnp.bfloat16)
    state = tx.init(params)
    updates, state = tx.update(jnp.asarray([-0.0]), state, params)
    assert_same_bits(state.master, jnp.asarray([0.0]))
    assert_same_bits(optax.apply_updates(params, updates), jnp.asarray([0.0], jnp.bfloat16))


def test_without_masters_it_averages_what_apply_updates_stores():
    """A step of an eighth of an ulp changes no bfloat16 parameter, and no average of it; a large one changes both."""
    tx = optax.chain(mpx.upcast(optax.sgd(1.0)), mpx.params_ema(0.0))
    params = jnp.ones(2, jnp.bfloat16)
    updates, state = tx.update(jnp.asarray([2.0**-10, 0.3]), tx.init(params), params)
    stored = optax.apply_updates(params, updates)
    assert stored[0] == 1
    assert stored[1] != 1
    assert_same_bits(mpx.ema_params(state), stored.astype(jnp.float32))


def test_a_finite_float64_master_out_of_range_is_stored_as_the_largest_float32():
    with jax.enable_x64(True):
        tx = mpx.master_weights(optax.sgd(1.0), jnp.float64)
        params = jnp.ones(2, jnp.float32)
        updates, _ = tx.update(jnp.asarray([-1e39, 1e39], jnp.float64), tx.init(params), params)
        largest = np.finfo(np.float32).max
        assert_same_bits(optax.apply_updates(params, updates), np.asarray([largest, -largest]))


def test_float32_parameters_are_their_float64_masters_rounded_to_nearest():
    with jax.enable_x64(True):
        tx = mpx.master_weights(optax.sgd(1.0), jnp.float64)
        params = jnp.ones(1000, jnp.float32)
        grads = np.random.default_rng(0).normal(size=1000)
        updates, state = tx.update(jnp.asarray(grads), tx.init(params), params)
        assert_same_bits(optax.apply_updates(params, updates), np.asarray(state.master).astype(np.float32))
