"""The cross-entropy of the examples' GPT: in chunks it is the same number, with gradients of the same precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from examples.gpt.loss import cross_entropy, mean_loss, token_losses

pytestmark = pytest.mark.slow

BATCH, LENGTH, WIDTH, ROWS, VOCABULARY = 4, 16, 8, 128, 100


def inputs(batch=BATCH, seed=0):
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(batch, LENGTH, WIDTH)).astype(np.float32)
    embedding = generator.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return features, embedding, generator.integers(0, VOCABULARY, (batch, LENGTH)).astype(np.int32)


def exact(features, embedding, targets, vocabulary=VOCABULARY):
    """Loss of each token, and the mean's gradients, in float64 and from the formulas of a textbook."""
    features, embedding = np.float64(features), np.float64(embedding)
    logits = features @ embedding[:vocabulary].T
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    is_target = np.eye(vocabulary)[targets]
    losses = -np.log((probabilities * is_target).sum(-1))
    error = (probabilities - is_target) / targets.size
    embedding_gradient = np.zeros(embedding.shape)
    embedding_gradient[:vocabulary] = np.einsum("btv,btc->vc", error, features)
    return losses, error @ embedding[:vocabulary], embedding_gradient


def loss_and_gradients(chunks, policy="f32"):
    loss_fn = lambda *given: mean_loss(*given, vocabulary=VOCABULARY, chunks=chunks)
    return jax.value_and_grad(mpx.autocast(loss_fn, policy) if policy != "f32" else loss_fn, (0, 1))


def distance(actual, expected):
    """Of two arrays, as a part of the size of the second one."""
    return np.linalg.norm(np.float64(actual) - expected) / np.linalg.norm(expected)


# --- What is computed. ---
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_large_logits_do_not_overflow_and_rows_of_minus_infinity_are_left_out(scale):
    """In float64 and from the textbook. Without its maximum (the negative control) a sum of exponentials overflows.

    A loss is the difference of two numbers of the size of the logits: it has their last digit.
    """
    generator = np.random.default_rng(1)
    logits = (scale * generator.normal(size=(5, 9))).astype(np.float32)
    logits[:, 7:] = -np.inf
    targets = generator.integers(0, 7, 5).astype(np.int32)
    shifted = np.float64(logits) - np.float64(logits).max(-1, keepdims=True)
    exact = np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(5), targets]
    last_digit = np.spacing(np.float32(np.abs(logits[:, :7]).max()))
    np.testing.assert_allclose(cross_entropy(logits, targets), exact, rtol=1e-6, atol=2 * last_digit)
    gradient = jax.grad(lambda x: cross_entropy(x, targets).sum())(logits)
    softmax = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient, softmax - np.eye(9)[targets], atol=1e-6 + 2 * last_digit)
    assert bool(np.isfinite(jnp.log(jnp.exp(logits).sum(-1))).all()) == (scale == 1.0)


@pytest.mark.parametrize("chunks", [1, 4])
def test_loss_and_gradients_are_those_of_the_formula(chunks):
    given = inputs()
    loss, (of_features, of_embedding) = jax.jit(loss_and_gradients(chunks))(*given)
    losses, features_gradient, embedding_gradient = exact(*given)

    assert loss.dtype == of_features.dtype == of_embedding.dtype == jnp.float32
    assert loss.shape == ()
    assert loss == pytest.approx(losses.mean(), rel=1e-6)
    assert distance(of_features, features_gradient) < 1e-6
    assert distance(of_embedding, embedding_gradient) < 1e-6
    assert not np.asarray(of_embedding[VOCABULARY:]).any()  # rows that only pad it
    # Negative control: one token less in 64 is seen.
    assert distance(exact(*(x[:, 1:] if x is not given[1] else x for x in given))[2], embedding_gradient) > 1e-3


def test_gradients_of_the_embedding_are_added_up_in_float32():
    """A chunk of 1,024s, then 31 of ones: bfloat16 has no number between 1,016 and 1,024, so that all ones get lost."""
    length = 32
    features = jnp.ones((1, length, WIDTH), jnp.bfloat16).at[:, 0].set(1024)
    embedding = jnp.asarray(inputs()[1] / 4096, jnp.bfloat16)
    targets = jnp.full((1, length), 7)
    expected = exact(*map(np.asarray, (features, embedding, targets)))[2]
    _, (_, gradient) = jax.jit(loss_and_gradients(length))(features, embedding, targets)

    @jax.jit
    def added_in_bfloat16():
        of_chunk = jax.grad(lambda e, i: token_losses(features[:, i], e, targets[:, i], vocabulary=VOCABULARY).sum())
        total = jnp.zeros_like(embedding)
        for i in range(length):
            total = jax.lax.optimization_barrier(total + of_chunk(embedding, slice(i, i + 1)))
        return total / length

    assert gradient.dtype == jnp.bfloat16
    assert distance(gradient, expected) < 2**-8
    assert distance(added_in_bfloat16(), expected) > 0.02  # negative control
