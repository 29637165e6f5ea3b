"""Sums over whole leaves are computed together, on one device, and change no bit.

Gradients are small integers: their squares are added up exactly, in any order.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import mpx
from mpx._fused.totals import run_totals
from tests.fused.helpers import assert_same_steps
from tests.helpers import all_eqns, assert_same_bits

SHAPES = [(16, 256), (256,), (16, 256), (), (256,), (3, 50)]
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5, momentum=0.5))
OF_EACH_LEAF = optax.chain(optax.scale_by_trust_ratio(), optax.sgd(0.5))


def integers(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.integers(-4, 5, shape), jnp.float32) for shape in shapes]


def on_devices(count):
    return jax.set_mesh(
        jax.make_mesh(
            (count,), ("data",), (AxisType.Auto,), devices=jax.devices()[:count]
        )
    )


def results_of_sums(step, *args):
    """Return how many arrays each sum of a step to one number adds up."""
    eqns = all_eqns(jax.make_jaxpr(step)(*args))
    names = "reduce", "reduce_sum"
    return sorted(
        len(e.outvars)
        for e in eqns
        if e.primitive.name in names and e.outvars[0].aval.shape == ()
    )


@pytest.mark.parametrize(
    "tx", [CLIPPED, OF_EACH_LEAF], ids=["clipping", "a norm of each leaf"]
)
def test_a_step_has_the_bits_of_one_whose_sums_are_computed_one_by_one(tx):
    with on_devices(1):
        assert_same_steps(tx, integers(0), [integers(1)])


def test_arrays_of_one_shape_are_added_up_in_one_operation_on_one_device_only():
    """Two arrays of each of two shapes, and one of another shape. The sum of a scalar
    is left as it is.
    """
    params = integers(0)
    step, args = (
        mpx.fused_update(CLIPPED, interpret=True),
        (
            params,
            CLIPPED.init(params),
            params,
        ),
    )
    with on_devices(1):
        assert results_of_sums(step, *args) == [1, 1, 2, 2]
    with on_devices(2):
        assert results_of_sums(step, *args) == [1] * 6


def test_a_sum_that_one_leaf_needs_is_computed_with_its_terms():
    params = integers(0)
    step, args = (
        mpx.fused_update(OF_EACH_LEAF, interpret=True),
        (
            params,
            OF_EACH_LEAF.init(params),
            params,
        ),
    )
    with on_devices(1):
        assert set(results_of_sums(step, *args)) == {1}


def test_an_operation_has_no_more_sums_than_a_kernel_can_hold():
    arrays = integers(0, [(4,)] * 70)
    eqns = jax.make_jaxpr(lambda xs: [jnp.sum(x) for x in xs])(arrays).eqns
    inputs = [v for eqn in eqns for v in eqn.invars]

    def together(xs):
        found = run_totals(eqns, dict(zip(inputs, xs, strict=True)))
        return [found[eqn.outvars[0]] for eqn in eqns]

    assert results_of_sums(together, arrays) == [6, 32, 32]
    assert_same_bits(together(arrays), [jnp.sum(x) for x in arrays])
