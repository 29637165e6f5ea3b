"""The log of a run, on a line and in a plot; and what it is measured with."""

import itertools
import json
import math

import jax
import pytest

from examples.gpt import meter, output

USUAL = {
    "step": 1, "loss": 5.5, "learning_rate": 1e-3, "gradient_norm": 2.0, "loss_scale": 1.0, "skipped_steps": 0,
    "seconds_per_step": None, "tokens_per_second": None, "mfu": None, "memory_bytes": None, "peak_memory_bytes": None,
    "validation_loss": None,
}  # fmt: skip
LINE = json.dumps(USUAL) + "\n"


def logged(path, *records):
    for record in records:
        output.write_log(path, record)
    return output.read_log(path)


@pytest.mark.parametrize("kept", [0, 1, len(LINE) - 1, len(LINE), len(LINE) + 9])
def test_a_log_that_a_kill_cut_off_keeps_its_whole_lines_and_goes_on(tmp_path, kept):
    path = tmp_path / "log.jsonl"
    path.write_text((LINE + LINE)[:kept])
    whole = [USUAL] * (kept // len(LINE))
    assert output.read_log(path) == whole
    output.begin_log(path, resumed_from=3)
    assert logged(path, USUAL) == [*whole, USUAL]


def test_a_run_that_goes_on_drops_the_lines_of_steps_that_it_repeats(tmp_path):
    path = tmp_path / "log.jsonl"
    logged(path, *(USUAL | {"step": step} for step in range(1, 5)))
    output.begin_log(path, resumed_from=2)
    assert [line["step"] for line in output.read_log(path)] == [1, 2]


def test_losses_that_are_no_numbers_become_null(tmp_path):
    """JSON has neither NaN nor infinity."""
    (line,) = logged(tmp_path / "log", USUAL | {"loss": math.inf, "gradient_norm": math.nan})
    assert (line["loss"], line["gradient_norm"], line["mfu"], line["step"]) == (None, None, None, 1)


@pytest.mark.parametrize("losses", [[], [5.0], [math.nan, 4.0]], ids=["none", "one", "not a number"])
def test_every_log_has_a_plot(losses, tmp_path):
    records = (
        USUAL | {"step": step, "loss": loss, "validation_loss": step and loss} for step, loss in enumerate(losses)
    )
    output.plot_log(tmp_path / "loss.png", logged(tmp_path / "log", *records), "title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_has_what_is_known_and_no_more():
    known = USUAL | {
        "validation_loss": 5.25, "loss_scale": 2.0**14, "skipped_steps": 1, "seconds_per_step": 0.02,
        "tokens_per_second": 12_800.0, "mfu": 0.415, "memory_bytes": 10**9, "peak_memory_bytes": 25 * 10**8,
    }  # fmt: skip
    assert output.line_of(USUAL) == "step 1: loss 5.5000, lr 1.00e-03, norm 2.00"
    assert output.line_of(known) == (
        "step 1: loss 5.5000, validation 5.2500, lr 1.00e-03, norm 2.00, scale 16384, 1 skipped, 20.0 ms, "
        "12,800 tokens/s, MFU 41.5%, memory 1.00 GB, peak 2.50 GB"
    )


def test_the_rate_is_two_operations_for_each_multiplication(monkeypatch):
    """A clock that advances by a second at every look: a round of products takes one."""
    seconds = itertools.count()
    monkeypatch.setitem(meter.SIZES, jax.default_backend(), 32)
    monkeypatch.setattr(meter.time, "perf_counter", lambda: next(seconds))
    assert meter.matmul_rate("bfloat16") == 2 * 32**3 * meter.PRODUCTS
