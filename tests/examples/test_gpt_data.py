"""Text, tokens and batches: what is held out, what is shuffled, and a position that any number of processes takes."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from examples.gpt import data
from examples.gpt.data import DataError, Rows, get_tokenizer

CONTEXT = 16


# --- Text. ---
def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path):
    for name, content in {"b.txt": b"two", "a/z.txt": b"one", ".git/x": b"no", "c.bin": b"n\0", "d/.x": b"no"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert list(data.documents(tmp_path)) == [b"one", b"two"]


def test_the_standard_library_is_read_in_a_fixed_order_without_its_tests():
    files = data.files(None)
    assert files == sorted(files) == data.files(None)
    assert {"argparse.py", "typing.py"} <= {file.name for file in files}
    assert not [file for file in files if {"test", "site-packages"} & set(file.parts[-3:-1])]


def test_a_long_file_is_cut_after_lines_into_documents_that_make_up_the_file(tmp_path, monkeypatch):
    content = "".join(f"line {number} é\n" * (number % 3) for number in range(99)).encode() + b"no end"
    (tmp_path / "a").write_bytes(content)
    monkeypatch.setattr(data, "DOCUMENT_BYTES", 50)
    documents = list(data.documents(tmp_path / "a"))
    assert b"".join(documents) == content
    assert len(documents) > 10
    assert all(document.endswith(b"\n") for document in documents[:-1])


@pytest.mark.parametrize(("every", "share"), [(10, 100), (4, 250)])
def test_the_held_out_part_is_never_trained_on_and_comes_from_all_over_the_text(every, share):
    training, held_out = data.split(np.arange(1000), every)
    assert sorted([*training, *held_out]) == list(range(1000))
    assert len(held_out) == share
    assert np.histogram(held_out, 10, (0, 1000))[0].min() > 0


# --- Tokenizers. ---
@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A tokenizer from files of GPT-2's form: all bytes, the pairs "he" and "el", and the words "hel" and "hello"."""
    folder = tmp_path_factory.mktemp("vocabulary")
    printable = [chr(value) for value in range(256) if chr(value).isprintable() and chr(value) != " "]
    characters = printable + [chr(256 + at) for at in range(256 - len(printable))]
    merges = ["e l", "h e", "h el", "l o", "hel lo"]
    (folder / "vocab.bpe").write_text("\n".join(["#version: 0.2", *merges, ""]))
    tokens = [*characters, *(merge.replace(" ", "") for merge in merges)]
    (folder / "encoder.json").write_text(json.dumps({token: at for at, token in enumerate(tokens)}))
    return get_tokenizer("gpt2", folder)


@given(st.text(st.characters(codec="utf-8")))
def test_text_comes_back_from_its_tokens(pairs, text):
    for tokenizer in (get_tokenizer("bytes"), pairs):
        tokens = tokenizer.encode(text)
        assert tokens.dtype == np.uint16
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode(tokenizer.encode(text.encode())) == text
    assert get_tokenizer("bytes").encode(text).tolist() == list(text.encode())


def test_what_is_no_text_becomes_a_mark(pairs):
    for tokenizer in (get_tokenizer("bytes"), pairs):
        assert tokenizer.decode(tokenizer.encode(b"a\xffb")) == "a\ufffdb"
        assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"  # half a character


def test_bytes_are_joined_by_the_published_files_and_the_separator_is_no_text(pairs):
    assert pairs.encode("hello").tolist() == [260]
    assert pairs.encode("help").tolist() == [258, ord("p") - ord("!")]  # GPT-2 counts from "!"
    assert (pairs.name, pairs.vocabulary, pairs.separator) == ("gpt2", 262, 261)
    assert pairs.separator not in pairs.encode("<|endoftext|>")
    assert pairs.decode([pairs.separator]) == "<|endoftext|>"


# --- A folder of tokens. ---
def part_of(folder, part):
    return np.fromfile(folder / f"{part}.bin", np.uint16)


def documents_of(part, folder, tokenizer):
    """Return what stands between the separators of a part."""
    tokens = part_of(folder, part)
    starts = np.flatnonzero(tokens == data.read_index(folder).separator)
    assert starts[0] == 0
    return [tokenizer.decode(document[1:]) for document in np.split(tokens, starts[1:])]


def document(number):
    return f"document number {number}\n" + "grüße " * (number % 7) + "\n"


@pytest.fixture
def many(tmp_path):
    """A folder of 120 documents."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(120):
        (folder / f"{number:03d}.txt").write_text(document(number), encoding="utf-8")
    return folder


@pytest.fixture
def single(tmp_path):
    """One document of 5,000 characters."""
    path = tmp_path / "single.txt"
    path.write_text("".join(f"{number:04d}\n" for number in range(1000)))
    return path


@pytest.mark.parametrize(("validation", "every"), [(0.1, 10), (0.25, 4)])
def test_every_tenth_of_many_documents_is_held_out(many, single, tmp_path, pairs, validation, every):
    """The text that comes after them is one more document."""
    index = data.prepare(tmp_path / "out", [many, single], tokenizer=pairs, validation=validation)
    held_out = [number for number in range(120) if number % every == every - 1]
    trained_on = [document(number) for number in range(120) if number not in held_out]
    assert documents_of("validation", tmp_path / "out", pairs) == list(map(document, held_out))
    assert documents_of("training", tmp_path / "out", pairs) == [*trained_on, single.read_text()]
    assert index == data.read_index(tmp_path / "out")
    assert (index.training, index.validation) == tuple(
        len(part_of(tmp_path / "out", part)) for part in ("training", "validation")
    )


def test_blocks_of_a_single_document_are_held_out(single, tmp_path):
    index = data.prepare(tmp_path / "out", [single])
    whole = np.concatenate([[0], get_tokenizer("bytes").encode(single.read_text())])
    for part, expected in zip(("training", "validation"), data.split(whole), strict=True):
        np.testing.assert_array_equal(part_of(tmp_path / "out", part), expected)
    assert index.sha256 == data.prepare(tmp_path / "again", [single]).sha256
    single.write_text(single.read_text().replace("0500", "0501"))
    assert index.sha256 != data.prepare(tmp_path / "other", [single]).sha256


def test_an_interrupted_command_leaves_no_index_and_is_repeated_with_the_same_options(many, tmp_path, monkeypatch):
    arguments = ["--text", str(many), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(data, "_parts", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        CliRunner().invoke(data.app, arguments)
    with pytest.raises(DataError, match=r"has no file tokens.json: .* interrupted"):
        data.read_index(tmp_path / "out")
    result = CliRunner().invoke(data.app, arguments)
    assert result.exit_code == 0, result.output
    assert data.read_index(tmp_path / "out").texts == [str(many)]


def test_tokens_that_are_cut_off_are_refused_by_name(single, tmp_path):
    data.prepare(tmp_path / "out", [single])
    path = tmp_path / "out" / "training.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"training.bin does not have the 4,\d+ tokens that tokens.json says"):
        data.read_index(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing"], "there is no file or folder missing"),
        (["--text", "short"], "the text is too short"),
        (["--text", "empty"], "there is no text in empty"),
        (["--text", "short", "--out", "full"], "the folder full has tokens already"),
        (["--tokenizer", "gpt2", "--vocabulary-files", "."], "vocab.bpe"),
    ],
)
def test_a_bad_option_is_refused_by_name(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("short")
    (tmp_path / "empty").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "tokens.json").touch()
    result = CliRunner().invoke(data.app, ["--out", "out", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "out" / "tokens.json").exists()


# --- Batches. ---
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


def test_a_part_without_a_whole_row_is_refused(rows, tmp_path):
    assert len(Rows(tmp_path, "training", 62)) == 1
    with pytest.raises(DataError, match="it has 63 tokens, and a context of 63 needs 64"):
        Rows(tmp_path, "training", 63)


def test_validation_rows_are_evenly_spaced_and_the_same_at_every_call(rows, tmp_path):
    """Of 8 rows."""
    batches = data.validation_batches(tmp_path, count=2, batch_size=2, context=4)
    assert batches.dtype == np.uint16
    assert [tuple(row) for row in batches.reshape(4, -1).tolist()] == [EVERY_ROW[index] for index in (0, 2, 5, 7)]
    every_one = data.validation_batches(tmp_path, count=4, batch_size=2, context=4)
    assert [tuple(row) for row in every_one.reshape(8, -1).tolist()] == EVERY_ROW[:8]
    with pytest.raises(DataError, match="has 8 sequences of context 4, and 3 batches of 3 need 9"):
        data.validation_batches(tmp_path, count=3, batch_size=3, context=4)
