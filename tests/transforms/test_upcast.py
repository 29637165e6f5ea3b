"""Check `upcast`: what the rule sees, and what every wrapper refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.eager


@pytest.fixture
def params():
    return {
        "kernel": jnp.ones((64, 64), jnp.bfloat16),
        "bias": jnp.zeros(3, jnp.float16),
        "scale": jnp.ones((), jnp.float32),
    }


WRAPPERS = {
    "upcast": mpx.upcast,
    "master_weights": mpx.master_weights,
    "low_precision_state": lambda rule: mpx.low_precision_state(
        rule, {"kernel": mpx.Blockwise8bit(signed=True)}
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_rule_sees_float32_parameters_gradients_and_extra_arguments(params, name):
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(updates=updates, params=params, state=state, **extra_args)
        return updates, state

    tx = WRAPPERS[name](
        optax.GradientTransformationExtraArgs(lambda params: params, update)
    )
    updates, _ = tx.update(
        params,
        tx.init(params),
        params,
        value=jnp.float16(2),
        ratio=0.5,
        hessian=params,
        count=3,
    )
    assert seen.pop("count") == 3
    for tree in (*seen.values(), updates):
        assert {x.dtype for x in jax.tree.leaves(tree)} == {np.dtype(np.float32)}


NARROW_ONLY = {
    "master_weights": mpx.master_weights(optax.identity()),
    "kahan_summation": mpx.kahan_summation(),
    "stochastic_rounding": mpx.stochastic_rounding(jax.random.key(0)),
}


@pytest.mark.parametrize("name", NARROW_ONLY)
def test_updates_of_float32_parameters_pass_through(name):
    tx, ones = NARROW_ONLY[name], jnp.ones(3, jnp.float32)
    updates, state = tx.update(jnp.full(3, 0.1, jnp.float32), tx.init(ones), ones)
    assert_same_bits(updates, jnp.full(3, 0.1, jnp.float32))
    assert not [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (3,)]


def test_a_rule_in_float64_sees_float64_and_returns_it():
    """Every array is float32 outside. The bare rule, as a negative control, keeps
    float32.
    """
    with jax.enable_x64(True):
        params, rule = {"w": jnp.ones(2, jnp.float32)}, optax.trace(0.9)
        tx = mpx.upcast(rule, jnp.float64)
        state = tx.init(params)
        updates, new_state = tx.update(params, state, params)
        assert {x["w"].dtype for x in (state.trace, new_state.trace, updates)} == {
            np.dtype(np.float64)
        }
        assert rule.init(params).trace["w"].dtype == np.float32


def strong(tree):
    return not any(jax.typeof(x).weak_type for x in jax.tree.leaves(tree))


def test_states_are_strongly_typed_from_the_start_and_after_an_update():
    # A Python number among the parameters.
    assert strong(mpx.upcast(optax.adam(1e-3)).init({"w": 1.0}))
    weak = optax.GradientTransformation(
        lambda p: jnp.asarray(0.5), lambda u, s, p=None: (u, jnp.asarray(1.0))
    )
    tx, params = mpx.upcast(weak), jnp.ones(2, jnp.bfloat16)
    state = tx.init(params)
    assert strong(state)
    assert strong(jax.eval_shape(tx.update, params, state, params)[1])


@pytest.mark.parametrize(
    ("rule", "leaf"),
    [(optax.adam(1e-3), "'0/mu': bfloat16"), (optax.sgd(0.1, 0.9), "'0/count'")],
)
def test_a_state_that_a_bare_rule_or_another_one_made_is_refused_by_its_leaves(
    rule, leaf
):
    """Of the first, Optax's own 16-bit moments, each update would be rounded to 16
    bits.
    """
    params = jnp.ones(2, jnp.bfloat16)
    with pytest.raises(
        ValueError,
        match=rf"`upcast`: the state is not one that its `init` makes(?s:.*){leaf}",
    ):
        mpx.upcast(optax.adam(1e-3)).update(params, rule.init(params), params)
