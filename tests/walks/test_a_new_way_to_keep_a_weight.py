"""A way to keep a weight that mpx has never seen is one class: it works everywhere
without another line.

The way: where the weight lies beside its bfloat16 parameter, in 127ths of the farthest
place that rounds to it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx.states import KeptWeight
from tests.helpers import assert_same_bits, stepper

pytestmark = pytest.mark.optax_promotion


class Beside(KeptWeight, keeps=[jnp.int8]):
    def restore(self, p, kept):
        p = p.astype(jnp.float32)
        return p + kept.astype(jnp.float32) * (jnp.abs(p) * jnp.float32(2**-8 / 127))

    def store(self, weight, dtype, key=None):
        p = mpx.formats.round_to(weight, dtype)
        places = (weight - p) / jnp.where(
            p == 0, 1, jnp.abs(p) * jnp.float32(2**-8 / 127)
        )
        return p.astype(dtype), jnp.round(places).astype(self.dtype)


BESIDE = Beside(np.dtype(np.int8))
RULE = optax.adam(1e-4)


def trained(tx, steps=40):
    params = {
        "w": jnp.linspace(1, 2, 64, dtype=jnp.bfloat16),
        "half": jnp.ones(4, jnp.float16),
    }
    step = lambda carry, _: (
        stepper(tx)(*carry, jax.tree.map(jnp.ones_like, carry[0])),
        None,
    )
    return jax.jit(lambda carry: jax.lax.scan(step, carry, length=steps)[0])(
        (params, tx.init(params))
    )


def weights(params, state):
    return mpx.master_params(params, state)["w"]


def test_weights_stay_near_those_of_whole_masters():
    """Each of 40 steps of 1e-4 rounds by at most 2**-9 / 127 of the weight. Control: 8
    bits fewer do not move.
    """
    params, state = trained(mpx.master_weights(RULE, BESIDE))
    whole = weights(*trained(mpx.master_weights(RULE)))
    assert (state.master["w"].dtype, state.master["half"].dtype) == (
        np.int8,
        np.float32,
    )
    assert jnp.abs(weights(params, state) / whole - 1).max() < 40 * 2**-9 / 127
    alone, _ = trained(mpx.upcast(RULE))
    assert jnp.abs(alone["w"].astype(jnp.float32) / whole - 1).max() > 40 * 2**-9 / 127


def test_parameters_changed_from_outside_are_found_with_those_from_before():
    params, state = trained(mpx.master_weights(RULE, BESIDE))
    pruned = params | {"w": params["w"].at[3].set(0)}
    text = r"'w': int8\[64\] fits other parameters of bfloat16\[64\] too"
    with pytest.raises(ValueError, match=text):
        mpx.is_synced(pruned, state)
    assert_same_bits(
        weights(pruned, mpx.resync(pruned, state, params)),
        weights(params, state).at[3].set(0),
    )


def test_a_training_run_moves_from_it_to_low_bits_and_back():
    """Low bits hold each of its weights, so that it comes back to the bit."""
    own, split = (mpx.master_weights(RULE, storage) for storage in (BESIDE, "split"))
    params, state = trained(own)
    there = mpx.convert_state(params, state, own, split)
    assert_same_bits(weights(*there), weights(params, state))
    assert_same_bits(mpx.convert_state(*there, split, own), (params, state))


def test_its_byte_is_planned_as_a_master():
    plan = mpx.memory_plan(
        {"w": jnp.zeros(64)}, mpx.master_weights(RULE, BESIDE), "bf16"
    )
    (row,) = [row for row in plan.rows if row.name == "master"]
    assert (row.kind, row.bytes) == ("masters", 64)


def test_a_dtype_that_another_class_keeps_is_refused():
    with pytest.raises(
        TypeError, match=r"`Bytes`: `LowBits` keeps uint8 already; take another dtype"
    ):

        class Bytes(Beside, keeps=[np.uint8]):
            pass
