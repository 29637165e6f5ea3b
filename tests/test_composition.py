"""Check invariants 8 and 10 beside `test_every_rule.py`: means of microbatches,
settings read from outside.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx

pytestmark = pytest.mark.optax_promotion


def params(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=64), dtype) for name in ("a", "b")}


def grads(step):
    rng = np.random.default_rng(step + 1)
    return {name: jnp.asarray(rng.normal(size=64), jnp.float32) for name in ("a", "b")}


def test_the_mean_of_microbatches_reaches_the_rule_in_float32():
    """(1 + 1.0052) / 2 = 1.0026, which bfloat16 rounds to 1; so a momentum in bfloat16
    stores it.
    """
    wrappers = {
        "masters": mpx.master_weights(optax.sgd(1.0)),
        "few bits": mpx.low_precision_state(
            optax.sgd(1.0, momentum=0.9), {"trace": "bf16"}, min_size=1
        ),
        # Negative control: bfloat16 gradients get a bfloat16 mean.
        "naive": optax.sgd(1.0),
    }
    found = {}
    for name, tx in wrappers.items():
        tx = optax.MultiSteps(tx, 2)
        start = jnp.zeros(1, jnp.float32 if name == "few bits" else jnp.bfloat16)
        state = tx.init(start)
        for slope in (1.0, 1.0052):
            updates, state = tx.update(
                jnp.full(1, slope, jnp.bfloat16 if name == "naive" else None),
                state,
                start,
            )
        found[name] = updates, state
    assert found["masters"][1].inner_opt_state.master[0] == -np.float32(1.0026)
    assert found["few bits"][0][0] == -np.float32(1.0026)
    assert optax.tree.get(found["few bits"][1], "trace")[0] == 1
    assert found["naive"][0][0] == -1


def test_the_learning_rate_and_the_scale_can_be_read_and_set_from_outside():
    """Store all that can be stored in few bits: what was injected keeps its float32
    value.
    """
    rule = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3, b2=0.999)
    rule = mpx.low_precision_state(rule, {".*": "bf16"}, min_size=1)
    tx = mpx.loss_scaling(mpx.master_weights(rule, storage="split"))
    state = tx.init(params())
    _, state = tx.update(grads(0), state, params())
    assert optax.tree.get(state, "learning_rate") == np.float32(1e-3)
    assert optax.tree.get(state, "b2") == np.float32(0.999)
    assert optax.tree.get(state, "loss_scale") == 2.0**15
    # One at a time: in one call Optax sets the outer one and does not look inside what
    # it replaced.
    state = optax.tree.set(state, learning_rate=jnp.float32(0.0))
    state = optax.tree.set(state, loss_scale=jnp.float32(2.0**4))
    assert float(mpx.get_loss_scale(state).loss_scale) == 16
    updates, _ = tx.update(grads(0), state, params())
    assert not any(u.any() for u in jax.tree.leaves(updates))
