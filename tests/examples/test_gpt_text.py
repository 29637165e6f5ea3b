"""Where the text of the GPT example comes from, and its two parts."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.gpt import text

CONTEXT = 64


def test_the_held_out_part_is_never_trained_on():
    positions = np.arange(12_345, dtype=np.uint32)
    training, held_out = text.split(positions, CONTEXT)

    assert np.intersect1d(training, held_out).size == 0
    np.testing.assert_array_equal(np.union1d(training, held_out), positions)
    assert len(held_out) == pytest.approx(len(positions) / 10, rel=0.02)
    batches = text.random_batches(training, seed=0, count=50, batch_size=8, context=16)
    assert not np.isin(np.stack(list(batches)), held_out).any()


def test_another_part_can_be_held_out_and_comes_from_all_over_the_text():
    """One block of four, and ten such blocks: the held-out tokens fall into every tenth of the text."""
    positions = np.arange(12_345, dtype=np.uint32)
    training, held_out = text.split(positions, CONTEXT, held_out_every=4)

    np.testing.assert_array_equal(np.union1d(training, held_out), positions)
    assert len(held_out) == pytest.approx(len(positions) / 4, rel=0.02)
    assert set(held_out * 10 // len(positions)) == set(range(10))


def test_a_text_too_short_for_its_blocks_is_refused_with_both_lengths():
    tokens = np.zeros(40 * (CONTEXT + 1) - 1, np.uint16)

    with pytest.raises(text.TextError, match="it has 2,599 tokens, and at least 2,600 are needed"):
        text.split(tokens, CONTEXT, held_out_every=4, unit="tokens")


def test_batches_depend_on_the_seed_alone_and_have_one_shape():
    tokens = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    make = lambda seed: list(text.random_batches(tokens, seed=seed, count=5, batch_size=3, context=16))

    first, again, other = make(0), make(0), make(1)
    assert {batch.shape for batch in first} == {(3, 17)}
    assert {batch.dtype for batch in first} == {np.dtype(np.uint8)}
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    fixed = text.fixed_batches(tokens, count=2, batch_size=3, context=16)
    assert fixed.shape == (2, 3, 17)
    np.testing.assert_array_equal(fixed[0, 0], tokens[:17])
    np.testing.assert_array_equal(fixed[-1, -1], tokens[-17:])


def test_the_standard_library_is_read_in_a_fixed_order_without_its_tests():
    folder, files = Path(sysconfig.get_path("stdlib")), text.standard_library_files()

    assert files == sorted(files, key=lambda path: path.as_posix())
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in files}
    assert not any({"test", "tests", "site-packages"} & set(path.relative_to(folder).parts) for path in files)


@pytest.fixture
def mixed_folder(tmp_path):
    """A folder with a hidden file, a binary one and an empty one between its texts."""
    (tmp_path / "b").mkdir()
    contents = [("c", b"3"), ("b/x", b"2"), ("a", b"1"), (".git", b"no"), ("image", b"\0no"), ("empty", b"")]
    for name, content in contents:
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(mixed_folder):
    assert text.read_text(mixed_folder).content == b"123"


def test_the_documents_of_a_folder_are_the_same_files(mixed_folder):
    assert list(text.documents(mixed_folder)) == [b"1", b"2", b"3"]


def test_reading_stops_at_the_maximum(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAXIMUM_BYTES", 5)
    for name in "abc":
        (tmp_path / name).write_bytes(b"123")

    assert text.read_text(tmp_path).content == b"12312"


def test_documents_do_not_stop_there(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAXIMUM_BYTES", 5)
    for name in "abc":
        (tmp_path / name).write_bytes(b"123")

    assert list(text.documents(tmp_path)) == [b"123"] * 3


def test_the_documents_of_the_standard_library_are_its_files():
    first = next(text.documents(None))

    assert first == text.standard_library_files()[0].read_bytes()


@given(st.lists(st.text("añ€😀\n"), max_size=20).map("".join), st.integers(4, 12))
def test_a_long_file_is_cut_into_documents_that_make_up_the_file(tmp_path_factory, content, maximum):
    """Cut after lines, or without a line at least between characters, of which the longest here has four bytes."""
    path = tmp_path_factory.getbasetemp() / "long"
    path.write_bytes(content.encode() + b".")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "MAXIMUM_DOCUMENT_BYTES", maximum)
        documents = list(text.documents(path))

    assert b"".join(documents) == path.read_bytes()
    assert all(documents)
    # What was left over from the piece before comes on top.
    assert max(map(len, documents)) < 2 * maximum
    assert "�" not in "".join(document.decode(errors="replace") for document in documents)


def test_a_long_file_is_cut_after_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAXIMUM_DOCUMENT_BYTES", 10)
    (tmp_path / "long").write_bytes(b"one\ntwo\nthree\nfour\nfive\n")

    assert list(text.documents(tmp_path / "long")) == [b"one\ntwo\n", b"three\nfour\n", b"five\n"]


def test_a_zero_byte_late_in_a_long_file_skips_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAXIMUM_DOCUMENT_BYTES", 10)
    (tmp_path / "a").write_bytes(b"text\n" * 10 + b"\0")
    (tmp_path / "b").write_bytes(b"text")

    assert list(text.documents(tmp_path)) == [b"text"]


def test_progress_ends_at_the_total_number_of_bytes(mixed_folder, monkeypatch):
    monkeypatch.setattr(text, "MAXIMUM_DOCUMENT_BYTES", 10)
    (mixed_folder / "long").write_bytes(b"line\n" * 9)
    read = []
    list(text.documents(mixed_folder, read.append))

    assert sum(read) == text.total_bytes([mixed_folder]) == 45 + 3 + 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no file or folder"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.write_bytes(b"\0"), "is no text: it has a zero byte in it"),
        (lambda path: path.mkdir(), "has no text files with anything in them"),
    ],
    ids=["missing", "empty file", "binary file", "empty folder"],
)
@pytest.mark.parametrize("read", [text.read_text, lambda path: list(text.documents(path))], ids=["text", "documents"])
def test_a_text_that_cannot_be_used_is_refused_by_name(read, make, message, tmp_path):
    make(tmp_path / "text")

    with pytest.raises(text.TextError, match=message) as caught:
        read(tmp_path / "text")
    assert str(tmp_path / "text") in str(caught.value)


@pytest.mark.parametrize("read", [text.read_text, lambda path: list(text.documents(path))], ids=["text", "documents"])
def test_a_text_that_cannot_be_read_is_refused_by_name(read, tmp_path, monkeypatch):
    def refuse(path, *arguments):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "text").write_bytes(b"text")
    monkeypatch.setattr(text.Path, "open", refuse)  # a test run as root can read every file

    with pytest.raises(text.TextError, match=r"cannot read .*text: Permission denied"):
        read(tmp_path / "text")
