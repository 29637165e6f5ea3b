"""Text from files, and the command that turns it into shards."""

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from examples.gpt import data, shards, text
from examples.gpt.shards import ShardError
from examples.gpt.text import TextError
from examples.gpt.tokenizers import BytePairTokenizer, ByteTokenizer, encoding_of_ranks

CONTEXT = 16


# --- Text. ---
@pytest.fixture
def mixed_folder(tmp_path):
    """Files of which some are hidden or no text."""
    folder = tmp_path / "mixed"
    for name, content in {"b.txt": b"two", "a/z.txt": b"one", ".git/x": b"no", "c.bin": b"n\0", "d/.x": b"no"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(mixed_folder):
    read = []
    assert list(text.documents(mixed_folder, read.append)) == [b"one", b"two"]
    assert text.read_text(mixed_folder) == b"onetwo"
    assert sum(read) == sum(path.stat().st_size for path in text.files(mixed_folder))


def test_the_standard_library_is_read_in_a_fixed_order_without_its_tests():
    files = text.files(None)
    assert files == sorted(files) == text.files(None)
    names = {file.name for file in files}
    assert {"argparse.py", "typing.py"} <= names
    assert not [file for file in files if {"test", "site-packages"} & set(file.parts[-3:-1])]
    assert next(text.documents(None)) == files[0].read_bytes()[: text.DOCUMENT_BYTES]


def test_a_long_file_is_cut_after_lines_into_documents_that_make_up_the_file(tmp_path, monkeypatch):
    content = "".join(f"line {number} é\n" * (number % 3) for number in range(99)).encode() + b"no end"
    (tmp_path / "a").write_bytes(content)
    monkeypatch.setattr(text, "DOCUMENT_BYTES", 50)
    documents = list(text.documents(tmp_path / "a"))
    assert b"".join(documents) == content
    assert len(documents) > 10
    assert all(document.endswith(b"\n") for document in documents[:-1])
    monkeypatch.setattr(text, "MAXIMUM_BYTES", 203)
    assert text.read_text(tmp_path) == content[:203]
    (tmp_path / "a").write_bytes(content + b"\0")  # late in a long file
    with pytest.raises(TextError, match="is no text: it has a zero byte"):
        list(text.documents(tmp_path / "a"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no file or folder"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.mkdir(), "has no text files"),
        (lambda path: path.write_bytes(b"a\0"), "has a zero byte"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_by_name(make, message, tmp_path):
    make(tmp_path / "text")
    for read in (text.read_text, lambda path: list(text.documents(path))):
        with pytest.raises(TextError, match=message) as caught:
            read(tmp_path / "text")
        assert str(tmp_path / "text") in str(caught.value)


def test_a_text_that_cannot_be_read_is_refused_by_name(mixed_folder, monkeypatch):
    def refuse(path, *arguments):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)  # a test that runs as root can read every file
    with pytest.raises(TextError, match=rf"cannot read {mixed_folder}/a/z.txt: Permission denied"):
        list(text.documents(mixed_folder))


def test_the_held_out_part_is_never_trained_on_and_comes_from_all_over_the_text():
    tokens = np.arange(1000, dtype=np.int32)
    for every, share in ((10, 100), (4, 250)):
        training, held_out = text.split(tokens, 2, held_out_every=every)
        assert sorted([*training, *held_out]) == tokens.tolist()
        assert len(held_out) == share
        assert np.histogram(held_out, 10, (0, 1000))[0].min() > 0
    with pytest.raises(TextError, match="it has 299 bytes, and at least 300 are needed"):
        text.split(tokens[:299], 2)


def test_random_batches_depend_on_the_seed_and_fixed_ones_on_nothing():
    tokens = np.arange(100, dtype=np.int32)
    batches = lambda seed: np.stack([*text.random_batches(tokens, seed=seed, count=5, batch_size=2, context=7)])
    np.testing.assert_array_equal(batches(1), batches(1))
    assert not np.array_equal(batches(1), batches(2))
    fixed = text.fixed_batches(tokens, count=5, batch_size=2, context=7)
    assert batches(1).shape == fixed.shape == (5, 2, 8)
    for made in (batches(1), fixed):
        np.testing.assert_array_equal(made - made[..., :1], np.broadcast_to(np.arange(8), made.shape))
    assert (fixed[0, 0, 0], fixed[-1, -1, -1]) == (0, 99)


# --- Shards. ---
def run(*arguments):
    return CliRunner().invoke(data.app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


def prepare(folder, *texts, **options):
    return data.prepare(folder, texts, context=CONTEXT, **options)


def documents_of(part, folder, tokenizer=None):
    """Return what stands between the separators of all shards of a part."""
    index = shards.read_index(folder)
    tokens = np.concatenate([shards.open_shard(folder / shard.name) for shard in getattr(index, part)])
    starts = np.flatnonzero(tokens == index.separator)
    assert starts[0] == 0
    return [(tokenizer or ByteTokenizer()).decode(document[1:]) for document in np.split(tokens, starts[1:])]


def document(number):
    return f"document number {number}\n" + "grüße " * (number % 7) + "\n"


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def many(tmp_path):
    """A folder of 120 documents, of which 12 will be held out."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(120):
        (folder / f"{number:03d}.txt").write_text(document(number), encoding="utf-8")
    return folder


@pytest.fixture
def single(tmp_path):
    """One document of 5,000 characters, which will be cut into blocks."""
    path = tmp_path / "single.txt"
    path.write_text("".join(f"{number:04d}\n" for number in range(1000)))
    return path


def test_the_shards_decode_to_the_documents_of_which_every_tenth_is_held_out(many, tmp_path):
    for validation, every in ((0.1, 10), (0.25, 4)):
        prepare(tmp_path / "out", many, validation=validation, overwrite=True)
        held_out = [document(number) for number in range(120) if number % every == every - 1]
        assert documents_of("validation", tmp_path / "out") == held_out
        assert documents_of("training", tmp_path / "out") == [
            document(number) for number in range(120) if number % every != every - 1
        ]


def test_few_documents_are_cut_into_blocks_of_which_every_tenth_is_held_out(single, tmp_path):
    index = prepare(tmp_path / "out", single)
    whole = np.concatenate([[0], ByteTokenizer().encode(single.read_text())])
    training, held_out = text.split(whole, CONTEXT)
    np.testing.assert_array_equal(shards.open_shard(tmp_path / "out" / index.training[0].name), training)
    np.testing.assert_array_equal(shards.open_shard(tmp_path / "out" / index.validation[0].name), held_out)


def test_several_texts_are_read_one_after_the_other_and_progress_ends_at_their_size(many, single, tmp_path):
    read = []
    index = prepare(tmp_path / "out", many, single, on_read=read.append)
    assert index.texts == (str(many), str(single))
    assert documents_of("training", tmp_path / "out")[-1] == single.read_text()
    assert sum(read) == single.stat().st_size + sum(path.stat().st_size for path in many.iterdir())


def test_another_tokenizer_puts_its_own_separator_in_front_of_documents(many, tmp_path):
    pytest.importorskip("tiktoken")
    tokenizer = BytePairTokenizer("pairs", encoding_of_ranks({bytes([value]): value for value in range(256)}))
    index = prepare(tmp_path / "out", many, tokenizer=tokenizer)
    assert (index.tokenizer, index.vocabulary, index.separator) == ("pairs", 257, 256)
    assert documents_of("validation", tmp_path / "out", tokenizer)[0] == document(9)


@pytest.mark.parametrize("shard_tokens", [500, 503, 516])
def test_a_new_shard_begins_after_so_many_tokens_and_a_short_end_stays_with_the_last(single, tmp_path, shard_tokens):
    index = prepare(tmp_path / "out", single, shard_tokens=shard_tokens)
    lengths = [shard.tokens for shard in index.training]
    assert set(lengths[:-1]) == {shard_tokens}
    assert CONTEXT < lengths[-1] <= shard_tokens + CONTEXT
    whole = prepare(tmp_path / "whole", single)
    assert sum(lengths) == whole.tokens("training")


def test_a_folder_with_an_index_is_not_overwritten_unless_that_is_asked(many, single, tmp_path):
    index = prepare(tmp_path / "out", many, shard_tokens=500)
    with pytest.raises(ShardError, match=r"has shards already; choose another one, or pass `--overwrite`"):
        prepare(tmp_path / "out", single)
    with pytest.raises(TextError, match="there is no file or folder"):
        prepare(tmp_path / "out", tmp_path / "missing", overwrite=True)
    assert shards.read_index(tmp_path / "out") == index

    (tmp_path / "out" / "notes.txt").touch()
    prepare(tmp_path / "out", single, overwrite=True)
    assert [*files_of(tmp_path / "out")] == ["index.json", "notes.txt", "training-00000.npy", "validation-00000.npy"]


def test_an_interrupted_run_leaves_no_index_and_the_next_one_needs_no_option(many, tmp_path, monkeypatch):
    prepare(tmp_path / "out", many)
    fsync, calls = os.fsync, []

    def interrupt(file):
        calls.append(file)
        if len(calls) == 2:
            raise KeyboardInterrupt
        fsync(file)

    arguments = ("--text", many, "--out", tmp_path / "out", "--context", CONTEXT, "--shard-tokens", 500)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        stopped = run(*arguments, "--overwrite")
    assert stopped.exit_code == 130
    assert "has no index" in stopped.output
    assert "index.json" not in files_of(tmp_path / "out")

    assert run(*arguments).exit_code == 0
    result = run("--check", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Every checksum fits" in result.output


# --- Errors. ---
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing"], "--text: there is no file or folder missing"),
        (["--tokenizer", "words"], "no tokenizer is called 'words'; there are bytes, gpt2"),
        (["--vocabulary-files", "."], "'bytes' needs no vocabulary files"),
        (["--validation", "0"], "--validation"),
        (["--shard-tokens", "1024"], "`shard_tokens` 1,024 must be larger than `context` 1,024"),
        (["--out", "/dev/null"], "--out: cannot write into the folder /dev/null"),
        (["--check", "--text", "."], "--check takes no other option than --out"),
        (["--check"], "--out: the folder out has no file index.json"),
    ],
)
def test_a_bad_option_is_refused_by_name(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("--out", "out", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_text_too_short_for_either_part_is_refused(many, tmp_path):
    """Of 120 documents one in 500 is none."""
    (tmp_path / "short").write_text("too short")
    with pytest.raises(TextError, match=r"it has 10 tokens, and at least 1,700 are needed\."):
        prepare(tmp_path / "out", tmp_path / "short")
    with pytest.raises(TextError, match="its validation part has 0 tokens, and a sequence of context 16 needs 17"):
        prepare(tmp_path / "out", many, validation=0.002)
    assert "index.json" not in files_of(tmp_path / "out")
