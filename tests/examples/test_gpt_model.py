"""The GPT of the examples: one source for every precision, and full gradients for the embedding of a frequent token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx
from examples.gpt.model import GPT, next_byte_loss

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = pytest.mark.optax_promotion

TOKEN = 7


@pytest.fixture(scope="module")
def model_and_loss():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        graphdef, params = nnx.split(GPT(width=32, depth=1, context=8, rngs=nnx.Rngs(0)))
    params = mpx.cast(params, "bf16")

    def loss_fn(params, tokens):
        return next_byte_loss(nnx.merge(graphdef, params)(tokens), jnp.roll(tokens, 1, axis=1) + 1)

    return params, loss_fn


def error_of_row(gradient, exact):
    row, expected = (np.asarray(g["token_embedding"][...], np.float32)[TOKEN] for g in (gradient, exact))
    return np.linalg.norm(row - expected) / np.linalg.norm(expected)


def test_a_token_seen_a_thousand_times_gets_its_full_gradient(model_and_loss):
    """125 sequences of 8 equal tokens. Cast once, the thousand terms are added up in bfloat16, where they get lost."""
    params, loss_fn = model_and_loss
    tokens = jnp.full((125, 8), TOKEN)
    exact = jax.jit(jax.grad(loss_fn))(mpx.cast(params, "f32"), tokens)
    with_autocast = jax.jit(mpx.grad(mpx.autocast(loss_fn, "bf16")))(params, tokens)
    cast_once = jax.jit(mpx.grad(loss_fn))(params, tokens)

    assert with_autocast["token_embedding"][...].dtype == jnp.float32
    print(error_of_row(with_autocast, exact), error_of_row(cast_once, exact))
    assert error_of_row(with_autocast, exact) < 0.01
    assert error_of_row(cast_once, exact) > 0.1


def test_every_matrix_product_of_the_model_is_lowered(model_and_loss):
    params, loss_fn = model_and_loss
    explanation = mpx.explain(jax.grad(loss_fn), "bf16")(mpx.cast(params, "f32"), jnp.zeros((2, 8), jnp.int32))
    assert explanation.lowered_share == 1.0
    forward = mpx.explain(loss_fn, "bf16")(params, jnp.zeros((2, 8), jnp.int32))
    # Four linear layers and two products of attention in the block, and the head; twice each in the backward pass.
    assert sum(row.count for row in forward.contractions) == 7
    assert sum(row.count for row in explanation.contractions) == 3 * 7
