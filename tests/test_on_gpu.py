"""Check the command for the day a GPU is there: it stops in time, goes on, and one failure costs no other part.

No time is judged here. Sizes are tiny, and what needs a GPU is made up.
"""

import json
import math
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from benchmarks import all_tests, ladder, on_gpu, programs, reading, workers
from benchmarks.on_gpu_report import markdown
from benchmarks.on_gpu_units import SIZES, TESTS, Unit, all_units
from benchmarks.report import Sheet
from benchmarks.rungs import RUNGS, TORCH_RUNGS
from benchmarks.workers import Clock, run_worker
from mpx.tools.program.targets import TARGETS
from tests.test_ladder import STEP

pytestmark = pytest.mark.optax_promotion

CONDITIONS = dict.fromkeys(("jaxlib", "flax", "optax", "numpy", "mpx", "python"), "1.0")
CONDITIONS |= {"device": "NVIDIA H200", "driver": "580", "jax": "0.11.2", "date": "2026-11-22 12:00"}
SMALLEST = SIZES["smallest"]
DEVICE = {"backend": "gpu", "conditions": CONDITIONS, "matmul FLOP/s": 8e14}


def unit_of(name, measure, **more):
    return Unit("part", "doctor", name, measure, **{"packages": ()} | more)


def bench_of(seconds=math.inf, run=run_worker):
    return ladder.Bench(SMALLEST.setting, DEVICE, Clock(seconds), run)


def book_of(folder):
    return on_gpu.Book(folder, lambda line: None)


def statuses(folder):
    return {name: entry["status"] for name, entry in on_gpu.read(folder)["part"]["units"].items()}


# ---- units ----------------------------------------------------------------------------------------------------------


def test_what_fails_or_lacks_a_package_is_reported_and_stops_nothing(tmp_path):
    def broken(bench):
        raise MemoryError("none is left")

    units = [
        unit_of("broken", broken),
        unit_of("said", lambda bench: {"failed": "no such kernel", "log": "a long story"}),
        unit_of("without", broken, packages=("no_such_package",)),
        unit_of("fine", lambda bench: {"text": "all is well"}),
        unit_of("nothing", lambda bench: {"rows": []}),
    ]
    assert on_gpu.measure_units(units, book_of(tmp_path), bench_of()) == []
    assert statuses(tmp_path) == {
        "broken": "failed", "said": "failed", "without": "left out", "fine": "done", "nothing": "left out"
    }  # fmt: skip
    printed = markdown(on_gpu.read(tmp_path))
    for said in ("MemoryError: none is left", "no such kernel", "not installed: no_such_package", "all is well"):
        assert said in printed
    assert "a long story" in (tmp_path / "log.txt").read_text()


def test_results_are_there_after_each_unit(tmp_path):
    seen = []
    look = lambda bench: seen.append(statuses(tmp_path) if (tmp_path / "part.json").exists() else {}) or {"text": ""}
    on_gpu.measure_units([unit_of(name, look) for name in "abc"], book_of(tmp_path), bench_of())
    assert seen == [{}, {"a": "done"}, {"a": "done", "b": "done"}]


def test_a_unit_that_does_not_fit_into_the_time_waits_and_a_shorter_one_does_not(tmp_path):
    units = [unit_of(name, lambda bench: {"text": ""}, seconds=seconds) for name, seconds in (("a", 101), ("b", 80))]
    assert on_gpu.measure_units(units, book_of(tmp_path), bench_of(60)) == units[:1]  # ten seconds are spared
    assert statuses(tmp_path) == {"b": "done"}


def test_a_command_that_goes_on_repeats_nothing_that_is_done(tmp_path):
    calls = []

    def called(name, **answer):
        return unit_of(name, lambda bench: calls.append(name) or answer)

    units = [called("done", text=""), called("failed", failed="no"), called("late", text="")]
    first, second = tmp_path / "first", tmp_path / "second"
    on_gpu.measure_units(units[:2], book_of(first), bench_of())
    book = book_of(second)
    book.take_over(first)
    assert statuses(second) == statuses(first) == {"done": "done", "failed": "failed"}
    on_gpu.measure_units(units, book, bench_of())
    assert calls == ["done", "failed", "late"]
    on_gpu.measure_units(units, book, bench_of(), again=True)
    assert calls == ["done", "failed", "late", "failed"]
    assert "late" not in statuses(first)


def test_a_unit_that_hangs_is_stopped_and_gets_twice_the_time_later(tmp_path, monkeypatch):
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    budgets = []

    def measure(bench):
        budgets.append(bench.setting.timeout)
        return bench.run("hanging", {}, timeout=bench.setting.timeout)

    unit = unit_of("slow", measure, seconds=0.2)
    for seconds in (math.inf, math.inf, 10.7):  # ten seconds are spared
        assert on_gpu.measure_units([unit], book_of(tmp_path / "out"), bench_of(seconds)) == [unit]
    assert statuses(tmp_path / "out") == {"slow": "stopped"}
    assert budgets[:2] == [0.2, 0.4]
    assert 0.4 < budgets[2] < 0.8  # what was left, and no reason for more the next time
    assert on_gpu.read(tmp_path / "out")["part"]["units"]["slow"]["stops"] == 2


def test_the_processes_of_a_unit_share_its_budget(tmp_path):
    timeouts = []

    def measure(bench):
        for _ in range(2):
            timeouts.append(bench.clock.cut(bench.setting.timeout))
            time.sleep(0.05)
        return {"text": ""}

    on_gpu.measure_units([unit_of("two", measure, seconds=30)], book_of(tmp_path), bench_of())
    assert 29 < timeouts[1] <= timeouts[0] - 0.05 <= 30


def test_results_of_another_device_are_not_mixed(tmp_path):
    on_gpu.measure_units([unit_of("a", lambda bench: {"text": ""})], book_of(tmp_path), bench_of())
    book_of(tmp_path).check(DEVICE)
    with pytest.raises(ValueError, match=r"measured on \['NVIDIA H200'.*but this is \['NVIDIA H100'"):
        book_of(tmp_path).check(DEVICE | {"conditions": CONDITIONS | {"device": "NVIDIA H100"}})


def test_the_command_measures_goes_on_and_reports(tmp_path, monkeypatch):
    units = [unit_of(name, lambda bench, name=name: {"text": f"{name} was seen"}, seconds=1) for name in ("one", "two")]
    monkeypatch.setattr(on_gpu, "all_units", lambda size, compiled: units[: len(list(tmp_path.glob("*"))) or 1])
    monkeypatch.setattr(on_gpu, "run_worker", lambda module, job, **options: DEVICE)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "unused")
    ask = lambda *arguments: CliRunner().invoke(on_gpu.app, [*map(str, arguments)], catch_exceptions=False).output
    assert "part, one: done" in ask("--out", tmp_path / "first", "--parts", "part")
    second = ask("--out", tmp_path / "second", "--continue", tmp_path / "first", "--minutes", 1)
    assert ("one: done" in second, "two: done" in second) == (False, True)
    reported = ask("--out", tmp_path / "second", "--report")
    assert "Measured on 2026-11-22 12:00 on NVIDIA H200, driver 580" in reported
    assert reported.index("one was seen") < reported.index("two was seen")


def test_all_parts_come_in_the_order_of_what_matters_most():
    units = all_units(SIZES["gpu"], compiled=True)
    parts = list(dict.fromkeys(unit.part for unit in units))
    assert parts == ["optimizer", "ladder", "autocast", "overhead", "training", "tests", "doctor"]
    assert len({(unit.part, unit.name) for unit in units}) == len(units)
    assert all(unit.seconds <= 300 for unit in units)
    names = {unit.name for unit in units if unit.part == "ladder"}
    assert names >= {f"JAX: {name}" for name in RUNGS} | {
        f"PyTorch: {name}" for name in TORCH_RUNGS if name != "padded"
    }
    tests = {unit.name for unit in units if unit.part == "tests"}
    assert {Path(__file__).name, "transforms"} <= tests
    assert {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")} == tests


# ---- jobs -----------------------------------------------------------------------------------------------------------


def rows_of(part, *names):
    """Measure units in this process, at the small size."""
    run = lambda module, job, **options: json.loads(json.dumps(workers.call(job)))
    units = {unit.name: unit for unit in all_units(SMALLEST, compiled=False) if unit.part == part}
    with jax.numpy_rank_promotion("allow"):  # as in a process of its own
        entries = [on_gpu.measure(units[name], bench_of(run=run), 60.0) for name in names]
    assert [entry.get("note") for entry in entries] == [None] * len(names)
    return {part: {"device": DEVICE, "units": dict(zip(names, entries, strict=True))}}


def test_an_optimizer_step_is_measured_and_reported():
    printed = markdown(rows_of("optimizer", "one: f32", "one: full"))
    assert "one: 1 tensor, 262,144 parameters" in printed
    assert "at most 1.03" in printed
    assert "Nothing differs." in printed


def test_tests_are_run_and_those_that_fail_are_named(tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text("def test_good():\n    pass\n\n\ndef test_bad():\n    assert 1 == 2\n")
    row = all_tests.run(str(path))
    assert row["counts"] == {"passed": 1, "failed": 1}
    assert "test_bad" in row["failures"][0]


def test_tests_that_do_not_start_are_no_result(monkeypatch):
    ended = subprocess.CompletedProcess([], 4, stdout="", stderr="ImportError: no module named flax")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: ended)
    with pytest.raises(RuntimeError, match="pytest did not run: ImportError"):
        all_tests.run("tests")


@pytest.mark.slow
def test_the_other_parts_are_measured_and_reported():
    parts = rows_of("autocast", "f32: autocast, dots") | rows_of("overhead", "bfloat16")
    parts |= rows_of("training", "f32") | rows_of("doctor", "doctor")
    printed = markdown(parts)
    for said in ("autocast, dots", "training step, bfloat16", "mean gap to f32", "the main job"):
        assert said in printed


# ---- the report -----------------------------------------------------------------------------------------------------


def test_gpt2_is_reported_beside_its_bound_and_pytorch():
    """A step of 2 ms with a bound of 1 ms; PyTorch's 2.4 ms are 1.2 times as long."""
    program = {"peak bytes": 10**9, "bound ms": 1.0}
    jax = {"rung": "8bit", "label": "8-bit moments", "after": "split"} | STEP | {"program": program}
    jax |= ladder.rates(jax, 1e12) | {"job": {"preset": "gpt2-124m", "batch_size": 16}}
    torch = {"rung": "fused", "label": "fused AdamW", "compiled": True, "peak bytes": 10**9} | STEP | {"ms": 2.4}
    torch |= {"peak bytes": 10**9, "tokens/s": 1e6 / 2.4}
    entry = lambda table, row: {"table": table, "status": "done", "seconds": 1.0, "rows": [row]}
    units = {"JAX: 8bit": entry("ladder", jax), "PyTorch: fused": entry("PyTorch", torch)}
    printed = markdown({"ladder": {"device": DEVICE, "units": units}})
    assert "| 8bit | 8-bit moments | 2.00 | 1.90 to 2.10 | 1.000 | 2.00 |" in printed
    assert "| 8bit | fused | 500,000 | 416,667 | 1.200 |" in printed


def test_a_table_has_the_columns_of_all_rows():
    sheet = Sheet("title", [{"a": "1", "note": "x|y"}, {"a": "2", "b": "3", "c": "4"}], "below")
    assert sheet.columns == ["a", "b", "c", "note"]
    assert sheet.markdown().splitlines()[2:6] == [
        "| a | b | c | note |", "| --- | --- | --- | --- |", "| 1 |  |  | x/y |", "| 2 | 3 | 4 |  |"
    ]  # fmt: skip


# ---- programs -------------------------------------------------------------------------------------------------------


def test_what_good_kernels_reach_of_an_h200_is_4_terabytes_and_800_teraflops_a_second():
    reached = reading.reached_of(TARGETS["h200"])
    assert (reached.bandwidth, reached.rates["bf16"]) == (pytest.approx(4e12), pytest.approx(8e14))
    assert reached.launch_seconds == TARGETS["h200"].launch_seconds


PROGRAM = {
    "moved bytes": 52 * 10**9, "outside bytes": 26 * 10**9, "kernels": 150, "peak bytes": 28 * 10**9,
    "temporary bytes": 0, "flops": {}, "compile s": 7.0, "bound ms": 10.0, "reached ms": 12.0, "reached FLOP/s": 8e14,
}  # fmt: skip


def compiled(module, job, **options):
    """Answer as the compiler for an H200 would; that of 8-bit moments fails."""
    recipe = job.get("recipe") or job["arguments"]["recipe"]
    if recipe in ("split + 8-bit", "bf16-split-8bit"):
        return {"failed": "out of registers"}
    if module == workers.CALL:
        return {"recipe": recipe, "parameters": 10**9} | dict.fromkeys(("program by hand", "program mpx"), PROGRAM)
    assert job["kind"] == "program"
    found = {"program": PROGRAM, "compiled for": "NVIDIA H200", "jax": "0.10.2"}
    return found | {"tokens": 12_000 * job["microbatches"], "flops per token": 4 * 10**8}


@pytest.mark.parametrize("command", [programs, ladder])
def test_programs_are_read_rung_by_rung_and_one_that_fails_is_a_row(command, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "run_worker", compiled)
    path = tmp_path / "found.json"
    result = CliRunner().invoke(command.app, ["--target", "h200", "--rungs", "flash,8bit", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert [row["rung"] for row in json.loads(path.read_text())["ladder"]] == ["flash", "8bit"]
    words = result.output.replace("│", "|").split()
    assert "out of registers" in result.output
    assert {"10.0", "12.0", "28.0", "52.0", "26.0", "50%"} <= set(words)  # a million tokens of 4e8 a second, of 8e14


def test_recipes_are_read_beside_those_by_hand():
    bench = ladder.start_reading(Clock(None), compiled)
    rows = [programs.read_recipe(recipe, bench, "h200", 1) for recipe in programs.RECIPES]
    printed = programs.recipes_table(rows).markdown()
    assert "| split | 52.00, 52.00 | 28.00, 28.00 |" in printed
    assert printed.count("out of registers") == 1


def test_a_program_of_this_machine_is_read_too():
    """On a CPU there are figures of traffic and memory, and no bound."""
    x = jnp.ones((64, 64))
    found = reading.compiled_figures(jax.jit(lambda x: x @ x).lower(x).compile())
    assert found["flops"] == {"f32": 2 * 64**3}
    assert found["moved bytes"] == 2 * 64 * 64 * 4
    assert "bound ms" not in found
