"""Check how a step runs around its kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx

PARAMS = {"w": jnp.linspace(-1, 1, 16 * 256, dtype=jnp.float32).reshape(16, 256)}


def test_what_an_optimizer_prints_is_printed_once(capfd):
    def update(updates, state, params=None):
        jax.debug.print("norm {}", optax.tree.norm(updates).astype(np.int32))
        return updates, state

    tx = optax.chain(
        optax.GradientTransformation(lambda params: (), update), optax.sgd(0.5)
    )
    step = jax.jit(mpx.fused_update(tx, interpret=True))
    jax.block_until_ready(step(PARAMS, tx.init(PARAMS), PARAMS))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("norm") == 1


def test_a_result_that_stands_in_a_state_twice_takes_one_place():
    def update(updates, state, params=None):
        mean = jax.tree.map(lambda a, b, new: 0.25 * (a + b + 2 * new), *state, updates)
        return mean, (mean, mean)

    both = lambda params: (
        jax.tree.map(jnp.copy, params),
        jax.tree.map(jnp.copy, params),
    )
    tx = optax.GradientTransformation(both, update)
    params, state = jax.jit(mpx.fused_update(tx, interpret=True))(
        PARAMS, tx.init(PARAMS), PARAMS
    )
    for result, factor in ((params, 2), (state[0], 1), (state[1], 1)):
        np.testing.assert_array_equal(result["w"], factor * PARAMS["w"])
