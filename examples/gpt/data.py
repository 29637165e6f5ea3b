"""Turn text files into shards of tokens, with a part held out for validation, and write an index of them.

Run it from the root of the repository:

    python -m examples.gpt.data
    python -m examples.gpt.data --text my_folder --text book.txt --tokenizer gpt2 --vocabulary-files gpt2 --out tokens
    python -m examples.gpt.data --check --out tokens

Without a text it reads the source code of Python's standard library. Of 100 documents or more every tenth is held out
as a whole (`--validation 0.1`; a file above 1 MB is several documents); fewer are joined and cut into 100 blocks.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from examples.gpt import shards, text
from examples.gpt.shards import Index, Part, Shard, ShardError
from examples.gpt.text import TextError
from examples.gpt.tokenizers import NAMES, ByteTokenizer, Tokenizer, get_tokenizer

SHARD_TOKENS = 100_000_000  # 200 MB: few files even of a large text, and one fits into memory while it is written
VALIDATION = 0.1
CONTEXT = 1024  # that of GPT-2
MANY_DOCUMENTS = 100  # every tenth of fewer documents would not represent the others
SUFFIX = ".npy"
_OWN_NAME = re.compile(rf"(training|validation)-\d+{re.escape(SUFFIX)}(\.\d+\.partial)?")
_MORE = "Use more text, a shorter context, or a larger part for validation."


# --- Making shards. ---
def prepare(
    folder: Path,
    texts: Sequence[Path] = (),
    *,
    tokenizer: Tokenizer | None = None,
    shard_tokens: int = SHARD_TOKENS,
    validation: float = VALIDATION,
    context: int = CONTEXT,
    overwrite: bool = False,
    on_read: Callable[[int], None] = lambda count: None,
) -> Index:
    """Make the shards and the index of a folder, by default of the bytes of Python's standard library.

    The index is written last, and an old one is removed first: after an interruption there is none, and the next call
    replaces what is there. A new shard begins after `shard_tokens` tokens. The part that is held out is rounded to 1/2,
    1/3, 1/4 and so on. Each part must hold a sequence of `context` tokens.
    """
    if shard_tokens <= context:
        raise ValueError(
            f"`shard_tokens` {shard_tokens:,} must be larger than `context` {context:,}: a sequence has one token more."
        )
    tokenizer, paths = tokenizer or ByteTokenizer(), list(texts) or [None]
    for path in paths:
        text.files(path)  # a missing text is told before anything is removed
    documents = itertools.chain.from_iterable(text.documents(path, on_read) for path in paths)
    writers = [_Writer(folder, part, tokenizer, shard_tokens, context) for part in ("training", "validation")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / shards.INDEX_NAME).exists() and not overwrite:
            raise ShardError(f"the folder {folder} has shards already; choose another one, or pass `--overwrite`.")
        (folder / shards.INDEX_NAME).unlink(missing_ok=True)
        _fill(*writers, documents, round(1 / validation))
        parts = [writer.finished() for writer in writers]
        names = tuple(map(text.name_of, paths))
        index = Index(names, tokenizer.name, tokenizer.vocabulary, tokenizer.separator, *parts)
        shards.write_index(folder, index)
        for path in folder.iterdir():  # what earlier calls left
            if _OWN_NAME.fullmatch(path.name) and path.name not in {shard.name for shard in parts[0] + parts[1]}:
                path.unlink()
    except OSError as error:
        raise ShardError(f"cannot write into the folder {folder}: {error.strerror or error}.") from error
    return index


def check(folder: Path) -> Index:
    """Read every shard of a folder, and raise a `ShardError` that names all that are damaged."""
    index, wrong = shards.read_index(folder), []
    for shard in index.training + index.validation:
        try:
            shards.verify_shard(folder / shard.name, shard, index.vocabulary)
        except ShardError as error:
            wrong.append(str(error))
    if wrong:
        raise ShardError("\n".join(wrong))
    return index


class _Writer:
    """A cutter of one part's tokens into shards."""

    def __init__(self, folder: Path, part: Part, tokenizer: Tokenizer, shard_tokens: int, context: int) -> None:
        self.folder, self.part, self.tokenizer = folder, part, tokenizer
        self.shard_tokens, self.context = shard_tokens, context
        self._waiting, self._count, self._shards = [], 0, []

    def add(self, tokens: np.ndarray) -> None:
        self._waiting.append(tokens)
        self._count += len(tokens)
        # A rest that would be too short for a sequence stays with the shard before it.
        if self._count > self.shard_tokens + self.context:
            rest = np.concatenate(self._waiting)
            while len(rest) > self.shard_tokens + self.context:
                self._write(rest[: self.shard_tokens])
                rest = rest[self.shard_tokens :]
            self._waiting, self._count = [rest.copy()], len(rest)

    def finished(self) -> tuple[Shard, ...]:
        if self._count <= self.context:
            raise TextError(
                f"the text is too short: its {self.part} part has {self._count:,} tokens, and a sequence of context "
                f"{self.context:,} needs {self.context + 1:,}. {_MORE}"
            )
        self._write(np.concatenate(self._waiting))
        return tuple(self._shards)

    def _write(self, tokens: np.ndarray) -> None:
        path = self.folder / f"{self.part}-{len(self._shards):05d}{SUFFIX}"
        self._shards.append(shards.write_shard(path, tokens, vocabulary=self.tokenizer.vocabulary))


def _fill(training: _Writer, held_out: _Writer, documents: Iterable[bytes], held_out_every: int) -> None:
    tokenizer = training.tokenizer
    separator = np.array([tokenizer.separator], np.uint16)
    in_tokens = (np.concatenate([separator, tokenizer.encode(document)]) for document in documents)
    first = list(itertools.islice(in_tokens, MANY_DOCUMENTS))
    if len(first) < MANY_DOCUMENTS:
        parts = text.split(np.concatenate(first), training.context, held_out_every=held_out_every, unit="tokens")
        training.add(parts[0])
        held_out.add(parts[1])
        return
    for number, tokens in enumerate(itertools.chain(first, in_tokens)):
        (held_out if number % held_out_every == held_out_every - 1 else training).add(tokens)


# --- The command line. ---
def main(
    text_paths: Annotated[
        list[Path] | None,
        typer.Option("--text", help="File or folder; may be repeated. Without it Python's standard library."),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help=f"One of {', '.join(NAMES)}.")] = "bytes",
    vocabulary_files: Annotated[
        Path | None, typer.Option(help="Folder with GPT-2's vocab.bpe and encoder.json.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the shards and their index.")] = Path("tokens"),
    shard_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a shard.")] = SHARD_TOKENS,
    validation: Annotated[
        float, typer.Option(min=1e-6, max=0.5, help="Part of the text that is held out: 1/2, 1/3 and so on.")
    ] = VALIDATION,
    context: Annotated[int, typer.Option(min=1, help="Longest sequence that each part must hold.")] = CONTEXT,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the shards of the folder.")] = False,
    only_check: Annotated[bool, typer.Option("--check", help="Only compare the folder with its checksums.")] = False,
) -> None:
    """Turn text files into shards of tokens, or check existing shards."""
    console = Console()
    if only_check and (text_paths or vocabulary_files or overwrite):
        raise typer.BadParameter("--check takes no other option than --out.")
    try:
        if only_check:
            index = check(out)
        else:
            made_by, paths = get_tokenizer(tokenizer, vocabulary_files), text_paths or []
            columns = TextColumn("reading"), BarColumn(bar_width=20), DownloadColumn(), TimeRemainingColumn()
            with Progress(*columns, console=console) as progress:
                found = itertools.chain.from_iterable(map(text.files, paths or [None]))
                task = progress.add_task("", total=sum(file.stat().st_size for file in found))
                index = prepare(
                    out, paths, tokenizer=made_by, shard_tokens=shard_tokens, validation=validation, context=context,
                    overwrite=overwrite, on_read=lambda count: progress.advance(task, count),
                )  # fmt: skip
    except KeyboardInterrupt:
        unfinished = "" if (out / shards.INDEX_NAME).exists() else f" {out} has no index; the next run starts again."
        console.print(f"Stopped before the end.{unfinished}", markup=False)
        raise typer.Exit(130) from None
    except (ValueError, OSError) as error:
        hints = {TextError: "--text", ShardError: "--out"}
        raise typer.BadParameter(str(error), param_hint=hints.get(type(error))) from error
    console.print(
        f"{'Every checksum fits' if only_check else 'Written'}: {out / shards.INDEX_NAME}, "
        f"{index.tokens('training'):,} tokens to train on in {len(index.training)} shards, "
        f"{index.tokens('validation'):,} held out in {len(index.validation)} ({index.tokenizer}, "
        f"{', '.join(index.texts)}).",
        markup=False,
    )


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
