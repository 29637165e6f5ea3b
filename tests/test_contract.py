"""Check what every transformation promises, over all of them; by default over one of
each kind.
"""

import functools
import sys

import chex
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from tests.helpers import (
    QUICKLY,
    assert_same_bits,
    cases,
    eight_cpu_devices,
    float32_round_trips,
    types_of,
    unfused,
)

pytestmark = pytest.mark.optax_promotion

RULE = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 0.0, 100))
)


def low_precision(formats, **options):
    return mpx.low_precision_state(RULE, formats, min_size=1, **options)


TRANSFORMS = {
    "upcast": lambda: mpx.upcast(RULE),
    "clip_by_predicted_norm": lambda: optax.chain(
        mpx.clip_by_predicted_norm(1.0, "kernel|w"), mpx.upcast(RULE)
    ),
    "master_weights full": lambda: mpx.master_weights(RULE),
    "master_weights split": lambda: mpx.master_weights(RULE, storage="split"),
    "master_weights split24": lambda: mpx.master_weights(
        RULE, storage="split24", key=jax.random.key(0)
    ),
    "loss_scaling": lambda: mpx.loss_scaling(mpx.upcast(RULE)),
    "kahan_summation": lambda: optax.chain(mpx.upcast(RULE), mpx.kahan_summation()),
    "stochastic_rounding": lambda: optax.chain(
        mpx.upcast(RULE), mpx.stochastic_rounding(jax.random.key(0))
    ),
    "low_precision_state bf16": lambda: low_precision({"mu": "bf16", "nu": "bf16"}),
    "low_precision_state 8 bits": lambda: low_precision(
        {"mu": mpx.Blockwise8bit(16), "nu": mpx.Blockwise8bit()}
    ),
    "low_precision_state 4 bits": lambda: low_precision(
        {"mu": mpx.Blockwise4bit(16)}, key=jax.random.key(0)
    ),
    "low_precision_state stochastic": lambda: low_precision(
        {"mu": "f16", "nu": mpx.Blockwise8bit()},
        rounding="stochastic",
        key=jax.random.key(0),
    ),
    "any_precision_adamw": lambda: mpx.any_precision_adamw(
        use_kahan_summation=True, momentum_dtype="bf16"
    ),
    "mixed_precision f16": lambda: mpx.mixed_precision(RULE, "f16"),
}
KINDS = {
    "master_weights split", "kahan_summation", "stochastic_rounding", "low_precision_state stochastic",
    "mixed_precision f16",
}  # fmt: skip

# What XLA compiles in half a second.
LIGHT = {"master_weights split", "kahan_summation", "mixed_precision f16"}


# One after the other, for the program that the tests of one share.
every_transform = pytest.mark.parametrize(
    "name", cases(TRANSFORMS, KINDS), scope="module"
)


def params():
    """Return a tree of every kind of leaf: None, a masked node, a scalar, no elements,
    containers, three dtypes.
    """
    return {
        "kernel": jnp.linspace(-1, 1, 12, dtype=jnp.bfloat16).reshape(4, 3),
        "bias": jnp.zeros(3, jnp.float32),
        "scalar": jnp.ones((), jnp.float16),
        "none": None,
        "masked": optax.MaskedNode(),
        "nested": [(jnp.ones(2, jnp.float16),)],
        "nothing": jnp.zeros((0, 3), jnp.bfloat16),
    }


def one_leaf():
    return {"w": jnp.ones(3, jnp.bfloat16)}


def grads(like):
    return jax.tree.map(lambda p: jnp.full(p.shape, 0.1, jnp.float32), like)


def make_step(tx):
    def step(params, state):
        updates, state = tx.update(grads(params), state, params)
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def trained(name):
    """Return parameters and state after three steps to which both are donated, and how
    often a step was traced.
    """
    tx = TRANSFORMS[name]()
    chex.clear_trace_counter()  # which counts functions of the same code together
    step = chex.assert_max_traces(make_step(tx), n=1)
    step = jax.jit(step, donate_argnums=(0, 1), compiler_options=QUICKLY)
    now = params()
    state = tx.init(now)
    for _ in range(3):
        now, state = step(now, state)
    return jax.block_until_ready((now, state))


@every_transform
def test_a_step_to_which_parameters_and_state_are_donated_compiles_once(name):
    trained(name)


@every_transform
def test_a_tree_of_every_kind_of_leaf_is_trained(name):
    start, (now, _) = params(), trained(name)
    assert types_of(now) == types_of(start)
    assert now["none"] is None
    assert now["masked"] == optax.MaskedNode()
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(now))
    assert (now["kernel"] != start["kernel"]).any()


@every_transform
def test_an_empty_tree_is_trained(name):
    tx = TRANSFORMS[name]()
    for empty in ({}, (), {"a": None}):
        updates, _ = tx.update(empty, tx.init(empty), empty)
        assert jax.tree.leaves(updates) == []


@pytest.mark.eager
@pytest.mark.parametrize(
    "name", cases(sorted(TRANSFORMS.keys() - {"low_precision_state stochastic"}), LIGHT)
)
def test_the_state_can_be_a_scan_carry_and_steps_in_it_have_the_bits_of_single_ones(
    name,
):
    """Compare without fusion what is decoded in one program with the rule: it may
    contract with the rule's sums.
    """
    options = unfused() if "low_precision" in name or "any_precision" in name else {}
    tx = TRANSFORMS[name]()
    step, start = make_step(tx), params()
    carry = start, tx.init(start)
    scan = lambda c: jax.lax.scan(lambda c, _: (step(*c), None), c, length=3)
    scanned, _ = jax.jit(scan, compiler_options=options)(carry)
    single = jax.jit(step, compiler_options=options)
    for _ in range(3):
        carry = single(*carry)
    assert types_of(scanned) == types_of(carry)
    assert_same_bits(scanned, carry)


@every_transform
def test_the_state_keeps_the_sharding_of_the_parameters(name):
    sharding = NamedSharding(eight_cpu_devices(), P("data"))
    start = {"w": jax.device_put(jnp.ones((16, 2), jnp.bfloat16), sharding)}
    gradients = {"w": jax.device_put(jnp.ones((16, 2)), sharding)}
    tx = TRANSFORMS[name]()
    state = jax.jit(tx.init, compiler_options=QUICKLY)(start)
    step = jax.jit(lambda p, s, g: tx.update(g, s, p), compiler_options=QUICKLY)
    updates, new_state = step(start, state, gradients)
    kept = [leaf for leaf in jax.tree.leaves(new_state) if leaf.shape == (16, 2)]
    assert all(
        leaf.sharding.is_equivalent_to(sharding, 2) for leaf in [updates["w"], *kept]
    )


def without_nothing(tree):
    """Return the tree with None for each array without elements, which Orbax does not
    save.
    """
    return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


@every_transform
def test_orbax_saves_and_restores_the_state_as_it_is(name, tmp_path):
    state = without_nothing(trained(name)[1])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "state", jax.eval_shape(lambda: state)
        )
    assert_same_bits(restored, state)
    assert types_of(restored) == types_of(state)


@every_transform
def test_no_rounding_is_left_to_a_compiler_that_may_drop_it(name):
    """On a GPU `f32 -> 16 bits -> f32` inside one program may become nothing (invariant
    7).
    """
    tx, start = TRANSFORMS[name](), params()
    assert not float32_round_trips(tx.update, grads(start), tx.init(start), start)


# what Optax adds or multiplies in one dtype only, as the page on modes says
OF_ONE_DTYPE = {
    "sgd": optax.sgd(1e-3, momentum=0.9),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "clipping and a linear schedule": (
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.sgd(optax.linear_schedule(1e-3, 0.0, 10)),
        )
    ),
}


@pytest.mark.parametrize("rule", OF_ONE_DTYPE)
def test_rules_that_add_no_two_dtypes_run_under_strict_promotion(rule, monkeypatch):
    start = params()
    monkeypatch.setattr(sys.modules[__name__], "RULE", OF_ONE_DTYPE[rule])
    for name in (
        "loss_scaling",
        "master_weights split",
        "kahan_summation",
        "stochastic_rounding",
        "mixed_precision f16",
    ):
        tx = TRANSFORMS[name]()
        with jax.numpy_dtype_promotion("strict"):
            jax.eval_shape(lambda tx=tx: tx.update(grads(start), tx.init(start), start))


@pytest.mark.parametrize("name", cases(sorted(KINDS), {"master_weights split"}))
def test_it_is_traced_with_leak_checks(name):
    tx = TRANSFORMS[name]()
    with jax.checking_leaks():
        jax.eval_shape(
            jax.jit(lambda p: tx.update(grads(p), tx.init(p), p)), one_leaf()
        )


@every_transform
def test_it_runs_in_64_bit_mode_with_the_same_types(name):
    def types():
        tx, start = TRANSFORMS[name](), one_leaf()
        state = jax.eval_shape(tx.init, start)
        updates, new_state = jax.eval_shape(tx.update, grads(start), state, start)
        assert types_of(new_state) == types_of(state)
        return types_of(updates)

    with jax.enable_x64(False):
        expected = types()
    with jax.enable_x64(True):
        assert types() == expected


@every_transform
def test_it_runs_under_debug_nans(name):
    """No inf or NaN is made on the way to a good step."""
    tx, start = TRANSFORMS[name](), one_leaf()
    with jax.debug_nans(True), jax.debug_infs(True):
        tx.update(grads(start), tx.init(start), start)


@pytest.mark.eager
@every_transform
def test_leaves_that_do_not_train_pass_through_masked(name):
    """Integers, keys, complex numbers and 8-bit floats among the parameters keep their
    bits (invariant 9).
    """
    still = {
        "ids": jnp.arange(3),
        "key": jax.random.key(0),
        "mask": jnp.array([True]),
        "wave": jnp.ones(2, jnp.complex64),
        "tiny": jnp.ones(2, jnp.float8_e4m3fn),
    }
    start = one_leaf() | still
    mask = {path: path == "w" for path in start}
    tx = optax.masked(TRANSFORMS[name](), mask)
    gradients = {"w": jnp.full(3, 0.1)} | {path: optax.MaskedNode() for path in still}
    trained = {
        path: leaf if mask[path] else optax.MaskedNode() for path, leaf in start.items()
    }
    updates, state = tx.update(gradients, tx.init(start), trained)
    assert {
        path for path, update in updates.items() if update != optax.MaskedNode()
    } == {"w"}
    assert not any(
        leaf.shape == (2,) and leaf.dtype == jnp.complex64
        for leaf in jax.tree.leaves(state)
    )


@every_transform
def test_a_whole_module_is_taken_for_parameters_where_what_is_no_array_has_no_gradient(
    name,
):
    """Trainers of Equinox make the state from the arrays of a module, and give the
    module to `update`.
    """
    others = {
        "function": jnp.tanh,
        "name": "layer",
        "number": 3,
        "rate": 0.1,
        "flag": True,
        "count": jnp.zeros((), int),
    }
    tx, start = TRANSFORMS[name](), params()
    state, none = tx.init(start | dict.fromkeys(others)), dict.fromkeys(others)
    updated = lambda given: jax.jit(
        lambda state: tx.update(grads(start) | none, state, given),
        compiler_options=QUICKLY,
    )
    assert_same_bits(updated(start | others)(state), updated(start | none)(state))


GIVEN_AN_ARRAY = {
    "stochastic_rounding": mpx.stochastic_rounding,
    "24 bits": lambda key: mpx.master_weights(
        optax.sgd(0.1), storage="split24", key=key
    ),
    "low_precision_state": lambda key: mpx.low_precision_state(
        optax.trace(0.9), {"trace": "bf16"}, min_size=1, rounding="stochastic", key=key
    ),
    "loss scale": lambda key: mpx.loss_scaling(
        optax.sgd(0.1), mpx.DynamicLossScale((key[0] + 2).astype(jnp.float32))
    ),
}


@pytest.mark.parametrize("name", GIVEN_AN_ARRAY)
def test_donating_the_state_does_not_delete_the_key_or_the_scale_that_was_given(name):
    params = jnp.ones(3, jnp.bfloat16)
    tx = GIVEN_AN_ARRAY[name](jax.random.PRNGKey(0))
    state = tx.init(params)
    with jax.disable_jit(False):
        jax.jit(tx.update, donate_argnums=1)(jnp.ones(3), state, params)
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    jax.block_until_ready(tx.update(jnp.ones(3), tx.init(params), params))
