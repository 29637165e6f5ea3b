"""Batches from shards: every row once an epoch, from any position on, in any number of processes, ahead of time."""

import gc
import itertools
import json
import subprocess
import sys
import threading
import time
import weakref

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.gpt import shards
from examples.gpt.loader import Loader, Position, prefetch, validation_batches
from examples.gpt.shards import Index, Shard, ShardError, Source

CONTEXT = 4


def make_folder(folder, training, validation=(9,), vocabulary=60_000):
    """Shards of these lengths whose tokens are 0, 1, 2 and so on through a part, so that each tells its place."""
    described = {}
    for part, lengths in (("training", training), ("validation", validation)):
        first, described[part] = 0, []
        for number, length in enumerate(lengths):
            name = f"{part}-{number}.tokens"
            shards.write_shard(folder / name, np.arange(first, first + length, dtype=np.uint16), vocabulary=vocabulary)
            described[part].append(Shard(name, length))
            first += length
    parts = {part: tuple(found) for part, found in described.items()}
    shards.write_index(folder, Index("test", vocabulary, 0, **parts, text=Source((), 0, 0, "")))
    return folder


@pytest.fixture
def folder(tmp_path):
    """Shards of 5, 0, 8 and 2 rows; the second is too short for one."""
    return make_folder(tmp_path, training=(21, 4, 35, 10), validation=(17, 3, 20))


@pytest.fixture(scope="module")
def make_scratch(tmp_path_factory):
    return lambda *arguments, **options: make_folder(tmp_path_factory.mktemp("scratch"), *arguments, **options)


def rows_of(lengths, context=CONTEXT):
    """All rows of a part, from their definition."""
    starts = np.cumsum([0, *lengths[:-1]])
    return [
        tuple(range(start + row * context, start + row * context + context + 1))
        for start, length in zip(starts, lengths, strict=True)
        for row in range(length)
        if row * context + context < length
    ]


def take(made, count):
    """So many batches, and the position after the last."""
    pairs = list(itertools.islice(made, count))
    return np.stack([batch for batch, _ in pairs]), pairs[-1][1]


def rows_from(made, count):
    """So many rows, whatever the batches."""
    batches, _ = take(made, -(-count // made.batch_size))
    return [tuple(row) for row in np.concatenate(batches).tolist()[:count]]


# --- The order of rows. ---
def test_an_epoch_has_every_row_exactly_once(folder):
    """15 rows: 5 of the shard with 21 tokens, none of 4, 8 of 35 and 2 of 10."""
    made = Loader(folder, batch_size=1, context=CONTEXT)

    assert made.rows_per_epoch == 15
    assert made.tokens_per_epoch == 60
    for epoch in range(3):
        continued = Loader(folder, batch_size=1, context=CONTEXT, position=Position(epoch))
        assert sorted(rows_from(continued, 15)) == rows_of((21, 4, 35, 10))


def test_rows_come_in_another_order_in_every_epoch_and_for_every_seed(folder):
    first, second = np.split(np.array(rows_from(Loader(folder, batch_size=5, context=CONTEXT), 30)), 2)
    other = np.array(rows_from(Loader(folder, batch_size=5, context=CONTEXT, seed=1), 15))

    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert not np.array_equal(np.sort(first[:, 0]), first[:, 0])


def test_shards_are_read_one_after_the_other_in_another_order_in_every_epoch(folder):
    """Neighbours in the sequence are of one shard, but for three places an epoch."""
    rows = np.array(rows_from(Loader(folder, batch_size=15, context=CONTEXT), 20 * 15))[:, 0].reshape(20, 15)
    shard_of_row = np.digitize(rows, np.cumsum([21, 4, 35]))
    orders = [tuple(shard for shard, _ in itertools.groupby(epoch)) for epoch in shard_of_row.tolist()]

    assert {tuple(sorted(order)) for order in orders} == {(0, 2, 3)}
    assert len(set(orders)) == 6


def test_a_batch_is_rows_of_uint16_with_one_token_more_than_the_context(folder):
    batch, position = next(iter(Loader(folder, batch_size=6, context=CONTEXT)))

    assert batch.shape == (6, CONTEXT + 1)
    assert batch.dtype == np.uint16
    assert isinstance(position, Position)


def test_the_validation_part_is_read_from_its_own_shards(folder):
    made = Loader(folder, "validation", batch_size=1, context=CONTEXT)

    assert sorted(rows_from(made, 8)) == rows_of((17, 3, 20))


def test_iterating_starts_at_the_same_place_every_time(folder):
    made = Loader(folder, batch_size=2, context=CONTEXT, position=Position(2, 1))

    np.testing.assert_array_equal(take(made, 20)[0], take(made, 20)[0])


def test_only_one_shard_is_open_at_a_time(folder, monkeypatch):
    opened, open_shard = [], shards.open_shard
    monkeypatch.setattr(shards, "open_shard", lambda path: opened.append(path.name) or open_shard(path))
    take(Loader(folder, batch_size=1, context=CONTEXT), 15)

    assert sorted(opened) == ["training-0.tokens", "training-2.tokens", "training-3.tokens"]


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5).filter(lambda lengths: max(lengths) > CONTEXT)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 12), st.integers(1, 12), st.integers(0, 30), st.integers(0, 3))
def test_a_position_continues_with_the_same_rows_whatever_the_size_of_batches(
    make_scratch, lengths, batch_size, other_batch_size, count, seed
):
    path = make_scratch(lengths)
    made = Loader(path, batch_size=batch_size, context=CONTEXT, seed=seed)
    position = take(made, count)[1] if count else Position()
    position = Position.from_dict(json.loads(json.dumps(position.as_dict())))
    continued = Loader(path, batch_size=other_batch_size, context=CONTEXT, seed=seed, position=position)

    assert rows_from(continued, 20) == rows_from(made, count * batch_size + 20)[count * batch_size :]


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_the_parts_of_all_processes_make_up_the_batch_of_one(make_scratch, lengths, rows, processes, seed):
    path = make_scratch(lengths)
    options = {"batch_size": rows * processes, "context": CONTEXT, "seed": seed}
    whole, after = take(Loader(path, **options), 6)
    made = [Loader(path, **options, process_index=index, process_count=processes) for index in range(processes)]
    parts = [take(part, 6) for part in made]

    np.testing.assert_array_equal(np.concatenate([batches for batches, _ in parts], axis=1), whole)
    assert {position for _, position in parts} == {after}


@settings(max_examples=20)
@given(LENGTHS, st.integers(0, 3))
def test_every_row_comes_once_an_epoch_whatever_the_shards(make_scratch, lengths, seed):
    made = Loader(make_scratch(lengths), batch_size=3, context=CONTEXT, seed=seed)
    rows = rows_from(made, 2 * made.rows_per_epoch)

    assert sorted(rows[: made.rows_per_epoch]) == rows_of(lengths)
    assert sorted(rows[made.rows_per_epoch :]) == rows_of(lengths)


def test_a_run_goes_on_with_another_number_of_processes(folder):
    whole, _ = take(Loader(folder, batch_size=6, context=CONTEXT), 8)
    _, position = take(Loader(folder, batch_size=6, context=CONTEXT, process_index=1, process_count=2), 3)
    parts = [
        take(Loader(folder, batch_size=6, context=CONTEXT, position=position, process_index=i, process_count=3), 5)[0]
        for i in range(3)
    ]

    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole[3:])


# --- Positions and numbers that do not fit. ---
@pytest.mark.parametrize(
    ("position", "message"),
    [
        (Position(0, 4, 0), r"the position \(0, 4, 0\) does not fit .*: it has 4 shards"),
        (Position(0, 0, 8), r"this shard has \d rows of context 4"),
        (Position(0, 0, -1), "`row` of a position must be an integer from 0 on, but is -1"),
        (Position(0.5, 0, 0), "`epoch` of a position must be an integer from 0 on, but is 0.5"),
    ],
)
def test_a_position_that_does_not_fit_is_refused(position, message, folder):
    with pytest.raises(ValueError, match=message):
        Loader(folder, batch_size=2, context=CONTEXT, position=position)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 0, "shard": 0}, "a position has epoch, shard, row, but this one has epoch, shard"),
        ({"epoch": 0, "shard": 0, "row": "1"}, "`row` of a position must be an integer from 0 on, but is '1'"),
        ({"epoch": True, "shard": 0, "row": 0}, "`epoch` of a position must be an integer"),
    ],
)
def test_a_description_that_is_no_position_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        Position.from_dict(content)


def test_a_position_of_a_checkpoint_has_plain_integers():
    """A checkpoint gives back arrays of NumPy's numbers, which JSON would not take."""
    position = Position.from_dict({"epoch": np.int64(1), "shard": np.int32(2), "row": np.int64(3)})

    assert [type(value) for value in position] == [int, int, int]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 5, "process_count": 2}, "`batch_size` 5 cannot be divided among 2 processes"),
        ({"process_index": 2, "process_count": 2}, "`process_index` 2 is none of 2 processes"),
        ({"process_index": -1}, "`process_index` -1 is none of 1 processes"),
        ({"process_count": 0}, "is none of 0 processes"),
        ({"batch_size": 0}, "`batch_size` must be 1 or more, but is 0"),
        ({"context": 0}, "`context` must be 1 or more, but is 0"),
        ({"seed": -1}, "`seed` must be 0 or more, but is -1"),
        ({"part": "test"}, '`part` must be "training" or "validation", but is \'test\''),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options, message, folder):
    with pytest.raises(ValueError, match=message):
        Loader(folder, **({"batch_size": 4, "context": CONTEXT} | options))


def test_too_little_data_for_one_row_is_refused(folder):
    with pytest.raises(ShardError, match="its longest shard has 35 tokens, and a context of 35 needs 36"):
        Loader(folder, batch_size=1, context=35)


def test_a_shard_that_is_cut_while_training_is_refused_by_name(folder):
    batches = iter(Loader(folder, batch_size=15, context=CONTEXT))
    path = folder / "training-2.tokens"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(ShardError, match=r"training-2\.tokens is truncated"):
        next(batches)


def test_a_token_outside_of_the_vocabulary_is_refused_by_name(folder):
    path = folder / "training-2.tokens"
    path.write_bytes(path.read_bytes()[:64] + b"\xff" * 70)

    with pytest.raises(ShardError, match=r"training-2\.tokens has the token 65535, which is not in its vocabulary"):
        next(iter(Loader(folder, batch_size=15, context=CONTEXT)))


# --- Validation. ---
def test_validation_rows_are_the_same_at_every_call_and_evenly_spaced(folder):
    """4 of 8 rows, the first and the last among them: 0, 7/3, 14/3 and 7, rounded."""
    batches = validation_batches(folder, count=2, batch_size=2, context=CONTEXT)
    rows = rows_of((17, 3, 20))

    assert batches.dtype == np.uint16
    np.testing.assert_array_equal(batches, np.array([rows[0], rows[2], rows[5], rows[7]]).reshape(2, 2, CONTEXT + 1))
    np.testing.assert_array_equal(batches, validation_batches(folder, count=2, batch_size=2, context=CONTEXT))


def test_all_validation_rows_may_be_asked_for(folder):
    batches = validation_batches(folder, count=4, batch_size=2, context=CONTEXT)

    assert [tuple(row) for row in batches.reshape(8, -1).tolist()] == rows_of((17, 3, 20))


def test_more_validation_rows_than_there_are_are_refused(folder):
    with pytest.raises(ShardError, match="has 8 sequences of context 4, and 3 batches of 3 need 9"):
        validation_batches(folder, count=3, batch_size=3, context=CONTEXT)


def test_no_validation_batches_are_refused(folder):
    with pytest.raises(ValueError, match="`count` must be 1 or more, but is 0"):
        validation_batches(folder, count=0, batch_size=3, context=CONTEXT)


# --- Ahead of time. ---
def wait_until(condition):
    """A thread needs a moment; what it never does shows after a second."""
    for _ in range(200):
        if condition():
            return True
        time.sleep(0.005)
    return False


def prefetching_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


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


def test_the_loader_can_be_prefetched_with_its_positions(folder):
    made = Loader(folder, batch_size=2, context=CONTEXT)
    put = lambda pair: (jax.device_put(pair[0]), pair[1])
    fetched = list(itertools.islice(prefetch(made, put), 9))

    expected, after = take(made, 9)
    np.testing.assert_array_equal(np.stack([batch for batch, _ in fetched]), expected)
    assert fetched[-1][1] == after


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


def test_closing_stops_the_thread():
    items = prefetch(itertools.count(), put=lambda item: item)
    next(items)
    assert prefetching_threads()
    items.close()

    assert not prefetching_threads()


def test_dropping_the_iterator_stops_the_thread():
    items = prefetch(itertools.count(), put=lambda item: item)
    next(items)
    del items
    gc.collect()

    assert not prefetching_threads()


def test_an_interruption_of_the_loop_stops_the_thread():
    def loop():
        for item in prefetch(itertools.count(), put=lambda item: item):
            if item == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    gc.collect()

    assert wait_until(lambda: not prefetching_threads())


def test_items_are_not_kept_once_they_are_taken():
    """Else the memory of one more batch would be held than anybody sees."""
    items = prefetch((np.zeros(1) for _ in range(9)), put=lambda item: item, ahead=1)
    taken = weakref.ref(next(items))

    assert wait_until(lambda: taken() is None)
    items.close()


def test_nothing_ahead_is_refused():
    with pytest.raises(ValueError, match="`ahead` must be 1 or more, but is 0"):
        prefetch([], ahead=0)


PROGRAM = """
import itertools, sys
import numpy as np
from examples.gpt.loader import prefetch
items = prefetch(np.zeros(100) for _ in itertools.count())
next(items)
{end}
"""


@pytest.mark.parametrize(("end", "codes"), [("", {0}), ("raise KeyboardInterrupt", {130, -2}), ("sys.exit(3)", {3})])
def test_an_interpreter_ends_with_an_iterator_in_use(end, codes):
    """After an interruption Python ends by the signal itself, of which a shell makes 130."""
    program = [sys.executable, "-c", PROGRAM.format(end=end)]
    done = subprocess.run(program, capture_output=True, timeout=60, check=False)

    assert done.returncode in codes, done.stderr
