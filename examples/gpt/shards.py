"""Store tokens in shards: `.npy` files of uint16 numbers, and the file `index.json` that lists and describes them.

A shard is mapped into memory, never read as a whole. The index names the tokenizer, the text, and the shards of both
parts, each with its number of tokens and the SHA-256 of its file. A folder with anything else is refused with a
`ShardError` that names the file.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

VERSION = 2
INDEX_NAME = "index.json"
MAXIMUM_VOCABULARY = 1 << 16
# A name without a separator of paths: an index cannot point outside of its folder.
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_MAKE_AGAIN = "Make the shards again: `python -m examples.gpt.data` with the options of then, and with `--overwrite`."

Part = Literal["training", "validation"]


class ShardError(ValueError):
    """A shard or an index cannot be used; the message names it and says what to do."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """The name of a file beside the index, its number of tokens and its checksum."""

    name: str
    tokens: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Index:
    """The names of the texts in a folder, the meaning of their tokens, and the shards of both parts."""

    texts: tuple[str, ...]
    tokenizer: str
    vocabulary: int
    separator: int
    training: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    def tokens(self, part: Part) -> int:
        """Return the number of tokens of one part."""
        return sum(shard.tokens for shard in getattr(self, part))


# --- One shard. ---
def write_shard(path: Path, tokens: np.ndarray, *, vocabulary: int) -> Shard:
    """Write uint16 tokens of shape (n,), and raise a `ShardError` if one of them is not in the vocabulary."""
    if tokens.max() >= vocabulary:
        raise ShardError(f"{path}: token {tokens.max()} is not in the vocabulary of {vocabulary:,}.")
    with _replaced(path) as file:
        np.save(file, tokens.astype("<u2"), allow_pickle=False)
    return Shard(path.name, len(tokens), _sha256(path))


def open_shard(path: Path) -> np.ndarray:
    """Map the tokens of a shard into memory, read-only, and raise a `ShardError` if the file is no shard."""
    if not path.is_file():  # opening a pipe would wait for a writer
        raise ShardError(f"cannot read the shard {path}: it is not a file.")
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
        if tokens.dtype != np.dtype("<u2") or tokens.ndim != 1 or tokens.offset + tokens.nbytes != path.stat().st_size:
            raise ValueError("it is not one row of uint16")
    except Exception as error:  # NumPy raises many types for a damaged header
        raise ShardError(f"{path} is no shard of tokens, or is damaged: {error}. {_MAKE_AGAIN}") from error
    return tokens.view(np.ndarray)  # a plain view is faster to slice


def verify_shard(path: Path, shard: Shard, vocabulary: int) -> None:
    """Read a whole shard, and raise a `ShardError` if its checksum or a token is wrong."""
    largest = open_shard(path).max()
    if _sha256(path) != shard.sha256:
        raise ShardError(f"{path} is damaged: it does not have the checksum in {INDEX_NAME}. {_MAKE_AGAIN}")
    if largest >= vocabulary:
        raise ShardError(f"{path} has the token {largest}, which is not in its vocabulary of {vocabulary:,}.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name when all of it is on the disk, and none after an error."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


# --- The index. ---
def write_index(folder: Path, index: Index) -> None:
    """Write the index of a folder, after all of its shards."""
    with _replaced(folder / INDEX_NAME) as file:
        file.write((json.dumps({"version": VERSION} | dataclasses.asdict(index), indent=2) + "\n").encode())


def read_index(folder: Path) -> Index:
    """Read the index of a folder, and raise a `ShardError` unless all of its shards are there and of their length."""
    path = folder / INDEX_NAME
    if not path.is_file():  # also a pipe, which would be waited for, or a device, which may never end
        raise ShardError(
            f"the folder {folder} has no file {INDEX_NAME}: it is no folder of shards, or the command that made it was "
            "interrupted. Make one with `python -m examples.gpt.data --text YOUR_TEXT --out ANOTHER_FOLDER`."
        )
    try:
        index = _parsed(json.loads(path.read_bytes()))
    except OSError as error:
        raise ShardError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ShardError(f"{path} is no index of shards: {error}") from error
    for shard in index.training + index.validation:
        there = len(open_shard(folder / shard.name))
        if there != shard.tokens:
            raise ShardError(
                f"{folder / shard.name} has {there:,} tokens, but {INDEX_NAME} says {shard.tokens:,}. {_MAKE_AGAIN}"
            )
    return index


def fingerprint(index: Index) -> str:
    """Return a hash that two folders share only if they have the same tokens in the same shards."""
    parts = [[shard.sha256 for shard in part] for part in (index.training, index.validation)]
    return hashlib.sha256(json.dumps([index.tokenizer, *parts]).encode()).hexdigest()


def _parsed(content: Any) -> Index:
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']} cannot be read, only version {VERSION}. {_MAKE_AGAIN}")
    shard = lambda fields: Shard(str(fields["name"]), int(fields["tokens"]), str(fields["sha256"]))
    index = Index(
        texts=tuple(map(str, content["texts"])),
        tokenizer=str(content["tokenizer"]),
        vocabulary=int(content["vocabulary"]),
        separator=int(content["separator"]),
        training=tuple(map(shard, content["training"])),
        validation=tuple(map(shard, content["validation"])),
    )
    if not 0 <= index.separator < index.vocabulary <= MAXIMUM_VOCABULARY:
        raise ValueError(f"a vocabulary of {index.vocabulary} with the separator {index.separator} cannot be.")
    names = [shard.name for shard in index.training + index.validation]
    if not (index.training and index.validation) or len(set(names)) < len(names):
        raise ValueError("each part needs shards, and no shard may be named twice.")
    for name in names:
        if not _SAFE_NAME.fullmatch(name):
            raise ValueError(f"the name {name!r} of a shard may have letters, digits, '.', '_' and '-' only.")
    return index
