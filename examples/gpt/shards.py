"""Shards: files of tokens that can be mapped into memory, and the index that says which belong together.

A shard is a header of 64 bytes and then its tokens, each an unsigned 16-bit number; all numbers are little-endian:

    bytes     what
     0 to 8   b"GPTSHARD"
     8 to 12  version of the format, 1
    12 to 16  size of the vocabulary; every token is below it
    16 to 24  number of tokens
    24 to 56  SHA-256 of the tokens' bytes
    56 to 60  zero
    60 to 64  CRC-32 of the 60 bytes before

An index is the file `index.json` beside the shards. It names the tokenizer, the text, and the shards of both parts.
Whatever else stands in such files is refused with a `ShardError` that names the file.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

MAGIC = b"GPTSHARD"
VERSION = 1
INDEX_NAME = "index.json"
TOKEN = np.dtype("<u2")
MAXIMUM_VOCABULARY = 1 << 16
_FIELDS = struct.Struct("<8sIIQ32s4x")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
# File names only, of characters that mean the same on every system: an index cannot point outside of its folder.
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_TOKENS_AT_ONCE = 1 << 22  # 8 MiB: a check needs little memory, however long the shard is

Part = Literal["training", "validation"]


class ShardError(ValueError):
    """A shard, an index or a folder of them cannot be used; the message names it and says what to do."""


@dataclasses.dataclass(frozen=True)
class Header:
    """What a shard says of itself."""

    vocabulary: int
    tokens: int
    sha256: bytes


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard as its index describes it: the name of a file beside the index, and how many tokens are in it."""

    name: str
    tokens: int


@dataclasses.dataclass(frozen=True)
class Source:
    """The text that shards were made of."""

    names: tuple[str, ...]
    documents: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Index:
    """Which shards of a folder belong together, and what their tokens mean."""

    tokenizer: str
    vocabulary: int
    separator: int
    training: tuple[Shard, ...]
    validation: tuple[Shard, ...]
    text: Source

    def shards(self, part: Part) -> tuple[Shard, ...]:
        """The shards of one part.

        Raises:
            ValueError: if there is no such part.
        """
        if part not in ("training", "validation"):
            raise ValueError(f'`part` must be "training" or "validation", but is {part!r}.')
        return self.training if part == "training" else self.validation

    def tokens(self, part: Part) -> int:
        """How many tokens one part has."""
        return sum(shard.tokens for shard in self.shards(part))


# --- One shard. ---
def write_shard(path: Path, tokens: np.ndarray, *, vocabulary: int) -> None:
    """Writes a shard; until it is complete, nothing stands under its name.

    Raises:
        ShardError: if there are no tokens, they are not uint16, or one of them is not in the vocabulary.
    """
    if tokens.dtype.newbyteorder("<") != TOKEN or tokens.ndim != 1 or not tokens.size:
        raise ShardError(
            f"{path}: a shard takes one or more uint16 tokens in one row, but got {tokens.dtype} of shape "
            f"{tokens.shape}."
        )
    if not 1 <= vocabulary <= MAXIMUM_VOCABULARY:
        raise ShardError(f"{path}: a vocabulary has 1 to {MAXIMUM_VOCABULARY:,} tokens, but this one has {vocabulary}.")
    if tokens.max() >= vocabulary:
        raise ShardError(f"{path}: token {tokens.max()} is not in the vocabulary of {vocabulary:,}.")
    content = np.ascontiguousarray(tokens, TOKEN).view(np.uint8).data
    fields = _FIELDS.pack(MAGIC, VERSION, vocabulary, len(tokens), hashlib.sha256(content).digest())
    with _replaced(path) as file:
        file.write(fields + _CHECKSUM.pack(zlib.crc32(fields)))
        file.write(content)


def open_shard(path: Path) -> np.memmap:
    """Maps the tokens of a shard into memory, read-only; the header and the size of the file are checked.

    Raises:
        ShardError: if the file is missing, is no shard, is damaged in its header, or has another size than it says.
    """
    header = read_header(path)
    try:
        return np.memmap(path, TOKEN, mode="r", offset=HEADER_BYTES, shape=(header.tokens,))
    except (OSError, ValueError) as error:
        raise ShardError(f"{path} cannot be mapped into memory: {error}.") from error


def read_header(path: Path) -> Header:
    """Reads what a shard says of itself, and checks it against the size of the file.

    Raises:
        ShardError: as `open_shard`.
    """
    try:
        # Opening a pipe would wait for a writer.
        if path.exists() and not path.is_file():
            raise ShardError(f"{path} is no shard of tokens: it is not a file.")
        with path.open("rb") as file:
            content = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ShardError(f"cannot read the shard {path}: {error.strerror or error}.") from error
    return _parsed_header(path, content, size)


def verify_shard(path: Path, on_read: Callable[[int], None] | None = None) -> Header:
    """Reads a whole shard and checks its tokens too: their checksum, and that all are in the vocabulary.

    Args:
        path: of the shard.
        on_read: hears of every number of bytes that was read.

    Raises:
        ShardError: as `open_shard`, and if the tokens are not those that were written.
    """
    header, tokens, digest, largest = read_header(path), open_shard(path), hashlib.sha256(), 0
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        piece = np.asarray(tokens[start : start + _TOKENS_AT_ONCE])
        digest.update(piece.view(np.uint8).data)
        largest = max(largest, int(piece.max()))
        if on_read is not None:
            on_read(piece.nbytes)
    if digest.digest() != header.sha256:
        raise ShardError(f"{path} is damaged: its tokens do not have the checksum in its header. {_MAKE_AGAIN}")
    if largest >= header.vocabulary:
        raise ShardError(f"{path} has the token {largest}, which is not in its vocabulary of {header.vocabulary:,}.")
    return header


_MAKE_AGAIN = "Make the shards again: `python -m examples.gpt.data` with the options of then, and with `--overwrite`."


def _parsed_header(path: Path, content: bytes, size: int) -> Header:
    if not content.startswith(MAGIC):
        raise ShardError(f"{path} is no shard of tokens: it does not begin with {MAGIC!r}.")
    if len(content) < HEADER_BYTES:
        raise ShardError(f"{path} is truncated: it has {size} bytes, and the header alone has {HEADER_BYTES}.")
    fields, checksum = content[: _FIELDS.size], content[_FIELDS.size :]
    _, version, vocabulary, tokens, sha256 = _FIELDS.unpack(fields)
    if version != VERSION:
        raise ShardError(f"{path} is a shard of version {version}, and only version {VERSION} can be read.")
    if zlib.crc32(fields) != _CHECKSUM.unpack(checksum)[0]:
        raise ShardError(f"{path} is damaged: its header does not have the checksum at its end. {_MAKE_AGAIN}")
    if not 1 <= vocabulary <= MAXIMUM_VOCABULARY or not tokens:
        raise ShardError(f"{path} has a header that no shard has: {tokens} tokens, vocabulary of {vocabulary}.")
    expected = HEADER_BYTES + TOKEN.itemsize * tokens
    if size < expected:
        there = (size - HEADER_BYTES) // TOKEN.itemsize
        raise ShardError(f"{path} is truncated: the header promises {tokens:,} tokens, there are {there:,}.")
    if size > expected:
        raise ShardError(
            f"{path} has {size - expected:,} bytes more than the {tokens:,} tokens that its header promises."
        )
    return Header(vocabulary, tokens, sha256)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name only when all of it is on the disk; after an error nothing remains of it."""
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
    """Writes the index of a folder, which must be the last thing that is written."""
    content = {"version": VERSION} | dataclasses.asdict(index)
    with _replaced(folder / INDEX_NAME) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def read_index(folder: Path) -> Index:
    """Reads the index of a folder, and checks that every shard in it is there and is the one that it describes.

    The tokens themselves are not read; `verify_shard` does that.

    Raises:
        ShardError: if the folder, the index or a shard is missing, or anything about them does not fit.
    """
    path = folder / INDEX_NAME
    try:
        if not folder.is_dir():
            raise ShardError(
                f"there is no folder {folder}. Make one with `python -m examples.gpt.data --text YOUR_TEXT`."
            )
        if not path.exists():
            raise ShardError(
                f"the folder {folder} has no {INDEX_NAME}: it is no folder of shards, or the run that made them was "
                f"interrupted. Make them with `python -m examples.gpt.data --text YOUR_TEXT --out ANOTHER_FOLDER`."
            )
        # A pipe would be waited for, and a device may never end.
        if not path.is_file():
            raise ShardError(f"cannot read {path}: it is not a file.")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ShardError(f"cannot read {path}: {error.strerror or error}.") from error
    except ShardError:
        raise
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{path} is no JSON: {error}.") from error
    index = _parsed_index(path, content)
    for shard in index.training + index.validation:
        _check_against_index(folder / shard.name, shard, index)
    return index


def fingerprint(folder: Path) -> str:
    """A hash that two folders share only if their tokens, and how these are cut into shards, are the same.

    Raises:
        ShardError: as `read_index`.
    """
    index, digest = read_index(folder), hashlib.sha256()
    for part in (index.training, index.validation):
        # (JSON has strings that are no Unicode text.)
        digest.update(f"{index.tokenizer} {len(part)} ".encode(errors="surrogatepass"))
        for shard in part:
            digest.update(read_header(folder / shard.name).sha256)
    return digest.hexdigest()


def _check_against_index(path: Path, shard: Shard, index: Index) -> None:
    header = read_header(path)
    if header.tokens != shard.tokens:
        raise ShardError(f"{path} has {header.tokens:,} tokens, but {INDEX_NAME} says {shard.tokens:,}. {_MAKE_AGAIN}")
    if header.vocabulary != index.vocabulary:
        raise ShardError(
            f"{path} was made with a vocabulary of {header.vocabulary:,} tokens, but {INDEX_NAME} says "
            f"{index.vocabulary:,}. {_MAKE_AGAIN}"
        )


def _parsed_index(path: Path, content: Any) -> Index:
    version = _field(path, content, "version", int)
    if version != VERSION:
        raise ShardError(f"{path} is an index of version {version}, and only version {VERSION} can be read.")
    text = _field(path, content, "text", dict)
    names = _field(path, text, "names", list)
    if not all(isinstance(name, str) for name in names):
        raise ShardError(f"{path} is no index of shards: `names` must be a list of strings.")
    index = Index(
        tokenizer=_field(path, content, "tokenizer", str),
        vocabulary=_field(path, content, "vocabulary", int),
        separator=_field(path, content, "separator", int),
        training=_shards(path, content, "training"),
        validation=_shards(path, content, "validation"),
        text=Source(
            names=tuple(names),
            documents=_field(path, text, "documents", int),
            bytes=_field(path, text, "bytes", int),
            sha256=_field(path, text, "sha256", str),
        ),
    )
    if not 0 <= index.separator < index.vocabulary <= MAXIMUM_VOCABULARY:
        raise ShardError(
            f"{path} is no index of shards: vocabulary {index.vocabulary}, separator {index.separator}; a vocabulary "
            f"has at most {MAXIMUM_VOCABULARY:,} tokens, and the separator is one of them."
        )
    counts = collections.Counter(shard.name for shard in index.training + index.validation)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise ShardError(f"{path} has the shard {name!r} more than once.")
    return index


def _shards(path: Path, content: dict[str, Any], part: str) -> tuple[Shard, ...]:
    entries = _field(path, content, part, list)
    if not entries:
        raise ShardError(f"{path} has no shard in `{part}`.")
    shards = tuple(Shard(_field(path, entry, "name", str), _field(path, entry, "tokens", int)) for entry in entries)
    for shard in shards:
        if not _SAFE_NAME.fullmatch(shard.name):
            raise ShardError(
                f"{path} has the shard {shard.name!r}: a name has letters, digits, '.', '_' and '-' only, so that it "
                f"cannot lead out of the folder."
            )
    return shards


def _field(path: Path, content: Any, name: str, kind: type) -> Any:
    """One field of an object; True is no number here."""
    if not isinstance(content, dict):
        raise ShardError(f"{path} is no index of shards: there is {type(content).__name__} in place of an object.")
    if name not in content:
        raise ShardError(f"{path} is no index of shards: `{name}` is missing.")
    if type(content[name]) is not kind:
        raise ShardError(
            f"{path} is no index of shards: `{name}` must be {kind.__name__}, but is {type(content[name]).__name__}."
        )
    return content[name]
