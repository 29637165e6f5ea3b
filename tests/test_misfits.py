"""Check that gradients and states which do not fit are refused where they come in, with the path of the leaf."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.optax_promotion

PARAMS = {"a": {"w": jnp.ones((3, 2))}, "b": jnp.ones(2)}
WRAPPERS = {
    "upcast": mpx.upcast,
    "master_weights": mpx.master_weights,
    "loss_scaling": mpx.loss_scaling,
    "low_precision_state": lambda rule: mpx.low_precision_state(rule, {"mu": "bf16"}, min_size=0),
    "mixed_precision": lambda rule: mpx.mixed_precision(rule, "params=f32,compute=bf16"),
}


def updates_of(name):
    """Return a function from gradients to what they become."""
    if name == "fused_update":
        step = mpx.fused_update(optax.adam(1.0), interpret=True)
        return lambda grads, params=PARAMS: step(grads, optax.adam(1.0).init(params), params)
    tx = WRAPPERS[name](optax.adam(1.0))
    return lambda grads, params=PARAMS: tx.update(grads, tx.init(params), params)


@pytest.mark.parametrize("name", [*WRAPPERS, "fused_update"])
@pytest.mark.parametrize("shape", [(1, 2), (1, 1), (2,), ()], ids=str)
def test_gradients_that_would_be_broadcast_are_refused(name, shape):
    grads = PARAMS | {"a": {"w": jnp.ones(shape)}}
    message = rf"`{name}`: gradients (.|\n)*'a/w': update float32\[.*\], parameter float32\[3, 2\]"
    with pytest.raises(ValueError, match=message):
        updates_of(name)(grads)
    updates_of(name)(PARAMS)


@pytest.mark.parametrize("name", [*WRAPPERS, "fused_update"])
def test_gradients_of_other_parameters_are_named(name):
    message = rf"`{name}`: gradients or updates do not (.|\n)*'a/w': in the param(.|\n)*'a/v': in the gradients only"
    with pytest.raises(ValueError, match=message):
        updates_of(name)(PARAMS | {"a": {"v": jnp.ones((3, 2))}})


def test_gradients_may_be_missing_where_none_stands_for_them():
    tx = mpx.upcast(optax.sgd(1.0))
    updates, _ = tx.update({"a": None, "b": jnp.ones(2)}, tx.init(PARAMS), PARAMS)
    assert updates["a"] is None


def test_gradients_of_examples_reach_a_rule_that_adds_them_up():
    rule = optax.contrib.differentially_private_aggregate(1e6, 0.0, 0)
    tx = mpx.loss_scaling(rule, mpx.NoOpLossScale())
    grads = jax.tree.map(lambda p: jnp.stack([p, 3 * p]), PARAMS)
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    assert_same_bits(updates, jax.tree.map(lambda p: 2 * p, PARAMS))


def test_the_gradients_of_lookahead_are_those_of_its_fast_parameters():
    rule = optax.lookahead(optax.sgd(1.0), 2, 0.5)
    params = optax.LookaheadParams.init_synced(PARAMS)
    fused = mpx.fused_update(rule, interpret=True)(PARAMS, rule.init(params), params)
    assert_same_bits(fused[0].fast, jax.tree.map(jnp.zeros_like, PARAMS))


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(
    "other", [optax.sgd(1.0), optax.chain(*[optax.sgd(1.0)] * 3), mpx.loss_scaling(optax.sgd(1.0))]
)
def test_the_state_of_another_recipe_is_refused_with_what_it_is_and_what_to_do(name, other):
    """Where a wrapper has no state of its own, its rule stumbles over the other one."""
    tx, state = WRAPPERS[name](optax.adam(1.0)), other.init(PARAMS)
    message = rf"`{name}`.* but got (tuple of |LossScalingState)(.|\n)*`convert_state` makes one of this recipe"
    with pytest.raises(TypeError, match=message):
        tx.update(PARAMS, state, PARAMS)
