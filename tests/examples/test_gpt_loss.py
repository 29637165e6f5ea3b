"""The cross-entropy of the examples' GPT, whole and in chunks, is that of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt.loss import mean_loss

pytestmark = pytest.mark.slow

BATCH, LENGTH, WIDTH, ROWS, VOCABULARY = 4, 16, 8, 128, 100


def inputs():
    generator = np.random.default_rng(0)
    features = generator.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
    embedding = generator.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return (
        features,
        embedding,
        generator.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32),
    )


def exact(features, embedding, targets, vocabulary=VOCABULARY):
    """Loss of each token, and the mean's gradients, in float64 and from the formulas of
    a textbook.
    """
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


def loss_and_gradients(chunks):
    return jax.value_and_grad(
        lambda *given: mean_loss(*given, vocabulary=VOCABULARY, chunks=chunks), (0, 1)
    )


def distance(actual, expected):
    """Of two arrays, as a part of the size of the second one."""
    return np.linalg.norm(np.float64(actual) - expected) / np.linalg.norm(expected)


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
    assert (
        distance(
            exact(*(x[:, 1:] if x is not given[1] else x for x in given))[2],
            embedding_gradient,
        )
        > 1e-3
    )
