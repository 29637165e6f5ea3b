"""Sampling from models whose logits are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt.sample import generate

KEY = jax.random.key(0)
# Of six tokens; the last one is padding of the vocabulary.
PROBABILITIES = np.array([0.4, 0.05, 0.3, 0.2, 0.05, 0.0])
DRAWS = 8_000


def fixed(logits, tokens):
    """Return the same logits at every position, whatever the tokens are."""
    return jnp.broadcast_to(logits[None, None], (*tokens.shape, len(logits)))


def weighted_sum(params, tokens):
    """Return rows of a table, summed over all tokens so far with a weight for each position: a wrong shift shows."""
    table, weights = params
    return jnp.cumsum(weights[None, :, None] * table[tokens], axis=1)


def most_likely_continuation(params, prompt, count):
    """Continue by `weighted_sum`, one token at a time, in float64 and without padding."""
    table, weights = (array.astype(np.float64) for array in params)
    tokens = list(prompt)
    for _ in range(count):
        seen = tokens[-len(weights) :]
        tokens.append(int(np.argmax(weights[: len(seen)] @ table[seen])))
    return tokens[len(prompt) :]


def frequencies(logits, **options):
    drawn = generate(fixed, logits, np.array([0]), count=DRAWS, context=2, key=KEY, **options)
    return np.bincount(drawn, minlength=len(PROBABILITIES)) / DRAWS


def assert_drawn_from(expected, measured):
    """A frequency of n draws has the standard deviation sqrt(p (1 - p) / n); of ours none may be 4 of them away."""
    expected = np.asarray(expected) / np.sum(expected)
    assert (np.abs(measured - expected) <= 4 * np.sqrt(expected * (1 - expected) / DRAWS)).all(), measured


@pytest.mark.parametrize("length", [1, 6, 7, 20])
def test_a_full_window_moves_on_as_in_a_loop_over_growing_lists(length):
    """The window has 7 tokens: it is filled at once, on the way, or by the end of a longer prompt.

    A token makes itself less likely, or the most likely continuation would soon be one token for ever.
    """
    generator = np.random.default_rng(0)
    table = (generator.normal(size=(11, 11)) - 3 * np.eye(11)).astype(np.float32)
    params = table, generator.uniform(0.5, 1.5, size=7).astype(np.float32)
    prompt = np.random.default_rng(length).integers(0, 11, length)
    expected = most_likely_continuation(params, prompt, 30)
    tokens = generate(weighted_sum, params, prompt, count=30, context=7, key=KEY, temperature=0.0)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, expected)
    assert len(set(expected)) > 3  # a loop that repeats one token would hide a wrong shift


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_probabilities_and_padding_is_never_drawn(temperature):
    """Logits divided by a temperature are probabilities to the power of its inverse."""
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(PROBABILITIES), np.float32)
    measured = frequencies(logits, temperature=temperature)
    assert_drawn_from(PROBABILITIES ** (1 / temperature), measured)
    assert measured[5] == 0
    with pytest.raises(AssertionError):  # negative control
        assert_drawn_from(PROBABILITIES ** (1 / (1.25 * temperature)), measured)
