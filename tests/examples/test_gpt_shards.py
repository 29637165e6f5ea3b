"""Shards and their index: what was written comes back, and nothing else is ever taken for a shard."""

import json
import os
import struct
import zlib

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from examples.gpt import shards
from examples.gpt.shards import Index, ShardError
from tests.examples.shard_files import write_folder

TOKENS = np.arange(1000, dtype=np.uint16) % 300
NAMES = ("training-00000.tokens", "training-00001.tokens", "validation-00000.tokens")


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "some.tokens"
    shards.write_shard(path, TOKENS, vocabulary=300)
    return path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A file that Hypothesis may fill again and again, and the bytes of a real shard."""
    path = tmp_path_factory.mktemp("scratch") / "scratch.tokens"
    shards.write_shard(path, TOKENS, vocabulary=300)
    return path, path.read_bytes()


def make_folder(folder):
    return write_folder(folder, NAMES, TOKENS, vocabulary=300)


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("shared")
    make_folder(path)
    return path, (path / "index.json").read_bytes()


# --- One shard. ---
def test_tokens_come_back_as_they_were_written(shard):
    tokens = shards.open_shard(shard)

    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == np.uint16
    np.testing.assert_array_equal(tokens, TOKENS)
    assert shards.verify_shard(shard) == shards.read_header(shard)


def test_a_shard_is_as_its_documentation_says(shard):
    content = shard.read_bytes()

    assert content[:24] == b"GPTSHARD" + struct.pack("<IIQ", 1, 300, 1000)
    assert content[60:64] == struct.pack("<I", zlib.crc32(content[:60]))
    assert content[64:] == TOKENS.astype("<u2").tobytes()


def test_an_open_shard_cannot_be_written(shard):
    with pytest.raises(ValueError, match="read-only"):
        shards.open_shard(shard)[0] = 1


def test_tokens_in_the_other_order_of_bytes_are_the_same_tokens(tmp_path):
    shards.write_shard(tmp_path / "big", TOKENS.astype(">u2"), vocabulary=300)

    np.testing.assert_array_equal(shards.open_shard(tmp_path / "big"), TOKENS)


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "message"),
    [
        (np.zeros(0, np.uint16), 256, r"takes one or more uint16 tokens in one row, but got uint16 of shape \(0,\)"),
        (np.zeros(3, np.int32), 256, "but got int32"),
        (np.zeros((3, 3), np.uint16), 256, r"of shape \(3, 3\)"),
        (np.full(3, 256, np.uint16), 256, "token 256 is not in the vocabulary of 256"),
        (np.zeros(3, np.uint16), 70_000, "a vocabulary has 1 to 65,536 tokens, but this one has 70000"),
    ],
)
def test_what_is_no_row_of_tokens_is_not_written(tokens, vocabulary, message, tmp_path):
    with pytest.raises(ShardError, match=message):
        shards.write_shard(tmp_path / "new", tokens, vocabulary=vocabulary)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_old_shard_and_nothing_else(shard, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        shards.write_shard(shard, TOKENS[:10], vocabulary=300)

    assert list(shard.parent.iterdir()) == [shard]
    np.testing.assert_array_equal(shards.open_shard(shard), TOKENS)


def header(version=1, vocabulary=300, tokens=1000):
    """A header whose checksum fits, whatever is in it."""
    fields = struct.pack("<8sIIQ32s4x", b"GPTSHARD", version, vocabulary, tokens, b"")
    return fields + struct.pack("<I", zlib.crc32(fields))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no shard of tokens: it does not begin with b'GPTSHARD'"),
        (b"\x89PNG" * 100, "is no shard of tokens"),
        (b"GPTSHARD" + bytes(20), "is truncated: it has 28 bytes, and the header alone has 64"),
        (header(version=2), "is a shard of version 2, and only version 1 can be read"),
        (header()[:12] + b"\1" + header()[13:], "is damaged: its header does not have the checksum at its end"),
        (header(vocabulary=0), "has a header that no shard has"),
        (header(vocabulary=70_000), "has a header that no shard has"),
        (header(tokens=0), "has a header that no shard has"),
        (header() + bytes(1999), "is truncated: the header promises 1,000 tokens, there are 999"),
        (header() + bytes(2001), "has 1 bytes more than the 1,000 tokens that its header promises"),
        (header(tokens=2**64 - 1), "is truncated: the header promises 18,446,744,073,709,551,615 tokens"),
    ],
)
def test_what_is_no_shard_is_refused_by_name(content, message, tmp_path):
    path = tmp_path / "wrong.tokens"
    path.write_bytes(content)

    with pytest.raises(ShardError, match=message) as caught:
        shards.open_shard(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda path: None, "cannot read the shard .*: No such file"), (lambda path: path.mkdir(), "it is not a file")],
    ids=["missing", "folder"],
)
def test_what_is_no_file_is_refused_by_name(make, message, tmp_path):
    make(tmp_path / "wrong.tokens")

    with pytest.raises(ShardError, match=message):
        shards.open_shard(tmp_path / "wrong.tokens")


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda rest: b"GPTSHARD" + rest)))
def test_random_bytes_are_no_shard(scratch, content):
    path, _ = scratch
    path.write_bytes(content)

    with pytest.raises(ShardError, match=r"scratch\.tokens"):
        shards.open_shard(path)


@given(st.integers(0, 64 + 2 * len(TOKENS) - 1))
@example(0)
@example(63)
@example(64)
def test_a_shard_cut_anywhere_is_refused(scratch, size):
    path, content = scratch
    path.write_bytes(content[:size])

    with pytest.raises(ShardError, match=r"scratch\.tokens is (truncated|no shard)"):
        shards.open_shard(path)


@given(st.integers(0, 8 * 64 - 1))
def test_a_flipped_bit_in_the_header_is_seen_at_once(scratch, bit):
    path, content = scratch
    path.write_bytes(flipped(content, bit))

    with pytest.raises(ShardError, match=r"scratch\.tokens"):
        shards.open_shard(path)


@given(st.integers(8 * 64, 8 * (64 + 2 * len(TOKENS)) - 1))
def test_a_flipped_bit_in_the_tokens_is_seen_by_the_checksum(scratch, bit):
    path, content = scratch
    path.write_bytes(flipped(content, bit))

    with pytest.raises(ShardError, match=r"scratch\.tokens is damaged: its tokens do not have the checksum"):
        shards.verify_shard(path)


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_token_outside_of_the_vocabulary_is_seen_by_the_check(tmp_path):
    path = tmp_path / "foreign.tokens"
    shards.write_shard(path, TOKENS, vocabulary=300)
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, 12, 200)
    struct.pack_into("<I", content, 60, zlib.crc32(content[:60]))
    path.write_bytes(content)

    with pytest.raises(ShardError, match="has the token 299, which is not in its vocabulary of 200"):
        shards.verify_shard(path)


def test_a_check_in_several_pieces_sees_all_of_them(shard, monkeypatch):
    monkeypatch.setattr(shards, "_TOKENS_AT_ONCE", 300)
    read = []
    shards.verify_shard(shard, read.append)

    assert read == [600, 600, 600, 200]


# --- The index. ---
def test_an_index_comes_back_as_it_was_written(tmp_path):
    index = make_folder(tmp_path)

    assert shards.read_index(tmp_path) == index
    assert index.tokens("training") == 2000
    assert [shard.name for shard in index.shards("validation")] == ["validation-00000.tokens"]


def test_a_part_that_there_is_not_is_refused(folder):
    with pytest.raises(ValueError, match='`part` must be "training" or "validation", but is \'test\''):
        shards.read_index(folder).shards("test")


def test_a_folder_that_is_not_there_is_refused_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(ShardError, match=r"there is no folder .*nowhere.*python -m examples\.gpt\.data --text"):
        shards.read_index(tmp_path / "nowhere")


def test_a_folder_without_an_index_is_refused(folder):
    (folder / "index.json").unlink()

    with pytest.raises(ShardError, match=r"has no index\.json: .* interrupted"):
        shards.read_index(folder)


def test_an_index_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "index.json").mkdir()

    with pytest.raises(ShardError, match=r"cannot read .*index\.json"):
        shards.read_index(tmp_path)


def edit(folder, change):
    content = json.loads((folder / "index.json").read_text())
    change(content)
    (folder / "index.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=2), "is an index of version 2"),
        (lambda index: index.pop("tokenizer"), "`tokenizer` is missing"),
        (lambda index: index.update(vocabulary="300"), "`vocabulary` must be int, but is str"),
        (lambda index: index.update(separator=True), "`separator` must be int, but is bool"),
        (lambda index: index.update(separator=300), "vocabulary 300, separator 300"),
        (lambda index: index.update(separator=-1), "separator -1"),
        (lambda index: index.update(vocabulary=70_000), "vocabulary 70000"),
        (lambda index: index.update(training=[]), "has no shard in `training`"),
        (lambda index: index.update(validation=[]), "has no shard in `validation`"),
        (lambda index: index.update(validation=["a"]), "there is str in place of an object"),
        (lambda index: index.update(text=None), "`text` must be dict, but is NoneType"),
        (lambda index: index["text"].update(names=[1]), "`names` must be a list of strings"),
        (lambda index: index["validation"].append(index["training"][0]), "'training-00000.tokens' more than once"),
        (lambda index: index["training"][0].update(tokens=999), "has 1,000 tokens, but index.json says 999"),
        (lambda index: index.update(vocabulary=301), "made with a vocabulary of 300 tokens, but index.json says 301"),
        (lambda index: index["training"][0].update(name="missing.tokens"), r"cannot read the shard .*missing\.tokens"),
        (lambda index: index["training"][0].update(name="a" * 5000), "cannot read the shard"),
    ],
)
def test_an_index_with_something_wrong_is_refused(change, message, folder):
    edit(folder, change)

    with pytest.raises(ShardError, match=message):
        shards.read_index(folder)


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "a\\b", "/etc/passwd", "..", ".", "", "a\0b", "c:x", "ä", "\ud800", "x\n"]
)
def test_a_name_that_could_lead_out_of_the_folder_is_refused(name, folder):
    edit(folder, lambda index: index["training"][0].update(name=name))

    with pytest.raises(ShardError, match="cannot lead out of the folder"):
        shards.read_index(folder)


def test_a_truncated_shard_is_found_by_the_index(folder):
    path = folder / NAMES[1]
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(ShardError, match=r"training-00001\.tokens is truncated"):
        shards.read_index(folder)


@given(st.binary(max_size=100))
@example(b"[" * 100_000)
@example(b"9" * 10_000)
@example(b'{"version": NaN}')
@example(b'{"version": 1e999}')
def test_random_bytes_are_no_index(shared_folder, content):
    folder, _ = shared_folder
    (folder / "index.json").write_bytes(content)

    with pytest.raises(ShardError, match=r"index\.json"):
        shards.read_index(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS_OF_TEXT = ("names", "documents", "bytes", "sha256")
PATHS = [
    *((name,) for name in ("version", "tokenizer", "vocabulary", "separator", "training", "validation", "text")),
    *(("text", name) for name in FIELDS_OF_TEXT),
    *(("training", 0, name) for name in ("name", "tokens")),
    ("validation", 0),
    ("text", "names", 0),
]
# What may be anything of its kind: it is told to the user, and a separator is any token.
FREE = {("tokenizer",), ("separator",), ("text", "names", 0)} | {("text", name) for name in FIELDS_OF_TEXT}


def index_or_error(folder):
    """What comes out; any other exception ends the test."""
    try:
        return shards.read_index(folder)
    except ShardError as error:
        return error


@given(JSON)
def test_random_json_is_no_index(shared_folder, content):
    folder, _ = shared_folder
    (folder / "index.json").write_text(json.dumps(content))

    with pytest.raises(ShardError, match=r"index\.json"):
        shards.read_index(folder)


@given(st.sampled_from(PATHS), JSON)
def test_an_index_with_random_json_in_one_place_is_read_or_refused(shared_folder, path, value):
    folder, original = shared_folder
    content = json.loads(original)
    *outer, last = path
    place = content
    for key in outer:
        place = place[key]
    assume(type(place[last]) is not type(value) or place[last] != value)
    place[last] = value
    (folder / "index.json").write_text(json.dumps(content))

    found = index_or_error(folder)
    if isinstance(found, ShardError):
        assert str(folder) in str(found)
    else:
        assert path in FREE


@given(st.integers(0, 700), st.integers(0, 7))
def test_an_index_with_a_flipped_bit_is_read_or_refused(shared_folder, position, bit):
    folder, original = shared_folder
    (folder / "index.json").write_bytes(flipped(original, 8 * min(position, len(original) - 1) + bit))

    found = index_or_error(folder)
    assert isinstance(found, Index) or str(folder) in str(found)
