r"""Turn text into tokens, and tokens into batches.

Run it from the root of the repository:

    python -m examples.gpt.data
    python -m examples.gpt.data --text my_folder --text book.txt \
        --tokenizer gpt2 --out tokens

Without a text it reads the source code of Python's standard library. Texts are cut
after lines into pieces of 10 kB, and every tenth piece is held out. tiktoken fetches
GPT-2's vocabulary, and looks into `TIKTOKEN_CACHE_DIR` first.

A folder of tokens has `training.bin` and `validation.bin`, uint16 numbers one after
another, and `tokens.json`, which says what made them. Training maps the numbers into
memory; Grain shuffles them and knows the position to resume from.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, SupportsIndex

import grain
import numpy as np
import tiktoken
import typer
from typer import Option

from examples.gpt.text import PIECE_BYTES, pieces

INDEX_NAME = "tokens.json"
HELD_OUT_EVERY = 10
# not endless: of endless rows Grain 0.2.18 cannot count the batches of one row
EPOCHS = 1_000_000
READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)  # batches

Part = Literal["training", "validation"]


# --- Tokenizers. ---
@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A way to turn text into tokens and back."""

    name: str
    vocabulary: int  # number of tokens
    separator: int  # the token in front of every document
    encode: Callable[[str], np.ndarray]  # to uint16
    decode: Callable[[np.ndarray], str]  # bytes that are no UTF-8 become U+FFFD


def get_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer "bytes", whose separator is the zero byte, which no text
    has; or "gpt2".
    """
    if name == "bytes":

        def encode(text):
            return np.frombuffer(text.encode(errors="replace"), np.uint8).astype(
                np.uint16
            )

        def decode(tokens):
            return np.asarray(tokens, np.uint8).tobytes().decode(errors="replace")

        return Tokenizer("bytes", 256, 0, encode, decode)
    pairs = tiktoken.get_encoding("gpt2")

    def encode(text):
        # `<|endoftext|>` is text in a text.
        return np.asarray(pairs.encode_ordinary(text), np.uint16)

    def decode(tokens):
        return pairs.decode(np.asarray(tokens).tolist(), errors="replace")

    return Tokenizer("gpt2", pairs.n_vocab, pairs.eot_token, encode, decode)


# --- A folder of tokens. ---
@dataclasses.dataclass(frozen=True)
class Index:
    """What made a folder of tokens, and how many each part has."""

    texts: list[str]
    tokenizer: str
    training: int
    validation: int
    sha256: str  # of the tokens of both parts


def prepare(
    folder: Path, texts: Sequence[Path] = (), tokenizer: str = "bytes"
) -> Index:
    """Make a folder of tokens, by default of the bytes of Python's standard library.

    The index is written last: after an interruption there is none, and the next call
    replaces what is there.
    """
    made_by, paths = get_tokenizer(tokenizer), list(texts) or [None]
    if (folder / INDEX_NAME).exists():
        raise ValueError(
            f"the folder {folder} has tokens already; choose another one, or remove it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    counts, digest = {"training": 0, "validation": 0}, hashlib.sha256()
    with (
        file_of(folder, "training").open("wb") as training,
        file_of(folder, "validation").open("wb") as validation,
    ):
        read = (piece for path in paths for piece in pieces(path))
        for number, (piece, begins) in enumerate(read, start=1):
            part, file = (
                ("training", training)
                if number % HELD_OUT_EVERY
                else ("validation", validation)
            )
            tokens = made_by.encode(piece.decode(errors="replace"))
            content = (
                np.array([made_by.separator] * begins + tokens.tolist())
                .astype("<u2")
                .tobytes()
            )
            file.write(content)
            digest.update(part.encode() + content)
            counts[part] += len(content) // 2
    if not counts["validation"]:
        raise ValueError(
            f"the text is too short: it must have {HELD_OUT_EVERY} pieces of"
            f" {PIECE_BYTES:,} bytes."
        )
    names = [str(path or "Python's standard library") for path in paths]
    index = Index(names, tokenizer, **counts, sha256=digest.hexdigest())
    (folder / INDEX_NAME).write_text(
        json.dumps(dataclasses.asdict(index), indent=2) + "\n"
    )
    return index


def read_index(folder: Path) -> Index:
    """Read the index of a folder of tokens."""
    path = folder / INDEX_NAME
    if not path.is_file():
        raise ValueError(
            f"the folder {folder} has no file {INDEX_NAME}: it is no folder of tokens,"
            " or the command that made it was interrupted. Make one with `python -m"
            " examples.gpt.data`."
        )
    return Index(**json.loads(path.read_text()))


def file_of(folder: Path, part: Part) -> Path:
    """Return the file of a part."""
    return folder / f"{part}.bin"


# --- Batches. ---
class Rows:
    """The sequences of one part. Row r has the tokens from `r * context` to `r *
    context + context`, both included.

    The targets of a row are its inputs, one token later. So its last token is the first
    one of the next row.
    """

    def __init__(self, folder: Path, part: Part, context: int) -> None:
        self.context = context
        self.tokens = np.memmap(file_of(folder, part), "<u2", mode="r")

    def __len__(self) -> int:
        """Return the number of rows."""
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        """Return one row, uint16 of shape (context + 1,)."""
        start = int(index) * self.context
        return np.asarray(self.tokens[start : start + self.context + 1])


def batches(
    rows: Rows,
    *,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[np.ndarray]:
    """Return an iterator over this process's rows of every batch; each epoch has a new
    order.

    Its `get_state()` is the position, which `set_state` accepts in any number of
    processes: batches have the same rows.
    """
    shuffled = (
        grain.MapDataset.source(rows)
        .shuffle(seed)
        .repeat(EPOCHS)[process_index::process_count]
    )
    return iter(shuffled.batch(batch_size // process_count).to_iter_dataset(READ_AHEAD))


def validation_batches(
    folder: Path, count: int, batch_size: int, context: int
) -> np.ndarray:
    """Return evenly spaced rows of the validation part, uint16 of shape (count,
    batch_size, context + 1).
    """
    rows, wanted = Rows(folder, "validation", context), count * batch_size
    if wanted > len(rows):
        raise ValueError(
            f"the validation part of {folder} has {len(rows):,} sequences of context"
            f" {context}, and {count} batches of {batch_size} need {wanted:,}: use more"
            " text, or a smaller batch."
        )
    chosen = np.linspace(0, len(rows) - 1, wanted).round().astype(np.int64)
    return np.stack([rows[number] for number in chosen]).reshape(
        count, batch_size, context + 1
    )


# --- The command line. ---
def main(
    text: Annotated[
        list[Path] | None,
        Option(help="File or folder; may be repeated. Without it Python's library."),
    ] = None,
    tokenizer: Annotated[
        Literal["bytes", "gpt2"], Option(help="What a token is.")
    ] = "bytes",
    out: Annotated[Path, Option(help="Folder for the tokens and their index.")] = Path(
        "tokens"
    ),
) -> None:
    """Turn text files into tokens."""
    try:
        index = prepare(out, text or [], tokenizer)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(
        f"Written: {out / INDEX_NAME}, {index.training:,} tokens to train on,"
        f" {index.validation:,} held out."
    )


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command()(main)

if __name__ == "__main__":
    app()
