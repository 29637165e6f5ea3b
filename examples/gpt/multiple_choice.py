"""Multiple-choice questions in the form of HellaSwag, answered by the loss of a language model.

A question is the start of a text and several endings, of which one is right. The model is never asked anything: each
ending is appended to the start, and the ending that the model finds most likely is its answer.

HellaSwag's validation split is `hellaswag_val.jsonl` of https://github.com/rowanz/hellaswag, 10,042 questions of four
endings each; chance is 0.25.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

PADDING = 0  # any token will do: it stands after all that counts, and the model is causal


class MultipleChoiceError(ValueError):
    """The questions cannot be used, or not be scored; the message says which one, why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        context: the start of the text.
        endings: two or more ways to go on, without the space that comes before them.
        label: the index of the right one.
    """

    context: str
    endings: tuple[str, ...]
    label: int

    def __post_init__(self) -> None:
        if not self.context.strip():
            raise MultipleChoiceError("the context is empty.")
        if len(self.endings) < 2:
            raise MultipleChoiceError(f"there must be two endings or more, but the number is {len(self.endings)}.")
        empty = [index for index, ending in enumerate(self.endings) if not ending.strip()]
        if empty:
            raise MultipleChoiceError(f"ending {empty[0]} is empty.")
        if not 0 <= self.label < len(self.endings):
            raise MultipleChoiceError(f"the label must be from 0 to {len(self.endings) - 1}, but is {self.label}.")


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How many questions were answered right.

    Attributes:
        acc: share of the items whose right ending has the lowest total loss.
        acc_norm: share of the items whose right ending has the lowest mean loss a token.
        items: number of items.
    """

    acc: float
    acc_norm: float
    items: int


# --- The file. ---
def read_items(path: Path) -> list[Item]:
    """Reads a JSONL file of HellaSwag's form: "ctx", "endings" and "label", and any other keys, on each line.

    The label may be a number or a string of digits; both are in circulation. Lines with nothing on them are skipped.
    The text is taken as it stands.

    Raises:
        MultipleChoiceError: if the file cannot be read, has no items, or a line is not of this form.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MultipleChoiceError(f"cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise MultipleChoiceError(f"{path} is not a text in UTF-8: {error.reason} at byte {error.start}.") from error
    items = []
    # Not `splitlines`, which also cuts at characters that may stand unescaped within a string of JSON.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                items.append(_parse(line))
            except MultipleChoiceError as error:
                raise MultipleChoiceError(f"{path}, line {number}: {error}") from error
    if not items:
        raise MultipleChoiceError(f"{path} has no items; each line should be one, as JSON.")
    return items


def _parse(line: str) -> Item:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise MultipleChoiceError(f"this is not JSON: {error.msg} at column {error.colno}.") from error
    if not isinstance(fields, dict):
        raise MultipleChoiceError(f"this should be a JSON object, but is a {type(fields).__name__}.")
    missing = [key for key in ("ctx", "endings", "label") if key not in fields]
    if missing:
        raise MultipleChoiceError(f"the key {missing[0]!r} is missing; there are {', '.join(map(repr, fields))}.")
    context, endings = fields["ctx"], fields["endings"]
    if not isinstance(context, str):
        raise MultipleChoiceError(f"'ctx' must be a string, but is {context!r}.")
    if not isinstance(endings, list) or not all(isinstance(ending, str) for ending in endings):
        raise MultipleChoiceError(f"'endings' must be a list of strings, but is {endings!r}.")
    return Item(context, tuple(endings), _parse_label(fields["label"]))


def _parse_label(label: Any) -> int:
    if isinstance(label, str) and label.isascii() and label.isdecimal():
        return int(label)
    if isinstance(label, int) and not isinstance(label, bool):
        return label
    # The test split is published without its labels: some copies have an empty string there.
    hint = " The test split of HellaSwag has no labels; use the validation split." if label in ("", None) else ""
    raise MultipleChoiceError(f"'label' must be a number or a string of digits, but is {label!r}.{hint}")


# --- The score. ---
@dataclasses.dataclass(frozen=True)
class _Row:
    """A context and one of its endings, as tokens; `ending_length` is the number of tokens that count, at the end."""

    name: str
    tokens: np.ndarray
    ending_length: int


def accuracy(
    losses_of: Callable[[np.ndarray], ArrayLike],
    items: Sequence[Item],
    encode: Callable[[str], np.ndarray],
    *,
    context: int,
    batch_size: int = 8,
) -> Accuracy:
    """Scores every ending by the loss of its tokens after the context, and counts how often the right one wins.

    For an ending e of the context c, with l(t) the cross-entropy of token t given all tokens before it:

        tokens     = encode(c), encode(" " + e)
        total loss = sum of l(t) over the tokens of " " + e     the lowest wins `acc`
        mean loss  = total loss / number of these tokens        the lowest wins `acc_norm`

    Of equal losses the first ending wins. The mean over tokens is what reproductions of GPT-2 print. It is not the
    `acc_norm` of lm-evaluation-harness, which divides by the length of the ending's text instead and edits the text
    before: compare numbers of one kind only.

    Every call of `losses_of` has the same shape, so that a compiled model compiles once. Endings are padded on the
    right, and the last batch with rows that do not count. A context that is too long loses its start, for each ending
    as much as this ending needs.

    Args:
        losses_of: takes int32 tokens of shape (batch_size, context + 1), of which a model reads `tokens[:, :-1]` and
            predicts `tokens[:, 1:]`, and returns the loss of each prediction, of shape (batch_size, context) and any
            floating dtype. Sums are taken in float64.
        items: the questions.
        encode: turns a text into token ids, of shape (n,) and any integer dtype.
        context: number of tokens that the model reads.
        batch_size: endings at a time.

    Raises:
        MultipleChoiceError: if there are no items, an ending does not fit into the window, or a loss that counts is
            NaN or infinite. Such a loss compares with nothing, and a diverged model should not pass for a bad one.
    """
    if not items:
        raise MultipleChoiceError("`accuracy`: there are no items to score.")
    for name, value in (("context", context), ("batch_size", batch_size)):
        if value < 1:
            raise MultipleChoiceError(f"`accuracy`: `{name}` must be 1 or more, but is {value}.")
    # All rows before the first loss: what is wrong with an item is known before the model has run for minutes.
    rows = [row for index, item in enumerate(items) for row in _rows(index, item, encode, context)]
    totals = np.concatenate(
        [
            _totals(losses_of, rows[start : start + batch_size], context, batch_size)
            for start in range(0, len(rows), batch_size)
        ]
    )
    means = totals / np.array([row.ending_length for row in rows])
    return Accuracy(acc=_share_right(items, totals), acc_norm=_share_right(items, means), items=len(items))


def _share_right(items: Sequence[Item], losses: np.ndarray) -> float:
    """Of items whose right ending has the lowest of its endings' losses, which stand one after another."""
    ends = np.cumsum([len(item.endings) for item in items])
    answers = [of_item.argmin() for of_item in np.split(losses, ends[:-1])]
    return float(np.mean([answer == item.label for answer, item in zip(answers, items, strict=True)]))


def _rows(index: int, item: Item, encode: Callable[[str], np.ndarray], context: int) -> list[_Row]:
    """One row an ending, cut at its start to the `context + 1` tokens that a model reads and predicts."""
    beginning = f"{item.context[:40]}…" if len(item.context) > 40 else item.context
    item_name = f"items[{index}] ({beginning!r})"
    start = _encoded(encode, item.context, f"{item_name}, the context")
    rows = []
    for number, text in enumerate(item.endings):
        name = f"{item_name}, ending {number}"
        ending = _encoded(encode, " " + text, name)
        if len(ending) > context:
            raise MultipleChoiceError(
                f"`accuracy`: {name} has {len(ending)} tokens, but the window has room for {context}; use a model with "
                "a longer context, or leave this item out."
            )
        rows.append(_Row(name, np.concatenate([start, ending])[-(context + 1) :], len(ending)))
    return rows


def _encoded(encode: Callable[[str], np.ndarray], text: str, name: str) -> np.ndarray:
    tokens = np.asarray(encode(text))
    if tokens.ndim != 1 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise MultipleChoiceError(
            f"`accuracy`: {name}: `encode` must return one or more integers in one dimension, but returned "
            f"{tokens.dtype} of shape {tokens.shape}."
        )
    return tokens.astype(np.int32)


def _totals(
    losses_of: Callable[[np.ndarray], ArrayLike], rows: list[_Row], context: int, batch_size: int
) -> np.ndarray:
    """The loss of each row's ending."""
    tokens = np.full((batch_size, context + 1), PADDING, np.int32)
    for row_index, row in enumerate(rows):
        tokens[row_index, : len(row.tokens)] = row.tokens
    losses = np.asarray(losses_of(tokens))
    if losses.shape != (batch_size, context):
        raise MultipleChoiceError(
            f"`accuracy`: `losses_of` must return a loss for each of the {context} predictions, of shape "
            f"{(batch_size, context)}, but returned {losses.shape}."
        )
    totals = np.empty(len(rows))
    for row_index, row in enumerate(rows):
        last = len(row.tokens) - 1  # token i is predicted at position i - 1
        totals[row_index] = losses[row_index, last - row.ending_length : last].astype(np.float64).sum()
        if not np.isfinite(totals[row_index]):
            raise MultipleChoiceError(
                f"`accuracy`: {row.name}: the loss is {totals[row_index]}, which compares with nothing; has the "
                "training of this model diverged, or does it give a token no probability at all?"
            )
    return totals
