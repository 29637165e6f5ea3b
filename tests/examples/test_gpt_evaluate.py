"""HellaSwag's questions, and their score under a model whose losses can be added up by hand."""

import numpy as np
import pytest

from examples.gpt.evaluate import Accuracy, Question, accuracy

ALPHABET = " abcd"  # a character is a token; the space is 0, as is the padding
# The loss of each letter after another one, in nats.
LOSSES = np.array(
    [
        [8, 1, 2, 3, 4],  # after " "
        [1, 2, 3, 4, 5],  # after "a"
        [1, 1, 1, 1, 1],  # after "b"
        [2, 2, 2, 2, 2],  # after "c"
        [8, 8, 8, 8, 8],  # after "d"
    ],
    np.float32,
)


def encode(text):
    return np.array([ALPHABET.index(letter) for letter in text], np.uint16)


def bigram_losses(tokens):
    return LOSSES[tokens[:, :-1], tokens[:, 1:]]


def score(*items, losses_of=bigram_losses, context=8, **options):
    return accuracy(losses_of, items, encode, context=context, **options)


# --- The score. ---
def test_acc_takes_the_lowest_total_and_acc_norm_the_lowest_mean_of_the_endings_tokens():
    """After "b" the space costs 1, so the endings of each item cost as follows.

    " a" 1 + 1 = 2, mean 1; " d" 1 + 4 = 5, mean 2.5: both take the first.
    " d" 1 + 4 = 5, mean 2.5; " bbbbb" 1 + 2 + 4 * 1 = 7, mean 7/6: the total takes the first, the mean the second.
    A mean over the twelve tokens of the context as well, 5/14 and 7/18, would take the first.
    """
    short, long = Question("ab", ("a", "d"), 0), Question("ab" * 6, ("d", "bbbbb"), 1)
    assert score(short, long, context=20) == Accuracy(acc=0.5, acc_norm=1.0, questions=2)


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_the_size_of_a_batch_does_not_matter_and_every_batch_has_the_same_shape(batch_size):
    generator = np.random.default_rng(0)
    text = lambda: "".join(generator.choice(list("abcd"), generator.integers(1, 5)))
    items = [Question(text(), (text(), text(), text()), int(generator.integers(3))) for _ in range(10)]
    shapes = set()
    losses_of = lambda tokens: shapes.add((tokens.shape, tokens.dtype)) or bigram_losses(tokens)
    assert score(*items, losses_of=losses_of, batch_size=batch_size) == score(*items, batch_size=30)
    assert shapes == {((batch_size, 9), np.dtype(np.int32))}
