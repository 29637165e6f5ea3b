"""Check that the new state of a rule is computed twice for a GPU, and that nothing else changes by it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx._transforms import computed_again
from tests.helpers import QUICKLY, all_eqns, assert_same_bits

pytestmark = pytest.mark.optax_promotion

MOMENTS = {"mu": mpx.Blockwise8bit(), "nu": mpx.Blockwise8bit()}


def arrays(seed):
    return {"w": jnp.asarray(np.random.default_rng(seed).normal(size=(16, 512)), jnp.float32)}


def trained(tx, compiled=lambda f: jax.jit(f, compiler_options=QUICKLY), steps=3):
    state, update = tx.init(arrays(0)), compiled(tx.update)
    for seed in range(steps):
        updates, state = update(arrays(seed), state, arrays(0))
    return updates, state


def lowered_for(platform, tx):
    traced = jax.jit(tx.update).trace(arrays(1), jax.eval_shape(tx.init, arrays(0)), arrays(0))
    return traced.lower(lowering_platforms=(platform,)).as_text()


def decodings(tx):
    """Return how often the one moment of a transformation is decoded in a program for every platform."""
    update = lambda *args: tx.update(*args)  # JAX would remember what it has traced of a function that it knows
    program = jax.make_jaxpr(update)(arrays(1), jax.eval_shape(tx.init, arrays(0)), arrays(0))
    return 1 + any(eqn.primitive.name == "optimization_barrier" for eqn in all_eqns(program))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(computed_again, "_copy", jax.lax.optimization_barrier)


def test_a_gpu_decodes_each_moment_twice_and_other_machines_once():
    tx = mpx.low_precision_state(optax.adam(1e-3), MOMENTS)
    assert lowered_for("cuda", tx).count("optimization_barrier") == len(MOMENTS)
    assert "optimization_barrier" not in lowered_for("cpu", tx)
    assert "optimization_barrier" not in lowered_for("tpu", tx)


@pytest.mark.parametrize("key", [None, 0], ids=["nearest", "stochastic"])
def test_what_is_computed_twice_has_the_same_bits(as_on_a_gpu, monkeypatch, key):
    options = {} if key is None else {"rounding": "stochastic", "key": jax.random.key(key)}
    made = lambda: mpx.low_precision_state(optax.adamw(1e-3), MOMENTS, **options)  # a new one is traced anew
    twice = trained(made())
    monkeypatch.setattr(computed_again, "_copy", lambda x: x * 0)  # negative control: scales are those of the copy
    assert not np.array_equal(*(next(iter(state.block_scales.values())) for _, state in (trained(made()), twice)))
    monkeypatch.setattr(computed_again, "mixing_culprit", lambda *_, **__: "anything")
    assert_same_bits(trained(made()), twice)


def printed(m):
    jax.debug.print("{}", m[0, 0])
    return m


CHANGES = {  # of a moment, before the gradient is added, and how often it is decoded for a GPU
    "elementwise": (lambda m: 0.9 * m, 2),
    "a product": (lambda m: m @ jnp.eye(512, dtype=jnp.float32), 1),
    "a sum": (lambda m: m / (1 + jnp.sum(m)), 1),
    "printed": (printed, 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_only_what_is_elementwise_and_prints_nothing_is_computed_twice(name):
    change, times = CHANGES[name]

    def update(updates, state, params=None):
        trace = jax.tree.map(lambda m, g: change(m) + g, state.trace, updates)
        return trace, optax.TraceState(trace)

    rule = optax.GradientTransformation(optax.trace(0.9).init, update)
    assert decodings(mpx.low_precision_state(rule, {"trace": mpx.Blockwise8bit()})) == times


def test_a_step_that_is_traced_for_kernels_computes_it_once():
    tx = mpx.low_precision_state(optax.trace(0.9), {"trace": mpx.Blockwise8bit()})
    assert decodings(tx) == 2
    with computed_again.computed_once():
        assert decodings(tx) == 1
    assert decodings(tx) == 2


def test_any_format_with_scales_is_computed_twice():
    @dataclasses.dataclass(frozen=True)
    class Halved(mpx.Blockwise8bit):
        def scales_of(self, x):
            return super().scales_of(x / 2)

        def encode(self, x, scales, key=None):
            return super().encode(x / 2, scales, key)

    tx = mpx.low_precision_state(optax.trace(0.9), {"trace": Halved(signed=True)})
    assert decodings(tx) == 2
    scales = trained(tx, steps=1)[1].block_scales.popitem()[1]
    assert_same_bits(jnp.max(jnp.abs(scales)), jnp.max(jnp.abs(arrays(0)["w"])) / 2)


def test_it_works_under_vmap_in_scan_and_inside_a_derivative(as_on_a_gpu):
    """Scale by powers of two only: then all programs have the same bits."""
    tx = mpx.low_precision_state(optax.sgd(2.0**-10, momentum=0.5), {"trace": mpx.Blockwise8bit()})
    expected = trained(tx, steps=2)
    gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), arrays(0), arrays(1))

    @jax.jit
    def scanned(gradients):
        step = lambda state, g: tx.update(g, state, arrays(0))[::-1]
        state, updates = jax.lax.scan(step, tx.init(arrays(0)), gradients)
        return jax.tree.map(lambda leaf: leaf[-1], updates), state

    assert_same_bits(scanned(gradients), expected)
    batched = jax.jit(jax.vmap(scanned))(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), gradients))
    assert_same_bits(jax.tree.map(lambda leaf: leaf[1], batched), expected)
    slope = jax.grad(lambda rate: scanned(jax.tree.map(lambda g: rate * g, gradients))[0]["w"].sum())(1.0)
    assert np.isfinite(slope)
