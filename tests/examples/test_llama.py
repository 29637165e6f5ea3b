"""Check the example's Llama: against one written plainly, and on eight devices against
one.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import mpx
from examples import llama

pytestmark = [pytest.mark.optax_promotion, pytest.mark.many_devices]

SMALL = llama.Config(width=64, hidden=96, depth=2, heads=4, key_heads=2, vocabulary=64)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 33)).astype("int32")


def plain_loss(config, params, tokens):
    """Return the loss with unrolled layers, complex rotations, repeated keys, and all
    logits.
    """
    norm = lambda x, scale: x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    length, head = tokens.shape[1] - 1, config.width // config.heads
    angles = np.arange(length)[:, None] * 500_000.0 ** (-np.arange(0, head, 2) / head)

    def rotated(x):
        a, b = jnp.split(x, 2, -1)
        turned = (a + 1j * b) * np.exp(1j * angles)[:, None].astype("complex64")
        return jnp.concatenate([turned.real, turned.imag], -1)

    x = params["embedding"][tokens[:, :-1]]
    for i in range(config.depth):
        w = {name: leaf[i] for name, leaf in params["layers"].items()}
        h = norm(x, w["attention_norm"])
        query, key, value = (
            (h @ w[name]).reshape(8, length, -1, head)
            for name in ("query", "key", "value")
        )
        key, value = (
            jnp.repeat(z, config.heads // config.key_heads, 2)
            for z in (rotated(key), value)
        )
        logits = jnp.einsum("bthd,bshd->bhts", rotated(query), key) / head**0.5
        weights = jax.nn.softmax(
            jnp.where(np.tri(length, dtype=bool), logits, -jnp.inf)
        )
        x = (
            x
            + jnp.einsum("bhts,bshd->bthd", weights, value).reshape(x.shape) @ w["out"]
        )
        h = norm(x, w["mlp_norm"])
        x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    log_probabilities = jax.nn.log_softmax(norm(x, params["norm"]) @ params["head"])
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], 2).mean()


def test_loss_and_gradients_are_those_of_a_plain_llama():
    with jax.numpy_rank_promotion("allow"):
        # Attention has a choice.
        params = jax.tree.map(
            lambda w: 5 * w, llama.init_params(SMALL, jax.random.key(0))
        )
        of = lambda loss: jax.jit(
            jax.value_and_grad(lambda params: loss(SMALL, params, TOKENS))
        )(params)
        (loss, grads), (expected, plain) = of(llama.loss_fn), of(plain_loss)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(
        a, b, rtol=2e-3, atol=1e-4 * jnp.abs(b).max()
    )
    jax.tree.map(close, grads, plain)


def losses_on(count, recipe, **options):
    """Return the losses of some steps on so many devices; one has no mesh."""
    fields = {name: options.pop(name) for name in ("kept",) if name in options}
    start, step = llama.make_step(
        dataclasses.replace(SMALL, **fields), recipe, learning_rate=1e-2, **options
    )
    mesh = jax.make_mesh((count,), ("data",), devices=jax.devices("cpu")[:count])
    with jax.set_mesh(mesh) if count > 1 else contextlib.nullcontext():
        params, opt_state = jax.jit(start)(jax.random.key(0))
        tokens = llama.on_mesh(jnp.asarray(TOKENS), llama.DIVIDED)
        losses = []
        for _ in range(4):
            params, opt_state, loss = step(params, opt_state, tokens)
            losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    ("recipe", "options", "tolerance"),
    [
        ("f32", {}, 1e-5),
        pytest.param(
            *(
                "bf16-split24-8bit",
                {"kept": mpx.Blockwise8bit(), "grad_dtype": "bf16"},
                2e-3,
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_eight_devices_train_with_the_losses_of_one(recipe, options, tolerance):
    one, eight = (losses_on(count, recipe, **options) for count in (1, 8))
    assert one[-1] < one[0] - 0.3
    np.testing.assert_allclose(eight, one, rtol=tolerance)


@pytest.mark.slow  # it reads Python's library
def test_the_command_trains():
    result = CliRunner().invoke(
        llama.app,
        ["--steps", "20", "--length", "32", "--rows", "8"],
        catch_exceptions=False,
    )
    losses = [float(line.rpartition(" ")[2]) for line in result.output.splitlines()]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 5.6
