"""Batches from shards: every row once an epoch, from any position on, in any number of processes, ahead of time."""

import gc
import itertools
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.gpt import shards
from examples.gpt.loader import Loader, Rows, prefetch, validation_batches
from examples.gpt.shards import Index, ShardError
from tests.helpers import examples

CONTEXT = 4


def make_folder(folder, training, validation=(9,), vocabulary=60_000):
    """Write shards of these lengths whose tokens are 0, 1, 2 and so on through a part, so that each tells its place."""
    parts = []
    for part, lengths in (("training", training), ("validation", validation)):
        starts = np.cumsum([0, *lengths])
        tokens = [
            np.arange(start, start + length, dtype=np.uint16) for start, length in zip(starts, lengths, strict=False)
        ]
        parts.append(
            tuple(
                shards.write_shard(folder / f"{part}-{number}.npy", row, vocabulary=vocabulary)
                for number, row in enumerate(tokens)
            )
        )
    shards.write_index(folder, Index((), "test", vocabulary, 0, *parts))
    return folder


@pytest.fixture
def folder(tmp_path):
    """Shards of 5, 0, 8 and 2 rows; the second is too short for one."""
    return make_folder(tmp_path, training=(21, 4, 35, 10), validation=(17, 3, 20))


@pytest.fixture
def rows(folder):
    return Rows(folder, "training", CONTEXT)


def rows_of(lengths, context=CONTEXT):
    """Return all rows of a part, from their definition."""
    starts = np.cumsum([0, *lengths[:-1]])
    return [
        tuple(range(start + row * context, start + row * context + context + 1))
        for start, length in zip(starts, lengths, strict=True)
        for row in range(length)
        if row * context + context < length
    ]


def rows_from(loader, count):
    """Return so many rows, whatever the batches."""
    batches = [batch for batch, _ in itertools.islice(loader, -(-count // loader.batch_size))]
    return [tuple(row) for row in np.concatenate(batches).tolist()[:count]]


# --- The order of rows. ---
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5).filter(lambda n: max(n) > CONTEXT), st.integers(0, 2**31))
@examples(30)
def test_every_row_comes_once_an_epoch_in_another_order_in_every_epoch(tmp_path_factory, lengths, seed):
    rows = Rows(make_folder(tmp_path_factory.mktemp("rows"), lengths), "training", CONTEXT)
    expected = rows_of(lengths)
    count = len(expected)
    drawn = rows_from(Loader(rows, batch_size=3, seed=seed), 2 * count)
    assert sorted(drawn[:count]) == sorted(drawn[count:]) == sorted(expected)
    if count > 8:  # equal by chance once in 300,000
        assert drawn[:count] != drawn[count:]
        assert drawn[:count] != rows_from(Loader(rows, batch_size=3, seed=seed + 1), count)
    # Iterating again begins at the same place.
    assert rows_from(Loader(rows, batch_size=3, seed=seed), count) == drawn[:count]


@pytest.mark.parametrize("position", [0, 1, 14, 15, 16, 40])
def test_a_position_continues_with_the_same_rows_whatever_the_size_of_batches(rows, position):
    """An epoch has 15 rows."""
    whole = rows_from(Loader(rows, batch_size=5, seed=3), 70)
    for batch_size in (1, 4, 6):
        resumed = Loader(rows, batch_size=batch_size, seed=3, position=position)
        assert rows_from(resumed, 30) == whole[position : position + 30]
        assert next(iter(resumed))[1] == position + batch_size


@pytest.mark.parametrize("processes", [1, 2, 3, 6])
def test_the_parts_of_all_processes_make_up_the_batch_of_one(rows, processes):
    """Also of a run that was started by another number of them: the position is that of all together."""
    options = {"batch_size": 6, "seed": 1, "position": 12}
    parts = [Loader(rows, **options, process_index=index, process_count=processes) for index in range(processes)]
    batches = [
        np.concatenate([batch for batch, _ in of_all]) for of_all in itertools.islice(zip(*parts, strict=True), 9)
    ]
    expected = [batch for batch, _ in itertools.islice(Loader(rows, **options), 9)]
    np.testing.assert_array_equal(batches, expected)


def test_a_batch_that_processes_cannot_share_is_refused(rows):
    with pytest.raises(ValueError, match="`batch_size` 5 cannot be divided among 2 processes"):
        Loader(rows, batch_size=5, seed=0, process_count=2)


def test_too_little_data_for_one_row_is_refused(folder):
    with pytest.raises(ShardError, match="its longest shard has 35 tokens, and a context of 35 needs 36"):
        Rows(folder, "training", 35)
    assert len(Rows(folder, "training", 34)) == 1


def test_a_token_outside_of_the_vocabulary_is_refused(tmp_path):
    folder = make_folder(tmp_path, training=(21,), vocabulary=21)
    path = folder / "training-0.npy"
    path.write_bytes(path.read_bytes()[:-2] + b"\x15\x00")
    with pytest.raises(ShardError, match=r"has the token 21, which is not in its vocabulary of 21; .* --check"):
        rows_from(Loader(Rows(folder, "training", CONTEXT), batch_size=5, seed=0), 5)


# --- Validation. ---
def test_validation_rows_are_evenly_spaced_and_the_same_at_every_call(folder):
    """Of 8 rows, 4 in either shard."""
    batches = validation_batches(folder, count=2, batch_size=2, context=CONTEXT)
    every = rows_of((17, 3, 20))
    assert batches.dtype == np.uint16
    assert [tuple(row) for row in batches.reshape(4, -1).tolist()] == [every[index] for index in (0, 2, 5, 7)]
    np.testing.assert_array_equal(batches, validation_batches(folder, count=2, batch_size=2, context=CONTEXT))
    every_one = validation_batches(folder, count=4, batch_size=2, context=CONTEXT)
    assert [tuple(row) for row in every_one.reshape(8, -1).tolist()] == every


# --- Ahead of time. ---
def wait_until(condition):
    """Give a thread a moment; what it never does shows after a second."""
    return any(condition() or time.sleep(0.005) for _ in range(200))


def prefetching_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_prefetching_keeps_all_batches_in_order_and_puts_them_on_the_device(count):
    fetched = list(prefetch(np.full((2, 3), index, np.uint8) for index in range(count)))
    assert all(isinstance(batch, jax.Array) for batch in fetched)
    assert [int(batch[0, 0]) for batch in fetched] == list(range(count))
    assert not prefetching_threads()


@pytest.mark.parametrize("ahead", [1, 3])
def test_as_many_items_as_allowed_and_no_more_are_on_their_way_before_they_are_asked_for(ahead):
    made = []
    items = prefetch(iter(range(99)), put=lambda item: made.append(item) or item, ahead=ahead)
    for taken in range(1, 4):
        next(items)
        assert wait_until(lambda: len(made) == taken + ahead)  # noqa: B023 - called at once
        time.sleep(0.02)
        assert len(made) == taken + ahead
    items.close()


@pytest.mark.parametrize("where", ["batches", "put"])
def test_an_exception_is_raised_in_the_place_of_its_item(where):
    def check(item, here):
        if item == 3 and here == where:
            raise ShardError("the fourth is broken")
        return item

    items = prefetch((check(item, "batches") for item in range(9)), put=lambda item: check(item, "put"), ahead=2)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ShardError, match="the fourth is broken"):
        next(items)
    assert not prefetching_threads()


def test_closing_or_dropping_the_iterator_stops_the_thread():
    for close in (True, False):
        items = prefetch(itertools.count(), put=lambda item: item)
        next(items)
        assert prefetching_threads()
        if close:
            items.close()
        del items
        gc.collect()
        assert not prefetching_threads()


PROGRAM = """
import itertools, sys
import numpy as np
from examples.gpt.loader import prefetch
items = prefetch(np.zeros(100) for _ in itertools.count())
next(items)
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "codes"), [("", {0}), ("raise KeyboardInterrupt", {130, -2}), ("sys.exit(3)", {3})])
def test_an_interpreter_ends_with_an_iterator_in_use(end, codes):
    """After an interruption Python ends by the signal itself, which a shell reports as 130."""
    program = [sys.executable, "-c", PROGRAM.format(end=end)]
    done = subprocess.run(program, capture_output=True, timeout=60, check=False)
    assert done.returncode in codes, done.stderr
