"""Convert text to tokens and back: plain bytes, or the byte pairs of GPT-2.

A tokenizer has a `name`, a `vocabulary` (the number of its tokens) and a `separator` (the token in front of every
document), and the methods `encode` and `decode`. Both raise a `ValueError` for what has no token or no text.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tiktoken

NAMES = ("bytes", "gpt2")
GPT2_VOCABULARY = 50_257
GPT2_FILES = ("vocab.bpe", "encoder.json")
SPECIAL_TOKEN = "<|endoftext|>"
# GPT-2's pattern of words, in which bytes are joined, in tiktoken's form: `++` does not backtrack over many blanks.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_BLANKS = re.compile(r"(\s{10000})")  # tiktoken fails on a run of a million blanks, so a long run is cut
REASON_CHARACTERS = 200
_WHERE_FROM = (
    f"Put the files {GPT2_FILES[0]} and {GPT2_FILES[1]} that OpenAI published with GPT-2 "
    f"(https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/) into a folder, and name it with "
    f"`--vocabulary-files FOLDER`."
)


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer whose tokens are bytes. The zero byte separates documents, since no text has one."""

    name: str = "bytes"
    vocabulary: int = 256
    separator: int = 0

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the bytes of a text, or of its UTF-8, as uint16."""
        content = text.encode(errors="replace") if isinstance(text, str) else text
        if b"\0" in content:
            raise ValueError(
                f"the text has a zero byte at position {content.index(0)}, which only stands between documents."
            )
        return np.frombuffer(content, np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens; a separator is a zero character."""
        return _checked(tokens, self).astype(np.uint8).tobytes().decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class BytePairTokenizer:
    """A tokenizer that joins the bytes of each word pair by pair; the separator is the last token."""

    name: str
    encoding: "tiktoken.Encoding"

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens, the separator included."""
        return self.encoding.n_vocab

    @property
    def separator(self) -> int:
        """Return `<|endoftext|>`, which stood between documents when GPT-2 was trained."""
        return self.encoding.eot_token

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the tokens of a text, uint16. `<|endoftext|>` in it is text; bytes that are no UTF-8 become U+FFFD."""
        content = text.decode(errors="replace") if isinstance(text, bytes) else text
        pieces = [np.asarray(self.encoding.encode_ordinary(piece), np.uint16) for piece in _BLANKS.split(content)]
        return np.concatenate(pieces)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens; a separator is `<|endoftext|>`, and half a character is U+FFFD."""
        return self.encoding.decode(_checked(tokens, self).tolist(), errors="replace")


Tokenizer = ByteTokenizer | BytePairTokenizer


def get_tokenizer(name: str, vocabulary_files: Path | None = None) -> Tokenizer:
    """Return the tokenizer "bytes", or "gpt2", which needs tiktoken and a folder with `vocab.bpe` and `encoder.json`.

    Without the folder tiktoken looks into its own cache and then asks the network.
    """
    if name not in NAMES:
        raise ValueError(f"no tokenizer is called {name!r}; there are {', '.join(NAMES)}.")
    if name == "bytes":
        if vocabulary_files is not None:
            raise ValueError(f"the tokenizer 'bytes' needs no vocabulary files, but was given {vocabulary_files}.")
        return ByteTokenizer()
    where = vocabulary_files or "the cache of tiktoken, which could not fetch it either"
    try:
        import tiktoken

        encoding = tiktoken.get_encoding(name) if vocabulary_files is None else _encoding(vocabulary_files)
    except ImportError as error:
        raise ValueError("the tokenizer 'gpt2' needs the package tiktoken; run `pip install tiktoken`.") from error
    except Exception as error:  # tiktoken checks by `assert`, so a damaged file can raise any type
        reason = f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]
        raise ValueError(f"cannot read GPT-2's vocabulary in {where} ({reason}). {_WHERE_FROM}") from error
    if encoding.n_vocab != GPT2_VOCABULARY:
        raise ValueError(
            f"the vocabulary in {where} is not GPT-2's: it has {encoding.n_vocab:,} tokens, and GPT-2's has "
            f"{GPT2_VOCABULARY:,}. {_WHERE_FROM}"
        )
    return BytePairTokenizer(name, encoding)


def _encoding(folder: Path) -> "tiktoken.Encoding":
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    paths = [folder / name for name in GPT2_FILES]
    # tiktoken caches files by path; with their hashes it notices that one has changed.
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    return encoding_of_ranks(data_gym_to_mergeable_bpe_ranks(*map(str, paths), *hashes))


def encoding_of_ranks(ranks: Mapping[bytes, int]) -> "tiktoken.Encoding":
    """Return the encoding in which each sequence of bytes has this token; lower tokens are joined first."""
    import tiktoken

    special_tokens = {SPECIAL_TOKEN: len(ranks)}
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=special_tokens)


def _checked(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    tokens = np.asarray(tokens, np.int64)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocabulary:
        raise ValueError(
            f"tokens from {tokens.min()} to {tokens.max()} are not all in the vocabulary of {tokenizer.name!r}, which "
            f"has {tokenizer.vocabulary:,} tokens; leave out the padding before decoding."
        )
    return tokens
