"""Check invariants 1, 3 and 6 around every optimizer that Optax and `optax.contrib` export.

By default one rule of each kind is trained; CI trains them all.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests import sweep
from tests.helpers import QUICKLY, assert_same_bits, cases, types_of, unfused
from tests.rules import EXCLUDED, PARTS, RULES, bfloat16_params, exported_transformations, gradients

pytestmark = pytest.mark.optax_promotion

STEPS = 20
# Moments, momentum, factored and matrix-shaped state, signs, a key, an average of the weights; a rule that wants the
# loss, the gradients of each example, or the initial weights.
FAMILIES = {
    "adafactor", "adamw", "lion", "noisy_sgd", "polyak_sgd", "sgd", "contrib.cocob", "contrib.dpsgd", "contrib.muon",
    "contrib.schedule_free",
}  # fmt: skip
AVERAGING = [name for name in RULES if sweep.moment_fields(name)]
LOW = [state for state in sweep.STATES if state != "f32"]


# Rule by rule, for the programs that the tests of one share.
every_rule = pytest.mark.parametrize("name", cases(RULES, FAMILIES), scope="module")


def test_the_table_of_rules_is_complete():
    assert exported_transformations() - PARTS - set(EXCLUDED) == set(RULES)
    assert FAMILIES <= RULES.keys()


def one_step(rule, tx, params, state, grads):
    """Take a step; a rule that wants the loss gets the loss of the masters, if there are any."""
    masters = mpx.master_params(params, state)
    updates, state = tx.update(grads, state, params, **rule.extra_args(masters, grads))
    return optax.apply_updates(params, updates), state


def both(rule, wrap):
    """Return a function that steps a float32 and a wrapped bfloat16 training run, and where both begin."""
    params = bfloat16_params()
    exact = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    reference, wrapped = rule.make(), wrap(rule.make())

    def step(carry, grads):
        exact, exact_state, params, state = carry
        exact, exact_state = one_step(rule, reference, exact, exact_state, grads)
        params, state = one_step(rule, wrapped, params, state, grads)
        return (exact, exact_state, params, state), None

    return step, (exact, jax.tree.map(strongly_typed, reference.init(exact)), params, wrapped.init(params))


def strongly_typed(x):
    """Return the array with a type that a scan keeps."""
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if x.aval.weak_type else x


def scanned(step, carry, rule, **jit_options):
    stepped = jax.jit(lambda carry, grads: jax.lax.scan(step, carry, grads)[0], **jit_options)
    return stepped(carry, gradients(rule, STEPS))


@functools.cache
def trained_with_full_masters(name):
    """Return the float32 training run and the one beside it, both of one program."""
    rule = RULES[name]
    return scanned(*both(rule, mpx.master_weights), rule)


@every_rule
def test_masters_follow_the_float32_trajectory_to_the_bit_in_one_program(name):
    exact, _, params, state = trained_with_full_masters(name)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(exact))
    assert_same_bits(mpx.master_params(params, state), exact)
    assert bool(mpx.is_synced(params, state))


# Without fusion a step takes long to compile: by default one rule of each kind of state.
@pytest.mark.parametrize("name", cases(RULES, {"adafactor", "adamw", "contrib.muon", "contrib.schedule_free", "lion"}))
def test_split_masters_follow_the_float32_trajectory_to_the_bit(name):
    """Compile without fusion: fused with the join of the halves, a rule's products and sums may contract otherwise."""
    rule = RULES[name]
    step, carry = both(rule, lambda tx: mpx.master_weights(tx, storage="split"))
    options = unfused(batched_products="muon" in name)
    exact, _, params, state = scanned(step, carry, rule, compiler_options=options)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(exact))
    assert_same_bits(mpx.master_params(params, state), exact)


def test_the_same_rule_on_bfloat16_parameters_does_not_follow_it():
    """Train without mpx, the negative control: most of the weights end elsewhere."""
    rule, params = RULES["adamw"], bfloat16_params()
    exact, _, _, _ = trained_with_full_masters("adamw")
    tx = rule.make()
    narrow = lambda grads: jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
    step = lambda carry, grads: (one_step(rule, tx, *carry, narrow(grads)), None)
    params, _ = scanned(step, (params, tx.init(params)), rule)
    as_bfloat16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
    assert (params["kernel"] != as_bfloat16["kernel"]).mean() > 0.5


@pytest.mark.parametrize("name", cases(RULES, {"adamw", "lion", "sgd", "contrib.schedule_free"}))
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
    "scaled": lambda tx: mpx.loss_scaling(mpx.master_weights(tx)),
    **sweep.WRITE_BACKS,
}


def wrapped_in_every_way(name):
    """Yield a rule in each wrapper, and with each way to store its averages under each way to keep parameters."""
    for wrapper, wrap in WRAPPERS.items():
        yield wrapper, wrap(RULES[name].make())
    for write_back in sweep.WRITE_BACKS if name in AVERAGING else ():
        for state in LOW:
            yield f"{write_back}, {state}", sweep.transformation(name, write_back, state)


@every_rule
def test_an_update_changes_no_type_of_the_state(name):
    """Compare structure, shapes, dtypes and weak types: the state can be a scan carry and compiles once."""
    rule = RULES[name]
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), sweep.initial_params(0))
    batch = jax.tree.map(lambda a: jnp.asarray(a[0]), sweep.examples())
    grads = jax.eval_shape(lambda: sweep.gradients(rule, params, batch))
    for way, tx in wrapped_in_every_way(name):
        start = jax.eval_shape(tx.init, params)

        def step(state, grads, tx=tx):
            loss = lambda p: sweep.loss_fn(p, batch)
            return tx.update(grads, state, params, **rule.extra_args(params, grads, loss))

        updates, state = jax.eval_shape(step, start, grads)
        assert types_of(state) == types_of(start), way
        assert {u.dtype for u in jax.tree.leaves(updates)} == {np.dtype(np.float32)}, way


def buffers_stand_once(params, state):
    buffers = [id(leaf) for leaf in jax.tree.leaves((params, state))]
    return len(set(buffers)) == len(buffers)


@every_rule
def test_no_buffer_stands_twice_in_parameters_and_state(name):
    """Several rules keep the parameters themselves in their state; donating both would then fail."""
    for dtype in (jnp.bfloat16, jnp.float32):
        params = jax.tree.map(lambda p, dtype=dtype: p.astype(dtype), bfloat16_params())
        for wrapper, wrap in WRAPPERS.items():
            assert buffers_stand_once(params, wrap(RULES[name].make()).init(params)), (wrapper, dtype)


def test_a_bare_rule_that_keeps_the_initial_weights_shares_their_buffers():
    """Look at `cocob`, the negative control."""
    params = bfloat16_params()
    assert not buffers_stand_once(params, RULES["contrib.cocob"].make().init(params))


IN_TURN = [(name, LOW[i % len(LOW)]) for i, name in enumerate(AVERAGING)]
FEW_BITS = dict.fromkeys([*IN_TURN, *[("adamw", state) for state in LOW]])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "state"), FEW_BITS)
def test_a_rule_trains_with_its_averages_in_few_bits(name, state):
    """Train with a low format and a way to keep parameters in turn; `benchmarks/state_formats.py` trains them all."""
    write_backs = list(sweep.WRITE_BACKS)
    turn = (AVERAGING.index(name) + LOW.index(state)) % len(write_backs)
    tx = sweep.transformation(name, write_backs[turn], state)
    before, after, final_state = sweep.train(name, tx, jnp.bfloat16, compiler_options=QUICKLY)
    assert after < before
    leaves = [x for x in jax.tree.leaves(final_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in leaves)
    narrow = {np.dtype(jnp.bfloat16)} if state.startswith("bf16") else {np.dtype(np.int8), np.dtype(np.uint8)}
    stored = final_state[0] if "Kahan" in write_backs[turn] else final_state
    assert narrow & {x.dtype for x in jax.tree.leaves(stored)}


def test_the_table_in_the_docs_counts_every_rule_and_names_those_that_lose():
    table = Path(__file__).parents[1] / "benchmarks" / "STATE_FORMATS.md"
    summary, *sections = re.split(r"^## ", table.read_text(), flags=re.MULTILINE)
    cells_of = lambda text: [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]
    head, *counted = cells_of(summary)
    assert head[1:] == list(sweep.WRITE_BACKS)
    assert [state for state, *_ in counted] == [section.splitlines()[0] for section in sections]
    for (state, *counts), section in zip(counted, sections, strict=True):
        rules = list(RULES) if state == "f32" else AVERAGING
        lost = {rule: figures for rule, _, *figures in cells_of(section)[1:]}
        assert set(lost) <= set(rules)
        for i, count in enumerate(counts):
            bold = sum("**" in figures[i] for figures in lost.values())
            assert count == f"{len(rules) - bold} of {len(rules)}", (state, head[1 + i])
