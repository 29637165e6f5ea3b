"""What pages say of bytes, held against programs for an H200."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
from tests.pages import ROOT, run_blocks

MEMORY = ROOT / "docs" / "concepts" / "memory.md"
README = ROOT / "README.md"


def peak_of(page, pairs, device):
    """Return the peak of the page's training step, in bytes a parameter, for wide
    layers.
    """
    text = page.read_text()
    for old, new in [
        ("(256, 8)", "(2, 4096)"),
        ("nn.Dense(64)", "nn.Dense(4096)"),
        *pairs,
    ]:
        assert old in text, old
        text = text.replace(old, new)
    names = run_blocks(text[: text.index("\nfor step in")] + "\n```\n", page.name)
    arguments = jax.eval_shape(
        lambda: tuple(names[name] for name in ("params", "opt_state", "x", "y"))
    )
    report = mpx.step_report(names["train_step"], *arguments, target=device)
    return report.peak_bytes / sum(leaf.size for leaf in jax.tree.leaves(arguments[0]))


@pytest.mark.optax_promotion
def test_the_training_step_of_the_readme_has_the_bytes_that_it_names(h200):
    assert 14.0 < peak_of(README, [], "h200") < 14.1


@pytest.mark.optax_promotion
def test_the_same_step_without_donation_has_twice_the_state(h200):
    assert peak_of(README, [(", donate_argnums=(0, 1))", ")")], "h200") > 25.9


def peak(layers, clipped=False, by="update"):
    """Return the peak of memory of a step, in bytes a parameter: 16 layers of 2,048 x
    8,192, 8-bit moments.
    """
    policy = mpx.get_policy("params=bf16,compute=bf16,output=f32")
    adamw8 = mpx.low_precision_state(optax.adamw(1e-3), {"mu|nu": mpx.Blockwise8bit()})
    tx = mpx.mixed_precision(
        optax.chain(optax.clip_by_global_norm(1.0), adamw8) if clipped else adamw8,
        policy,
    )
    layer = lambda x, w: (x + jax.nn.relu(x @ w["up"]) @ w["down"], None)
    unrolled = lambda x, ws: (
        functools.reduce(lambda x, w: layer(x, w)[0], ws, x),
        None,
    )
    run = unrolled if layers == "unrolled" else lambda x, ws: jax.lax.scan(layer, x, ws)
    loss_fn = mpx.autocast(lambda params, x: jnp.mean(run(x, params)[0] ** 2), policy)
    shapes = {"up": (2048, 8192), "down": (8192, 2048)}
    make = lambda *before: {
        name: jax.ShapeDtypeStruct((*before, *s), jnp.bfloat16)
        for name, s in shapes.items()
    }
    params = [make()] * 16 if layers == "unrolled" else make(16)

    def step(params, opt_state, x):
        loss, grads = mpx.value_and_grad(
            loss_fn, mpx.get_loss_scale(opt_state), grad_dtype="as_computed"
        )(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    arguments = (
        params,
        jax.eval_shape(tx.init, params),
        jax.ShapeDtypeStruct((64, 2048), jnp.float32),
    )
    if by == "train_step":
        step = mpx.train_step(loss_fn, tx)
    report = mpx.step_report(step, *arguments, target="h200", donate_argnums=(0, 1))
    return report.peak_bytes / (16 * 2 * 2048 * 8192)


PEAKS = {
    "unrolled": {"layers": "unrolled"},
    "clipped": {"layers": "unrolled", "clipped": True},
    "scanned,": {"layers": "scanned"},
    "scanned in `train_step`": {"layers": "scanned", "by": "train_step"},
}


@pytest.mark.slow
@pytest.mark.optax_promotion
@pytest.mark.parametrize("how", PEAKS)
def test_a_step_has_the_peak_that_the_memory_page_states(how, h200):
    (stated,) = re.findall(rf"\b([\d.]+) {how}", MEMORY.read_text())
    assert peak(**PEAKS[how]) == pytest.approx(float(stated), abs=0.03)
