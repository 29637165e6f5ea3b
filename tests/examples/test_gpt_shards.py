"""Shards of tokens and their index: what is none is refused by name, whatever is in it."""

import json
import os

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from examples.gpt import data, shards
from examples.gpt.shards import Index, ShardError
from tests.helpers import examples

TOKENS = np.arange(50, dtype=np.uint16) % 30
NAMES = ("training-00000.npy", "validation-00000.npy")


def write_folder(folder):
    training, validation = (shards.write_shard(folder / name, TOKENS, vocabulary=30) for name in NAMES)
    index = Index(("a text",), "bytes", 30, 0, (training,), (validation,))
    shards.write_index(folder, index)
    return index


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder to damage again and again, and the bytes of its files."""
    folder = tmp_path_factory.mktemp("shards")
    write_folder(folder)
    return folder, {path.name: path.read_bytes() for path in folder.iterdir()}


def damages(content):
    """Draw the bytes of a file of which some were cut off, changed, inserted or added."""
    place, some = st.integers(0, len(content)), st.binary(max_size=9)
    return st.one_of(
        st.builds(lambda at: content[:at], place),
        st.builds(lambda at, new: content[:at] + new + content[at + len(new) :], place, some),
        st.builds(lambda at, to, other: content[:at] + content[to:] + other, place, place, some),
    )


def refused(reader, *arguments):
    """Return the message of a `ShardError`, or None; any other exception ends the test."""
    try:
        reader(*arguments)
    except ShardError as error:
        return str(error)
    return None


# --- One shard. ---
def test_tokens_come_back_as_they_were_written_and_cannot_be_changed(folder):
    tokens = shards.open_shard(folder / NAMES[0])
    np.testing.assert_array_equal(tokens, TOKENS)
    np.testing.assert_array_equal(np.load(folder / NAMES[0], allow_pickle=False), TOKENS)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
    np.save(folder / NAMES[0], TOKENS.astype(np.int32))
    assert "it is not one row of uint16" in refused(shards.open_shard, folder / NAMES[0])


def test_a_token_outside_of_the_vocabulary_is_not_written(tmp_path):
    with pytest.raises(ShardError, match="token 29 is not in the vocabulary of 29"):
        shards.write_shard(tmp_path / "a.npy", TOKENS, vocabulary=29)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_old_shard_and_nothing_else(folder, monkeypatch):
    def interrupt(file):
        raise KeyboardInterrupt

    before = sorted(folder.iterdir())
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        shards.write_shard(folder / NAMES[0], TOKENS[:10], vocabulary=30)
    assert sorted(folder.iterdir()) == before
    np.testing.assert_array_equal(shards.open_shard(folder / NAMES[0]), TOKENS)


@given(st.data())
@examples(100)
def test_a_damaged_shard_is_refused_by_name(shared, data):
    folder, contents = shared
    path = folder / NAMES[0]
    changed = data.draw(damages(contents[NAMES[0]]) | st.binary(max_size=200))
    assume(changed != contents[NAMES[0]])
    path.write_bytes(changed)
    (shard,) = shards.read_index(folder).training if refused(shards.read_index, folder) is None else (None,)
    assert shard is None or str(path) in refused(shards.verify_shard, path, shard, 30)
    path.write_bytes(contents[NAMES[0]])
    assert refused(shards.read_index, folder) is None  # negative control


# --- The index. ---


@pytest.mark.parametrize("make", [lambda path: None, os.mkfifo], ids=["missing", "a pipe that nobody writes"])
def test_what_is_no_file_is_neither_a_shard_nor_an_index(make, folder):
    """A pipe would be waited for without end."""
    for name in (NAMES[0], "index.json"):
        (folder / name).unlink()
        make(folder / name)
        message = refused(shards.read_index, folder)
        assert str(folder) in message
        assert name in message


def test_an_index_comes_back_as_written_and_only_the_same_tokens_have_the_same_fingerprint(folder, tmp_path):
    index = shards.read_index(folder)
    assert index == write_folder(folder)
    assert (index.tokens("training"), index.tokens("validation")) == (50, 50)
    other = shards.write_shard(folder / NAMES[1], TOKENS[::-1].copy(), vocabulary=30)
    assert shards.fingerprint(index) == shards.fingerprint(write_folder(folder))
    assert shards.fingerprint(index) != shards.fingerprint(Index(("a",), "bytes", 30, 0, index.training, (other,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 1 cannot be read"),
        ({"separator": 30}, "a vocabulary of 30 with the separator 30"),
        ({"vocabulary": 1 << 17}, "a vocabulary of 131072"),
        ({"training": []}, "each part needs shards"),
        ({"training": [3]}, "is no index of shards"),
        ({"training": [{"name": NAMES[1], "tokens": 50, "sha256": ""}]}, "no shard may be named twice"),
        ({"training": [{"name": NAMES[0], "tokens": 49, "sha256": ""}]}, "has 50 tokens, but index.json says 49"),
        *(
            ({"training": [{"name": name, "tokens": 50, "sha256": ""}]}, "may have letters, digits")
            for name in ("../a.npy", "/a.npy", "a/b")
        ),
    ],
)
def test_an_index_with_something_wrong_is_refused(change, message, folder):
    path = folder / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in refused(shards.read_index, folder)
    assert str(folder) in refused(shards.read_index, folder)


@given(st.data())
@examples(100)
def test_a_damaged_index_is_read_or_refused_by_name(shared, data):
    folder, contents = shared
    path = folder / "index.json"
    json_like = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)
    random = st.dictionaries(st.sampled_from([*json.loads(contents["index.json"])]), json_like).map(json.dumps)
    path.write_bytes(data.draw(damages(contents["index.json"]) | random.map(str.encode) | st.just(b"[" * 100_000)))
    message = refused(lambda: shards.fingerprint(shards.read_index(folder)))
    path.write_bytes(contents["index.json"])
    assert message is None or str(folder) in message


def test_a_check_names_all_damaged_shards(tmp_path):
    write_folder(tmp_path)
    for name in NAMES:
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-2] + b"\1\0")
    message = refused(data.check, tmp_path)
    assert message.count("does not have the checksum in index.json") == 2
    assert all(name in message for name in NAMES)
    (shard,) = shards.read_index(tmp_path).training
    write_folder(tmp_path)
    assert "has the token 29" in refused(shards.verify_shard, tmp_path / NAMES[0], shard, 29)
