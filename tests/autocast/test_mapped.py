"""A `jax.vmap` around autocast: products with a vector that it makes products of
matrices are narrowed, others not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet

import mpx
from tests.autocast.helpers import (
    BF16,
    F16,
    F32,
    all_in,
    contractions,
    exact_jit,
    narrow_dot,
    normal,
)
from tests.helpers import assert_same_bits

HEAD_IN_FLOAT32 = mpx.Policy(
    "float32", "bfloat16", "float32", overrides=(("head", "float32"),)
)
W, BATCH = normal(0, 8, 16) / 4, normal(1, 32, 16)


def field(w, x):
    """The next state of one example, by two products with a vector."""
    return jnp.sin(w.T @ (w @ x))


def by_hand(dtype):
    dot = narrow_dot(dtype)
    return lambda w, batch: jnp.sin(dot(dot(batch, w.T), w))


AROUND = {
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "jit in vmap": lambda f: jax.vmap(jax.jit(f), (None, 0)),
    "vmap in jit": lambda f: jax.jit(jax.vmap(f, (None, 0))),
    "vmap of vmap": lambda f: (
        lambda w, x: jax.vmap(jax.vmap(f, (None, 0)), (None, 0))(w, x[None])[0]
    ),
    "scan in vmap": lambda f: jax.vmap(
        lambda w, x: lax.scan(lambda x, _: (f(w, x), None), x, length=1)[0], (None, 0)
    ),
    "checkpoint in vmap": lambda f: jax.vmap(jax.checkpoint(f), (None, 0)),
}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("way", AROUND)
def test_a_batch_of_vectors_times_a_weight_is_narrowed_as_by_hand_and_so_are_its_gradients(
    way, dtype
):
    """Control: without a batch all is in float32."""
    fun = mpx.autocast(field, dtype, loss_scale=mpx.NoOpLossScale())
    assert set(contractions(fun, W, BATCH[0])) == {all_in(F32)}
    loss = lambda f: jax.value_and_grad(
        lambda w, x: jnp.cos(f(w, x)).mean(), argnums=(0, 1)
    )
    assert set(contractions(loss(AROUND[way](fun)), W, BATCH)) == {all_in(dtype)}
    actual, expected = (
        exact_jit(loss(f))(W, BATCH) for f in (AROUND[way](fun), by_hand(dtype))
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=0.01 * abs(b).max()),
        actual,
        expected,
    )
    np.testing.assert_allclose(
        AROUND[way](fun)(W, BATCH), by_hand(dtype)(W, BATCH), rtol=0, atol=0.02
    )


def test_a_batch_of_gradients_is_narrowed_but_for_outer_products():
    """Each example has a gradient of its own, in which nothing is summed: that is exact
    for given cotangents.
    """
    grads = jax.vmap(
        jax.grad(lambda w, x: mpx.autocast(field, BF16)(w, x).sum(), argnums=(0, 1)),
        (None, 0),
    )
    found = contractions(grads, W, BATCH)
    assert (found.count(all_in(BF16)), found.count(all_in(F32))) == (4, 2)
    expected = jax.vmap(
        jax.grad(lambda w, x: field(w, x).sum(), argnums=(0, 1)), (None, 0)
    )(W, BATCH)
    for a, e in zip(grads(W, BATCH), expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=0.02 * abs(e).max())


@pytest.mark.parametrize("axes", [(0, 0), (0, None)])
def test_what_stays_a_product_with_a_vector_stays_exact(axes):
    """Counts by a batch of tables, each times a vector: 257, which bfloat16 has not."""
    table = jnp.ones((4, 257, 3), F32)
    count = mpx.autocast(lambda table, ones: ones @ table, BF16)
    ones = jnp.ones((4, 257) if axes[1] == 0 else 257, F32)
    assert_same_bits(jax.vmap(count, axes)(table, ones), jnp.full((4, 3), 257.0))


precise = lambda w, x: jnp.dot(w, x, precision="highest")
KEPT = {
    "a precision that is asked for": (precise, BF16, W, BATCH),
    "complex numbers": (jnp.matmul, BF16, W * (1 + 1j), BATCH.astype(np.complex64)),
    "an override": (lambda w, x: w["head"] @ x, HEAD_IN_FLOAT32, {"head": W}, BATCH),
    "an island": (mpx.full_precision(jnp.matmul), BF16, W, BATCH),
}


@pytest.mark.filterwarnings("ignore:.* no matrix product of")
@pytest.mark.parametrize("name", KEPT)
def test_a_product_that_is_kept_for_another_reason_is_kept_under_vmap_too(name):
    fun, policy, w, batch = KEPT[name]
    actual, expected = (
        jax.vmap(f, (None, 0))(w, batch) for f in (mpx.autocast(fun, policy), fun)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_derivatives_without_a_batch_are_those_of_float32_and_rows_of_a_jacobian_are_a_batch():
    fun, x = mpx.autocast(field, BF16), BATCH[0]
    both = [lambda x, f=f: f(W, x) for f in (fun, field)]
    for way in (
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: lambda x: jax.linearize(f, x)[1](x),
    ):
        np.testing.assert_allclose(*(way(f)(x) for f in both), rtol=1e-5, atol=1e-6)
    for way in (jax.jacfwd, jax.jacrev, jax.hessian):
        actual, expected = (way(f)(x) for f in both)
        np.testing.assert_allclose(
            actual, expected, rtol=0, atol=0.03 * abs(expected).max()
        )


def test_gradients_of_a_weight_in_a_batch_are_float32_sums_if_they_are_asked_for():
    fun = mpx.autocast(field, BF16, reduce_dtype=F32)
    grad = jax.grad(lambda w, x: jax.vmap(fun, (None, 0))(w, x).sum())
    of_weights = [c for c in contractions(grad, W, BATCH) if c.result == F32]
    assert len(of_weights) == 2
    assert {c.lhs for c in of_weights} == {BF16}


def test_a_vector_field_of_one_example_has_a_taylor_series():
    w, x = jnp.eye(8) / 2, jnp.arange(8.0)

    def series(field):
        terms = (jnp.ones(8), jnp.zeros(8))
        return jet.jet(lambda x: field(w, x), (x,), (terms,))

    def field(w, x):
        return jnp.tanh(x @ w)

    found, expected = series(mpx.autocast(field, "bf16")), series(field)
    for ours, plain in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, plain, atol=1e-6)
