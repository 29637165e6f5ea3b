"""What a run shows of a record, on a terminal and in a file."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from examples.gpt.dashboard import line_of, progress_of
from examples.gpt.run_log import Record

FIRST = Record(7, 5.5, 1e-3, 2.0, 1.0, 0, None, None, None, None, None)
EVALUATED = dataclasses.replace(FIRST, step=8, validation_loss=5.25)


def test_a_line_says_only_what_is_known():
    assert line_of(FIRST) == "loss 5.5000, lr 1.00e-03, norm 2.00"


def test_a_line_says_all_that_is_known():
    record = dataclasses.replace(
        EVALUATED, loss_scale=2.0**14, skipped_steps=1, seconds_per_step=0.02, tokens_per_second=12_800.0, mfu=0.415,
        memory_bytes=10**9, peak_memory_bytes=25 * 10**8,
    )  # fmt: skip
    assert line_of(record) == (
        "loss 5.5000, validation 5.2500, lr 1.00e-03, norm 2.00, scale 16384, 1 skipped, 20.0 ms, 12,800 tokens/s, "
        "MFU 41.5%, memory 1.00 GB, peak 2.50 GB"
    )


@pytest.mark.parametrize(("is_terminal", "lines"), [(False, ["step 7", "step 8"]), (True, ["step 8"])])
def test_a_terminal_keeps_lines_with_a_validation_loss_and_a_file_all(is_terminal, lines):
    """On the terminal the others are shown on the line that moves."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=200, color_system=None)
    with progress_of(console, steps=10, done=6) as show:
        show(FIRST)
        show(EVALUATED)
    shown = file.getvalue()
    assert re.findall(r"step \d: loss", shown) == [f"{line}: loss" for line in lines]
    assert ("8/10" in shown) == is_terminal
