"""Check `params_ema` against the weighted mean by its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import QUICKLY, assert_same_bits

pytestmark = pytest.mark.optax_promotion

STEPS = 40


def trained(tx, params, steps=STEPS):
    """Return the state after some steps, and the masters after each."""
    state, masters = tx.init(params), []
    step = jax.jit(tx.update, compiler_options=QUICKLY)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        grads = jnp.asarray(rng.normal(size=params.shape) + 1, jnp.float32)
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
        masters.append(np.asarray(mpx.master_params(params, state), np.float64))
    return state, masters


def weighted_mean(history, decay, start=None):
    weights = [(1 - decay) * decay ** (len(history) - 1 - i) for i in range(len(history))]
    total = sum(w * x for w, x in zip(weights, history, strict=True))
    return total / sum(weights) if start is None else total + decay ** len(history) * start


@pytest.mark.parametrize("storage", ["full", "split"])
def test_it_is_the_weighted_mean_of_the_masters(storage):
    """Keep several averages of one training run, each in a chain element."""
    start = jnp.asarray(np.random.default_rng(1).normal(size=100), jnp.bfloat16)
    options = [(decay, debias) for decay in (0.0, 0.9, 0.999) for debias in (True, False)]
    averages = [mpx.params_ema(decay, debias=debias) for decay, debias in options]
    state, masters = trained(mpx.master_weights(optax.chain(optax.adam(1e-3), *averages), storage=storage), start)
    for (decay, debias), average in zip(options, state.inner_state[1:], strict=True):
        expected = weighted_mean(masters, decay, None if debias else np.asarray(start, np.float64))
        average = mpx.averaged_params(average)
        assert average.dtype == jnp.float32
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-6)
        if debias:  # negative control: the mean of the rounded parameters is another one
            rounded = [np.asarray(jnp.asarray(m, jnp.bfloat16), np.float64) for m in masters]
            assert np.abs(weighted_mean(rounded, decay) - expected).max() > 1e-4


def test_the_first_debiased_average_is_the_first_parameters_to_the_bit_however_far_they_moved():
    tx = mpx.master_weights(optax.chain(optax.adam(1e-3), mpx.params_ema(0.999)))
    params = jnp.full(10, 300.0, jnp.bfloat16)
    updates, state = tx.update(jnp.ones(10), tx.init(params), params)
    assert_same_bits(mpx.averaged_params(state), mpx.master_params(optax.apply_updates(params, updates), state))
    tx, params = mpx.params_ema(0.9), jnp.full(4, 300.0, jnp.float32)
    updates = jnp.asarray([-299.9, -300.001, 1e-3, 7e5], jnp.float32)
    _, state = tx.update(updates, tx.init(params), params)
    assert_same_bits(mpx.averaged_params(state), optax.apply_updates(params, updates))


def test_without_masters_it_averages_what_apply_updates_stores():
    """A step of an eighth of an ulp changes no bfloat16 parameter, and no average of it; a large one changes both."""
    tx = optax.chain(mpx.upcast(optax.sgd(1.0)), mpx.params_ema(0.0))
    params = jnp.ones(2, jnp.bfloat16)
    updates, state = tx.update(jnp.asarray([2.0**-10, 0.3]), tx.init(params), params)
    stored = optax.apply_updates(params, updates)
    assert (stored == 1).tolist() == [True, False]
    assert_same_bits(mpx.averaged_params(state), stored.astype(jnp.float32))


def test_updates_pass_through_and_leaves_that_are_not_floating_are_not_averaged():
    tx = mpx.params_ema(0.9)
    params = {"w": jnp.ones(3), "ids": jnp.arange(3), "none": None}
    updates = {"w": jnp.full(3, 0.5), "ids": jnp.zeros(3, int), "none": None}
    new, state = tx.update(updates, tx.init(params), params)
    assert_same_bits(new, updates)
    assert mpx.averaged_params(state)["ids"] == optax.MaskedNode()
    assert_same_bits(mpx.averaged_params(state)["w"], jnp.full(3, 1.5))


def test_the_average_of_an_infinite_weight_is_infinite():
    params, tx = jnp.array([-jnp.inf, 1.0]), mpx.params_ema(0.9)
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(jnp.zeros(2), state, params)
    assert_same_bits(mpx.averaged_params(state), params)


def test_float64_parameters_have_a_float64_average():
    with jax.enable_x64(True):
        tx, params = mpx.params_ema(0.5), jnp.full(2, 1 + 2.0**-40)
        _, state = tx.update(jnp.zeros(2), tx.init(params), params)
        assert_same_bits(mpx.averaged_params(state), np.full(2, 1 + 2.0**-40))


def test_the_debiased_step_is_right_to_the_precision_of_float32_after_many_steps():
    """Go from 0 to 1 in one step after a million: 1 - decay, over a weight of 1 - decay**1000001.

    A weight that is summed up in float32 ends 4e-4 off for 0.9999 and 4e-3 off for 0.99999.
    """
    for decay in (0.99, 0.999, 0.9999, 0.99999):
        tx = mpx.params_ema(decay)
        state = mpx.states.ParamsEmaState(jnp.int32(1_000_000), jnp.zeros(()))
        _, state = tx.update(jnp.ones(()), state, jnp.zeros(()))
        np.testing.assert_allclose(mpx.averaged_params(state), (1 - decay) / (1 - decay**1_000_001), rtol=3e-7)


def test_averaged_steps_saturate():
    state = mpx.states.ParamsEmaState(jnp.int32(2**31 - 1), jnp.zeros(()))
    _, state = mpx.params_ema(0.999).update(jnp.ones(()), state, jnp.zeros(()))
    assert int(state.averaged_steps) == 2**31 - 1
    assert abs(float(mpx.averaged_params(state)) - 1e-3) < 1e-8
