"""A wrapper that mpx has never seen is one file: it declares the role of each field of
its state once.

The wrapper keeps float32 masters of its own, and the largest gradient that it has seen.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import assert_same_bits, eight_cpu_devices

pytestmark = pytest.mark.optax_promotion

BF16 = mpx.get_policy("params=bf16,compute=bf16,output=f32")


@mpx.register_state(
    writes_back="own_masters", copies="master", largest="measure", rule="inner"
)
class OwnMastersState(NamedTuple):
    copies: Any
    largest: jax.Array
    rule: Any


def own_masters(inner):
    def init(params):
        copies = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return OwnMastersState(copies, jnp.zeros(()), inner.init(copies))

    def update(grads, state, params):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, rule = inner.update(grads, state.rule, state.copies)
        copies = optax.apply_updates(state.copies, updates)
        land = lambda p, copy: mpx.states.landing_update(
            p, mpx.formats.round_to(copy, p.dtype), "own_masters"
        )
        updates = jax.tree.map(land, params, copies)
        return updates, OwnMastersState(
            copies, jnp.maximum(state.largest, optax.tree.norm(grads)), rule
        )

    return optax.GradientTransformation(init, update)


def trained(tx):
    params = {"w": jnp.linspace(-1, 1, 16, dtype=jnp.bfloat16)}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update({"w": jnp.full(16, 0.1)}, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


RULE = optax.adam(1e-3)


def test_its_masters_are_found():
    params, state = trained(own_masters(RULE))
    assert_same_bits(mpx.master_params(params, state), state.copies)
    assert (state.copies["w"] != params["w"].astype(np.float32)).any()
    assert mpx.is_synced(params, state)


def test_parameters_changed_from_outside_are_noticed_and_become_its_masters():
    params, state = trained(own_masters(RULE))
    pruned = {"w": params["w"].at[3].set(0)}
    assert not mpx.is_synced(pruned, state)
    assert_same_bits(
        mpx.resync(pruned, state).copies, {"w": state.copies["w"].at[3].set(0)}
    )


@pytest.mark.parametrize("storage", ["full", "split"])
def test_a_training_run_moves_from_it_to_the_masters_of_mpx_and_back(storage):
    """What it has measured begins anew."""
    params, state = trained(own_masters(RULE))
    other = mpx.master_weights(RULE, storage=storage)
    there = mpx.convert_state(params, state, own_masters(RULE), other)
    assert_same_bits(mpx.master_params(*there), state.copies)
    _, back = mpx.convert_state(*there, other, own_masters(RULE))
    assert_same_bits(back, state._replace(largest=jnp.zeros(())))


def test_its_bytes_are_planned_as_masters():
    plan = mpx.memory_plan({"w": jnp.zeros(16)}, own_masters(RULE), BF16)
    (row,) = [row for row in plan.rows if row.name == "copies"]
    assert (row.kind, row.bytes) == ("masters", 64)


def test_nothing_may_hide_16_bit_parameters_from_it():
    with pytest.raises(
        ValueError,
        match="`own_masters` stands inside `upcast`, sees parameters in float32",
    ):
        mpx.upcast(own_masters(RULE)).init({"w": jnp.ones(2, jnp.bfloat16)})


def test_check_chain_sees_what_changes_its_updates():
    mpx.check_chain(optax.chain(optax.clip(1.0), own_masters(RULE)))
    with pytest.raises(
        ValueError,
        match=(
            r"final when `own_masters` had rounded it, but `\w+` changes it after that"
        ),
    ):
        mpx.check_chain(optax.chain(own_masters(RULE), optax.clip(1.0)))


def test_zero1_shards_its_masters():
    mesh = eight_cpu_devices()
    params = {"w": jnp.ones(16, jnp.bfloat16)}
    state = mpx.zero1(own_masters(RULE), mesh).init(params)
    assert state.copies["w"].sharding.spec == jax.sharding.PartitionSpec("data")


@pytest.mark.parametrize(
    ("roles", "error", "message"),
    [
        (
            {"copies": "masters"},
            ValueError,
            "unknown roles {'copies': 'masters'}; the roles are",
        ),
        (
            {"copies": "master"},
            TypeError,
            "has the fields .'copies', 'largest', 'rule'., and roles were given for",
        ),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(roles, error, message):
    with pytest.raises(error, match=message):
        mpx.register_state(**roles)(OwnMastersState)
