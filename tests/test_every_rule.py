"""Invariants 1, 3 and 6 around every optimizer that Optax and `optax.contrib` export."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import assert_same_bits, types_of, unfused
from tests.rules import EXCLUDED, PARTS, RULES, bfloat16_params, exported_transformations, gradients

pytestmark = pytest.mark.optax_promotion

STEPS = 20
every_rule = pytest.mark.parametrize("name", RULES, scope="module")  # rule by rule, for the programs they share


def test_the_table_of_rules_is_complete():
    assert exported_transformations() - PARTS - set(EXCLUDED) == set(RULES)


def reference_step(rule, tx, state, params, grads):
    updates, state = tx.update(grads, state, params, **rule.extra_args(params, grads))
    return optax.apply_updates(params, updates), state


def wrapped_step(rule, tx, params, state, grads):
    masters = mpx.master_params(params, state)
    updates, state = tx.update(grads, state, params, **rule.extra_args(masters, grads))
    return optax.apply_updates(params, updates), state


def both(rule, wrap):
    """A float32 training and a wrapped bfloat16 one from the same weights, stepped by one function."""
    params = bfloat16_params()
    exact = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    reference, wrapped = rule.make(), wrap(rule.make())

    def step(carry, grads):
        exact, exact_state, params, state = carry
        exact, exact_state = reference_step(rule, reference, exact_state, exact, grads)
        params, state = wrapped_step(rule, wrapped, params, state, grads)
        return (exact, exact_state, params, state), None

    return step, (exact, jax.tree.map(strongly_typed, reference.init(exact)), params, wrapped.init(params))


def strongly_typed(x):
    """The array, whose type a scan then keeps."""
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if x.aval.weak_type else x


def scanned(step, carry, rule, **jit_options):
    stepped = jax.jit(lambda carry, grads: jax.lax.scan(step, carry, grads)[0], **jit_options)
    return stepped(carry, gradients(rule, STEPS))


@functools.cache
def trained_with_full_masters(name):
    """Beside the float32 training, in one program."""
    rule = RULES[name]
    return scanned(*both(rule, mpx.master_weights), rule)


@every_rule
def test_masters_follow_the_float32_trajectory_to_the_bit_in_one_program(name):
    exact, _, params, state = trained_with_full_masters(name)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(exact))
    assert_same_bits(mpx.master_params(params, state), exact)
    assert bool(mpx.is_synced(params, state))


@every_rule
def test_split_masters_follow_the_float32_trajectory_to_the_bit(name):
    """Without fusion: fused with the join of the halves, a rule's own products and sums may contract differently."""
    rule = RULES[name]
    step, carry = both(rule, lambda tx: mpx.master_weights(tx, storage="split"))
    options = unfused(batched_products="muon" in name)
    exact, _, params, state = scanned(step, carry, rule, compiler_options=options)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(exact))
    assert_same_bits(mpx.master_params(params, state), exact)


@every_rule
def test_fused_split_masters_stay_within_rounding_of_the_float32_trajectory(name):
    """Sums over a whole leaf and contracted products may round differently: a few units in the last place."""
    rule, (exact, _, _, _) = RULES[name], trained_with_full_masters(name)
    tx = mpx.master_weights(rule.make(), storage="split")
    step = lambda carry, grads: (wrapped_step(rule, tx, *carry, grads), None)
    start = bfloat16_params()
    params, state = scanned(step, (start, tx.init(start)), rule)
    for ours, theirs in zip(jax.tree.leaves(mpx.master_params(params, state)), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_the_same_rule_on_bfloat16_parameters_does_not_follow_it():
    """The negative control: without mpx, most of the weights end elsewhere."""
    rule, params = RULES["adamw"], bfloat16_params()
    exact, _, _, _ = trained_with_full_masters("adamw")
    tx = rule.make()

    def step(carry, grads):
        params, state = carry
        return reference_step(rule, tx, state, params, jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)), None

    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), gradients(rule, STEPS))
    as_bfloat16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
    assert (params["kernel"] != as_bfloat16["kernel"]).mean() > 0.5


@every_rule
def test_masters_follow_the_float32_trajectory_to_the_bit_eagerly(name):
    rule = RULES[name]
    step, carry = both(rule, mpx.master_weights)
    grads = gradients(rule, 2)
    for i in range(2):
        carry, _ = step(carry, jax.tree.map(lambda g, i=i: g[i], grads))
    exact, _, params, state = carry
    assert_same_bits(mpx.master_params(params, state), exact)


WRAPPERS = {
    "upcast": mpx.upcast,
    "full": mpx.master_weights,
    "split": lambda tx: mpx.master_weights(tx, storage="split"),
    "scaled": lambda tx: mpx.loss_scaling(mpx.master_weights(tx)),
    "kahan": lambda tx: optax.chain(mpx.upcast(tx), mpx.kahan_summation()),
    "stochastic": lambda tx: optax.chain(mpx.upcast(tx), mpx.stochastic_rounding(jax.random.key(0))),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@every_rule
def test_an_update_changes_no_type_of_the_state(name, wrapper):
    """Structure, shapes, dtypes and weak types: the state can be a scan carry and compiles once."""
    rule, tx = RULES[name], WRAPPERS[wrapper](RULES[name].make())
    params = bfloat16_params()
    state = tx.init(params)
    grads = jax.tree.map(lambda g: g[0], gradients(rule, 1))

    def step(params, state):
        return tx.update(grads, state, params, **rule.extra_args(params, grads))

    updates, new_state = jax.eval_shape(step, params, state)
    assert types_of(new_state) == types_of(jax.eval_shape(lambda: state))
    assert {u.dtype for u in jax.tree.leaves(updates)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("wrapper", ["upcast", "full", "split", "scaled", "kahan"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@every_rule
def test_no_buffer_stands_twice_in_parameters_and_state(name, dtype, wrapper):
    """Several rules keep the parameters themselves in their state; donating both would then fail."""
    params = jax.tree.map(lambda p: p.astype(dtype), bfloat16_params())
    state = WRAPPERS[wrapper](RULES[name].make()).init(params)
    buffers = [id(leaf) for leaf in jax.tree.leaves((params, state))]
    assert len(set(buffers)) == len(buffers)


def test_donating_what_a_bare_rule_keeps_of_the_parameters_fails():
    """The negative control: `cocob` keeps the initial weights."""
    params = bfloat16_params()
    state = RULES["contrib.cocob"].make().init(params)
    buffers = [id(leaf) for leaf in jax.tree.leaves((params, state))]
    assert len(set(buffers)) < len(buffers)
