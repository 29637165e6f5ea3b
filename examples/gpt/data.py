"""Turn text into tokens, and tokens into batches.

Run it from the root of the repository:

    python -m examples.gpt.data
    python -m examples.gpt.data --text my_folder --text book.txt --tokenizer gpt2 --vocabulary-files gpt2 --out tokens

Without a text it reads the source code of Python's standard library. Of 100 documents or more every tenth is held out
as a whole (`--validation 0.1`; a file above 1 MB is several documents); fewer are joined and cut into 100 blocks.

A folder of tokens has `training.bin` and `validation.bin`, uint16 numbers one after another, and `tokens.json`, which
says what made them. Training maps the numbers into memory; Grain shuffles them and knows the position to resume from.
"""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, SupportsIndex

import grain
import numpy as np
import typer

from examples.gpt import text

INDEX_NAME = "tokens.json"
VALIDATION = 0.1
CONTEXT = 1024  # that GPT-2 has
MANY_DOCUMENTS = 100  # every tenth of fewer documents would not represent the others
# The files that OpenAI published with GPT-2, and their SHA-256.
GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_BLANKS = re.compile(r"(\s{10000})")  # tiktoken fails on a run of a million blanks, so a long run is cut
EPOCHS = 1_000_000  # not endless: of endless rows Grain 0.2.18 cannot count the batches of one row
READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)  # batches

Part = Literal["training", "validation"]


class DataError(ValueError):
    """A folder of tokens cannot be used; the message says why and what to do."""


# --- Tokenizers. ---
@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A way to turn text into tokens and back."""

    name: str
    vocabulary: int  # number of tokens
    separator: int  # the token in front of every document
    encode: Callable[[bytes | str], np.ndarray]  # to uint16
    decode: Callable[[np.ndarray], str]  # bytes that are no UTF-8 become U+FFFD


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose tokens are bytes. The zero byte separates documents, since no text has one."""

    def encode(text: bytes | str) -> np.ndarray:
        content = text.encode(errors="replace") if isinstance(text, str) else text
        if b"\0" in content:
            raise ValueError(f"the text has a zero byte at position {content.index(0)}, which separates documents.")
        return np.frombuffer(content, np.uint8).astype(np.uint16)

    decode = lambda tokens: np.asarray(tokens, np.uint8).tobytes().decode(errors="replace")
    return Tokenizer("bytes", 256, 0, encode, decode)


def byte_pair_tokenizer(ranks: dict[bytes, int]) -> Tokenizer:
    """Return GPT-2's tokenizer with this token for each sequence of bytes, by tiktoken; lower tokens are joined first.

    Documents are separated by `<|endoftext|>`, as when GPT-2 was trained. In a text it is text.
    """
    import tiktoken
    from tiktoken_ext.openai_public import ENDOFTEXT, r50k_pat_str

    special = {ENDOFTEXT: len(ranks)}
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)

    def encode(text: bytes | str) -> np.ndarray:
        content = text.decode(errors="replace") if isinstance(text, bytes) else text
        pieces = [np.asarray(encoding.encode_ordinary(piece), np.uint16) for piece in _BLANKS.split(content)]
        return np.concatenate(pieces)

    decode = lambda tokens: encoding.decode(np.asarray(tokens).tolist(), errors="replace")
    return Tokenizer("gpt2", encoding.n_vocab, encoding.eot_token, encode, decode)


def get_tokenizer(name: str, vocabulary_files: Path | None = None) -> Tokenizer:
    """Return the tokenizer "bytes", or "gpt2", which needs tiktoken and a folder with `vocab.bpe` and `encoder.json`.

    Without the folder tiktoken looks into its own cache and then asks the network.
    """
    if name not in ("bytes", "gpt2"):
        raise ValueError(f"no tokenizer is called {name!r}; there are bytes, gpt2.")
    if name == "bytes":
        if vocabulary_files is not None:
            raise ValueError(f"the tokenizer 'bytes' needs no vocabulary files, but was given {vocabulary_files}.")
        return byte_tokenizer()
    where = GPT2_URL if vocabulary_files is None else f"{vocabulary_files}/"
    try:
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks

        pairs, tokens = GPT2_FILES
        ranks = data_gym_to_mergeable_bpe_ranks(
            where + pairs, where + tokens, vocab_bpe_hash=GPT2_FILES[pairs], encoder_json_hash=GPT2_FILES[tokens]
        )
        return byte_pair_tokenizer(ranks)
    except ImportError as error:
        raise ValueError("the tokenizer 'gpt2' needs the package tiktoken; run `pip install tiktoken`.") from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot read GPT-2's vocabulary ({error}). Put the files {' and '.join(GPT2_FILES)} that OpenAI published "
            f"({GPT2_URL}) into a folder, and name it with `--vocabulary-files FOLDER`."
        ) from error


# --- A folder of tokens. ---
@dataclasses.dataclass(frozen=True)
class Index:
    """What made a folder of tokens, and how many each part has."""

    texts: list[str]
    tokenizer: str
    vocabulary: int
    separator: int
    training: int
    validation: int
    sha256: str  # of the tokens of both parts


def prepare(
    folder: Path,
    texts: Sequence[Path] = (),
    *,
    tokenizer: Tokenizer | None = None,
    validation: float = VALIDATION,
    context: int = CONTEXT,
    overwrite: bool = False,
) -> Index:
    """Make a folder of tokens, by default of the bytes of Python's standard library.

    The index is written last, and an old one is removed first: after an interruption there is no index, and the next
    call replaces what is there. The held-out part is rounded to 1/2, 1/3, 1/4 and so on. Each part must hold a sequence
    of `context` tokens.
    """
    tokenizer, paths = tokenizer or byte_tokenizer(), list(texts) or [None]
    for path in paths:
        text.files(path)  # a missing text is told before anything is removed
    if (folder / INDEX_NAME).exists() and not overwrite:
        raise DataError(f"the folder {folder} has tokens already; choose another one, or pass `--overwrite`.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX_NAME).unlink(missing_ok=True)
    documents = itertools.chain.from_iterable(map(text.documents, paths))
    counts, digest = {"training": 0, "validation": 0}, hashlib.sha256()
    with _file(folder, "training").open("wb") as training, _file(folder, "validation").open("wb") as held_out:
        for part, tokens in _parts(documents, tokenizer, round(1 / validation), context):
            content = tokens.astype("<u2").tobytes()
            (training if part == "training" else held_out).write(content)
            digest.update(part.encode() + content)
            counts[part] += len(tokens)
    for part, count in counts.items():
        if count <= context:
            raise text.TextError(
                f"the text is too short: its {part} part has {count:,} tokens, and a sequence of context {context:,} "
                f"needs {context + 1:,}. Use more text, a shorter context, or a larger part for validation."
            )
    names = list(map(text.name_of, paths))
    index = Index(names, tokenizer.name, tokenizer.vocabulary, tokenizer.separator, **counts, sha256=digest.hexdigest())
    (folder / INDEX_NAME).write_text(json.dumps(dataclasses.asdict(index), indent=2) + "\n")
    return index


def _parts(
    documents: Iterable[bytes], tokenizer: Tokenizer, held_out_every: int, context: int
) -> Iterator[tuple[Part, np.ndarray]]:
    """Yield tokens, each document with a separator in front of it, and the part that they belong to."""
    separator = np.array([tokenizer.separator], np.uint16)
    in_tokens = (np.concatenate([separator, tokenizer.encode(document)]) for document in documents)
    first = list(itertools.islice(in_tokens, MANY_DOCUMENTS))
    if len(first) < MANY_DOCUMENTS:
        training, held_out = text.split(np.concatenate(first), context, held_out_every=held_out_every, unit="tokens")
        yield "training", training
        yield "validation", held_out
        return
    for number, tokens in enumerate(itertools.chain(first, in_tokens)):
        yield ("validation" if number % held_out_every == held_out_every - 1 else "training"), tokens


def read_index(folder: Path) -> Index:
    """Read the index of a folder of tokens, and raise a `DataError` unless both parts are there in full."""
    path = folder / INDEX_NAME
    if not path.is_file():
        raise DataError(
            f"the folder {folder} has no file {INDEX_NAME}: it is no folder of tokens, or the command that made it was "
            "interrupted. Make one with `python -m examples.gpt.data --text YOUR_TEXT --out ANOTHER_FOLDER`."
        )
    index = Index(**json.loads(path.read_text()))
    for part, count in (("training", index.training), ("validation", index.validation)):
        file = _file(folder, part)
        if not file.is_file() or file.stat().st_size != 2 * count:
            raise DataError(
                f"{file} does not have the {count:,} tokens that {INDEX_NAME} says. Make the folder again with "
                "`--overwrite`."
            )
    return index


def _file(folder: Path, part: str) -> Path:
    return folder / f"{part}.bin"


# --- Batches. ---
class Rows:
    """The sequences of one part. Row r has the tokens from `r * context` to `r * context + context`, both included.

    The targets of a row are its inputs, one token later. So its last token is the first one of the next row.
    """

    def __init__(self, folder: Path, part: Part, context: int) -> None:
        self.folder, self.context, self.vocabulary = folder, context, read_index(folder).vocabulary
        self.tokens = np.memmap(_file(folder, part), "<u2", mode="r")
        if not len(self):
            raise DataError(
                f"the {part} part of {folder} is too short for one sequence: it has {len(self.tokens):,} tokens, and a "
                f"context of {context} needs {context + 1:,}; use more text or a shorter context."
            )

    def __len__(self) -> int:
        """Return the number of rows."""
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        """Return one row, uint16 of shape (context + 1,)."""
        start = int(index) * self.context
        row = np.asarray(self.tokens[start : start + self.context + 1])
        if row.max() >= self.vocabulary:  # the model would read such a token as another one
            raise DataError(
                f"the tokens in {self.folder} are damaged: {row.max()} is not in their vocabulary of "
                f"{self.vocabulary:,}."
            )
        return row


def batches(
    rows: Rows, *, batch_size: int, seed: int, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator[np.ndarray]:
    """Return an iterator over this process's rows of every batch; each epoch has a new order.

    Its `get_state()` is the position, which `set_state` accepts in any number of processes: batches have the same rows.
    """
    if batch_size % process_count:
        raise DataError(f"a batch of {batch_size} rows cannot be divided among {process_count} processes.")
    shuffled = grain.MapDataset.source(rows).shuffle(seed).repeat(EPOCHS)[process_index::process_count]
    return iter(shuffled.batch(batch_size // process_count).to_iter_dataset(READ_AHEAD))


def validation_batches(folder: Path, *, count: int, batch_size: int, context: int) -> np.ndarray:
    """Return evenly spaced rows of the validation part, uint16 of shape (count, batch_size, context + 1)."""
    rows, wanted = Rows(folder, "validation", context), count * batch_size
    if wanted > len(rows):
        raise DataError(
            f"the validation part of {folder} has {len(rows):,} sequences of context {context}, and {count} batches of "
            f"{batch_size} need {wanted:,}; ask for fewer batches, or make the part larger."
        )
    chosen = np.linspace(0, len(rows) - 1, wanted).round().astype(np.int64)
    return np.stack([rows[number] for number in chosen]).reshape(count, batch_size, context + 1)


# --- The command line. ---
def main(
    text_paths: Annotated[
        list[Path] | None,
        typer.Option("--text", help="File or folder; may be repeated. Without it Python's standard library."),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="bytes or gpt2.")] = "bytes",
    vocabulary_files: Annotated[
        Path | None, typer.Option(help="Folder with GPT-2's vocab.bpe and encoder.json.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the tokens and their index.")] = Path("tokens"),
    validation: Annotated[
        float, typer.Option(min=1e-6, max=0.5, help="Part of the text that is held out: 1/2, 1/3 and so on.")
    ] = VALIDATION,
    context: Annotated[int, typer.Option(min=1, help="Longest sequence that each part must hold.")] = CONTEXT,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the tokens of the folder.")] = False,
) -> None:
    """Turn text files into tokens."""
    try:
        made_by, paths = get_tokenizer(tokenizer, vocabulary_files), text_paths or []
        options = {"validation": validation, "context": context, "overwrite": overwrite}
        index = prepare(out, paths, tokenizer=made_by, **options)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(
        f"Written: {out / INDEX_NAME}, {index.training:,} tokens to train on, {index.validation:,} held out "
        f"({index.tokenizer}, {', '.join(index.texts)})."
    )


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
