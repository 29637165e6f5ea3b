"""The log of a run: what is read is what was written, after a kill too."""

import dataclasses
import json
import math

import pytest

from examples.gpt.run_log import Record, RunLog, read_records, write_plot

FIELDS = [field.name for field in dataclasses.fields(Record)]


def record(step, **changes):
    usual = Record(step, 5.5, 1e-3, 2.0, 1.0, 0, 0.02, 6400.0, 0.4, 10**9, 2 * 10**9, None)
    return dataclasses.replace(usual, **changes)


@pytest.fixture
def path(tmp_path):
    log = RunLog(tmp_path / "log.jsonl")
    for step in range(1, 5):
        log.write(record(step))
    return log.path


def test_a_line_has_every_field(path):
    first = json.loads(path.read_text().splitlines()[0])
    assert list(first) == FIELDS
    assert first == dataclasses.asdict(record(1))


def test_a_log_is_read_as_it_was_written(path):
    assert read_records(path) == [record(step) for step in range(1, 5)]


def test_without_a_file_there_are_no_records(tmp_path):
    assert read_records(tmp_path / "log.jsonl") == []


def test_losses_that_are_no_numbers_become_null_and_are_read_as_such(tmp_path):
    """JSON has neither NaN nor infinity. A number that was not taken stays None."""
    log = RunLog(tmp_path / "log.jsonl")
    log.write(record(1, loss=math.inf, gradient_norm=math.nan, mfu=None))

    content = json.loads(log.path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["loss"] is None
    (read,) = read_records(log.path)
    assert math.isnan(read.loss)
    assert math.isnan(read.gradient_norm)
    assert read.mfu is None


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_the_line_that_a_kill_cut_off_is_left_out(path, kept):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:kept])
    assert read_records(path) == [record(step) for step in range(1, 4)]


def test_a_damaged_line_before_the_last_is_named(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:40] + "\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2: this is no line of a run's log"):
        read_records(path)


@pytest.mark.parametrize("line", ["3", "[]", "{}", '{"step": 1}'])
def test_json_that_is_no_record_is_named(path, line):
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1: this is no line of a run's log"):
        read_records(path)


def test_a_run_that_goes_on_drops_the_lines_of_steps_that_it_does_again(path):
    path.write_text(path.read_text()[:-30])  # of the fourth line
    log = RunLog(path, resumed_from=2)
    log.write(record(3, loss=4.0))
    assert read_records(path) == [record(1), record(2), record(3, loss=4.0)]


def test_a_new_run_begins_a_new_log(path):
    RunLog(path)
    assert path.read_text() == ""


@pytest.mark.parametrize(
    "records",
    [[], [record(1)], [record(1, loss=math.nan, gradient_norm=math.nan), record(2, validation_loss=5.0)]],
    ids=["none", "one", "not a number"],
)
def test_every_log_has_a_plot(records, tmp_path):
    write_plot(tmp_path / "loss.png", records, "title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_killed_as_it_goes_on_still_has_its_log(path, monkeypatch):
    """Killed before the shorter log takes the place of the longer one."""

    def kill(*arguments):
        raise RuntimeError("killed")

    monkeypatch.setattr(type(path), "replace", kill)
    with pytest.raises(RuntimeError, match="killed"):
        RunLog(path, resumed_from=2)
    assert read_records(path) == [record(step) for step in range(1, 5)]
