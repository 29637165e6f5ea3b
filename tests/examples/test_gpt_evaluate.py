"""HellaSwag's questions, and their score under a model whose losses can be added up by hand."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt.evaluate import Accuracy, Question, QuestionError, accuracy, read_questions

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
RIGHT = {"ctx": "ab", "endings": ["a", "d"], "label": 0, "ind": 7}


def encode(text):
    return np.array([ALPHABET.index(letter) for letter in text], np.uint16)


def bigram_losses(tokens):
    return LOSSES[tokens[:, :-1], tokens[:, 1:]]


def score(*items, losses_of=bigram_losses, context=8, **options):
    return accuracy(losses_of, items, encode, context=context, **options)


@pytest.fixture
def write(tmp_path):
    """Make a file of lines, which are texts or what becomes JSON."""

    def write(*lines):
        path = tmp_path / "items.jsonl"
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        path.write_text(text, encoding="utf-8")
        return path

    return write


# --- The file. ---
def test_questions_are_read_in_order_with_labels_as_numbers_or_digits(write):
    """Lines with nothing on them are skipped, and a separator of lines within a string does not end one."""
    other = {"ctx": "c", "endings": ["a", "b", "c d"], "label": "2"}
    separator = '{"ctx": "a\u2028b", "endings": ["a", "b"], "label": 1}'
    assert read_questions(write(RIGHT, "", other, separator)) == [
        Question("ab", ("a", "d"), 0),
        Question("c", ("a", "b", "c d"), 2),
        Question("a\u2028b", ("a", "b"), 1),
    ]


NEEDED = "a question needs a text 'ctx', two texts or more as 'endings', and the 'label' of one of them"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "Expecting property name"),
        *((line, "is no question: ") for line in ([1], {"ctx": "a", "label": 0}, RIGHT | {"ctx": 5})),
        *((RIGHT | {"label": label}, "is no question: ") for label in ("one", "", None)),
        *((RIGHT | {"endings": endings}, "is no question: ") for endings in (7, ["a", 5])),
        *((RIGHT | {"endings": endings}, NEEDED) for endings in (["a"], ["a", ""])),
        *((RIGHT | {"label": label}, NEEDED) for label in (2, -1, "2")),
        (RIGHT | {"ctx": " "}, NEEDED),
    ],
)
def test_a_wrong_line_is_named_with_its_file_and_number(line, message, write):
    path = write(RIGHT, "", line)
    with pytest.raises(QuestionError, match=message) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}, line 3")


def test_a_file_without_questions_is_refused(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b"\n")
    with pytest.raises(QuestionError, match=r"questions.jsonl has no questions"):
        read_questions(path)


# --- The score. ---
def test_acc_takes_the_lowest_total_and_acc_norm_the_lowest_mean_of_the_endings_tokens():
    """After "b" the space costs 1, so the endings of each item cost as follows.

    " a" 1 + 1 = 2, mean 1; " d" 1 + 4 = 5, mean 2.5: both take the first.
    " d" 1 + 4 = 5, mean 2.5; " bbbbb" 1 + 2 + 4 * 1 = 7, mean 7/6: the total takes the first, the mean the second.
    A mean over the twelve tokens of the context as well, 5/14 and 7/18, would take the first.
    """
    short, long = Question("ab", ("a", "d"), 0), Question("ab" * 6, ("d", "bbbbb"), 1)
    assert score(short, long, context=20) == Accuracy(acc=0.5, acc_norm=1.0, questions=2)


def test_questions_may_have_different_numbers_of_endings_and_of_equal_losses_the_first_wins():
    """The endings of one letter each cost 1 + 1, 1 + 2, 1 + 3 and 1 + 4."""
    items = [Question("b", ("d", "c", "a"), 2), Question("b", ("d", "c"), 1), Question("b", ("d", "c", "b", "a"), 3)]
    assert score(*items) == Accuracy(acc=1.0, acc_norm=1.0, questions=3)
    assert score(Question("b", ("a", "a"), 0)) == Accuracy(1.0, 1.0, 1)
    assert score(Question("b", ("a", "a"), 1)) == Accuracy(0.0, 0.0, 1)


def test_an_ending_is_scored_with_the_space_before_it():
    """ " ba" costs 1 + 2 + 1 = 4, mean 4/3, and " a" costs 1 + 1 = 2, mean 1.

    Without the space "ba" would cost 3 + 1 and "a" 2. Both means would be 2, and the first ending would win.
    """
    seen = []
    item = Question("aaaa", ("ba", "a"), 1)
    assert score(item, losses_of=lambda tokens: seen.append(tokens.copy()) or bigram_losses(tokens)).acc_norm == 1.0
    np.testing.assert_array_equal(seen[0][:2], [[1, 1, 1, 1, 0, 2, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0, 0, 0]])


def test_the_size_of_a_batch_does_not_matter_and_every_batch_has_the_same_shape():
    generator = np.random.default_rng(0)
    text = lambda: "".join(generator.choice(list("abcd"), generator.integers(1, 5)))
    items = [Question(text(), (text(), text(), text()), int(generator.integers(3))) for _ in range(10)]
    for batch_size in (1, 7, 100):
        shapes = set()
        losses_of = lambda tokens, shapes=shapes: shapes.add((tokens.shape, tokens.dtype)) or bigram_losses(tokens)
        assert score(*items, losses_of=losses_of, batch_size=batch_size) == score(*items, batch_size=30)
        assert shapes == {((batch_size, 9), np.dtype(np.int32))}


@pytest.mark.parametrize("elsewhere", [-1000.0, np.nan])
def test_only_losses_of_the_endings_tokens_count(elsewhere):
    """Row 0 is "b d" and row 1 "b a": the predictions at positions 0 and 1 count, and row 2 does not."""

    def losses_of(tokens):
        losses = np.full((3, 8), elsewhere)
        losses[:2, :2] = bigram_losses(tokens)[:2, :2]
        return losses

    assert score(Question("b", ("d", "a"), 1), losses_of=losses_of, batch_size=3) == Accuracy(1.0, 1.0, 1)


def test_a_context_that_is_too_long_loses_its_start():
    """A model of 4 tokens gets 5 and predicts 4: " a" leaves room for "bcd", and " bcd" only for "d"."""
    seen = []
    item = Question("abcd", ("a", "bcd"), 0)
    score(item, losses_of=lambda tokens: seen.append(tokens.copy()) or bigram_losses(tokens), context=4, batch_size=2)
    np.testing.assert_array_equal(seen, [[encode("bcd a"), encode("d bcd")]])


def test_an_ending_longer_than_the_window_is_refused_before_the_model_runs():
    items = [Question("a", ("b", "c"), 0), Question("a" * 50, ("b", "cccc"), 0)]
    message = r"an ending of question 1 \('a{40}'\) has 5 tokens, but the model has room for 4"
    with pytest.raises(QuestionError, match=message):
        score(*items, losses_of=lambda tokens: pytest.fail("the error came too late"), context=4)
    assert score(*items, context=5).questions == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_loss_that_compares_with_nothing_is_refused(bad):
    losses_of = lambda tokens: np.where(tokens[:, 1:] == 4, bad, bigram_losses(tokens))
    message = "the loss of an ending is NaN or infinite; did the training run diverge"
    with pytest.raises(QuestionError, match=message):
        score(Question("b", ("a", "b"), 0), Question("b", ("a", "b", "d"), 0), losses_of=losses_of)


def test_losses_of_16_bits_are_added_up_in_float64():
    """In bfloat16 256 + 1 is 256, so the ending of 300 tokens, space included, would cost as much as the one of 270."""
    losses_of = lambda tokens: jnp.ones((tokens.shape[0], tokens.shape[1] - 1), jnp.bfloat16)
    item = Question("a", ("a" * 299, "a" * 269), 1)
    ones = np.asarray(losses_of(np.zeros((1, 301))))
    assert ones[0].sum() == ones[0, :270].sum()  # negative control
    assert score(item, losses_of=losses_of, context=300).acc == 1.0
