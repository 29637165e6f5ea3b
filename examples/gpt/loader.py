"""Load batches from shards of tokens, in an order that a checkpoint can continue, and copy them to the device early.

Row r of a shard is its tokens from `r * context` to `r * context + context`, both included: the inputs and, one later,
the targets. In every epoch all rows of all shards come in a new random order, which follows from the seed. A position
is the number of rows read since the beginning, by all processes together. It holds for any number of processes and any
size of batches.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from examples.gpt import shards
from examples.gpt.shards import Part, ShardError

Item = TypeVar("Item")
Placed = TypeVar("Placed")


class Rows:
    """All rows, of `context + 1` tokens, in one part of a folder of shards, which are mapped into memory."""

    def __init__(self, folder: Path, part: Part, context: int) -> None:
        index = shards.read_index(folder)
        self.folder, self.context, self.vocabulary = folder, context, index.vocabulary
        self._shards = [shards.open_shard(folder / shard.name) for shard in getattr(index, part)]
        # A row shares one token with the next, and the last token of a shard is only a target.
        counts = [(len(tokens) - 1) // context for tokens in self._shards]
        self._ends = np.cumsum(counts)
        if not len(self):
            raise ShardError(
                f"the {part} part of {folder} is too short for one sequence: its longest shard has "
                f"{max(map(len, self._shards)):,} tokens, and a context of {context} needs {context + 1:,}; use more "
                "text or a shorter context."
            )

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends[-1])

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        """Return rows by their numbers, uint16 of shape (len(numbers), context + 1)."""
        rows = np.empty((len(numbers), self.context + 1), np.uint16)
        for row, number in zip(rows, numbers, strict=True):
            shard = int(np.searchsorted(self._ends, number, side="right"))
            start = (int(number) - (int(self._ends[shard - 1]) if shard else 0)) * self.context
            row[:] = self._shards[shard][start : start + self.context + 1]
        if rows.max(initial=0) >= self.vocabulary:  # the model would read such a token as another one
            raise ShardError(
                f"a shard in {self.folder} has the token {rows.max()}, which is not in its vocabulary of "
                f"{self.vocabulary:,}; `python -m examples.gpt.data --check --out {self.folder}` says which."
            )
        return rows


class Loader:
    """An iterator over one process's part of every batch, without end, with the position after the batch.

    A batch has `batch_size` rows over all processes, and takes its last rows from the next epoch where one ends. The
    `position` comes from an earlier loader with the same rows and seed.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch_size: int,
        seed: int,
        position: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        if batch_size < 1 or batch_size % process_count:
            raise ValueError(
                f"`batch_size` {batch_size} cannot be divided among {process_count} processes; choose a multiple of "
                f"{process_count}."
            )
        size = batch_size // process_count
        self._own = slice(process_index * size, (process_index + 1) * size)
        self.rows, self.batch_size, self.position = rows, batch_size, position
        # A batch can have rows of two epochs.
        self._order = functools.lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(len(rows))
        )

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield uint16 rows of shape (batch_size / process_count, context + 1), and the position after the batch."""
        position = self.position
        while True:
            epochs, places = np.divmod(np.arange(position, position + self.batch_size)[self._own], len(self.rows))
            numbers = [self._order(int(epoch))[place] for epoch, place in zip(epochs, places, strict=True)]
            position += self.batch_size
            yield self.rows[np.asarray(numbers)], position


def validation_batches(folder: Path, *, count: int, batch_size: int, context: int) -> np.ndarray:
    """Return evenly spaced rows of the validation shards, uint16 of shape (count, batch_size, context + 1)."""
    rows, wanted = Rows(folder, "validation", context), count * batch_size
    if wanted > len(rows):
        raise ShardError(
            f"the validation part of {folder} has {len(rows):,} sequences of context {context}, and {count} batches of "
            f"{batch_size} need {wanted:,}; ask for fewer batches, or make the part larger."
        )
    chosen = np.linspace(0, len(rows) - 1, wanted).round().astype(np.int64)
    return rows[chosen].reshape(count, batch_size, context + 1)


_END = object()


def prefetch(
    batches: Iterable[Item], put: Callable[[Item], Placed] = jax.device_put, ahead: int = 2
) -> Iterator[Placed]:
    """Call `put` in a thread on up to `ahead` items that nobody has asked for, so that no step waits for a batch."""
    items = iter(batches)

    def put_next() -> Placed | object:
        for item in items:
            return put(item)
        return _END

    executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        waiting = collections.deque(executor.submit(put_next) for _ in range(ahead))
        while (placed := waiting.popleft().result()) is not _END:
            waiting.append(executor.submit(put_next))
            yield placed
    finally:
        executor.shutdown(cancel_futures=True)
