"""Check that the ladder measures what it says, and that a rung that fails does not cost the others.

No time is judged here.
"""

import ast
import dataclasses
import io
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import fixed_batch, gpt2_in_jax, ladder, ladder_picture, report, rungs
from benchmarks.rungs import EXTRAS, F32, FIXED, LADDER, RUNGS, TORCH_LADDER, TORCH_RUNGS, choose_rungs, choose_setting
from benchmarks.token_batches import text_tokens, token_batches
from benchmarks.workers import Clock, run_worker, time_rounds
from examples.gpt import text
from examples.gpt.model import PRESETS, Config
from examples.gpt.recipes import get_recipe

pytestmark = pytest.mark.optax_promotion

SMALLEST = Config(width=32, depth=1, heads=2, context=16, vocabulary=100)
CPU = {"backend": "cpu", "matmul FLOP/s": 1e12}
GPU = CPU | {"backend": "gpu"}
STEP = {
    "ms": 2.0, "ms spread": [1.9, 2.1], "tokens": 1000, "loss": 3.0, "flops per token": 10**6,
    "peak bytes": None, "peak bytes before": None, "program": {"peak bytes": 10**9},
}  # fmt: skip


@pytest.fixture
def smallest(monkeypatch):
    """Return the setting of a model that is compiled in seconds; its vocabulary is padded."""
    monkeypatch.setitem(PRESETS, "smallest", SMALLEST)
    return choose_setting("cpu", preset="smallest", batch_size=2, steps=1, rounds=1, token_budget=64)


def bench_of(run, device=CPU, **given):
    return ladder.Bench(choose_setting(device["backend"], **given), device, Clock(None), run)


def shown(table):
    console = Console(file=io.StringIO(), width=240)
    console.print(table)
    return console.file.getvalue()


# ---- the rungs ------------------------------------------------------------------------------------------------------


def changes(before, after):
    a, b = before.settings(), after.settings()
    return {name for name in a if a[name] != b[name]}


def test_a_rung_is_the_one_before_it_and_one_change():
    for steps, by_name in ((LADDER, RUNGS), (TORCH_LADDER, TORCH_RUNGS)):
        names = [rung.name for rung in steps]
        assert [rung.after in names[:i] for i, rung in enumerate(steps)] == [False] + [True] * (len(names) - 1)
        assert {len(changes(by_name[rung.after], rung)) for rung in by_name.values() if rung.after} == {1}
    assert len(RUNGS) == len(LADDER) + len(EXTRAS)


def test_every_recipe_exists():
    of_parts = {recipe for part in fixed_batch.PARTS.values() for recipe in part.recipes} - {fixed_batch.CAST}
    recipes = sorted({rung.recipe for rung in RUNGS.values()} | of_parts)
    assert [get_recipe(name).name for name in recipes] == recipes


def test_rungs_are_chosen_by_name_and_stay_in_order():
    assert [rung.name for rung in choose_rungs(["8bit,f32", "scanned"])] == ["f32", "8bit", "scanned"]
    assert choose_rungs(None) == list(LADDER)
    with pytest.raises(ValueError, match=r"no rung is called f16; there are f32, tf32, bf16,"):
        choose_rungs(["f32,f16"])
    result = CliRunner().invoke(ladder.app, ["--rungs", "f33"])
    assert (result.exit_code, "f33" in result.output) == (2, True)


def test_accumulation_fills_the_budget_of_tokens_and_takes_fewer_steps():
    """524,288 tokens are 32 microbatches of 16 sequences of 1,024; ten steps of one are as many as two of 32 or less"""
    setting = choose_setting("gpu")
    assert [setting.microbatches(rung, 1024) for rung in (RUNGS["8bit"], RUNGS["accumulate"])] == [1, 32]
    assert [setting.steps_of(count) for count in (1, 4, 32)] == [10, 2, 2]
    assert dataclasses.replace(setting, token_budget=1).microbatches(RUNGS["accumulate"], 1024) == 1


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def test_mfu_is_the_share_of_the_measured_rate():
    """1,000 tokens in 2 ms are 500,000 a second; at a million operations each, half of 10**12."""
    found = ladder.rates(STEP, 1e12)
    assert [found[key] for key in ("tokens/s", "FLOP/s", "MFU")] == pytest.approx([5e5, 5e11, 0.5])
    assert "failed" not in found
    assert ladder.rates(STEP | {"loss": math.nan}, 1e12)["failed"] == "the loss is nan"


def test_memory_is_measured_where_the_device_counts_and_says_so():
    kinds = lambda **more: [ladder.rates(STEP | more, 1e12)[key] for key in ("memory", "memory is")]
    assert kinds() == [10**9, "the compiler's figure"]
    assert kinds(**{"peak bytes": 5, "peak bytes before": 3}) == [5, "measured"]
    assert kinds(**{"peak bytes": 5, "peak bytes before": 5}) == [
        5,
        "that of compiling, which was more than a step needs",
    ]


def test_a_gain_is_over_the_nearest_rung_before_that_ran():
    rows = [{"rung": rung.name, "after": rung.after, "tokens/s": 10.0**i} for i, rung in enumerate(LADDER[:4])]
    rows[1]["failed"] = "out of memory"
    ladder.add_gains(rows)
    assert [row.get("gain") for row in rows] == [None, None, pytest.approx(100), pytest.approx(10)]
    assert [ladder.gain_cell(row) for row in rows] == ["", "", "100.00 over f32", "10.00"]


def test_a_rung_that_is_slower_says_what_it_pays_for_how_much_memory():
    """A tenth of the time for 2 of 5 GB. One that is faster says nothing, and neither does one that only costs."""
    row = lambda rung, speed, gb: {
        "rung": rung.name, "after": rung.after, "tokens/s": speed, "program": {"peak bytes": gb * 10**9}
    }  # fmt: skip
    rows = [row(F32, 10.0, 9), row(RUNGS["tf32"], 110.0, 5), row(RUNGS["bf16"], 100.0, 3), row(RUNGS["flash"], 90.0, 4)]
    ladder.add_gains(rows)
    assert [ladder.trade_cell(row) for row in rows] == ["", "", "10.0% of time for 2.0 GB", ""]


def test_a_picture_of_the_ladder_has_a_bar_for_each_rung_that_ran(tmp_path):
    row = {"label": "a rung", "tokens": 100, "tokens/s": 1e3, "program": {"peak bytes": 10**9}}
    ladder_picture.write_picture(
        tmp_path / "ladder.png", [row, row | {"memory": 5}, {"failed": "no memory"}], "a title"
    )
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("value", "least", "most"), [(1.2, True, False), (1.1, True, True), (math.nan, False, False)])
def test_a_target_is_met_at_its_bound(value, least, most):
    verdicts = [report.judge("x", value, 1.1, least=which) for which in (True, False)]
    assert [row["met"] for row in verdicts] == [least, most]
    assert [row["bound"] for row in verdicts] == ["at least 1.1", "at most 1.1"]


def test_fixed_batch_targets_compare_updates_with_gradients():
    ms = lambda recipe, what, value: {"recipe": recipe, what: {"ms": value}}
    found = {
        "passes": [ms("f32", "gradient", 9.0), ms("bf16-split", "gradient", 3.0)],
        "updates": [ms("f32", "update", 2.0), ms("bf16-split", "update", 4.0), ms(fixed_batch.CAST, "cast", 1.0)],
    }
    assert [row["met"] for row in fixed_batch.targets(found)] == [False, True]
    assert [row["met"] for row in fixed_batch.targets({"updates": found["updates"]})] == [True]


# ---- a failure ------------------------------------------------------------------------------------------------------


def answers(module, job, **options):
    """Answer as a worker would; TF32 fails."""
    if job["kind"] == "device":
        return CPU | {"conditions": {}}
    if job["recipe"] == "tf32":
        return {"failed": "RESOURCE_EXHAUSTED: [out] of memory", "log": "..."}
    ms = {"ms": 2.0, "ms spread": [1.9, 2.1]}
    parts = {"passes": {"forward": ms, "gradient": ms}, "update": {"update": ms}, "cast": {"cast": ms}}
    return parts.get(job["kind"], STEP)


def test_a_rung_that_fails_is_a_row_and_the_others_go_on():
    kept = []
    bench = bench_of(answers)
    measure = lambda rung: ladder.measure_rung(rung, bench)
    rows = ladder.each_rung(list(LADDER[:4]), measure, lambda rows: kept.append(len(rows)))
    assert ["failed" in row for row in rows] == [False, True, False, False]
    assert kept == [1, 2, 3, 4]
    printed = shown(ladder.ladder_table(rows, 1e12))
    assert "RESOURCE_EXHAUSTED: [out] of memory" in printed
    assert "1.00 over f32" in printed


def test_flash_attention_is_left_out_without_a_gpu_and_the_row_says_so():
    rows = [ladder.measure_rung(RUNGS["flash"], bench_of(answers, device)) for device in (CPU, GPU)]
    assert [row["job"]["attention"] for row in rows] == ["xla", "cudnn"]
    assert [row.get("note") for row in rows] == [ladder.NO_FLASH, None]


def test_xla_flags_reach_the_processes_of_jax_beside_those_of_the_user(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    seen = []
    run = lambda module, job, environment, **options: seen.append(environment) or STEP
    for flags in ("", "--b=2"):
        bench_of(run, xla_flags=flags).in_jax(FIXED, "step")
    assert seen == [{}, {"XLA_FLAGS": "--a=1 --b=2"}]


def test_the_command_prints_a_table_and_writes_all_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(ladder, "run_worker", answers)
    path = tmp_path / "ladder.json"
    result = CliRunner().invoke(ladder.app, ["--json", str(path), "--rungs", "f32,tf32,8bit"])
    assert result.exit_code == 0, result.output
    assert [row["rung"] for row in json.loads(path.read_text())["ladder"]] == ["f32", "tf32", "8bit"]
    assert "1.00 over f32" in result.output


def test_the_parts_of_a_step_are_compared_with_float32():
    bench = bench_of(answers)
    for part in fixed_batch.PARTS.values():
        rows = [fixed_batch.measure_recipe(part, recipe, bench) for recipe in part.recipes]
        printed = fixed_batch.table(part, rows).markdown()
        assert all(fixed_batch.JULIA[what] in printed for what in part.times)
        assert ("f32 / this" in printed) == ("cast" not in part.times or "update" in part.times)
        assert ("RESOURCE_EXHAUSTED" in printed) == ("tf32" in part.recipes)


def test_a_device_that_cannot_be_used_is_said_at_once():
    with pytest.raises(RuntimeError, match="the device cannot be used: no driver"):
        ladder.start_bench(Clock(None), lambda *arguments, **options: {"failed": "no driver"})


# ---- processes ------------------------------------------------------------------------------------------------------


def worker(tmp_path, monkeypatch, code):
    (tmp_path / "the_worker.py").write_text(f"import json, sys, time\njob = json.load(sys.stdin)\n{code}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "the_worker"


def test_a_worker_answers_with_its_last_line(tmp_path, monkeypatch):
    module = worker(tmp_path, monkeypatch, "print('a warning'); print(json.dumps({'double': 2 * job['n']}))")
    assert run_worker(module, {"n": 21}) == {"double": 42}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise MemoryError('no [bytes] left\\nand more')", "MemoryError: no [bytes] left"),
        ("raise MemoryError(900 * 'E')", "MemoryError: " + 184 * "E" + "..."),
        ("sys.exit('bye')", "bye"),
        ("import os; os._exit(7)", "the process ended with status 7"),
        ("print('nonsense')", "it printed no result"),
    ],
)
def test_a_worker_that_fails_gives_the_reason(tmp_path, monkeypatch, code, said):
    assert run_worker(worker(tmp_path, monkeypatch, code), {})["failed"] == said


def test_a_worker_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch):
    """Its child would write a file after a second."""
    late = f"time.sleep(1); open({str(tmp_path / 'late')!r}, 'w')"
    code = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', {'import time; ' + late!r}])\ntime.sleep(60)"
    assert run_worker(worker(tmp_path, monkeypatch, code), {}, timeout=0.5)["failed"] == "no result after 0 s"
    time.sleep(1.5)
    assert not (tmp_path / "late").exists()


def test_nothing_begins_when_no_time_is_left():
    assert run_worker("no_such_module", {}, timeout=Clock(-1.0).cut(300.0)) == {"failed": "left out: no time is left"}
    assert Clock(None).cut(300.0) == 300.0
    assert Clock(10.0).cut(300.0) <= 10.0


def test_times_are_those_of_the_rounds_after_the_first():
    calls = []
    found = time_rounds(calls.append, steps=3, rounds=4)
    assert calls == [3] * 5
    assert found["ms spread"][0] <= found["ms"] <= found["ms spread"][1]


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [100, 256, 50_257])
def test_batches_are_text_below_the_vocabulary_and_differ(vocabulary):
    batches = token_batches(vocabulary, (2, 3, 17), count=4)
    assert batches.shape == (4, 2, 3, 17)
    assert batches.dtype == np.int32
    assert 0 <= batches.min() < batches.max() < vocabulary
    assert len({batch.tobytes() for batch in batches}) == 4
    np.testing.assert_array_equal(batches, token_batches(vocabulary, (2, 3, 17), count=4))


def test_pairs_of_bytes_are_tokens_of_a_large_vocabulary(monkeypatch):
    monkeypatch.setattr(text, "read_text", lambda path: b"abcd!")
    assert text_tokens(50_257).tolist() == [256 * ord("a") + ord("b"), 256 * ord("c") + ord("d")]
    assert text_tokens(256).tolist() == list(b"abcd!")


def test_without_text_tokens_are_random_and_not_equally_common(monkeypatch):
    def nothing(path):
        raise text.TextError("nothing")

    monkeypatch.setattr(text, "read_text", nothing)
    counts = np.bincount(text_tokens(1000), minlength=1000)
    assert counts.max() > 100 * np.median(counts)


# ---- the worker, in this process ------------------------------------------------------------------------------------


def in_process(module, job, **options):
    assert module == ladder.WORKER
    return json.loads(json.dumps(gpt2_in_jax.answer(job)))


@pytest.mark.slow
def test_a_step_with_accumulation_is_measured(smallest):
    """64 tokens are two microbatches of two sequences of 16. A weight takes 2 bytes, 2 of its master, 8 of moments."""
    bench = ladder.Bench(smallest, CPU, Clock(None), in_process)
    row = ladder.measure_rung(dataclasses.replace(RUNGS["accumulate"], recipe="bf16-split"), bench)
    assert "failed" not in row
    assert (row["tokens"], row["job"]["microbatches"], row["steps"]) == (64, 2, 2)
    assert row["parameters"] == 128 * 32 + 16 * 32 + 12 * 32**2 + 13 * 32 + 2 * 32
    assert row["memory"] > 12 * row["parameters"]
    assert 3 < row["loss"] < 6
    assert row["memory is"] == "the compiler's figure"


@pytest.mark.slow
def test_the_parts_of_a_step_are_measured(smallest):
    bench = ladder.Bench(smallest, CPU, Clock(None), in_process)
    passes = bench.in_jax(dataclasses.replace(FIXED, recipe="f16-scaled"), "passes")
    found = passes | bench.in_jax(FIXED, "update") | bench.in_jax(FIXED, "cast")
    assert all(found[name]["ms"] > 0 for part in fixed_batch.PARTS.values() for name in part.times if name != "step")


def test_float16_is_what_flash_attention_gets_of_a_float16_recipe(smallest):
    config = lambda recipe: gpt2_in_jax.make_config(
        {"preset": "smallest"} | dataclasses.replace(RUNGS["8bit"], recipe=recipe).settings()
    )
    assert [config(name).attention_dtype for name in ("f16-scaled", "bf16-split")] == ["float16", "bfloat16"]


def test_torch_belongs_to_the_workers_that_run_it():
    """Everywhere else it would need the extra, and hold memory that belongs to JAX."""
    root = Path(rungs.__file__).parents[1]
    importing = set()
    for path in [*root.glob("benchmarks/*.py"), *root.glob("examples/**/*.py"), *root.glob("mpx/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            importing |= {path.name for name in names if name.split(".")[0] == "torch"}
    assert importing == {"gpt2_in_torch.py", "adamw_in_torch.py"}
