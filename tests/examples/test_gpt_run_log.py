"""The records of a run, in its file, on a terminal and in a plot; and what they are measured with."""

import dataclasses
import io
import itertools
import json
import math
import re
from types import SimpleNamespace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from examples.gpt import meter
from examples.gpt.run_log import Record, RunLog, progress_of, read_records, write_plot
from tests.helpers import examples

USUAL = Record(1, 5.5, 1e-3, 2.0, 1.0, 0, 0.02, 6400.0, 0.4, 10**9, 2 * 10**9, None)
LINE = json.dumps(dataclasses.asdict(USUAL)).encode() + b"\n"


def record(step, **changes):
    return dataclasses.replace(USUAL, step=step, **changes)


@pytest.fixture
def path(tmp_path):
    log = RunLog(tmp_path / "log.jsonl")
    for step in range(1, 5):
        log.write(record(step))
    return log.path


# --- The file. ---
def test_a_log_is_read_as_it_was_written_with_every_field_on_each_line(path):
    assert read_records(path) == [record(step) for step in range(1, 5)]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        dataclasses.asdict(record(step)) for step in range(1, 5)
    ]
    assert read_records(path.with_name("none")) == []


def test_losses_that_are_no_numbers_become_null_and_are_read_as_nan(tmp_path):
    """JSON has neither NaN nor infinity. A number that was not measured stays None."""
    log = RunLog(tmp_path / "log.jsonl")
    log.write(record(1, loss=math.inf, gradient_norm=math.nan, mfu=None))
    content = json.loads(log.path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["loss"] is None
    (read,) = read_records(log.path)
    assert math.isnan(read.loss)
    assert math.isnan(read.gradient_norm)
    assert read.mfu is None


@pytest.mark.parametrize("line", ["3", "[]", "{}", '{"step": 1}', LINE.decode()[:40], "[" * 100_000])
def test_a_line_that_is_no_record_is_named_but_for_the_last(path, line):
    content = path.read_text()
    path.write_text(content + line)
    assert len(read_records(path)) == 4
    path.write_text(line + "\n" + content)
    with pytest.raises(ValueError, match=r"log\.jsonl, line 1: this is no line of a run's log"):
        read_records(path)


@given(st.integers(0, 2 * len(LINE)))
@examples(100)
def test_a_log_cut_off_anywhere_keeps_its_whole_lines_and_goes_on(tmp_path_factory, kept):
    path = tmp_path_factory.getbasetemp() / "log.jsonl"
    path.write_bytes((LINE + LINE)[:kept])
    whole = [USUAL] * sum(kept + 1 >= count * len(LINE) for count in (1, 2))  # the end of the line is not missed
    assert read_records(path) == whole
    RunLog(path, resumed_from=3).write(USUAL)
    assert read_records(path) == [*whole, USUAL]


def test_a_run_that_goes_on_drops_the_lines_of_steps_that_it_repeats(path):
    path.write_text(path.read_text()[:-30])  # of the fourth line
    RunLog(path, resumed_from=2).write(record(3, loss=4.0))
    assert read_records(path) == [record(1), record(2), record(3, loss=4.0)]
    RunLog(path)
    assert path.read_text() == ""  # a new run


def test_a_run_that_is_killed_as_it_goes_on_still_has_its_log(path, monkeypatch):
    """Killed before the shorter log takes the place of the longer one."""

    def kill(*arguments):
        raise RuntimeError("killed")

    monkeypatch.setattr(type(path), "replace", kill)
    with pytest.raises(RuntimeError, match="killed"):
        RunLog(path, resumed_from=2)
    assert len(read_records(path)) == 4


@pytest.mark.parametrize("losses", [[], [5.0], [math.nan, 4.0]], ids=["none", "one", "not a number"])
def test_every_log_has_a_plot(losses, tmp_path):
    records = [record(step, loss=loss, validation_loss=step and loss) for step, loss in enumerate(losses)]
    write_plot(tmp_path / "loss.png", records, "title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


# --- The terminal. ---
FIRST = Record(7, 5.5, 1e-3, 2.0, 1.0, 0, None, None, None, None, None)


def test_a_line_has_what_is_known_and_no_more():
    known = dataclasses.replace(
        FIRST, validation_loss=5.25, loss_scale=2.0**14, skipped_steps=1, seconds_per_step=0.02,
        tokens_per_second=12_800.0, mfu=0.415, memory_bytes=10**9, peak_memory_bytes=25 * 10**8,
    )  # fmt: skip
    assert str(FIRST) == "loss 5.5000, lr 1.00e-03, norm 2.00"
    assert str(known) == (
        "loss 5.5000, validation 5.2500, lr 1.00e-03, norm 2.00, scale 16384, 1 skipped, 20.0 ms, 12,800 tokens/s, "
        "MFU 41.5%, memory 1.00 GB, peak 2.50 GB"
    )


@pytest.mark.parametrize(("is_terminal", "lines"), [(False, ["step 7", "step 8"]), (True, ["step 8"])])
def test_a_terminal_keeps_lines_with_a_validation_loss_and_a_file_all(is_terminal, lines):
    """On the terminal the others are shown beside the progress bar."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=200, color_system=None)
    with progress_of(console, steps=10, done=6) as show:
        show(FIRST)
        show(dataclasses.replace(FIRST, step=8, validation_loss=5.25))
    shown = file.getvalue()
    assert re.findall(r"step \d: loss", shown) == [f"{line}: loss" for line in lines]
    assert ("8/10" in shown) == is_terminal


# --- The measurements. ---
def test_the_rate_is_two_operations_for_each_multiplication_whatever_a_slow_round_takes(monkeypatch):
    """A clock that advances by a second at every look: a round of products takes one; or in one case 898."""
    monkeypatch.setitem(meter.SIZES, jax.default_backend(), 32)
    for seconds in (itertools.count(), iter([0, 1, 1, 2, 2, 900, 900, 901, 901, 902])):
        monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda seconds=seconds: next(seconds)))
        assert meter.matmul_rate("bfloat16") == 2 * 32**3 * meter.PRODUCTS


def test_the_time_of_a_step_is_that_since_the_start(monkeypatch):
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(meter, "time", clock)
    stopwatch = meter.Stopwatch()
    clock.now += 60  # compiles
    assert stopwatch.seconds_per_step(1) is None
    stopwatch.start(1)
    clock.now += 3
    assert stopwatch.seconds_per_step(7) == 0.5
    clock.now += 60  # saves a checkpoint
    stopwatch.start(7)
    clock.now += 1
    assert stopwatch.seconds_per_step(8) == 1
