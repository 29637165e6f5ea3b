"""Text, tokens and batches: what is held out, what is shuffled, and a position that any number of processes takes."""

import itertools
import json

import numpy as np
import pytest
import tiktoken
from tiktoken_ext.openai_public import ENDOFTEXT, r50k_pat_str

from examples.gpt import data
from examples.gpt.data import Rows, get_tokenizer


@pytest.fixture(scope="module")
def pairs():
    """A tokenizer like GPT-2's: all bytes, the pairs "el" and "he", and the words "hel" and "hello"."""
    words = [*(bytes([value]) for value in range(256)), b"el", b"he", b"hel", b"lo", b"hello"]
    ranks, special = {word: rank for rank, word in enumerate(words)}, {ENDOFTEXT: len(words)}
    made = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken, "get_encoding", {"gpt2": made}.__getitem__)
        yield get_tokenizer("gpt2")


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder of 25 files of one piece, and a longer file."""
    monkeypatch.setattr(data, "PIECE_BYTES", 40)
    (tmp_path / "many").mkdir()
    for number in range(25):
        (tmp_path / "many" / f"{number:02d}.txt").write_text(f"document number {number}\n", encoding="utf-8")
    (tmp_path / "single.txt").write_text("".join(f"a line of number {number:02d}\n" for number in range(40)))
    return [tmp_path / "many", tmp_path / "single.txt"]


def test_every_tenth_piece_is_held_out_and_a_separator_begins_each_document(texts, tmp_path, pairs):
    index = data.prepare(tmp_path / "out", texts, "gpt2")
    pieces = [piece for path in texts for piece in data.pieces(path)]
    assert len(pieces) > 30
    assert [begins for _, begins in pieces].count(True) == 26
    expected = {"training": "", "validation": ""}
    for number, (piece, begins) in enumerate(pieces, start=1):
        expected["training" if number % 10 else "validation"] += "<|endoftext|>" * begins + piece.decode()
    for part, text in expected.items():
        tokens = np.fromfile(tmp_path / "out" / f"{part}.bin", np.uint16)
        assert pairs.decode(tokens) == text
        assert len(tokens) == getattr(index, part)
    assert index == data.read_index(tmp_path / "out")
    assert index.texts == list(map(str, texts))
    assert index.sha256 == data.prepare(tmp_path / "again", texts, "gpt2").sha256
    texts[1].write_text(texts[1].read_text().replace("11", "12"))
    assert index.sha256 != data.prepare(tmp_path / "other", texts, "gpt2").sha256


@pytest.fixture
def rows(tmp_path):
    """A part with 15 rows of 4 tokens and their last target, whose tokens count from 0: each tells its place."""
    for part, count in (("training", 63), ("validation", 34)):
        np.arange(count, dtype=np.uint16).tofile(tmp_path / f"{part}.bin")
    return Rows(tmp_path, "training", 4)


EVERY_ROW = [tuple(range(4 * row, 4 * row + 5)) for row in range(15)]


def drawn(rows, count, position=None, **options):
    """Return so many batches, and the position after them."""
    batches = data.batches(rows, **{"batch_size": 3, "seed": 0} | options)
    if position is not None:
        batches.set_state(position)
    made = list(itertools.islice(batches, count))
    return [[tuple(row) for row in batch.tolist()] for batch in made], batches.get_state()


def test_every_row_comes_once_an_epoch_in_another_order_in_every_epoch(rows):
    batches, _ = drawn(rows, 10)
    first, second = ([row for batch in part for row in batch] for part in (batches[:5], batches[5:]))
    assert sorted(first) == sorted(second) == EVERY_ROW
    assert first != second
    assert batches == drawn(rows, 10)[0]
    assert batches != drawn(rows, 10, seed=1)[0]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("done", [0, 1, 4])
def test_from_any_position_processes_share_the_batches_of_one(rows, processes, done):
    """Also of a run that was started by another number of them; a position goes through JSON."""
    whole, _ = drawn(rows, 9, batch_size=6)
    _, position = drawn(rows, done, batch_size=6)
    position = json.loads(json.dumps(position))
    parts = [
        drawn(rows, 4, position, batch_size=6, process_index=index, process_count=processes)[0]
        for index in range(processes)
    ]
    for number, batches in enumerate(zip(*parts, strict=True)):
        assert sorted(row for batch in batches for row in batch) == sorted(whole[done + number])
        assert {len(batch) for batch in batches} == {6 // processes}


def test_validation_rows_are_evenly_spaced_and_the_same_at_every_call(rows, tmp_path):
    """Of 8 rows."""
    assert [len(Rows(tmp_path, "training", context)) for context in (62, 63)] == [1, 0]  # of 63 tokens
    batches = data.validation_batches(tmp_path, 2, 2, context=4)
    assert batches.dtype == np.uint16
    assert [tuple(row) for row in batches.reshape(4, -1).tolist()] == [EVERY_ROW[index] for index in (0, 2, 5, 7)]
    every_one = data.validation_batches(tmp_path, 4, 2, context=4)
    assert [tuple(row) for row in every_one.reshape(8, -1).tolist()] == EVERY_ROW[:8]
    with pytest.raises(ValueError, match="has 8 sequences of context 4, and 3 batches of 3 need 9"):
        data.validation_batches(tmp_path, 3, 3, context=4)
