"""Measures against NumPy; and measuring changes no bit of what is measured."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core as jex_core

import mpx
from mpx import monitor
from tests.helpers import assert_same_bits, types_of

pytestmark = pytest.mark.optax_promotion

MEASURES = {
    "underflow": lambda: monitor.underflow("f16"),
    "histogram": monitor.exponent_histogram,
    "lost": lambda: monitor.lost_updates("bf16"),
}
GRADS = {
    "layers": [{"w": jnp.float32([1e-10, 1.0])}, {"w": jnp.float32([1e-10] * 2)}],
    "norm": jnp.ones(2),
}


def measured(measure, updates, params):
    """Return what `watch` keeps of a measure."""
    tx = monitor.watch({"it": measure})
    return jax.jit(tx.update)(updates, tx.init(params), params)[1].measurements["it"]


def test_a_share_of_nothing_is_zero_and_leaves_that_are_not_floating_are_left_out():
    underflow = jax.jit(monitor.underflow("f16"))
    for tree in (
        {},
        {"w": jnp.zeros(3)},
        {"w": jnp.zeros((0, 2))},
        {"ids": jnp.arange(3)},
    ):
        assert float(underflow(tree)) == 0
    tree = {
        "w": jnp.float32([1e-10, 1.0]),
        "ids": jnp.arange(3),
        "none": None,
        "masked": optax.MaskedNode(),
    }
    assert float(underflow(tree)) == 0.5
    assert list(monitor.underflow("f16", groups="leaf")(tree)) == ["w"]


def test_a_group_is_a_leaf_by_its_path():
    shares = monitor.underflow("f16", groups="leaf")(GRADS)
    assert {name: float(share) for name, share in shares.items()} == {
        "layers/0/w": 0.5,
        "layers/1/w": 1,
        "norm": 0,
    }
    lost = measured(
        monitor.lost_updates(groups="leaf"), GRADS, optax.tree.ones_like(GRADS)
    )
    assert {name: float(share) for name, share in lost.items()} == {
        "layers/0/w": 0.5,
        "layers/1/w": 1,
        "norm": 0,
    }


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, np.float16, np.float32], ids=["bf16", "f16", "f32"]
)
def test_lost_updates_are_those_that_apply_updates_does_not_show(dtype):
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=2000), dtype)
    wide = (
        jnp.asarray(
            rng.normal(size=2000) * np.exp2(rng.integers(-30, 0, 2000)), jnp.float32
        )
        .at[:100]
        .set(0)
    )
    for updates in (wide, wide.astype(jnp.bfloat16)):
        moved = np.asarray(optax.apply_updates(params, updates) != params)
        nonzero = np.asarray(updates != 0)
        expected = np.float32((nonzero & ~moved).sum()) / np.float32(nonzero.sum())
        assert 0.1 < expected < 0.9
        assert float(measured(monitor.lost_updates(), updates, params)) == expected


def test_lost_updates_of_another_format_are_those_of_weights_stored_in_it():
    """A weight of 1 + 0.45 ulp is stored as 1, which an update of 0.1 ulp does not
    move.
    """
    ulp = 2.0**-7
    params = jnp.float32([1.0, 1 + 0.45 * ulp, 1.0])
    updates = jnp.float32([0.1 * ulp, 0.1 * ulp, 0.6 * ulp])
    stored = lambda x: np.asarray(x, np.float32).astype(jnp.bfloat16)
    naive = stored(params + updates) == stored(params)
    # The negative control: it takes the second for one that moves.
    assert naive.sum() == 1
    assert (
        float(measured(monitor.lost_updates("bf16"), updates, params))
        == np.float32(2) / 3
    )
    assert float(measured(monitor.lost_updates(), updates, params)) == 0


def all_on(place):
    measures = {f"{name} {place}": make() for name, make in MEASURES.items()}
    return monitor.watch(measures | {f"norm {place}": optax.tree.norm})


RULES = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "lion": lambda: optax.lion(1e-3, weight_decay=0.1),
}


def network(dtype, outputs=2):
    rng = np.random.default_rng(0)
    shapes = {"a": (6, 17), "bias": (17,), "b": (17, outputs)}
    params = {
        name: jnp.asarray(rng.normal(size=shape) / 4, dtype)
        for name, shape in shapes.items()
    }
    x = jnp.asarray(rng.normal(size=(32, 6)), jnp.float32)
    return params, x, jnp.sin(x[:, :outputs])


def loss_fn(params, x, y):
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return jnp.mean(
        (jnp.tanh(x @ params["a"] + params["bias"][None]) @ params["b"] - y) ** 2
    )


def train_step(tx, x, y):
    def step(params, state):
        loss, grads = mpx.value_and_grad(loss_fn, mpx.get_loss_scale(state))(
            params, x, y
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def test_measures_read_bits_from_behind_one_barrier_and_updates_pass_through():
    """Whatever a compiler does, no arithmetic of a measure reads the numbers of the
    training run.
    """
    tx = all_on("first")
    params = {"w": jnp.ones((3, 1), jnp.float32), "b": jnp.ones(2, jnp.bfloat16)}
    state = tx.init(params)
    program = jax.make_jaxpr(lambda grads, params: tx.update(grads, state, params))(
        params, params
    ).jaxpr
    # The very gradients.
    assert program.outvars[: len(params)] == program.invars[: len(params)]
    # And no host.
    assert not [eqn for eqn in program.eqns if "callback" in eqn.primitive.name]

    def readers_of(values):
        inputs = lambda eqn: [v for v in eqn.invars if isinstance(v, jex_core.Var)]
        return [eqn for eqn in program.eqns if values.intersection(inputs(eqn))]

    readers = readers_of(set(program.invars))
    assert {eqn.primitive.name for eqn in readers} == {"bitcast_convert_type"}
    (barrier,) = readers_of({v for eqn in readers for v in eqn.outvars})
    assert barrier.primitive.name == "optimization_barrier"


def test_the_state_is_a_fixed_point_a_scan_carry_and_can_be_saved():
    inside = optax.chain(RULES["adamw"](), all_on("inside"))
    tx = optax.chain(all_on("first"), mpx.loss_scaling(mpx.master_weights(inside)))
    params, x, y = network(jnp.bfloat16)
    state = tx.init(params)
    step = train_step(tx, x, y)
    scan = lambda carry: jax.lax.scan(
        lambda carry, _: (step(*carry)[:2], None), carry, length=3
    )[0]
    assert types_of(jax.eval_shape(scan, (params, state))[1]) == types_of(state)
    # The negative control, and the reason for `watch`.
    theirs = optax.monitor({"norm": optax.tree.norm})
    assert types_of(theirs.update(params, theirs.init(params))[1]) != types_of(
        theirs.init(params)
    )
    assert_same_bits(
        flax.serialization.from_bytes(state, flax.serialization.to_bytes(state)), state
    )
    mpx.check_chain(tx)
