"""The log of a run, on a line and in a plot; and what it is measured with."""

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.gpt import meter, output
from tests.helpers import examples

USUAL = {
    "step": 1, "loss": 5.5, "learning_rate": 1e-3, "gradient_norm": 2.0, "loss_scale": 1.0, "skipped_steps": 0,
    "seconds_per_step": None, "tokens_per_second": None, "mfu": None, "memory_bytes": None, "peak_memory_bytes": None,
    "validation_loss": None,
}  # fmt: skip
LINE = json.dumps(USUAL).encode() + b"\n"


def logged(path, *records):
    for record in records:
        output.write_log(path, record)
    return output.read_log(path)


@given(st.integers(0, 2 * len(LINE)))
@examples(100)
def test_a_log_cut_off_anywhere_keeps_its_whole_lines_and_goes_on(tmp_path_factory, kept):
    path = tmp_path_factory.getbasetemp() / "log.jsonl"
    path.write_bytes((LINE + LINE)[:kept])
    whole = [USUAL] * (kept // len(LINE))
    assert output.read_log(path) == whole
    output.begin_log(path, resumed_from=3)
    assert logged(path, USUAL) == [*whole, USUAL]


def test_a_run_that_goes_on_drops_the_lines_of_steps_that_it_repeats(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    steps = lambda: [line["step"] for line in output.read_log(path)]
    logged(path, *(USUAL | {"step": step} for step in range(1, 5)))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *paths: 1 / 0)  # killed before the shorter log takes the other's place
        with pytest.raises(ZeroDivisionError):
            output.begin_log(path, resumed_from=2)
    assert steps() == [1, 2, 3, 4]
    output.begin_log(path, resumed_from=2)
    assert steps() == [1, 2]
    output.begin_log(path, resumed_from=0)
    assert steps() == []


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


# --- The measurements. ---
def test_the_rate_is_two_operations_for_each_multiplication_whatever_a_slow_round_takes(monkeypatch):
    """A clock that advances by a second at every look: a round of products takes one; or in one case 898."""
    monkeypatch.setitem(meter.SIZES, jax.default_backend(), 32)
    for seconds in (itertools.count(), iter([0, 1, 1, 2, 2, 900, 900, 901, 901, 902])):
        monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda seconds=seconds: next(seconds)))
        assert meter.matmul_rate("bfloat16") == 2 * 32**3 * meter.PRODUCTS
