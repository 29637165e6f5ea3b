"""Check what a step tells of its own values: on what updates land, and where a cheap
instruction has the same bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx._fused.known import Known
from mpx._jaxprs import Graph, traced_flat
from mpx._stored.blocks import mpx_root
from tests.fused.helpers import plain_step
from tests.helpers import BF16, assert_same_bits, on_an_absent_gpu, unfused

pytestmark = pytest.mark.optax_promotion

X = jax.ShapeDtypeStruct((8, 256), jnp.float32)


def known(step, *given):
    """Return what is known of the values of a step, and its equations."""
    program, _, _, calls = traced_flat(step, given)
    return Known(Graph(program), calls), program.eqns


NEITHER = {"sqrt": False, "div": False}
STEPS = {
    "of Adam": (lambda m, v: m / (jnp.sqrt(v) + 1e-8), {"sqrt": True, "div": True}),
    "turned": (lambda m, v: m / (1e-8 + jnp.sqrt(v)), {"sqrt": True, "div": True}),
    "a small number": (lambda m, v: m / (jnp.sqrt(v) + 1e-15), NEITHER),
    "a number of the state": (lambda m, v: m / (jnp.sqrt(v) + v[0, 0]), NEITHER),
    "nothing": (lambda m, v: m / jnp.sqrt(v), NEITHER),
    "no root": (lambda m, v: m / (v + 1e-8), {"div": False}),
    "a root alone": (lambda m, v: jnp.sqrt(v), {"sqrt": False}),
    "a root read twice": (
        lambda m, v: (s := jnp.sqrt(v)) / (s + 1e-8),
        {"sqrt": False, "div": True},
    ),
    "a root of mpx": (lambda m, v: mpx_root(v) * m, {"sqrt": True}),
    "in bfloat16": (
        lambda m, v: m.astype(BF16) / (jnp.sqrt(v.astype(BF16)) + 1e-3),
        NEITHER,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_root_that_is_too_small_to_change_a_sum_is_ordinary(name):
    step, expected = STEPS[name]
    found, eqns = known(step, X, X)
    assert {
        eqn.primitive.name: found.is_ordinary(eqn)
        for eqn in eqns
        if eqn.primitive.name in ("sqrt", "div")
    } == expected


def test_no_root_of_a_subnormal_number_changes_what_an_ordinary_one_is_added_to():
    largest = np.sqrt(np.float64(np.finfo(np.float32).smallest_normal))
    for eps in (2.0**-38, 1e-8, 1.0):
        assert np.float32(eps + largest) == np.float32(eps)
    assert np.float32(2.0**-41 + largest) != np.float32(2.0**-41)  # negative control


def steps_of(tx):
    """Return the plain step and that of `fused_update`, in one program each."""
    ways = plain_step(tx), mpx.fused_update(tx, interpret=True)
    return [jax.jit(step, compiler_options=unfused()) for step in ways]


def test_a_parameter_is_written_as_its_master_even_where_no_addition_reaches_it():
    """Of 1 and a master of 1.25 * 2**-30 the update is -1, and the sum of both 0."""
    tx = mpx.master_weights(optax.sgd(1.0))
    params = {"w": jnp.ones((8, 256), BF16)}
    zeros, master = jax.tree.map(jnp.zeros_like, params), np.float32(1.25 * 2**-30)
    state = tx.init(jax.tree.map(lambda p: jnp.full_like(p, master), params))
    plain, fused = (step(zeros, state, params)[0]["w"] for step in steps_of(tx))
    assert_same_bits(fused, jnp.full((8, 256), master, BF16))
    assert not plain.any()  # negative control


def test_an_update_that_is_changed_on_its_way_is_added_as_it_is():
    tx = optax.chain(mpx.master_weights(optax.sgd(1e-2), "split"), optax.scale(0.5))
    params = {"w": jnp.linspace(-1, 1, 2048).astype(BF16).reshape(8, 256)}
    grads = {"w": jnp.ones((8, 256), jnp.float32)}
    state = tx.init(params)
    plain, fused = (step(grads, state, params) for step in steps_of(tx))
    assert_same_bits(fused, plain)


def test_a_division_by_what_all_elements_share_compiles_in_all_dtypes():
    for dtype in (jnp.float32, BF16, jnp.float16):
        params = {"w": jax.ShapeDtypeStruct((256, 256), dtype)}
        tx = optax.stateless(lambda g, _: jax.tree.map(lambda x: x / x[0, 0], g))
        with on_an_absent_gpu():
            step = jax.jit(mpx.fused_update(tx)).trace(params, (None,), params)
            step.lower(lowering_platforms=("cuda",))
