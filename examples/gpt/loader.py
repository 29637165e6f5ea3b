"""Batches from shards of tokens, in an order that a checkpoint can continue, and their way to the device.

Row r of a shard is its tokens from `r * context` to `r * context + context`, both included: the inputs and, one later,
the targets. In every epoch the shards come in a new order, and the rows of each shard in a new order. Both follow from
the seed alone, so all processes agree on the one sequence of rows without a word between them, and a position in that
sequence holds for any number of processes and any size of batches.
"""

import atexit
import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from examples.gpt import shards
from examples.gpt.shards import Part, ShardError

# Seeds of NumPy that differ only in zeros at their end are the same seed, so the last number is never zero.
_ORDER_OF_SHARDS, _ORDER_OF_ROWS = 1, 2
_SECONDS_TO_STOP = 5.0  # what a copy to the device may still take when nobody wants it any more

Item = TypeVar("Item")
Placed = TypeVar("Placed")


class Position(NamedTuple):
    """Where a batch starts in the sequence of all rows.

    Attributes:
        epoch: how often all rows have been read.
        shard: how many shards have been read in this epoch. Which one that is follows from the seed.
        row: how many rows of this shard have been read.
    """

    epoch: int = 0
    shard: int = 0
    row: int = 0

    def as_dict(self) -> dict[str, int]:
        """The position for JSON."""
        return self._asdict()

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Position":
        """The position that `as_dict` described.

        Raises:
            ValueError: if it has other fields, or one is no number from 0 on.
        """
        if set(content) != set(cls._fields):
            raise ValueError(
                f"a position has {', '.join(cls._fields)}, but this one has {', '.join(map(str, content))}."
            )
        return cls(**content).checked()

    def checked(self) -> "Position":
        """The position itself, with plain integers.

        Raises:
            ValueError: if one of its numbers is no integer from 0 on.
        """
        for name, value in self._asdict().items():
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
                raise ValueError(f"`{name}` of a position must be an integer from 0 on, but is {value!r}.")
        return Position(*map(int, self))


class _Segment(NamedTuple):
    """Rows of a batch that come from one shard."""

    shard: int
    rows: np.ndarray


@dataclasses.dataclass
class _Open:
    """The order of rows and the tokens in use: one of each, since rows are read shard by shard."""

    order: tuple[tuple[int, int], np.ndarray] | None = None
    tokens: tuple[int, np.memmap] | None = None


class Loader:
    """Yields one process's part of every batch, without end, and where the next batch starts.

    Iterating starts at `position` every time. A batch takes its last rows from the next shard, or the next epoch, where
    one ends.

    Args:
        folder: with an index and its shards.
        part: "training" or "validation".
        batch_size: rows of a whole batch, over all processes.
        context: length of a sequence; rows have one token more.
        seed: of the order.
        position: where to start, from an earlier loader with the same folder, part, context and seed.
        process_index: which part of each batch is yielded ...
        process_count: ... of so many.

    Raises:
        ShardError: if the folder cannot be used, or no shard is long enough for a row.
        ValueError: if a number does not fit the others.
    """

    def __init__(
        self,
        folder: Path,
        part: Part = "training",
        *,
        batch_size: int,
        context: int,
        seed: int = 0,
        position: Position = Position(),  # noqa: B008 - a tuple does not change
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        _check_sizes(batch_size, context, seed)
        if process_count < 1 or not 0 <= process_index < process_count:
            raise ValueError(f"`process_index` {process_index} is none of {process_count} processes, counted from 0.")
        if batch_size % process_count:
            raise ValueError(
                f"`batch_size` {batch_size} cannot be divided among {process_count} processes; choose a multiple of "
                f"{process_count}."
            )
        self.folder, self.index = folder, shards.read_index(folder)
        self.part: Part = part
        self.batch_size, self.context, self.seed = batch_size, context, seed
        self.process_index, self.process_count = process_index, process_count
        self._rows = _rows_of_shards(folder, self.index, part, context)
        self.position = self._fitting(position.checked())

    @property
    def rows_per_epoch(self) -> int:
        """Rows that all processes together read before one comes again."""
        return sum(self._rows)

    @property
    def tokens_per_epoch(self) -> int:
        """Targets of one epoch; the few tokens at the end of a shard that fill no row are never read."""
        return self.rows_per_epoch * self.context

    def __iter__(self) -> Iterator[tuple[np.ndarray, Position]]:
        """Yields uint16 rows of shape (batch_size / process_count, context + 1), and the position after the batch."""
        position, opened = self.position, _Open()
        size = self.batch_size // self.process_count
        own = slice(self.process_index * size, (self.process_index + 1) * size)
        while True:
            segments, position = self._next_segments(position, opened)
            yield self._read(segments, own, opened), position

    def _fitting(self, position: Position) -> Position:
        """The position itself, if there is such a row."""
        if position.shard >= len(self._rows):
            raise ValueError(
                f"the position {tuple(position)} does not fit {self.folder}: it has {len(self._rows)} shards in "
                f"`{self.part}`, counted from 0. Was it made from other shards?"
            )
        rows = self._rows[self._order_of_shards(position.epoch)[position.shard]]
        if position.row >= max(rows, 1):
            raise ValueError(
                f"the position {tuple(position)} does not fit {self.folder}: this shard has {rows:,} rows of context "
                f"{self.context}, counted from 0. Was it made with another context or seed, or from other shards?"
            )
        return position

    def _order_of_shards(self, epoch: int) -> np.ndarray:
        generator = np.random.default_rng((self.seed, epoch, _ORDER_OF_SHARDS))
        return generator.permutation(len(self._rows))

    def _order_of_rows(self, epoch: int, shard: int, opened: _Open) -> np.ndarray:
        if opened.order is None or opened.order[0] != (epoch, shard):
            generator = np.random.default_rng((self.seed, epoch, shard, _ORDER_OF_ROWS))
            opened.order = (epoch, shard), generator.permutation(self._rows[shard])
        return opened.order[1]

    def _next_segments(self, position: Position, opened: _Open) -> tuple[list[_Segment], Position]:
        """The rows of one whole batch, and the position after them."""
        segments, missing = [], self.batch_size
        while missing:
            shard = int(self._order_of_shards(position.epoch)[position.shard])
            rows = self._order_of_rows(position.epoch, shard, opened)[position.row : position.row + missing]
            segments.append(_Segment(shard, rows))
            missing -= len(rows)
            position = position._replace(row=position.row + len(rows))
            if position.row >= self._rows[shard]:
                position = position._replace(shard=position.shard + 1, row=0)
            if position.shard == len(self._rows):
                position = Position(position.epoch + 1)
        return segments, position

    def _read(self, segments: list[_Segment], own: slice, opened: _Open) -> np.ndarray:
        """This process's rows out of those of a whole batch."""
        batch = np.empty((own.stop - own.start, self.context + 1), np.uint16)
        first = 0
        for segment in segments:
            start, stop = max(own.start, first), min(own.stop, first + len(segment.rows))
            if start < stop:
                target = batch[start - own.start : stop - own.start]
                self._read_rows(segment.shard, segment.rows[start - first : stop - first], target, opened)
            first += len(segment.rows)
        return batch

    def _read_rows(self, shard: int, rows: np.ndarray, target: np.ndarray, opened: _Open) -> None:
        path = self.folder / self.index.shards(self.part)[shard].name
        if opened.tokens is None or opened.tokens[0] != shard:
            opened.tokens = shard, shards.open_shard(path)
        _copy_rows(path, opened.tokens[1], rows, target, self.index.vocabulary)


def validation_batches(folder: Path, *, count: int, batch_size: int, context: int) -> np.ndarray:
    """Evenly spaced rows of the validation shards, the same at every call, each one once.

    Returns:
        uint16 tokens of shape (count, batch_size, context + 1).

    Raises:
        ShardError: if the folder cannot be used, or has fewer rows than that.
    """
    _check_sizes(batch_size, context)
    if count < 1:
        raise ValueError(f"`count` must be 1 or more, but is {count}.")
    index = shards.read_index(folder)
    rows_of_shards = _rows_of_shards(folder, index, "validation", context)
    total, wanted = sum(rows_of_shards), count * batch_size
    if wanted > total:
        raise ShardError(
            f"the validation part of {folder} has {total:,} sequences of context {context}, and {count} batches of "
            f"{batch_size} need {wanted:,}; ask for fewer batches, or make the part larger."
        )
    chosen = np.linspace(0, total - 1, wanted).round().astype(np.int64)
    batches = np.empty((wanted, context + 1), np.uint16)
    first, filled = 0, 0
    for shard, rows in zip(index.validation, rows_of_shards, strict=True):
        here = chosen[(chosen >= first) & (chosen < first + rows)] - first
        if len(here):
            path = folder / shard.name
            target = batches[filled : filled + len(here)]
            _copy_rows(path, shards.open_shard(path), here, target, index.vocabulary)
        first, filled = first + rows, filled + len(here)
    return batches.reshape(count, batch_size, context + 1)


def prefetch(
    batches: Iterable[Item], put: Callable[[Item], Placed] = jax.device_put, ahead: int = 2
) -> Iterator[Placed]:
    """Calls `put` on items before they are asked for, so that a step waits for neither the disk nor a copy.

    A thread does so from the first item that is asked for until the iterator ends, is closed or is no longer used.
    What holds for one thread only, such as `jax.default_device`, does not hold in `put`.

    Args:
        batches: what to put on the device.
        put: puts an item there.
        ahead: how many items may be there that nobody has asked for.

    Raises:
        ValueError: if `ahead` is below 1.
    """
    if ahead < 1:
        raise ValueError(f"`ahead` must be 1 or more, but is {ahead}.")
    return _prefetched(iter(batches), put, ahead)


def _prefetched(batches: Iterator[Item], put: Callable[[Item], Placed], ahead: int) -> Iterator[Placed]:
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    may_take, stop = threading.Semaphore(ahead), threading.Event()
    # The thread must not refer to this generator, which else would never count as no longer used.
    thread = threading.Thread(target=_put_all, args=(batches, put, done, may_take, stop), daemon=True, name="prefetch")

    def finish() -> None:
        stop.set()
        may_take.release()
        # The collector of unused objects may run in any thread, this one too.
        if threading.current_thread() is not thread:
            thread.join(_SECONDS_TO_STOP)

    thread.start()
    # Where an exception ends the program while the iterator is still in use, a copy must not outlive the interpreter.
    atexit.register(finish)
    try:
        while True:
            item, error = done.get()
            if error is not None:
                raise error
            if item is _END:
                return
            may_take.release()
            yield item.pop()
    finally:
        finish()
        atexit.unregister(finish)


_END = object()


def _put_all(
    batches: Iterator[Item],
    put: Callable[[Item], Placed],
    done: "queue.SimpleQueue[Any]",
    may_take: threading.Semaphore,
    stop: threading.Event,
) -> None:
    """The thread of `prefetch`: every item in a list of its own, and what ends them."""
    try:
        while True:
            may_take.acquire()
            if stop.is_set():
                return
            for item in itertools.islice(batches, 1):
                # In a list, so that the consumer can take it out and no other reference holds memory of the device.
                done.put(([put(item)], None))
                break
            else:
                done.put((_END, None))
                return
    except BaseException as error:
        done.put((None, error))


# --- Rows of shards. ---
def _check_sizes(batch_size: int, context: int, seed: int = 0) -> None:
    for name, value, minimum in (("batch_size", batch_size, 1), ("context", context, 1), ("seed", seed, 0)):
        if value < minimum:
            raise ValueError(f"`{name}` must be {minimum} or more, but is {value}.")


def _rows_of_shards(folder: Path, index: shards.Index, part: Part, context: int) -> list[int]:
    """How many rows each shard has: a row shares one token with the next, and the last token is only a target."""
    rows = [(shard.tokens - 1) // context for shard in index.shards(part)]
    if not sum(rows):
        longest = max(shard.tokens for shard in index.shards(part))
        raise ShardError(
            f"the {part} part of {folder} is too short for one sequence: its longest shard has {longest:,} tokens, and "
            f"a context of {context} needs {context + 1:,}; use more text or a shorter context."
        )
    return rows


def _copy_rows(path: Path, tokens: np.ndarray, rows: np.ndarray, target: np.ndarray, vocabulary: int) -> None:
    tokens, context = np.asarray(tokens), target.shape[1] - 1  # a plain array is faster to slice
    for row, place in zip(rows.tolist(), target, strict=True):
        place[:] = tokens[row * context : row * context + context + 1]
    # On a device such a token would be read as another one, without a word.
    if target.max() >= vocabulary:
        raise ShardError(f"{path} has the token {target.max()}, which is not in its vocabulary of {vocabulary:,}.")
