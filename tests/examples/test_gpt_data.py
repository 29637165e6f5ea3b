"""Text, tokens and batches: what is held out, what is shuffled, and a position that any number of processes takes."""

import itertools
import json
import string
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from examples.gpt import data, text
from examples.gpt.data import DataError, Rows, byte_pair_tokenizer, byte_tokenizer, get_tokenizer
from examples.gpt.text import TextError

CONTEXT = 16


# --- Text. ---
@pytest.fixture
def mixed_folder(tmp_path):
    """Files; some are hidden, or no text."""
    folder = tmp_path / "mixed"
    for name, content in {"b.txt": b"two", "a/z.txt": b"one", ".git/x": b"no", "c.bin": b"n\0", "d/.x": b"no"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(mixed_folder):
    assert list(text.documents(mixed_folder)) == [b"one", b"two"]
    assert text.read_text(mixed_folder) == b"onetwo"


def test_the_standard_library_is_read_in_a_fixed_order_without_its_tests():
    files = text.files(None)
    assert files == sorted(files) == text.files(None)
    assert {"argparse.py", "typing.py"} <= {file.name for file in files}
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
    with pytest.raises(TextError, match="there is no text in"):
        list(text.documents(tmp_path / "a"))


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


# --- Tokenizers. ---
PAIRS = [first + second for first in string.ascii_lowercase for second in string.ascii_lowercase]
TOKEN = {text: 256 + at for at, text in enumerate([*PAIRS, "hell", "hello"])}


@pytest.fixture(scope="module")
def pairs():
    """A small vocabulary: all bytes, all pairs of small letters, and the word `hello`."""
    pytest.importorskip("tiktoken")
    ranks = {bytes([value]): value for value in range(256)}
    return byte_pair_tokenizer(ranks | {text.encode(): token for text, token in TOKEN.items()})


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")), st.binary().filter(lambda x: b"\0" not in x))
def test_a_byte_is_a_token_and_text_comes_back(text, content):
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokenizer.encode(content)) == content.decode(errors="replace")
    with pytest.raises(ValueError, match="a zero byte at position 2"):
        tokenizer.encode(b"ab\0c")


@given(text=st.text(st.characters(codec="utf-8")))
def test_byte_pairs_come_back_as_the_text_they_were(pairs, text):
    assert pairs.decode(pairs.encode(text)) == text
    assert pairs.decode(pairs.encode("é")[:1]) == "\ufffd"  # half a character
    assert pairs.decode(pairs.encode(b"a\xffb")) == "a\ufffdb"


def test_bytes_are_joined_as_far_as_the_vocabulary_goes_and_the_separator_is_no_text(pairs):
    assert pairs.encode("hello").tolist() == [TOKEN["hello"]]
    assert pairs.encode("help").tolist() == [ord("h"), TOKEN["el"], ord("p")]  # the lowest pair first
    assert (pairs.vocabulary, pairs.separator) == (256 + len(TOKEN) + 1, 256 + len(TOKEN))
    assert pairs.separator not in pairs.encode("<|endoftext|>")
    assert pairs.decode([pairs.separator]) == "<|endoftext|>"
    million = "a" + " " * 1_000_000 + "b"  # the regular expressions of tiktoken fail on so many blanks
    assert pairs.decode(pairs.encode(million)) == million


def test_gpt2_files_are_read_if_they_are_the_published_ones(tmp_path, monkeypatch):
    """Files of GPT-2's form with 256 bytes and one pair: their hash is not the published one."""
    load = pytest.importorskip("tiktoken.load")
    printable = [chr(value) for value in range(256) if chr(value).isprintable() and chr(value) != " "]
    characters = printable + [chr(256 + at) for at in range(256 - len(printable))]
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n")
    (tmp_path / "encoder.json").write_text(json.dumps({x: at for at, x in enumerate([*characters, "ab"])}))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"cannot read GPT-2's vocabulary \(.*[Hh]ash.*--vocabulary-files"):
        get_tokenizer("gpt2", tmp_path)
    with pytest.raises(ValueError, match=r"No such file .*--vocabulary-files"):
        get_tokenizer("gpt2", tmp_path / "nothing")
    monkeypatch.setattr(data, "GPT2_FILES", {name: load.hashlib.sha256(
        (tmp_path / name).read_bytes()).hexdigest() for name in data.GPT2_FILES})  # fmt: skip
    tokenizer = get_tokenizer("gpt2", tmp_path)
    assert tokenizer.encode("abé").tolist() == [256, *map(characters.index, ("Ã", "©"))]
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setitem(sys.modules, "tiktoken.load", None)
    with pytest.raises(ValueError, match="pip install tiktoken"):
        get_tokenizer("gpt2", tmp_path)


# --- A folder of tokens. ---
def run(*arguments):
    return CliRunner().invoke(data.app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


def prepare(folder, *texts, **options):
    return data.prepare(folder, texts, **{"context": CONTEXT} | options)


def part_of(folder, part):
    return np.fromfile(folder / f"{part}.bin", np.uint16)


def documents_of(part, folder, tokenizer=None):
    """Return what stands between the separators of a part."""
    tokens = part_of(folder, part)
    starts = np.flatnonzero(tokens == data.read_index(folder).separator)
    assert starts[0] == 0
    return [(tokenizer or byte_tokenizer()).decode(document[1:]) for document in np.split(tokens, starts[1:])]


def document(number):
    return f"document number {number}\n" + "grüße " * (number % 7) + "\n"


@pytest.fixture
def many(tmp_path):
    """A folder of 120 documents; 12 will be held out."""
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


@pytest.mark.parametrize(("validation", "every"), [(0.1, 10), (0.25, 4)])
def test_every_tenth_of_many_documents_is_held_out(many, tmp_path, validation, every):
    index = prepare(tmp_path / "out", many, validation=validation)
    held_out = [number for number in range(120) if number % every == every - 1]
    assert documents_of("validation", tmp_path / "out") == list(map(document, held_out))
    assert documents_of("training", tmp_path / "out") == [document(n) for n in range(120) if n not in held_out]
    assert index == data.read_index(tmp_path / "out")
    assert (index.training, index.validation) == tuple(
        len(part_of(tmp_path / "out", part)) for part in ("training", "validation")
    )


def test_blocks_of_a_single_document_are_held_out(single, tmp_path):
    prepare(tmp_path / "out", single)
    whole = np.concatenate([[0], byte_tokenizer().encode(single.read_text())])
    for part, expected in zip(("training", "validation"), text.split(whole, CONTEXT), strict=True):
        np.testing.assert_array_equal(part_of(tmp_path / "out", part), expected)


def test_several_texts_are_read_one_after_the_other_with_the_separator_of_the_tokenizer(many, single, tmp_path, pairs):
    index = prepare(tmp_path / "out", many, single, tokenizer=pairs)
    assert (index.texts, index.tokenizer) == ([str(many), str(single)], "gpt2")
    assert documents_of("training", tmp_path / "out", pairs)[-1] == single.read_text()
    assert documents_of("validation", tmp_path / "out", pairs)[0] == document(9)


def test_a_folder_of_tokens_is_not_overwritten_unless_that_is_asked(many, single, tmp_path):
    index = prepare(tmp_path / "out", many)
    with pytest.raises(DataError, match=r"has tokens already; choose another one, or pass `--overwrite`"):
        prepare(tmp_path / "out", single)
    with pytest.raises(TextError, match="there is no file or folder"):
        prepare(tmp_path / "out", tmp_path / "missing", overwrite=True)
    assert data.read_index(tmp_path / "out") == index
    again = prepare(tmp_path / "out", single, overwrite=True)
    assert again == data.read_index(tmp_path / "out")
    assert again.sha256 != index.sha256
    assert again.sha256 == prepare(tmp_path / "other", single).sha256  # of the same tokens


def test_an_interrupted_command_leaves_no_index_and_the_next_one_needs_no_option(many, tmp_path, monkeypatch):
    prepare(tmp_path / "out", many)
    with monkeypatch.context() as patch:
        patch.setattr(data, "_parts", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "out", many, overwrite=True)
    with pytest.raises(DataError, match=r"has no file tokens.json: .* interrupted"):
        data.read_index(tmp_path / "out")
    result = run("--text", many, "--out", tmp_path / "out", "--context", CONTEXT)
    assert result.exit_code == 0, result.output
    assert f"held out (bytes, {many})" in result.output


def test_tokens_that_are_missing_or_damaged_are_refused_by_name(single, tmp_path):
    folder = tmp_path / "out"
    prepare(folder, single)
    path = folder / "training.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"training.bin does not have the 4,\d+ tokens that tokens.json says"):
        data.read_index(folder)
    path.write_bytes(content[:-2] + b"\x00\x01")  # 256
    rows = Rows(folder, "training", (len(content) - 2) // 2)
    with pytest.raises(DataError, match=rf"in {folder} are damaged: 256 is not in their vocabulary of 256"):
        next(data.batches(rows, batch_size=1, seed=0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing"], "there is no file or folder missing"),
        (["--text", "short"], "it has 10 tokens, and at least 102,500 are needed"),
        (["--tokenizer", "words"], "no tokenizer is called 'words'; there are bytes, gpt2"),
        (["--vocabulary-files", "."], "'bytes' needs no vocabulary files"),
        (["--validation", "0"], "--validation"),
        (["--out", "/dev/null"], "/dev/null"),
        (["--text", "many", "--validation", "0.002"], "its validation part has 0 tokens, and a sequence of context"),
        (["--text", "empty"], "there is no text in empty"),
    ],
)
def test_a_bad_option_is_refused_by_name(arguments, message, many, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("too short")
    (tmp_path / "empty").touch()
    result = run("--out", "out", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out" / "tokens.json").exists()


# --- Batches. ---
@pytest.fixture
def rows(tmp_path):
    """A part with 15 rows of 4 tokens and their last target, whose tokens count from 0: each tells its place."""
    index = data.Index([], "test", 63, 0, training=63, validation=34, sha256="")
    (tmp_path / "tokens.json").write_text(json.dumps(vars(index)))
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


def test_a_batch_that_processes_cannot_share_and_too_little_data_are_refused(rows):
    with pytest.raises(DataError, match="a batch of 5 rows cannot be divided among 2 processes"):
        data.batches(rows, batch_size=5, seed=0, process_count=2)
    with pytest.raises(DataError, match="it has 63 tokens, and a context of 63 needs 64"):
        Rows(rows.folder, "training", 63)
    assert len(Rows(rows.folder, "training", 62)) == 1


def test_validation_rows_are_evenly_spaced_and_the_same_at_every_call(rows):
    """Of 8 rows."""
    batches = data.validation_batches(rows.folder, count=2, batch_size=2, context=4)
    assert batches.dtype == np.uint16
    assert [tuple(row) for row in batches.reshape(4, -1).tolist()] == [EVERY_ROW[index] for index in (0, 2, 5, 7)]
    every_one = data.validation_batches(rows.folder, count=4, batch_size=2, context=4)
    assert [tuple(row) for row in every_one.reshape(8, -1).tolist()] == EVERY_ROW[:8]
    with pytest.raises(DataError, match="has 8 sequences of context 4, and 3 batches of 3 need 9"):
        data.validation_batches(rows.folder, count=3, batch_size=3, context=4)
