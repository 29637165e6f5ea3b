"""Check the command for the day a GPU is there: it stops in time, goes on, and one failure costs no other unit.

No time is judged here. Sizes are tiny, and what needs a GPU is made up.
"""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from benchmarks import on_gpu, reading, workers
from benchmarks.on_gpu_units import SIZES, Unit, all_units
from benchmarks.rungs import RUNGS
from mpx.tools.program.targets import TARGETS

pytestmark = pytest.mark.optax_promotion

DEVICE = dict.fromkeys(("jaxlib", "flax", "optax", "numpy", "mpx"), "1.0")
DEVICE |= {"device": "NVIDIA H200", "driver": "580", "jax": "0.11.2", "date": "2026-11-22 12:00"}
DEVICE |= {"backend": "gpu", "FLOP/s": 8e14}


def unit_of(name, *answer, **more):
    return Unit(f"part: {name}", "casts", name, {"answer": answer}, **more)


def run(function, arguments, *, timeout):
    """Answer as a worker would with what its arguments say."""
    return list(arguments["answer"])


def book_of(folder):
    book = on_gpu.Book(folder)
    book.check(DEVICE)
    return book


def measure(folder, units, seconds=math.inf, **options):
    return on_gpu.measure_units(units, book_of(folder), lambda: seconds, **{"run": run} | options)


def statuses(folder):
    return {name.removeprefix("part: "): entry["status"] for name, entry in on_gpu.Book(folder).found["units"].items()}


# ---- units ----------------------------------------------------------------------------------------------------------


def test_what_fails_or_lacks_a_package_is_reported_and_stops_nothing(tmp_path):
    missing = "ModuleNotFoundError: No module named 'torch'"
    units = [unit_of("said", {"failed": "no such kernel"}), unit_of("without", {"failed": missing})]
    units += [unit_of("fine", {"what": "all is well"}), unit_of("none")]
    assert measure(tmp_path, units) == []
    assert statuses(tmp_path) == {"said": "failed", "without": "failed", "fine": "done", "none": "done"}
    printed = on_gpu.Book(tmp_path).report()
    for said in ("| part: said | failed | no such kernel |", missing, "all is well"):
        assert said in printed


def test_a_unit_that_does_not_fit_into_the_time_waits_and_a_shorter_one_does_not(tmp_path):
    units = [unit_of("a", seconds=101), unit_of("b", seconds=80)]
    assert measure(tmp_path, units, 60) == units[:1]  # ten seconds are spared
    assert statuses(tmp_path) == {"b": "done"}


def test_a_command_that_goes_on_repeats_nothing_that_is_done(tmp_path):
    calls = []
    counted = lambda function, *arguments, **options: calls.append(function) or run(function, *arguments, **options)
    units = [unit_of("done", {"what": ""}), unit_of("failed", {"failed": "no"}), unit_of("late", {"what": ""})]
    measure(tmp_path, units[:2], run=counted)
    measure(tmp_path, units, run=counted)
    assert calls == ["done", "failed", "late"]
    assert statuses(tmp_path) == {"done": "done", "failed": "failed", "late": "done"}


def test_a_unit_that_is_stopped_gets_twice_the_time_later(tmp_path):
    budgets = []
    stop = lambda *arguments, timeout: budgets.append(timeout) or [{"failed": "no result", "stopped": True}]
    unit = unit_of("slow", seconds=100)
    for seconds in (math.inf, math.inf, 250):
        assert measure(tmp_path, [unit], seconds, run=stop) == [unit]
    assert budgets == [100, 200, 240]  # ten seconds are spared, and are no reason for more the next time
    assert statuses(tmp_path) == {"slow": "stopped"}
    assert on_gpu.Book(tmp_path).found["units"]["part: slow"]["stops"] == 2


def test_results_of_another_device_are_not_mixed(tmp_path):
    measure(tmp_path, [unit_of("a", {"what": ""})])
    book_of(tmp_path)
    with pytest.raises(ValueError, match=r"measured on \['NVIDIA H200'.*but this is \['NVIDIA H100'"):
        on_gpu.Book(tmp_path).check(DEVICE | {"device": "NVIDIA H100"})


def test_the_command_measures_goes_on_and_reports(tmp_path, monkeypatch):
    units = [unit_of(name, {"what": f"{name} was seen"}, seconds=1) for name in ("one", "two")]
    answer = lambda function, arguments, **options: [DEVICE] if ":" in function else list(arguments["answer"])
    lists = iter([units[:1], units[:1], units])
    monkeypatch.setattr(on_gpu, "all_units", lambda size: next(lists))
    monkeypatch.setattr(on_gpu, "run_worker", answer)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "unused")
    ask = lambda *arguments: CliRunner().invoke(on_gpu.app, [*map(str, arguments)], catch_exceptions=False).output
    assert "part: one: done" in ask("--out", tmp_path, "--parts", "part")
    assert "0 of 0 units are through" in ask("--out", tmp_path, "--parts", "other")
    second = ask("--out", tmp_path, "--minutes", 1)
    assert ("one: done" in second, "two: done" in second) == (False, True)
    reported = ask("--out", tmp_path, "--report")
    assert "Measured on 2026-11-22 12:00 on NVIDIA H200, driver 580" in reported
    assert reported.index("one was seen") < reported.index("two was seen")
    assert ask("--out", tmp_path / "other", "--report") == "Nothing has been measured.\n"


def test_all_parts_come_in_the_order_of_what_matters_most():
    units = all_units(SIZES["gpu"])
    parts = list(dict.fromkeys(unit.part for unit in units))
    assert parts == ["optimizer", "ladder", "autocast", "overhead"]
    names = [unit.name for unit in units]
    assert len(set(names)) == len(names)
    assert all(unit.seconds <= 300 for unit in units)
    assert {f"ladder: JAX, {name}" for name in RUNGS} < set(names)
    assert names.index("ladder: PyTorch, accumulation") < names.index("ladder: JAX, tf32")
    assert all(json.loads(json.dumps(unit.arguments)) for unit in units if unit.arguments)


# ---- all units, in this process -------------------------------------------------------------------------------------


def measured(folder, *names):
    """Measure units in this process, at the smallest size, and return the report."""
    call = lambda function, arguments, *, timeout: json.loads(json.dumps(workers.call(function, arguments)))
    units = {unit.name: unit for unit in all_units(SIZES["smallest"])}
    with jax.numpy_rank_promotion("allow"):  # as in a process of its own
        measure(folder, [units[name] for name in names], run=call)
    return on_gpu.Book(folder).report()


def test_an_optimizer_step_is_measured_and_reported(tmp_path):
    printed = measured(tmp_path, "optimizer: one, f32", "optimizer: one, full")
    assert "one: 1 tensor, 262,144 parameters" in printed
    assert "| recipe | by hand, ms | mpx, ms | mpx / by hand | 95% | target | moved by hand, mpx, GB |" in printed
    assert "at most 1.03: " in printed
    assert "Nothing differs." in printed


@pytest.mark.slow
def test_the_other_parts_are_measured_and_reported(tmp_path):
    names = "autocast: f32, autocast, dots", "overhead: bfloat16", "ladder: JAX, f32"
    printed = measured(tmp_path, *names, "autocast: accuracy, bf16 of f32", "autocast: residuals, f32")
    assert "not measured" not in printed
    for head in (
        "**a step**\n\n| what | by hand, ms | mpx, ms |",
        "| form | beside | by hand, ms | mpx, ms |",
        "| compute | parameters | after steps | form | loss mean | loss max | gradient mean | gradient max |",
        "| form | parameters | MB | parameters handed on, MB | beside | ratio | target |",
        "| rung | adds | ms a step | spread |",
    ):
        assert head in printed


# ---- programs -------------------------------------------------------------------------------------------------------


def test_what_good_kernels_reach_of_an_h200_is_4_terabytes_and_800_teraflops_a_second():
    reached = reading.reached_of(TARGETS["h200"])
    assert (reached.bandwidth, reached.rates["bf16"]) == (pytest.approx(4e12), pytest.approx(8e14))
    assert reached.launch_seconds == TARGETS["h200"].launch_seconds


def test_a_program_of_this_machine_is_read_too():
    """On a CPU there are figures of traffic and memory, and no bound."""
    x = jnp.ones((64, 64))
    found = reading.compiled_figures(jax.jit(lambda x: x @ x).lower(x).compile())
    assert found["flops"] == {"f32": 2 * 64**3}
    assert (found["moved GB"], found["outside GB"]) == (pytest.approx(2 * 64 * 64 * 4 / 1e9), 0)
    assert "bound ms" not in found
