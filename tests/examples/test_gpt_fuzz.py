"""Shards, indexes and logs of random bytes: what is no such file is refused by name, whatever is in it."""

import dataclasses
import hashlib
import json
import os
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from examples.gpt import shards
from examples.gpt.run_log import Record, RunLog, read_records
from examples.gpt.shards import ShardError
from tests.examples.shard_files import write_folder

TOKENS = np.arange(50, dtype=np.uint16) % 30
READERS = {"open": shards.open_shard, "header": shards.read_header, "verify": shards.verify_shard}
NAMES = ("training-00000.tokens", "validation-00000.tokens")
every_reader = pytest.mark.parametrize("reader", READERS)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A file to fill again and again, and the bytes of a real shard."""
    path = tmp_path_factory.mktemp("shard") / "scratch.tokens"
    shards.write_shard(path, TOKENS, vocabulary=30)
    return path, path.read_bytes()


def make_folder(folder):
    write_folder(folder, NAMES, TOKENS, vocabulary=30)


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("folder")
    make_folder(path)
    return path, {file.name: file.read_bytes() for file in path.iterdir()}


def header(magic=b"GPTSHARD", version=1, vocabulary=30, tokens=50, sha256=b"", zeros=b""):
    """A header whose checksum fits, whatever is in it."""
    fields = struct.pack("<8sIIQ32s4s", magic, version, vocabulary, tokens, sha256, zeros)
    return fields + struct.pack("<I", zlib.crc32(fields))


def damages(content):
    """What the bytes of a file become when some are cut off, changed, put in or added."""
    place = st.integers(0, len(content))
    some = st.binary(max_size=9)
    return st.one_of(
        st.builds(lambda at: content[:at], place),
        st.builds(lambda at, new: content[:at] + new + content[at + len(new) :], place, some),
        st.builds(lambda at, new: content[:at] + new + content[at:], place, some),
        st.builds(lambda at, to, other: content[:at] + content[to:] + other, place, place, some),
    )


def refused(reader, *arguments):
    """The message of a `ShardError`, or None; any other exception ends the test."""
    try:
        reader(*arguments)
    except ShardError as error:
        return str(error)
    return None


# --- A shard. ---
@given(data=st.data())
@example(data=None)
def test_a_damaged_shard_is_refused_by_name(scratch, data):
    path, content = scratch
    changed = content[:70] if data is None else data.draw(damages(content))
    assume(changed != content)
    path.write_bytes(changed)

    assert str(path) in (refused(shards.verify_shard, path) or "")


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda rest: b"GPTSHARD" + rest))
def test_random_bytes_are_no_shard_for_any_reader(scratch, content):
    path, _ = scratch
    path.write_bytes(content)

    for reader in READERS.values():
        assert str(path) in (refused(reader, path) or "")


NUMBERS = st.sampled_from([0, 1, 29, 30, 50, 51, 2**16, 2**16 + 1, 2**31, 2**32 - 1])


@given(NUMBERS, NUMBERS, NUMBERS | st.sampled_from([2**40, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 120))
def test_a_header_of_random_numbers_with_a_right_checksum_is_taken_only_if_it_says_what_is_there(
    scratch, version, vocabulary, tokens, size
):
    path, _ = scratch
    body = bytes(size)
    path.write_bytes(
        header(version=version, vocabulary=vocabulary, tokens=tokens, sha256=hashlib.sha256(body).digest()) + body
    )
    is_right = version == 1 and 1 <= vocabulary <= 2**16 and tokens >= 1 and size == 2 * tokens

    for reader in READERS.values():
        message = refused(reader, path)
        assert (message is None) == is_right
        assert is_right or str(path) in message


@every_reader
@pytest.mark.parametrize("tokens", [2**31, 2**40, 2**63 - 1, 2**64 - 1])
def test_a_shard_that_claims_to_be_huge_takes_no_memory(reader, tokens, tmp_path):
    """The claim is compared with the size of the file before anything is made for it."""
    path = tmp_path / "huge.tokens"
    path.write_bytes(header(tokens=tokens) + bytes(100))
    tracemalloc.start()
    try:
        message = refused(READERS[reader], path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert f"truncated: the header promises {tokens:,} tokens, there are 50" in message


def test_a_huge_shard_is_mapped_and_not_read(tmp_path):
    """A file of a terabyte, without any blocks on the disk."""
    path = tmp_path / "huge.tokens"
    path.write_bytes(header(tokens=2**39))
    try:
        os.truncate(path, 64 + 2**40)
    except OSError as error:
        pytest.skip(f"this file system has no files of this size: {error}")
    tracemalloc.start()
    try:
        message = refused(lambda: np.testing.assert_equal(shards.open_shard(path)[-1], 0))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert message is None or "cannot be mapped into memory" in message


def make_nothing(path):
    pass


def make_dangling(path):
    path.symlink_to(path.with_name("nowhere"))


def make_loop(path):
    path.symlink_to(path)


def make_link_to_a_folder(path):
    path.symlink_to(path.parent)


def make_link_to_a_device(path):
    path.symlink_to("/dev/zero")


NO_FILES = {
    "missing": make_nothing,
    "a dangling link": make_dangling,
    "a link to itself": make_loop,
    "a link to a folder": make_link_to_a_folder,
    "a link to an endless device": make_link_to_a_device,
    "a pipe that nobody writes": os.mkfifo,
    "a folder": os.mkdir,
}
every_no_file = pytest.mark.parametrize("what", NO_FILES)


@every_reader
@every_no_file
def test_what_is_no_file_is_no_shard(what, reader, tmp_path):
    path = tmp_path / "some.tokens"
    NO_FILES[what](path)

    assert str(path) in refused(READERS[reader], path)


@every_no_file
def test_what_is_no_file_is_no_index(what, folder):
    """A pipe was waited for, and a device read for ever."""
    path = folder / "index.json"
    path.unlink()
    NO_FILES[what](path)

    message = refused(shards.read_index, folder)
    assert str(folder) in message
    assert "index.json" in message


@every_no_file
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_no_shard_of_an_index(what, name, folder):
    path = folder / name
    path.unlink()
    NO_FILES[what](path)

    assert str(path) in refused(shards.read_index, folder)


def test_a_link_to_a_shard_is_a_shard(folder, tmp_path):
    path = tmp_path / "link.tokens"
    path.symlink_to(folder / NAMES[0])

    np.testing.assert_array_equal(shards.open_shard(path), TOKENS)


# --- A folder. ---
@given(st.sampled_from(NAMES), st.data())
def test_a_folder_with_a_damaged_shard_is_refused_or_has_the_same_fingerprint(shared_folder, name, data):
    """What is read of each shard is its header; the tokens are for `verify_shard`."""
    folder, contents = shared_folder
    for file, content in contents.items():
        (folder / file).write_bytes(content)
    expected = shards.fingerprint(folder)
    changed = data.draw(damages(contents[name]))
    (folder / name).write_bytes(changed)

    message = refused(shards.fingerprint, folder)
    if message is None:
        assert changed[:64] == contents[name][:64]
        assert shards.fingerprint(folder) == expected
    else:
        assert str(folder / name) in message


@given(st.data())
def test_a_damaged_index_is_read_or_refused_by_name(shared_folder, data):
    folder, contents = shared_folder
    for file, content in contents.items():
        (folder / file).write_bytes(content)
    (folder / "index.json").write_bytes(data.draw(damages(contents["index.json"])))

    message = refused(shards.fingerprint, folder)
    assert message is None or str(folder) in message


def test_a_folder_whose_tokenizer_has_a_name_that_is_no_unicode_text_has_a_fingerprint(folder):
    """JSON can say so: there was a UnicodeEncodeError."""
    path = folder / "index.json"
    path.write_text(path.read_text().replace('"bytes"', r'"\ud800"', 1))
    assert shards.read_index(folder).tokenizer == "\ud800"
    assert len(shards.fingerprint(folder)) == 64


# --- The log of a run. ---
RECORD = Record(3, 5.5, 1e-3, 2.0, 1.0, 0, 0.02, 6400.0, 0.4, 10**9, 2 * 10**9, None)
LINE = json.dumps(dataclasses.asdict(RECORD)).encode() + b"\n"
LINES = st.lists(st.just(LINE) | st.binary(max_size=20) | damages(LINE), max_size=4).map(b"".join)


@given(LINES)
def test_a_log_of_random_bytes_is_read_or_refused_by_a_value_error(scratch, content):
    path = scratch[0].with_name("log.jsonl")
    path.write_bytes(content)
    message, records = "log.jsonl, line", []
    try:
        records = read_records(path)
    except ValueError as error:
        message = str(error)
    assert "log.jsonl, line" in message
    assert len(records) <= len(content.splitlines())


@given(st.lists(st.text(st.characters(codec="ascii"), max_size=20), max_size=3), st.booleans())
def test_lines_that_are_no_records_are_named_but_for_the_last(scratch, lines, is_last):
    path = scratch[0].with_name("log.jsonl")
    random = "".join(lines)
    path.write_bytes(LINE + random.encode() + b"\n" + (b"" if is_last else LINE))
    number = len((LINE + random.encode()).splitlines())
    if is_last and number <= 2:
        assert read_records(path) == [RECORD]
    elif random or not is_last:
        with pytest.raises(ValueError, match=r"log\.jsonl, line \d+: this is no line of a run's log"):
            read_records(path)


@given(st.integers(0, 2 * len(LINE)))
def test_a_log_cut_off_anywhere_keeps_its_whole_lines(scratch, kept):
    path = scratch[0].with_name("log.jsonl")
    path.write_bytes((LINE + LINE)[:kept])
    whole = kept + 1 >= len(LINE), kept + 1 >= 2 * len(LINE)  # the end of the line is not missed
    assert read_records(path) == [RECORD] * sum(whole)


@given(st.integers(0, 2 * len(LINE)))
def test_a_run_goes_on_from_a_log_cut_off_anywhere(scratch, kept):
    path = scratch[0].with_name("log.jsonl")
    path.write_bytes((LINE + LINE)[:kept])
    whole = read_records(path)
    log = RunLog(path, resumed_from=3)
    log.write(RECORD)
    assert read_records(path) == [*whole, RECORD]
