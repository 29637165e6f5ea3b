"""Text as bytes, its split into training and held-out parts, and batches on their way to the device."""

import collections
import dataclasses
import hashlib
import itertools
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import numpy as np

# A run sees well below a million bytes, so more text than this would only take longer to read.
MAXIMUM_BYTES = 4_000_000
# Folders and files of the standard library that are no prose of code: tests, tables of numbers, other people's
# packages, and what differs from machine to machine.
SKIPPED_FOLDERS = {"__pycache__", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
# The text is cut into this many blocks, of which every tenth is held out: both parts come from all over the text,
# and only the two ends of a block can share a line with the other part.
BLOCKS = 100
HELD_OUT_EVERY = 10


class TextError(Exception):
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


def read_text(path: Path | None) -> Text:
    """Reads a file, the text files of a folder, or (None) the source code of Python's standard library.

    Files are taken in the order of their sorted paths, so that the same folder is always the same text, and reading
    stops at `MAXIMUM_BYTES`.

    Raises:
        TextError: if the path does not exist, cannot be read, or holds no text.
    """
    try:
        if path is None:
            name, content = "Python's standard library", _join(standard_library_files())
        elif path.is_dir():
            name, content = str(path), _join(_files_of_folder(path))
        elif path.is_file():
            name, content = str(path), _join([path])
        elif path.exists():
            raise TextError(f"{path} is neither a file nor a folder.")
        else:
            raise TextError(f"there is no file or folder {path}.")
    except OSError as error:
        raise TextError(f"cannot read {error.filename or path}: {error.strerror or error}.") from error
    if not content:
        raise TextError(
            "this Python has no source code of its standard library; pass `--text PATH`."
            if path is None
            else f"{path} is empty."
            if path.is_file()
            else f"the folder {path} has no text files with anything in them."
        )
    return Text(name, content)


def split(tokens: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits a text into the part to train on and the part that is never trained on, nine to one.

    Raises:
        TextError: if a block would be shorter than one sequence and its last target.
    """
    minimum = BLOCKS * (context + 1)
    if len(tokens) < minimum:
        raise TextError(f"the text is too short: it has {len(tokens):,} bytes, and at least {minimum:,} are needed.")
    blocks = np.array_split(tokens, BLOCKS)
    is_held_out = [index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for index in range(BLOCKS)]
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


def prefetch(batches: Iterable[np.ndarray], ahead: int = 2) -> Iterator[jax.Array]:
    """Puts batches on the device before they are asked for, so that a step never waits for a copy."""
    batches = iter(batches)
    waiting = collections.deque(jax.device_put(batch) for batch in itertools.islice(batches, ahead))
    while waiting:
        batch = waiting.popleft()
        waiting.extend(jax.device_put(following) for following in itertools.islice(batches, 1))
        yield batch


def standard_library_files() -> list[Path]:
    """The Python files of the standard library that are worth reading, in the order of their paths."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = (path for path in folder.rglob("*.py") if not _is_skipped(path.relative_to(folder)))
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _is_skipped(path: Path) -> bool:
    return not SKIPPED_FOLDERS.isdisjoint(path.parts) or any(part.startswith(SKIPPED_PREFIXES) for part in path.parts)


def _files_of_folder(folder: Path) -> list[Path]:
    is_hidden = lambda path: any(part.startswith(".") for part in path.relative_to(folder).parts)
    files = (path for path in folder.rglob("*") if path.is_file() and not is_hidden(path))
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _join(files: Iterable[Path]) -> bytes:
    """The first `MAXIMUM_BYTES` of the contents of files; one with a zero byte in it is no text."""
    parts, missing = [], MAXIMUM_BYTES
    for path in files:
        with path.open("rb") as file:
            content = file.read(missing)
        if b"\0" not in content:
            parts.append(content)
            missing -= len(content)
        if missing == 0:
            break
    return b"".join(parts)


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(context + 1)]
