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

    tx = optax.chain(optax.GradientTransformation(lambda params: (), update), optax.sgd(0.5))
    step = jax.jit(mpx.fused_update(tx, interpret=True))
    jax.block_until_ready(step(PARAMS, tx.init(PARAMS), PARAMS))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("norm") == 1


def test_a_new_parameter_that_is_also_a_new_state_takes_one_place():
    def update(updates, state, params):
        return updates, optax.apply_updates(params, updates)

    copies = optax.GradientTransformation(lambda params: jax.tree.map(jnp.copy, params), update)
    step = jax.jit(mpx.fused_update(copies, interpret=True))
    params, state = step(PARAMS, copies.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(params["w"], 2 * PARAMS["w"])
    np.testing.assert_array_equal(state["w"], params["w"])
