"""Check that the ladder measures what it says, and that a rung that fails does not cost the others.

No time is judged here. What a worker answers is made up, but for the last tests.
"""

import ast
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import gpt2_in_jax, ladder, programs, report, rungs, workers
from benchmarks.rungs import EXTRAS, LADDER, ON_CPU, ON_GPU, RUNGS
from benchmarks.workers import run_worker, time_rounds, token_batches
from examples.gpt.model import PRESETS, Config
from examples.gpt.recipes import get_recipe

pytestmark = pytest.mark.optax_promotion

SMALLEST = Config(width=32, depth=1, heads=2, context=16, vocabulary=100)
SETTING = dataclasses.replace(ON_CPU, preset="smallest", batch_size=2, steps=1, rounds=1, token_budget=64)
PROGRAM = {
    "moved GB": 52.0, "outside GB": 26.0, "kernels": 150, "peak GB": 28.0, "temporary GB": 0.0, "flops": {},
    "compile s": 7.0, "bound ms": 10.0, "reached ms": 12.0, "reached FLOP/s": 8e14,
}  # fmt: skip
STEP = {
    "ms": 20.0, "low": 19.0, "high": 21.0, "tokens": 1000, "loss": 3.0, "flops per token": 10**6,
    "peak bytes": None, "peak bytes before": None, "program": PROGRAM,
}  # fmt: skip


TIMES = ("ms", "low", "high", "loss")


def step(rung, **more):
    return {"rung": rung} | STEP | more


def with_peak(rung, speed, gigabytes):
    """Return a row of so many tokens a millisecond."""
    return step(rung, ms=1000 / speed, program=PROGRAM | {"peak GB": float(gigabytes)})


# ---- the rungs ------------------------------------------------------------------------------------------------------


def test_a_rung_is_the_one_before_it_and_one_change():
    settings = lambda rung: {k: v for k, v in dataclasses.asdict(rung).items() if k not in ("name", "label", "after")}
    names = [rung.name for rung in LADDER]
    assert [rung.after in names[:i] for i, rung in enumerate(LADDER)] == [False] + [True] * (len(names) - 1)
    pairs = [(settings(RUNGS[rung.after]), settings(rung)) for rung in RUNGS.values() if rung.after]
    assert {len(before.items() ^ after.items()) for before, after in pairs} == {2}
    assert len(RUNGS) == len(LADDER) + len(EXTRAS)
    assert all(get_recipe(rung.recipe) for rung in RUNGS.values())


def test_rungs_are_chosen_by_name_and_stay_in_order():
    assert [rung.name for rung in rungs.choose_rungs("scanned,8bit,f32")] == ["f32", "8bit", "scanned"]
    assert rungs.choose_rungs("") == list(LADDER)
    result = CliRunner().invoke(ladder.app, ["--rungs", "f32,f16"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "no rung is called f16; there are f32, tf32, bf16," in result.output


def test_accumulation_fills_the_budget_of_tokens_and_takes_fewer_steps():
    """524,288 tokens are 32 microbatches of 16 sequences of 1,024; ten steps of one are as many as two of 32 or less"""
    assert [ON_GPU.microbatches(accumulate, 1024) for accumulate in (False, True)] == [1, 32]
    assert [ON_GPU.steps_of(count) for count in (1, 4, 32)] == [10, 2, 2]
    assert dataclasses.replace(ON_GPU, token_budget=1).microbatches(True, 1024) == 1


# ---- what follows from what was measured ----------------------------------------------------------------------------


def test_mfu_is_the_share_of_the_measured_rate_or_of_what_is_reached():
    """1,000 tokens in 20 ms are 50,000 a second; at a million operations each, half of 10**11.

    The bound of a program lets 1,000 tokens in 12 ms pass.
    """
    measured, bad, read = ladder.derived([step("f32"), step("tf32", loss=math.nan), step("bf16", loss=1)], 1e11)
    assert [measured[key] for key in ("tokens/s", "MFU")] == pytest.approx([5e4, 0.5])
    assert (bad["failed"], "gain" in read) == ("the loss is nan", False)
    without_time = {key: value for key, value in step("f32").items() if key != "ms"}
    (read,) = ladder.derived([without_time])
    assert read["MFU at most"] == pytest.approx(1e12 / 12 / 8e14)
    assert "tokens/s" not in read


def test_memory_is_measured_where_the_device_counts_and_says_so():
    peaks = {(None, None): (28.0, " (compiled)"), (5e9, 3e9): (5.0, ""), (5e9, 5e9): (5.0, " at most")}
    for (peak, before), expected in peaks.items():
        (row,) = ladder.derived([step("f32", **{"peak bytes": peak, "peak bytes before": before})], 1.0)
        assert (row["peak GB"], row["peak is"]) == expected


def test_a_gain_is_over_the_rung_before_and_a_slower_one_says_what_it_pays():
    """A tenth of the time for 2 of 5 GB. One that is faster says nothing, and neither does one that only costs."""
    rows = [with_peak("f32", 1, 9), step("tf32", failed="out of memory"), with_peak("bf16", 110, 5)]
    rows += [with_peak("flash", 100, 3), with_peak("padded", 90, 4)]
    found = ladder.derived(rows, 1.0)
    assert [row.get("gain") for row in found] == [None, None, None, "0.91", "0.90"]
    assert [row.get("pays") for row in found] == [None, None, None, "10.0% of time for 2.0 GB", None]


@pytest.mark.parametrize(("value", "least", "most"), [(1.2, True, False), (1.1, True, True), (math.nan, False, False)])
def test_a_target_is_met_at_its_bound(value, least, most):
    said = {True: "met", False: "missed"}
    assert report.judged(value, least=1.1) == f"at least 1.1: {said[least]}"
    assert report.judged(value, most=1.1) == f"at most 1.1: {said[most]}"


def test_a_table_has_the_columns_that_some_row_fills():
    columns = {"a": "{a}", "b": "{b:.1f}", "c": "{c[x]}", "note": "{note}"}
    sheet = report.Sheet("title", [{"a": "1", "note": "x|y"}, {"a": "2", "b": 3, "c": None}], columns, "below")
    assert sheet.markdown().splitlines() == [
        "**title**", "", "| a | b | note |", "|---|---|---|", "| 1 |  | x/y |", "| 2 | 3.0 |  |", "", "below"
    ]  # fmt: skip


# ---- beside PyTorch -------------------------------------------------------------------------------------------------


def of_torch(accumulate, **more):
    row = {"rung": f"PyTorch {accumulate}", "accumulate": accumulate, "loss": 3.0, "tokens": 1000, "ms": 24.0}
    return row | {"peak GB": 10.0, "peak is": ""} | more


def test_gpt2_is_reported_beside_its_bound_and_its_counterpart():
    """20 ms with a bound of 10; PyTorch's 24 ms are 1.2 times as long, its 10 GB are 28 of 40."""
    counted = {"peak bytes": 7e9, "peak bytes before": 0}
    jax = [step("8bit", **counted), {"rung": "tf32", "failed": "out of memory"}, step("accumulate", **counted)]
    torch = [of_torch(False), of_torch(True), {"rung": "third", "accumulate": True, "failed": "no compiler"}]
    printed = "\n".join(sheet.markdown() for sheet in ladder.sheets(jax, torch, 1e11))
    for line in (
        "| 8bit | 8-bit moments, one kernel a leaf | 20.00 | 19.00 to 21.00 | 10.0 | 12.0 | 50,000 | 50.0% | 7 | 52 |",
        "| 8bit | 50,000 | 41,667 | 1.200 | 7 | 10 | 0.700 |",
        "| third |  |  |  |  | no compiler |",
    ):
        assert line in printed
    assert re.search(r"\| tf32 \| TF32 \|[ |]*\| out of memory \|", printed)
    assert "| tf32 | 50,000 |" not in printed


# ---- the commands ---------------------------------------------------------------------------------------------------


def answers(function, arguments, **options):
    """Answer as a worker would; one recipe fails."""
    name = function.partition(":")[2]
    if name == "device":
        return [{"backend": "cpu", "FLOP/s": 1e11}]
    if "8" in arguments.get("recipe", "") or arguments.get("rung", {}).get("name") == "8bit":
        return [{"failed": "RESOURCE_EXHAUSTED: [out] of memory", "log": "..."}]
    if name == "read":
        side = PROGRAM | {"moved": 26.0, "peak": 14.0, "temporary": 0.0}
        return [{"parameters": 10**9, "by hand": side, "mpx": side}]
    found = {key: value for key, value in STEP.items() if name == "measure_step" or key not in TIMES}
    return [found | {"compiled for": "NVIDIA H200", "jax": "0.10.2"}]


@pytest.mark.parametrize("command", [ladder, programs])
@pytest.mark.parametrize("target", [["--target", "h200"], []])
def test_the_commands_print_tables_and_one_rung_that_fails_is_a_row(command, target, monkeypatch, tmp_path):
    monkeypatch.setattr(ladder, "run_worker", answers)
    monkeypatch.setattr(programs, "run_worker", answers)
    picture = tmp_path / "ladder.png"
    asked = ["--rungs", "tf32,bf16,8bit,stacked", *target, *(["--picture", str(picture)] if command is ladder else [])]
    result = CliRunner().invoke(command.app, asked, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "| 1.00 |" in result.output
    assert "RESOURCE_EXHAUSTED: [out] of memory" in result.output
    assert picture.exists() == (command is ladder)
    if command is programs or target:
        assert "gpt2-124m, microbatches of 16 sequences, compiled for one NVIDIA H200" in result.output
        assert "| bf16 | bf16 autocast | 10.0 | 12.0 | 28 | 52 | 26 | 150 | 0% |" in result.output
    if command is programs:
        assert "| split | 26.00, 26.00 | 14.00, 14.00 | 0.00, 0.00 | 150, 150 | 10.000, 10.000 |" in result.output


# ---- processes ------------------------------------------------------------------------------------------------------


def worker(tmp_path, monkeypatch, code):
    (tmp_path / "the_worker.py").write_text(f"import sys, time\ndef answer(n=0):\n    {code}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(rungs.__file__).parents[1]}")
    return "the_worker:answer"


def test_a_worker_answers_with_its_rows(tmp_path, monkeypatch):
    function = worker(tmp_path, monkeypatch, "print('a warning'); return {'double': 2 * n}")
    assert run_worker(function, {"n": 21}) == [{"double": 42}]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise MemoryError('no [bytes] left\\nand more')", "MemoryError: no [bytes] left"),
        ("import os; os._exit(7)", "the process ended with status 7"),
    ],
)
def test_a_worker_that_fails_gives_the_reason(tmp_path, monkeypatch, code, said):
    (row,) = run_worker(worker(tmp_path, monkeypatch, code), {})
    assert row["failed"] == said


def test_times_are_those_of_the_rounds_after_the_first(monkeypatch):
    """Rounds of 9, 1, 3, 8 and 2 seconds, of two steps each."""
    calls, clock = [], iter([0, 1, 1, 4, 4, 12, 12, 14])
    monkeypatch.setattr(workers.time, "perf_counter", lambda: next(clock))
    found = time_rounds(calls.append, steps=2, rounds=4)
    assert calls == [2] * 5
    assert found == {"ms": 1250, "low": 500, "high": 4000}


def test_batches_are_below_the_vocabulary_and_differ_and_few_tokens_are_common():
    batches = token_batches(1000, (2, 3, 170), count=4)
    assert (batches.shape, batches.dtype) == ((4, 2, 3, 170), np.int32)
    assert 0 <= batches.min() < batches.max() < 1000
    assert len({batch.tobytes() for batch in batches}) == 4
    np.testing.assert_array_equal(batches, token_batches(1000, (2, 3, 170), count=4))
    counts = np.bincount(batches.ravel(), minlength=1000)
    assert counts.max() > 100 * np.median(counts)


# ---- the worker, in this process ------------------------------------------------------------------------------------


@pytest.fixture
def smallest(monkeypatch):
    """Add a model that is compiled in seconds; its vocabulary is padded."""
    monkeypatch.setitem(PRESETS, "smallest", SMALLEST)


def job(rung, **changes):
    return json.loads(json.dumps(ladder.job_of(dataclasses.replace(rung, **changes), SETTING)))


@pytest.mark.slow
def test_a_step_with_accumulation_is_measured(smallest):
    """64 tokens are two microbatches of two sequences of 16. A weight takes 2 bytes, 2 of its master, 8 of moments."""
    row = gpt2_in_jax.measure_step(**job(RUNGS["accumulate"], recipe="bf16-split"))
    parameters = 128 * 32 + 16 * 32 + 12 * 32**2 + 13 * 32 + 2 * 32
    assert (row["tokens"], row["note"]) == (64, gpt2_in_jax.NO_FLASH)
    assert row["program"]["peak GB"] > 12e-9 * parameters
    assert 3 < row["loss"] < 6


def test_operations_of_a_token_are_six_for_each_weight_and_those_of_attention():
    """GPT-2 124M: 6 (12 * 12 * 768**2 + 50,257 * 768) + 12 * 12 * 768 * 1,024."""
    assert gpt2_in_jax.flops_per_token(PRESETS["gpt2-124m"]) == 6 * 123_532_032 + 113_246_208


def test_the_rate_is_two_operations_for_each_multiplication(monkeypatch):
    """A clock that advances by a second at every look: a round of products takes one."""
    seconds = itertools.count()
    monkeypatch.setitem(gpt2_in_jax.PRODUCT_SIZES, jax.default_backend(), 32)
    monkeypatch.setattr(workers.time, "perf_counter", lambda: next(seconds))
    assert gpt2_in_jax.matmul_rate() == pytest.approx(2 * 32**3 * gpt2_in_jax.PRODUCTS)


def test_float16_is_what_flash_attention_gets_of_a_float16_recipe(smallest):
    made = [gpt2_in_jax.make_job(**job(RUNGS["8bit"], recipe=name)) for name in ("f16-scaled", "bf16-split")]
    assert [made.config.attention_dtype for made in made] == ["float16", "bfloat16"]


def test_torch_belongs_to_the_workers_that_run_it():
    """Everywhere else it would need the extra, and hold memory that belongs to JAX."""
    root = Path(rungs.__file__).parents[1]
    importing = set()
    for path in [*root.glob("benchmarks/*.py"), *root.glob("examples/**/*.py"), *root.glob("mpx/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            importing |= {path.name for name in names if name.split(".")[0] == "torch"}
    assert importing == {"adamw_in_torch.py", "gpt2_in_torch.py"}
