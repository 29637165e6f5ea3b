"""Turns text files into shards of tokens, of which a part is held out for validation, and writes an index of them.

Run it from the root of the repository:

    python -m examples.gpt.data
    python -m examples.gpt.data --text my_folder --text book.txt --tokenizer gpt2 --vocabulary-files gpt2 --out tokens
    python -m examples.gpt.data --check --out tokens

Without a text it reads the source code of Python's standard library. Of 100 documents or more every tenth is held out
whole (`--validation 0.1`; a file above 1 MB is several documents); fewer are joined and cut into 100 blocks, of which
every tenth is. Both parts so come from all over the text, and the same text always gives the same shards.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from examples.gpt import shards, text
from examples.gpt.shards import Index, Part, Shard, ShardError, Source
from examples.gpt.text import TextError
from examples.gpt.tokenizers import NAMES, ByteTokenizer, Tokenizer, TokenizerError, get_tokenizer

SHARD_TOKENS = 100_000_000  # 200 MB: few files even of a large text, and one fits into memory while it is written
VALIDATION = 0.1
CONTEXT = 1024  # of GPT-2; a longer sequence than both parts must hold is of no use
# Of fewer documents every tenth would be too few to say much about the others.
MANY_DOCUMENTS = 100
SUFFIX = ".tokens"
_OWN_NAME = re.compile(rf"(training|validation)-\d+{re.escape(SUFFIX)}(\.\d+\.partial)?")
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=20),
    DownloadColumn(),
    TransferSpeedColumn(),
    TimeRemainingColumn(),
)


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
    on_read: Callable[[int], None] | None = None,
) -> Index:
    """Makes the shards and the index of a folder; without an argument, of the bytes of Python's standard library.

    The index is written last, and an old one goes first: after an interruption there is none, and the next run
    writes over what is there.

    Args:
        folder: where to write; made if it does not exist.
        texts: files and folders, or nothing for the standard library.
        tokenizer: bytes if None.
        shard_tokens: a new shard begins after so many tokens.
        validation: the part of documents or blocks that is held out: 1/2, 1/3, 1/4 and so on.
        context: the longest sequence that will be asked for; each part must hold one.
        overwrite: whether shards that are there may be replaced.
        on_read: hears of every number of bytes that is done with.

    Raises:
        TextError: if a text cannot be read, or is too short to be split.
        ShardError: if the folder has an index and may not be overwritten, or cannot be written.
        ValueError: if a number is out of its range.
    """
    if not 0 < validation <= 0.5:
        raise ValueError(f"`validation` must be above 0 and at most 0.5, but is {validation}.")
    if shard_tokens <= context:
        raise ValueError(
            f"`shard_tokens` {shard_tokens:,} must be larger than `context` {context:,}: a sequence has one token more."
        )
    held_out_every = round(1 / validation)
    if not math.isclose(held_out_every * validation, 1.0, rel_tol=0.02):
        raise ValueError(
            f"`validation` must be one part of a whole number, such as 0.1, 0.05 or {1 / held_out_every:.3g}, but is "
            f"{validation}."
        )
    tokenizer = tokenizer or ByteTokenizer()
    paths = list(texts) or [None]
    for path in paths:
        text.files(path)  # what is not there shall be said before anything is removed
    _require_folder(folder, overwrite)
    counted = _Counted(itertools.chain.from_iterable(text.documents(path, on_read) for path in paths))
    training = _Writer(folder, "training", tokenizer, shard_tokens, context)
    held_out = _Writer(folder, "validation", tokenizer, shard_tokens, context)
    try:
        _fill(training, held_out, counted, held_out_every)
        index = Index(
            tokenizer=tokenizer.name,
            vocabulary=tokenizer.vocabulary,
            separator=tokenizer.separator,
            training=training.finished(),
            validation=held_out.finished(),
            text=counted.source(paths),
        )
        shards.write_index(folder, index)
        _remove_others(folder, index)
    except OSError as error:
        raise ShardError(f"cannot write into the folder {folder}: {error.strerror or error}.") from error
    return index


def check(folder: Path, on_read: Callable[[int], None] | None = None) -> Index:
    """Reads every shard of a folder and compares it with its checksum.

    Raises:
        ShardError: with all the shards that are damaged.
    """
    index, wrong = shards.read_index(folder), []
    for shard in index.training + index.validation:
        try:
            shards.verify_shard(folder / shard.name, on_read)
        except ShardError as error:
            wrong.append(str(error))
    if wrong:
        raise ShardError("\n".join(wrong))
    return index


class _Counted:
    """Documents on their way, and what the index says of them."""

    def __init__(self, documents: Iterable[bytes]) -> None:
        self.documents, self.bytes, self.sha256, self._documents = 0, 0, hashlib.sha256(), documents

    def __iter__(self) -> Iterator[bytes]:
        for document in self._documents:
            self.documents += 1
            self.bytes += len(document)
            self.sha256.update(document)
            yield document

    def source(self, paths: Iterable[Path | None]) -> Source:
        return Source(tuple(map(text.name_of, paths)), self.documents, self.bytes, self.sha256.hexdigest())


class _Writer:
    """Cuts the tokens of one part into shards."""

    def __init__(self, folder: Path, part: Part, tokenizer: Tokenizer, shard_tokens: int, context: int) -> None:
        self.folder, self.part, self.tokenizer = folder, part, tokenizer
        self.shard_tokens, self.context = shard_tokens, context
        self._waiting: list[np.ndarray] = []
        self._count = 0
        self._shards: list[Shard] = []

    def add(self, tokens: np.ndarray) -> None:
        self._waiting.append(tokens)
        self._count += len(tokens)
        # What would be too short for a sequence at the end stays with the shard before it.
        if self._count <= self.shard_tokens + self.context:
            return
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
        name = f"{self.part}-{len(self._shards):05d}{SUFFIX}"
        shards.write_shard(self.folder / name, tokens, vocabulary=self.tokenizer.vocabulary)
        self._shards.append(Shard(name, len(tokens)))


_MORE = "Use more text, a shorter context, or a larger part for validation."


def _fill(training: _Writer, held_out: _Writer, documents: Iterable[bytes], held_out_every: int) -> None:
    tokenizer = training.tokenizer
    separator = np.array([tokenizer.separator], np.uint16)
    in_tokens = (np.concatenate([separator, tokenizer.encode(document)]) for document in documents)
    first = list(itertools.islice(in_tokens, MANY_DOCUMENTS))
    if len(first) < MANY_DOCUMENTS:
        try:
            parts = text.split(np.concatenate(first), training.context, held_out_every=held_out_every, unit="tokens")
        except TextError as error:
            raise TextError(f"{error} {_MORE}") from error
        for writer, tokens in zip((training, held_out), parts, strict=True):
            writer.add(tokens)
        return
    for number, tokens in enumerate(itertools.chain(first, in_tokens)):
        writer = held_out if number % held_out_every == held_out_every - 1 else training
        writer.add(tokens)


def _require_folder(folder: Path, overwrite: bool) -> None:
    """Makes the folder, or takes the index away from the one that is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / shards.INDEX_NAME).exists() and not overwrite:
            raise ShardError(f"the folder {folder} has shards already; choose another one, or pass `--overwrite`.")
        (folder / shards.INDEX_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise ShardError(f"cannot make the folder {folder}: {error.strerror or error}.") from error


def _remove_others(folder: Path, index: Index) -> None:
    """Removes shards of an earlier run that this one has not written over, and what an interrupted one left."""
    names = {shard.name for shard in index.training + index.validation}
    for path in folder.iterdir():
        if _OWN_NAME.fullmatch(path.name) and path.name not in names:
            path.unlink()


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
    validation: Annotated[float, typer.Option(help="Part of the text that is held out, at most 0.5.")] = VALIDATION,
    context: Annotated[int, typer.Option(min=1, help="Longest sequence that each part must hold.")] = CONTEXT,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the shards of the folder.")] = False,
    only_check: Annotated[bool, typer.Option("--check", help="Only compare the folder with its checksums.")] = False,
) -> None:
    """Turns text files into shards of tokens, or checks shards that are there."""
    console = Console()
    if only_check:
        _require_nothing_else(text=text_paths, vocabulary_files=vocabulary_files, overwrite=overwrite)
    try:
        with Progress(*COLUMNS, console=console) as progress:
            if only_check:
                index = _check_with_progress(out, progress)
            else:
                options = {"shard_tokens": shard_tokens, "validation": validation, "context": context}
                made_by = get_tokenizer(tokenizer, vocabulary_files)
                index = _prepare_with_progress(
                    out, text_paths or [], progress, tokenizer=made_by, overwrite=overwrite, **options
                )
    except KeyboardInterrupt:
        unfinished = "" if (out / shards.INDEX_NAME).exists() else f" {out} has no index; the next run starts again."
        console.print(f"Stopped before the end.{unfinished}", markup=False)
        raise typer.Exit(130) from None
    except ValueError as error:
        hints = {TextError: "--text", ShardError: "--out", TokenizerError: "--tokenizer"}
        raise typer.BadParameter(str(error), param_hint=hints.get(type(error))) from error
    console.print(f"{'Every checksum fits' if only_check else 'Written'}: {_summary(out, index)}", markup=False)


def _require_nothing_else(**options: object) -> None:
    for name, value in options.items():
        if value:
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter("does nothing together with --check; leave it out.", param_hint=option)


def _prepare_with_progress(folder: Path, texts: list[Path], progress: Progress, **options: Any) -> Index:
    task = progress.add_task("reading", total=text.total_bytes(texts or [None]))
    return prepare(folder, texts, on_read=lambda count: progress.advance(task, count), **options)


def _check_with_progress(folder: Path, progress: Progress) -> Index:
    index = shards.read_index(folder)
    tokens = sum(shard.tokens for shard in index.training + index.validation)
    task = progress.add_task("checking", total=tokens * shards.TOKEN.itemsize)
    return check(folder, on_read=lambda count: progress.advance(task, count))


def _summary(folder: Path, index: Index) -> str:
    count: Callable[[Part], str] = lambda part: (
        f"{len(index.shards(part))} shard{'s' if len(index.shards(part)) > 1 else ''}"
    )
    training = f"{index.tokens('training'):,} tokens to train on in {count('training')}"
    held_out = f"{index.tokens('validation'):,} held out in {count('validation')}"
    return f"{folder / shards.INDEX_NAME}, {training}, {held_out} ({index.tokenizer}, {', '.join(index.text.names)})."


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
