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
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, SupportsIndex

import grain
import numpy as np
import tiktoken
import typer
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import ENDOFTEXT, r50k_pat_str
from typer import Option

INDEX_NAME = "tokens.json"
VALIDATION = 0.1
# Parts of the standard library that are tests, tables of numbers, foreign packages, or differ between machines.
SKIPPED_FOLDERS = {"__pycache__", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
DOCUMENT_BYTES = 1_000_000  # a longer file becomes several documents, so that no file needs to fit into memory
MANY_DOCUMENTS = 100  # every tenth of fewer documents would not represent the others
HELD_OUT_BLOCKS = 10  # from all over the text; only the two ends of a block can share a line with the training part
EPOCHS = 1_000_000  # not endless: of endless rows Grain 0.2.18 cannot count the batches of one row
READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)  # batches

Part = Literal["training", "validation"]
VocabularyOption = Annotated[Path | None, Option(help="Folder with GPT-2's vocab.bpe and encoder.json.")]


class DataError(ValueError):
    """A text or a folder of tokens cannot be used; the message says why and what to do."""


# --- Text. ---
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
        raise DataError(f"there is no text in {name_of(path)}: its files are empty, or have a zero byte.")


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
    raise DataError(f"there is no file or folder {path}.")


def name_of(path: Path | None) -> str:
    """Return the name of a text in a report."""
    return "Python's standard library" if path is None else str(path)


def _is_skipped(path: Path) -> bool:
    return not SKIPPED_FOLDERS.isdisjoint(path.parts) or any(part.startswith(SKIPPED_PREFIXES) for part in path.parts)


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return not any(b"\0" in piece for piece in iter(lambda: file.read(DOCUMENT_BYTES), b""))


def split(tokens: np.ndarray, held_out_every: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Split a text in two: every `held_out_every`th block is held out, `HELD_OUT_BLOCKS` blocks in all."""
    count = HELD_OUT_BLOCKS * held_out_every
    blocks = np.array_split(tokens, count)
    held_out = [blocks.pop(index) for index in reversed(range(held_out_every - 1, count, held_out_every))]
    return np.concatenate(blocks), np.concatenate(held_out[::-1])


# --- Tokenizers. ---
@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A way to turn text into tokens and back."""

    name: str
    vocabulary: int  # number of tokens
    separator: int  # the token in front of every document
    encode: Callable[[bytes | str], np.ndarray]  # to uint16
    decode: Callable[[np.ndarray], str]  # bytes that are no UTF-8 become U+FFFD


def get_tokenizer(name: str, vocabulary_files: Path | None = None) -> Tokenizer:
    """Return the tokenizer "bytes", or "gpt2", from a folder with OpenAI's `vocab.bpe` and `encoder.json`.

    Without the folder tiktoken looks into its own cache and then asks the network.
    """
    if name == "bytes":
        return _byte_tokenizer()
    if vocabulary_files is None:
        return _byte_pair_tokenizer(tiktoken.get_encoding("gpt2"))
    pairs, tokens = (str(vocabulary_files.absolute() / file) for file in ("vocab.bpe", "encoder.json"))
    ranks = data_gym_to_mergeable_bpe_ranks(pairs, tokens)
    special = {ENDOFTEXT: len(ranks)}
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    return _byte_pair_tokenizer(encoding)


def _byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose tokens are bytes. The zero byte separates documents, since no text has one."""

    def encode(text: bytes | str) -> np.ndarray:
        content = text.encode(errors="replace") if isinstance(text, str) else text
        return np.frombuffer(content, np.uint8).astype(np.uint16)

    decode = lambda tokens: np.asarray(tokens, np.uint8).tobytes().decode(errors="replace")
    return Tokenizer("bytes", 256, 0, encode, decode)


def _byte_pair_tokenizer(encoding: tiktoken.Encoding) -> Tokenizer:
    """Return GPT-2's tokenizer. `<|endoftext|>` separates documents, and is text in a text."""

    def encode(text: bytes | str) -> np.ndarray:
        content = text.decode(errors="replace") if isinstance(text, bytes) else text
        return np.asarray(encoding.encode_ordinary(content), np.uint16)

    decode = lambda tokens: encoding.decode(np.asarray(tokens).tolist(), errors="replace")
    return Tokenizer("gpt2", encoding.n_vocab, encoding.eot_token, encode, decode)


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
) -> Index:
    """Make a folder of tokens, by default of the bytes of Python's standard library.

    The index is written last: after an interruption there is none, and the next call replaces what is there. The
    held-out part is rounded to 1/2, 1/3, 1/4 and so on.
    """
    tokenizer, paths = tokenizer or get_tokenizer("bytes"), list(texts) or [None]
    if (folder / INDEX_NAME).exists():
        raise DataError(f"the folder {folder} has tokens already; choose another one, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    read = itertools.chain.from_iterable(map(documents, paths))
    counts, digest = {"training": 0, "validation": 0}, hashlib.sha256()
    with _file(folder, "training").open("wb") as training, _file(folder, "validation").open("wb") as held_out:
        for part, tokens in _parts(read, tokenizer, round(1 / validation)):
            content = tokens.astype("<u2").tobytes()
            (training if part == "training" else held_out).write(content)
            digest.update(part.encode() + content)
            counts[part] += len(tokens)
    if not all(counts.values()):
        raise DataError("the text is too short to hold out a part of it; use more text, or a larger --validation.")
    names = list(map(name_of, paths))
    index = Index(names, tokenizer.name, tokenizer.vocabulary, tokenizer.separator, **counts, sha256=digest.hexdigest())
    (folder / INDEX_NAME).write_text(json.dumps(dataclasses.asdict(index), indent=2) + "\n")
    return index


def _parts(texts: Iterable[bytes], tokenizer: Tokenizer, held_out_every: int) -> Iterator[tuple[Part, np.ndarray]]:
    """Yield tokens, each document with a separator in front of it, and the part that they belong to."""
    separator = np.array([tokenizer.separator], np.uint16)
    in_tokens = (np.concatenate([separator, tokenizer.encode(document)]) for document in texts)
    first = list(itertools.islice(in_tokens, MANY_DOCUMENTS))
    if len(first) < MANY_DOCUMENTS:
        training, held_out = split(np.concatenate(first), held_out_every)
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
            raise DataError(f"{file} does not have the {count:,} tokens that {INDEX_NAME} says; make the folder again.")
    return index


def _file(folder: Path, part: str) -> Path:
    return folder / f"{part}.bin"


# --- Batches. ---
class Rows:
    """The sequences of one part. Row r has the tokens from `r * context` to `r * context + context`, both included.

    The targets of a row are its inputs, one token later. So its last token is the first one of the next row.
    """

    def __init__(self, folder: Path, part: Part, context: int) -> None:
        self.context = context
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
        return np.asarray(self.tokens[start : start + self.context + 1])


def batches(
    rows: Rows, *, batch_size: int, seed: int, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator[np.ndarray]:
    """Return an iterator over this process's rows of every batch; each epoch has a new order.

    Its `get_state()` is the position, which `set_state` accepts in any number of processes: batches have the same rows.
    """
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
        list[Path] | None, Option("--text", help="File or folder; may be repeated. Without it Python's library.")
    ] = None,
    tokenizer: Annotated[Literal["bytes", "gpt2"], Option(help="What a token is.")] = "bytes",
    vocabulary_files: VocabularyOption = None,
    out: Annotated[Path, Option(help="Folder for the tokens and their index.")] = Path("tokens"),
    validation: Annotated[
        float, Option(min=1e-6, max=0.5, help="Part of the text that is held out: 1/2, 1/3 and so on.")
    ] = VALIDATION,
) -> None:
    """Turn text files into tokens."""
    try:
        made_by = get_tokenizer(tokenizer, vocabulary_files)
        index = prepare(out, text_paths or [], tokenizer=made_by, validation=validation)
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
