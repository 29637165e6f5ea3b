"""Read text as bytes, and split it into a part for training and a part for validation."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# A comparison reads well below a million bytes, so more text would only take longer to load.
MAXIMUM_BYTES = 4_000_000
# A longer file becomes several documents, cut after lines, so that no file needs to fit into memory.
DOCUMENT_BYTES = 1_000_000
# Parts of the standard library that are tests, tables of numbers, foreign packages, or differ between machines.
SKIPPED_FOLDERS = {"__pycache__", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
# Validation blocks come from all over the text. Only the two ends of a block can share a line with the training part.
HELD_OUT_BLOCKS = 10
HELD_OUT_EVERY = 10


class TextError(ValueError):
    """A text cannot be used; the message says why."""


# --- Reading. ---
def read_text(path: Path | None) -> bytes:
    """Read the first `MAXIMUM_BYTES` of the documents of a path, as `documents` finds them."""
    content = bytearray()
    for document in documents(path):
        content += document[: MAXIMUM_BYTES - len(content)]
        if len(content) == MAXIMUM_BYTES:
            break
    return bytes(content)


def documents(path: Path | None) -> Iterator[bytes]:
    """Yield the text files of a path one by one, in sorted order; a long file becomes several documents.

    None stands for the source code of Python's standard library. Files with a zero byte are not text and are left out.
    """
    found = False
    for file in filter(_is_text, files(path)):
        with file.open("rb") as opened:
            while document := b"".join(opened.readlines(DOCUMENT_BYTES)):
                found = True
                yield document
    if not found:
        raise TextError(f"there is no text in {name_of(path)}: its files are empty, or have a zero byte.")


def files(path: Path | None) -> list[Path]:
    """Return the files of a path in the order of reading, without hidden ones."""
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        return sorted(file for file in folder.rglob("*.py") if not _is_skipped(file.relative_to(folder)))
    if path.is_dir():
        is_hidden = lambda file: any(part.startswith(".") for part in file.relative_to(path).parts)
        found = (file for file in path.rglob("*") if file.is_file() and not is_hidden(file))
        return sorted(found, key=lambda file: file.relative_to(path).as_posix())
    if path.is_file():
        return [path]
    raise TextError(f"there is no file or folder {path}.")


def name_of(path: Path | None) -> str:
    """Return the name of a text in a report."""
    return "Python's standard library" if path is None else str(path)


def _is_skipped(path: Path) -> bool:
    return not SKIPPED_FOLDERS.isdisjoint(path.parts) or any(part.startswith(SKIPPED_PREFIXES) for part in path.parts)


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return not any(b"\0" in piece for piece in iter(lambda: file.read(DOCUMENT_BYTES), b""))


# --- The two parts and their sequences. ---
def split(
    tokens: np.ndarray, context: int, *, held_out_every: int = HELD_OUT_EVERY, unit: str = "bytes"
) -> tuple[np.ndarray, np.ndarray]:
    """Split a text in two: every `held_out_every`th block is held out, `HELD_OUT_BLOCKS` blocks in all."""
    count = HELD_OUT_BLOCKS * held_out_every
    minimum = count * (context + 1)
    if len(tokens) < minimum:
        raise TextError(f"the text is too short: it has {len(tokens):,} {unit}, and at least {minimum:,} are needed.")
    blocks = np.array_split(tokens, count)
    held_out = [blocks.pop(index) for index in reversed(range(held_out_every - 1, count, held_out_every))]
    return np.concatenate(blocks), np.concatenate(held_out[::-1])


def random_batches(tokens: np.ndarray, *, seed: int, count: int, batch_size: int, context: int) -> Iterator[np.ndarray]:
    """Yield `count` batches of shape (batch_size, context + 1): the targets are the inputs, one token later."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        starts = generator.integers(0, len(tokens) - context, size=batch_size)
        yield _windows(tokens, starts, context)


def fixed_batches(tokens: np.ndarray, *, count: int, batch_size: int, context: int) -> np.ndarray:
    """Return evenly spaced sequences, the same at every call, of shape (count, batch_size, context + 1)."""
    starts = np.linspace(0, len(tokens) - context - 1, count * batch_size).astype(np.int64)
    return _windows(tokens, starts, context).reshape(count, batch_size, context + 1)


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(context + 1)]
