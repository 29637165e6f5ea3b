"""Score a language model on multiple-choice questions of HellaSwag's form.

A question is the start of a text and several endings, one of which is right. Each ending is appended to the start, and
the model's answer is the ending that it finds most likely.

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

PADDING = 0  # any token: it stands after all that counts, and the model is causal


class MultipleChoiceError(ValueError):
    """Questions cannot be used or scored; the message says which one and why."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One question: the start of a text, its endings without the space before them, and the index of the right one."""

    context: str
    endings: tuple[str, ...]
    label: int


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The share of questions answered right."""

    acc: float
    acc_norm: float
    items: int


# --- The file. ---
def read_items(path: Path) -> list[Item]:
    """Read a JSONL file: "ctx", "endings" and "label", and any other keys, on each line that is not empty."""
    items = []
    try:
        # Not `splitlines`, which also cuts at characters that may stand unescaped in a string of JSON.
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
            if line.strip():
                items.append(_parse(line, f"{path}, line {number}"))
    except OSError as error:
        raise MultipleChoiceError(f"cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise MultipleChoiceError(f"{path} is not a text in UTF-8: {error.reason} at byte {error.start}.") from error
    if not items:
        raise MultipleChoiceError(f"{path} has no items; each line should be one, as JSON.")
    return items


def _parse(line: str, where: str) -> Item:
    is_text = lambda value: isinstance(value, str) and bool(value.strip())
    try:
        fields: Any = json.loads(line)
        context, endings, label = fields["ctx"], fields["endings"], int(fields["label"])  # some copies have digits
    except (ValueError, TypeError, LookupError) as error:
        raise MultipleChoiceError(
            f"{where}: this should be a JSON object with 'ctx', 'endings' and 'label', but: {error!r}. HellaSwag's "
            "validation split has labels, its test split has none."
        ) from error
    if not is_text(context):
        raise MultipleChoiceError(f"{where}: 'ctx' must be a text, but is {context!r}.")
    if not (isinstance(endings, list) and len(endings) > 1 and all(map(is_text, endings))):
        raise MultipleChoiceError(f"{where}: 'endings' must be a list of two texts or more, but is {endings!r}.")
    if not 0 <= label < len(endings):
        raise MultipleChoiceError(f"{where}: 'label' must be from 0 to {len(endings) - 1}, but is {label}.")
    return Item(context, tuple(endings), label)


# --- The score. ---
@dataclasses.dataclass(frozen=True)
class _Row:
    """A context and one of its endings as tokens, the last `ending_length` of which count."""

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
    """Score every ending by the loss of its tokens after the context, and count how often the right one is lowest.

    For an ending e of the context c, with l(t) the cross-entropy of token t given all tokens before it:

        tokens     = encode(c), encode(" " + e)
        total loss = sum of l(t) over the tokens of " " + e     the lowest wins `acc`
        mean loss  = total loss / number of these tokens        the lowest wins `acc_norm`

    Of equal losses the first ending wins. Reproductions of GPT-2 print this `acc_norm`; lm-evaluation-harness divides
    by the length of the ending's text instead. `losses_of` goes from int32 tokens (batch_size, context + 1) to the loss
    of each prediction (batch_size, context), always of one shape. A context that is too long loses its start.
    """
    # All rows are made before the first loss, so that a wrong item is found before the model runs for minutes.
    rows = [row for index, item in enumerate(items) for row in _rows(index, item, encode, context)]
    starts = range(0, len(rows), batch_size)
    totals = np.concatenate([_totals(losses_of, rows[i : i + batch_size], context, batch_size) for i in starts])
    ends = np.cumsum([len(item.endings) for item in items])[:-1]
    labels = [item.label for item in items]
    share = lambda losses: float(
        np.mean([x.argmin() == y for x, y in zip(np.split(losses, ends), labels, strict=True)])
    )
    means = totals / np.array([row.ending_length for row in rows])
    return Accuracy(acc=share(totals), acc_norm=share(means), items=len(items))


def _rows(index: int, item: Item, encode: Callable[[str], np.ndarray], context: int) -> list[_Row]:
    """Return one row an ending, cut at its start to the `context + 1` tokens that a model reads and predicts."""
    beginning = f"{item.context[:40]}…" if len(item.context) > 40 else item.context
    start, rows = encode(item.context), []
    for number, text in enumerate(item.endings):
        name, ending = f"items[{index}] ({beginning!r}), ending {number}", encode(" " + text)
        if len(ending) > context:
            raise MultipleChoiceError(
                f"{name} has {len(ending)} tokens, but the window has room for {context}; use a model with a longer "
                "context, or leave this item out."
            )
        rows.append(_Row(name, np.concatenate([start, ending]).astype(np.int32)[-(context + 1) :], len(ending)))
    return rows


def _totals(
    losses_of: Callable[[np.ndarray], ArrayLike], rows: list[_Row], context: int, batch_size: int
) -> np.ndarray:
    """Return the loss of each row's ending; rows and the last batch are padded at their ends."""
    tokens = np.full((batch_size, context + 1), PADDING, np.int32)
    for row_index, row in enumerate(rows):
        tokens[row_index, : len(row.tokens)] = row.tokens
    losses = np.asarray(losses_of(tokens))
    totals = np.empty(len(rows))
    for row_index, row in enumerate(rows):
        last = len(row.tokens) - 1  # token i is predicted at position i - 1
        totals[row_index] = losses[row_index, last - row.ending_length : last].astype(np.float64).sum()
        if not np.isfinite(totals[row_index]):
            raise MultipleChoiceError(
                f"{row.name}: the loss is {totals[row_index]}, which cannot be compared; did the training run diverge?"
            )
    return totals
