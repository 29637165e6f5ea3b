"""Check `stochastic_rounding`: its mean and its keys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import assert_same_bits

pytestmark = [pytest.mark.optax_promotion, pytest.mark.eager]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_mean_of_the_parameters_takes_every_update(dtype):
    """Add -1e-4 a hundred times to 100,000 weights of 1. The mean's standard error is
    about 1e-5.
    """
    naive = mpx.upcast(optax.sgd(1e-4))

    def mean(tx):
        def step(_, carry):
            params, state = carry
            updates, state = tx.update(jnp.ones(100_000), state, params)
            return optax.apply_updates(params, updates), state

        params = jnp.ones(100_000, dtype)
        params, _ = jax.jit(lambda p: jax.lax.fori_loop(0, 100, step, (p, tx.init(p))))(
            params
        )
        return params.astype(jnp.float32).mean()

    assert mean(naive) == 1  # negative control
    assert (
        abs(mean(optax.chain(naive, mpx.stochastic_rounding(jax.random.key(0)))) - 0.99)
        < 1e-4
    )


def test_equal_keys_give_equal_runs_and_each_step_and_each_leaf_draws_anew():
    params = {"a": jnp.ones(1000, jnp.bfloat16), "b": jnp.ones(1000, jnp.bfloat16)}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-9), params)
    tx = mpx.stochastic_rounding(jax.random.key(3))
    first, state = tx.update(grads, tx.init(params), params)
    again, _ = mpx.stochastic_rounding(jax.random.key(3)).update(
        grads, tx.init(params), params
    )
    second, _ = tx.update(grads, state, params)
    assert_same_bits(first, again)
    assert (first["a"] != second["a"]).any()
    assert (first["a"] != first["b"]).any()


def test_typed_raw_and_other_keys_are_taken_and_kept_as_integers():
    params = jnp.ones(3, jnp.bfloat16)
    for key in (
        jax.random.key(0),
        jax.random.PRNGKey(0),
        jax.random.key(0, impl="rbg"),
    ):
        tx = mpx.stochastic_rounding(key)
        state = tx.init(params)
        _, new_state = tx.update(jnp.ones(3), state, params)
        assert state.key.dtype == np.uint32
        assert new_state.key.shape == state.key.shape
