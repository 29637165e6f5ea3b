"""Text as bytes: where it is read from, and its split into a part to train on and a part that is held out."""

import dataclasses
import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

# A run of the comparison sees well below a million bytes, so more text than this would only take longer to read.
MAXIMUM_BYTES = 4_000_000
# A longer file is cut after a line into several documents, so that no file needs to fit into memory.
MAXIMUM_DOCUMENT_BYTES = 1_000_000
STANDARD_LIBRARY = "Python's standard library"
# Folders and files of the standard library that are no prose of code: tests, tables of numbers, other people's
# packages, and what differs from machine to machine.
SKIPPED_FOLDERS = {"__pycache__", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
# The text is cut into blocks, of which every tenth is held out: both parts come from all over the text, and only the
# two ends of a block can share a line with the other part.
HELD_OUT_BLOCKS = 10
HELD_OUT_EVERY = 10


class TextError(ValueError):
    """The text cannot be used; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A text and what identifies it in the report."""

    name: str
    content: bytes

    @property
    def sha256(self) -> str:
        """Runs are comparable only if this is equal: the standard library differs between Python versions."""
        return hashlib.sha256(self.content).hexdigest()


# --- Reading. ---
def read_text(path: Path | None) -> Text:
    """Reads a file, the text files of a folder, or (None) the source code of Python's standard library.

    Files are taken in the order of their sorted paths, so that the same folder is always the same text, and reading
    stops at `MAXIMUM_BYTES`.

    Raises:
        TextError: if the path does not exist, cannot be read, or holds no text.
    """
    try:
        content = _join(files(path))
    except OSError as error:
        raise _unreadable(path, error) from error
    if not content:
        raise _without_text(path)
    return Text(name_of(path), content)


def documents(path: Path | None, on_read: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Yields the same files one by one and without a limit: a document is a file, or a part of a long one.

    Args:
        path: a file, a folder, or None for Python's standard library.
        on_read: hears of every number of bytes that is done with, whether they were text or not.

    Raises:
        TextError: at the first document if the path does not exist or holds no text, and where a file cannot be read.
    """
    found = False
    try:
        for file in files(path):
            for document in _documents_of_file(file, on_read or (lambda count: None)):
                found = True
                yield document
    except OSError as error:
        raise _unreadable(path, error) from error
    if not found:
        raise _without_text(path)


def files(path: Path | None) -> list[Path]:
    """The files that a path stands for, in the order in which they are read.

    Raises:
        TextError: if the path is neither a file nor a folder.
    """
    if path is None:
        return standard_library_files()
    if path.is_dir():
        return _files_of_folder(path)
    if path.is_file():
        return [path]
    if path.exists():
        raise TextError(f"{path} is neither a file nor a folder.")
    raise TextError(f"there is no file or folder {path}.")


def total_bytes(paths: Iterable[Path | None]) -> int:
    """The size of all files of these paths, of which `documents` tells with `on_read` how much is done.

    Raises:
        TextError: if a path is neither a file nor a folder, or a file cannot be looked at.
    """
    total = 0
    for path in paths:
        try:
            total += sum(file.stat().st_size for file in files(path))
        except OSError as error:
            raise _unreadable(path, error) from error
    return total


def name_of(path: Path | None) -> str:
    """What a report calls the text of this path."""
    return STANDARD_LIBRARY if path is None else str(path)


def standard_library_files() -> list[Path]:
    """The Python files of the standard library that are worth reading, in the order of their paths."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = (path for path in folder.rglob("*.py") if not _is_skipped(path.relative_to(folder)))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _is_skipped(path: Path) -> bool:
    return not SKIPPED_FOLDERS.isdisjoint(path.parts) or any(part.startswith(SKIPPED_PREFIXES) for part in path.parts)


def _files_of_folder(folder: Path) -> list[Path]:
    is_hidden = lambda path: any(part.startswith(".") for part in path.relative_to(folder).parts)
    found = (path for path in folder.rglob("*") if path.is_file() and not is_hidden(path))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _join(paths: Iterable[Path]) -> bytes:
    """The first `MAXIMUM_BYTES` of the contents of files; one with a zero byte in it is no text."""
    parts, missing = [], MAXIMUM_BYTES
    for path in paths:
        with path.open("rb") as file:
            content = file.read(missing)
        if _is_text(content):
            parts.append(content)
            missing -= len(content)
        if missing == 0:
            break
    return b"".join(parts)


def _documents_of_file(path: Path, on_read: Callable[[int], None]) -> Iterator[bytes]:
    with path.open("rb") as file:
        pieces = lambda: iter(lambda: file.read(MAXIMUM_DOCUMENT_BYTES), b"")
        # Twice, for long files: the first part of one must not be taken for text if a zero byte comes later.
        if not all(_is_text(piece) for piece in pieces()):
            on_read(path.stat().st_size)
            return
        file.seek(0)
        rest = b""
        for piece in pieces():
            end = len(piece) if len(piece) < MAXIMUM_DOCUMENT_BYTES else _end_of_line(piece)
            yield rest + piece[:end]
            rest = piece[end:]
            on_read(len(piece))
        if rest:
            yield rest


def _is_text(content: bytes) -> bool:
    return b"\0" not in content


def _end_of_line(piece: bytes) -> int:
    """Where to cut: after the last line, or without one in front of the last character, which may be cut itself."""
    end = piece.rfind(b"\n") + 1
    if end:
        return end
    starts = (index for index in range(len(piece) - 1, 0, -1) if piece[index] & 0b1100_0000 != 0b1000_0000)
    return next(starts, len(piece))


def _unreadable(path: Path | None, error: OSError) -> TextError:
    return TextError(f"cannot read {error.filename or name_of(path)}: {error.strerror or error}.")


def _without_text(path: Path | None) -> TextError:
    if path is None:
        return TextError("this Python has no source code of its standard library; pass `--text PATH`.")
    if path.is_file() and path.stat().st_size == 0:
        return TextError(f"{path} is empty.")
    if path.is_file():
        return TextError(f"{path} is no text: it has a zero byte in it.")
    return TextError(f"the folder {path} has no text files with anything in them.")


# --- The two parts and their sequences. ---
def split(
    tokens: np.ndarray, context: int, *, held_out_every: int = HELD_OUT_EVERY, unit: str = "bytes"
) -> tuple[np.ndarray, np.ndarray]:
    """Splits a text into the part to train on and the part that is never trained on, nine to one.

    Args:
        tokens: the whole text.
        context: length of a sequence.
        held_out_every: of so many blocks one is held out, and of these there are `HELD_OUT_BLOCKS`.
        unit: what the message about a short text calls the tokens.

    Raises:
        TextError: if a block would be shorter than one sequence and its last target.
    """
    count = HELD_OUT_BLOCKS * held_out_every
    minimum = count * (context + 1)
    if len(tokens) < minimum:
        raise TextError(f"the text is too short: it has {len(tokens):,} {unit}, and at least {minimum:,} are needed.")
    blocks = np.array_split(tokens, count)
    is_held_out = [index % held_out_every == held_out_every - 1 for index in range(count)]
    training = np.concatenate([block for block, held_out in zip(blocks, is_held_out, strict=True) if not held_out])
    held_out = np.concatenate([block for block, held_out in zip(blocks, is_held_out, strict=True) if held_out])
    return training, held_out


def random_batches(tokens: np.ndarray, *, seed: int, count: int, batch_size: int, context: int) -> Iterator[np.ndarray]:
    """Yields `count` batches of shape (batch_size, context + 1): the targets are the inputs, one byte later."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        starts = generator.integers(0, len(tokens) - context, size=batch_size)
        yield _windows(tokens, starts, context)


def fixed_batches(tokens: np.ndarray, *, count: int, batch_size: int, context: int) -> np.ndarray:
    """Evenly spaced sequences, the same at every call; shape (count, batch_size, context + 1)."""
    starts = np.linspace(0, len(tokens) - context - 1, count * batch_size).astype(np.int64)
    return _windows(tokens, starts, context).reshape(count, batch_size, context + 1)


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(context + 1)]
