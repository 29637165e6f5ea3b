"""The command that turns text into shards."""

import json
import os

import numpy as np
import pytest
from typer.testing import CliRunner

from examples.gpt import data, shards, text
from examples.gpt.shards import ShardError
from examples.gpt.text import TextError
from examples.gpt.tokenizers import BytePairTokenizer, ByteTokenizer

CONTEXT = 16


def run(*arguments):
    return CliRunner().invoke(data.app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


def documents_of(part, folder, tokenizer=None):
    """What stands between the separators of all shards of a part."""
    index = shards.read_index(folder)
    tokens = np.concatenate([shards.open_shard(folder / shard.name) for shard in index.shards(part)])
    starts = np.flatnonzero(tokens == index.separator)
    assert starts[0] == 0
    return [(tokenizer or ByteTokenizer()).decode(document[1:]) for document in np.split(tokens, starts[1:])]


def document(number):
    return f"document number {number}\n" + "grüße " * (number % 7) + "\n"


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


def prepare(folder, *texts, **options):
    return data.prepare(folder, texts, context=CONTEXT, **options)


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


# --- What is written. ---
def test_the_shards_decode_to_the_documents_of_which_every_tenth_is_held_out(many, tmp_path):
    result = run("--text", many, "--out", tmp_path / "out", "--context", CONTEXT, "--shard-tokens", 1000)

    assert result.exit_code == 0, result.output
    assert documents_of("training", tmp_path / "out") == [document(n) for n in range(120) if n % 10 != 9]
    assert documents_of("validation", tmp_path / "out") == [document(n) for n in range(120) if n % 10 == 9]
    index = shards.read_index(tmp_path / "out")
    assert f"{index.tokens('training'):,} tokens to train on in {len(index.training)} shards" in result.output
    assert f"{index.tokens('validation'):,} held out in 1 shard (bytes, {many})" in result.output


def test_few_documents_are_cut_into_blocks_of_which_every_tenth_is_held_out(single, tmp_path):
    prepare(tmp_path / "out", single)
    tokens = np.concatenate([[0], ByteTokenizer().encode(single.read_bytes())])
    parts = text.split(tokens, CONTEXT)

    for name, expected in zip(("training", "validation"), parts, strict=True):
        np.testing.assert_array_equal(shards.open_shard(tmp_path / "out" / f"{name}-00000.tokens"), expected)


def test_a_larger_part_may_be_held_out(many, tmp_path):
    prepare(tmp_path / "out", many, validation=0.25)

    assert documents_of("validation", tmp_path / "out") == [document(n) for n in range(120) if n % 4 == 3]


def test_several_texts_are_read_one_after_the_other(many, single, tmp_path):
    index = prepare(tmp_path / "out", many, single)

    assert documents_of("training", tmp_path / "out")[-1] == single.read_text()
    assert index.text.names == (str(many), str(single))


def test_without_a_text_it_is_the_standard_library(tmp_path):
    index = data.prepare(tmp_path / "out")

    assert index == shards.read_index(tmp_path / "out")
    assert index.text.names == ("Python's standard library",)
    assert index.text.bytes == text.total_bytes([None])
    # A token for each byte, and one in front of each document.
    assert index.tokens("training") + index.tokens("validation") == index.text.bytes + index.text.documents


def test_the_index_tells_what_the_shards_were_made_of(many, tmp_path):
    prepare(tmp_path / "out", many)
    content = json.loads((tmp_path / "out" / "index.json").read_text())

    assert content["text"]["documents"] == 120
    assert content["text"]["sha256"] == text.read_text(many).sha256
    assert (content["tokenizer"], content["vocabulary"], content["separator"]) == ("bytes", 256, 0)


def test_a_new_shard_begins_after_so_many_tokens_and_a_short_end_stays_with_the_last(many, tmp_path):
    """What is left over is at least one sequence: it has more tokens than the context."""
    index = prepare(tmp_path / "out", many, shard_tokens=500)
    *full, last = [shard.tokens for shard in index.training]

    assert len(full) >= 5
    assert set(full) == {500}
    assert CONTEXT < last <= 500 + CONTEXT


@pytest.mark.parametrize("shard_tokens", range(500, 517))
def test_every_shard_holds_a_sequence(single, tmp_path, shard_tokens):
    index = prepare(tmp_path / "out", single, shard_tokens=shard_tokens)

    assert min(shard.tokens for shard in index.training + index.validation) > CONTEXT
    assert index.tokens("training") + index.tokens("validation") == 5001


def test_the_same_text_gives_the_same_files(many, tmp_path):
    for name in ("first", "second"):
        prepare(tmp_path / name, many, shard_tokens=1000)

    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")
    for name in files_of(tmp_path / "first"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_another_tokenizer_puts_its_own_separator_in_front_of_documents(many, tmp_path):
    pytest.importorskip("tiktoken")
    ranks = {bytes([value]): value for value in range(256)} | {b"do": 256, b"cu": 257, b"docu": 258}
    tokenizer = BytePairTokenizer.from_ranks("small", ranks)
    index = prepare(tmp_path / "out", many, tokenizer=tokenizer)

    assert (index.tokenizer, index.vocabulary, index.separator) == ("small", 260, 259)
    assert documents_of("validation", tmp_path / "out", tokenizer) == [document(n) for n in range(120) if n % 10 == 9]
    assert 258 in shards.open_shard(tmp_path / "out" / index.training[0].name)


def test_progress_ends_at_the_size_of_the_text(many, tmp_path):
    read = []
    prepare(tmp_path / "out", many, on_read=read.append)

    assert sum(read) == text.total_bytes([many])


# --- A folder that is there already. ---
def test_a_folder_with_an_index_is_not_overwritten(many, tmp_path):
    prepare(tmp_path / "out", many)
    result = run("--text", many, "--out", tmp_path / "out")

    assert result.exit_code == 2
    assert f"the folder {tmp_path / 'out'} has shards already" in result.output
    assert "--overwrite" in result.output


def test_overwriting_leaves_no_shard_of_the_run_before(many, single, tmp_path):
    prepare(tmp_path / "out", many, shard_tokens=500)
    (tmp_path / "out" / "training-00000.tokens.1.partial").touch()
    (tmp_path / "out" / "notes.txt").touch()
    result = run("--text", single, "--out", tmp_path / "out", "--context", CONTEXT, "--overwrite")

    assert result.exit_code == 0, result.output
    assert files_of(tmp_path / "out") == [
        "index.json",
        "notes.txt",
        "training-00000.tokens",
        "validation-00000.tokens",
    ]


def test_a_text_that_is_not_there_leaves_the_old_index(many, tmp_path):
    index = prepare(tmp_path / "out", many)
    with pytest.raises(TextError, match="there is no file or folder"):
        prepare(tmp_path / "out", tmp_path / "missing", overwrite=True)

    assert shards.read_index(tmp_path / "out") == index


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
    with pytest.raises(ShardError, match=r"has no index\.json"):
        shards.read_index(tmp_path / "out")

    assert run(*arguments).exit_code == 0
    data.check(tmp_path / "out")


# --- Errors. ---
@pytest.mark.parametrize(
    ("arguments", "option", "message"),
    [
        (["--text", "missing"], "--text", "there is no file or folder missing"),
        (["--tokenizer", "words"], "--tokenizer", "no tokenizer is called 'words'; there are bytes, gpt2"),
        (["--vocabulary-files", "."], "--tokenizer", "'bytes' needs no vocabulary files"),
        (["--validation", "0"], "Error", "`validation` must be above 0 and at most 0.5, but is 0.0"),
        (["--validation", "0.6"], "Error", "at most 0.5, but is 0.6"),
        (["--validation", "nan"], "Error", "at most 0.5, but is nan"),
        (["--shard-tokens", "1024"], "Error", "`shard_tokens` 1,024 must be larger than `context` 1,024"),
        (["--context", "0"], "--context", "Invalid value"),
        (["--out", "/dev/null"], "--out", "cannot make the folder /dev/null"),
        (["--check", "--text", "."], "--text", "does nothing together with --check"),
        (["--check", "--overwrite"], "--overwrite", "does nothing together with --check"),
        (["--check", "--vocabulary-files", "."], "--vocabulary-files", "does nothing together with --check"),
        (["--check"], "--out", "there is no folder out"),
    ],
)
def test_a_bad_option_is_refused_by_name(arguments, option, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("--out", "out", *arguments)

    assert result.exit_code == 2
    assert message in result.output
    assert option in result.output
    assert "Traceback" not in result.output


def test_gpt2_without_its_vocabulary_is_refused_with_the_option_that_helps(tmp_path):
    pytest.importorskip("tiktoken")
    result = run("--tokenizer", "gpt2", "--vocabulary-files", tmp_path, "--out", tmp_path / "out")

    assert result.exit_code == 2
    assert "there is no file" in result.output
    assert not (tmp_path / "out").exists()


def test_a_text_too_short_for_blocks_is_refused(tmp_path):
    (tmp_path / "short").write_text("too short")

    with pytest.raises(TextError, match=r"it has 10 tokens, and at least 1,700 are needed\. Use more text, a shorter"):
        prepare(tmp_path / "out", tmp_path / "short")


def test_documents_too_short_for_a_held_out_sequence_are_refused(many, tmp_path):
    """Of 120 documents one in 500 is none."""
    with pytest.raises(TextError, match="its validation part has 0 tokens, and a sequence of context 16 needs 17"):
        prepare(tmp_path / "out", many, validation=0.002)
    assert "index.json" not in files_of(tmp_path / "out")


def test_a_disk_that_is_full_is_an_error_of_the_folder(many, tmp_path, monkeypatch):
    def refuse(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)

    with pytest.raises(ShardError, match=r"cannot write into the folder .*out: No space left on device"):
        prepare(tmp_path / "out", many)


# --- Checking. ---
def test_a_check_of_good_shards_says_so(many, tmp_path):
    prepare(tmp_path / "out", many)
    result = run("--check", "--out", tmp_path / "out")

    assert result.exit_code == 0, result.output
    assert "Every checksum fits" in result.output


def test_a_check_names_all_damaged_shards(many, tmp_path):
    index = prepare(tmp_path / "out", many, shard_tokens=500)
    for shard in (index.training[1], index.validation[0]):
        path = tmp_path / "out" / shard.name
        path.write_bytes(path.read_bytes()[:-2] + b"\1\0")
    result = run("--check", "--out", tmp_path / "out")

    assert result.exit_code == 2
    assert "training-00001.tokens is damaged" in result.output
    assert "validation-00000.tokens is damaged" in result.output
    assert "training-00000.tokens" not in result.output
