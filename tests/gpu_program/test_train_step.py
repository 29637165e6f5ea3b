"""Check that no gradient of all layers exists in the programs that XLA compiles for an
H200.

Sixteen layers, each a matrix of 2,048 x 8,192 and one back: 537 million parameters. In
float32 their gradients are 2.1 GB. Figures are of jax 0.10.2.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
from mpx._fused import released

pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]

DEPTH, WIDTH, HIDDEN = 16, 2048, 8192
GB = 1e9
MOMENTS = mpx.Blockwise8bit()
RULES = {
    "f32": lambda: optax.adamw(1e-3),
    "8-bit": lambda: mpx.low_precision_state(optax.adamw(1e-3), {"mu|nu": MOMENTS}),
}


def layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, params)
    return (x**2).mean()


def unrolled(params, x):
    for i in range(DEPTH):
        x = jax.checkpoint(layer)(x, jax.tree.map(lambda w, i=i: w[i], params))
    return (x**2).mean()


def listed(params, x):
    for w in params:
        x = jax.checkpoint(layer)(x, w)
    return (x**2).mean()


def apart(loss_fn, tx):
    def step(params, opt_state, x):
        loss, grads = mpx.value_and_grad(loss_fn, grad_dtype="as_computed")(params, x)
        return *mpx.fused_update(tx)(grads, opt_state, params), loss

    return step


def report(make, loss_fn, tx, params):
    step = jax.jit(make(loss_fn, tx), donate_argnums=(0, 1))
    x = jax.ShapeDtypeStruct((512, WIDTH), jnp.float32)
    opt_state = jax.eval_shape(tx.init, params)
    return mpx.step_report(step, params, opt_state, x, target="h200")


def shapes(*leading):
    return {
        "up": jax.ShapeDtypeStruct((*leading, WIDTH, HIDDEN), jnp.float32),
        "down": jax.ShapeDtypeStruct((*leading, HIDDEN, WIDTH), jnp.float32),
    }


@pytest.mark.parametrize(("rule", "moved"), [("f32", 0.85), ("8-bit", 0.82)])
def test_layers_in_a_scan_have_no_gradients_of_all_layers(
    h200, rule, moved, monkeypatch
):
    # A program for one GPU, though this machine has eight CPUs.
    monkeypatch.setattr(released, "are_several_in_sight", lambda: False)
    tx = RULES[rule]()
    one, two = (
        report(make, scanned, tx, shapes(DEPTH)) for make in (mpx.train_step, apart)
    )
    gradients = 4 * 2 * DEPTH * WIDTH * HIDDEN
    assert two.temporary_bytes / GB == pytest.approx(2.37, abs=0.05)
    assert two.temporary_bytes > gradients > 4 * one.temporary_bytes
    # A kernel writes into the stacks, and reads a gradient that was never put in one.
    assert one.moved_bytes / two.moved_bytes == pytest.approx(moved, abs=0.02)
    assert not one.findings
    (finding,) = (x for x in two.findings if "all layers are kept" in x.what)
    assert finding.bytes >= gradients / 2
    assert "mpx.train_step" in finding.remedy


@pytest.mark.parametrize("how", ["stacked", "listed"])
def test_layers_without_a_loop_need_no_more_memory_than_apart(h200, how):
    loss_fn, params = (
        (unrolled, shapes(DEPTH))
        if how == "stacked"
        else (listed, [shapes() for _ in range(DEPTH)])
    )
    one, two = (
        report(make, loss_fn, optax.adamw(1e-3), params)
        for make in (mpx.train_step, apart)
    )
    assert one.temporary_bytes <= 1.01 * two.temporary_bytes
