"""Text to tokens and back: plain bytes, or the byte pairs of GPT-2."""

import dataclasses
import hashlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import tiktoken

NAMES = ("bytes", "gpt2")
GPT2_VOCABULARY = 50_257
GPT2_FILES = ("vocab.bpe", "encoder.json")
SPECIAL_TOKEN = "<|endoftext|>"
# How GPT-2 cuts a text into words before it joins bytes within each. The possessive `++` of tiktoken's own form cut
# the same words as the single `+` that was published, and do not go back over a long run of blanks.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# tiktoken gives up on a run of a million blanks. So long a run is cut into pieces, which changes tokens within it only.
_BLANKS = re.compile(r"(\s{10000})")


class TokenizerError(ValueError):
    """A tokenizer cannot be made, or cannot read what it was given; the message says what to do."""


class Tokenizer(Protocol):
    """What turns text into tokens.

    Attributes:
        name: for `get_tokenizer`.
        vocabulary: number of tokens; each one is below it.
        separator: the token that stands in front of every document.
    """

    @property
    def name(self) -> str:  # noqa: D102 - above
        ...

    @property
    def vocabulary(self) -> int:  # noqa: D102 - above
        ...

    @property
    def separator(self) -> int:  # noqa: D102 - above
        ...

    def encode(self, text: bytes | str) -> np.ndarray:
        """The tokens of a text, uint16, without a separator."""
        ...

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens; bytes that are no UTF-8, such as half a character, become U+FFFD.

        Raises:
            TokenizerError: if a token is outside of the vocabulary, as the padding of a model's embedding is.
        """
        ...


def get_tokenizer(name: str, vocabulary_files: Path | None = None) -> Tokenizer:
    """The tokenizer of a name.

    Args:
        name: "bytes", or "gpt2", which needs the package tiktoken.
        vocabulary_files: folder with GPT-2's `vocab.bpe` and `encoder.json`. Without it tiktoken looks into its own
            cache, and then asks the network.

    Raises:
        TokenizerError: if the name is unknown, tiktoken is missing, or the vocabulary is missing or another one.
    """
    if name == "bytes":
        if vocabulary_files is not None:
            raise TokenizerError(f"the tokenizer 'bytes' needs no vocabulary files, but was given {vocabulary_files}.")
        return ByteTokenizer()
    if name != "gpt2":
        raise TokenizerError(f"no tokenizer is called {name!r}; there are {', '.join(NAMES)}.")
    if importlib.util.find_spec("tiktoken") is None:
        raise TokenizerError(
            "the tokenizer 'gpt2' needs the package tiktoken, which is not installed; run `pip install tiktoken`."
        )
    if vocabulary_files is not None:
        tokenizer = BytePairTokenizer.from_ranks(name, _read_ranks(vocabulary_files))
        where = str(vocabulary_files)
    else:
        tokenizer = BytePairTokenizer(name, _cached_encoding())
        where = "tiktoken's cache"
    if tokenizer.vocabulary != GPT2_VOCABULARY:
        raise TokenizerError(
            f"the vocabulary in {where} is not that of GPT-2: it has {tokenizer.vocabulary:,} tokens, and GPT-2 has "
            f"{GPT2_VOCABULARY:,}. {_WHERE_FROM}"
        )
    return tokenizer


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """A token is a byte. The zero byte separates documents, since no text has one."""

    name: str = dataclasses.field(default="bytes", init=False)
    vocabulary: int = dataclasses.field(default=256, init=False)
    separator: int = dataclasses.field(default=0, init=False)

    def encode(self, text: bytes | str) -> np.ndarray:
        """The bytes of a text, or of its UTF-8.

        Raises:
            TokenizerError: if there is a zero byte in the text.
        """
        content = text.encode(errors="replace") if isinstance(text, str) else text
        if b"\0" in content:
            raise TokenizerError(
                f"the text has a zero byte at position {content.index(0)}, which only stands between documents."
            )
        return np.frombuffer(content, np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of these bytes; a separator is a zero character."""
        return _checked(tokens, self).astype(np.uint8).tobytes().decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class BytePairTokenizer:
    """Joins the bytes of each word pair by pair, as far as the vocabulary goes; the separator is the last token."""

    name: str
    encoding: "tiktoken.Encoding"

    @classmethod
    def from_ranks(cls, name: str, ranks: Mapping[bytes, int]) -> "BytePairTokenizer":
        """Makes a tokenizer of a vocabulary.

        Args:
            name: of the tokenizer.
            ranks: token of each sequence of bytes. All single bytes are in it; a lower number is joined first.

        Raises:
            TokenizerError: if the numbers are not 0, 1, 2 and so on, or a byte is missing.
        """
        import tiktoken

        if sorted(ranks.values()) != list(range(len(ranks))):
            raise TokenizerError(f"the vocabulary of {name!r} does not number its {len(ranks):,} tokens 0, 1, 2, ...")
        missing = [value for value in range(256) if bytes([value]) not in ranks]
        if missing:
            raise TokenizerError(
                f"the vocabulary of {name!r} lacks {len(missing)} single bytes, the first {missing[0]}."
            )
        if len(ranks) >= 1 << 16:
            raise TokenizerError(f"the vocabulary of {name!r} has {len(ranks):,} tokens, more than fit into 16 bits.")
        special_tokens = {SPECIAL_TOKEN: len(ranks)}
        return cls(
            name, tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=special_tokens)
        )

    @property
    def vocabulary(self) -> int:
        """All sequences of bytes, and the separator."""
        return self.encoding.n_vocab

    @property
    def separator(self) -> int:
        """`<|endoftext|>`, which GPT-2 was trained to see between documents."""
        return self.encoding.eot_token

    def encode(self, text: bytes | str) -> np.ndarray:
        """The tokens of a text, in which `<|endoftext|>` is text like any other.

        Bytes that are no UTF-8 become U+FFFD, since words are found in characters.
        """
        content = text.decode(errors="replace") if isinstance(text, bytes) else text
        pieces = [np.asarray(self.encoding.encode_ordinary(piece), np.uint16) for piece in _BLANKS.split(content)]
        return np.concatenate(pieces)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens; a separator is `<|endoftext|>`."""
        return self.encoding.decode(_checked(tokens, self).tolist(), errors="replace")


_WHERE_FROM = (
    f"Put the files {GPT2_FILES[0]} and {GPT2_FILES[1]} that OpenAI published with GPT-2 "
    f"(https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/) into a folder, and name it with "
    f"`--vocabulary-files FOLDER`."
)


def _checked(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    tokens = np.asarray(tokens)
    if tokens.size == 0:
        return tokens.astype(np.int64).ravel()
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise TokenizerError(f"`tokens` must be integers in one row, but are {tokens.dtype} of shape {tokens.shape}.")
    outside = np.flatnonzero((tokens < 0) | (tokens >= tokenizer.vocabulary))
    if outside.size:
        raise TokenizerError(
            f"token {tokens[outside[0]]} at position {outside[0]} is not in the vocabulary of {tokenizer.name!r}, "
            f"which has {tokenizer.vocabulary:,} tokens; leave out the padding before decoding."
        )
    return tokens


def _read_ranks(folder: Path) -> dict[bytes, int]:
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    paths = [folder / name for name in GPT2_FILES]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise TokenizerError(f"there is no file {' and no file '.join(missing)}. {_WHERE_FROM}")
    try:
        # tiktoken keeps copies of what it reads, by path: the hashes make it see that a file has changed since.
        merges_hash, encoder_hash = (hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
        return data_gym_to_mergeable_bpe_ranks(str(paths[0]), str(paths[1]), merges_hash, encoder_hash)
    except OSError as error:
        raise TokenizerError(f"cannot read the vocabulary in {folder}: {error}. {_WHERE_FROM}") from error
    # tiktoken checks with bare statements, so what a damaged file raises depends on where the damage is.
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise TokenizerError(
            f"{GPT2_FILES[0]} and {GPT2_FILES[1]} in {folder} are not GPT-2's vocabulary, or are damaged "
            f"({type(error).__name__}). {_WHERE_FROM}"
        ) from error


def _cached_encoding() -> "tiktoken.Encoding":
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    # Failures of the network are OSErrors too.
    except (OSError, ValueError, ImportError) as error:
        raise TokenizerError(
            f"tiktoken has no vocabulary of GPT-2 in its cache, and could not fetch it ({type(error).__name__}). "
            f"{_WHERE_FROM}"
        ) from error
