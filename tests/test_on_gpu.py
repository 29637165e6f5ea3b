"""Smoke tests of the command for the day a GPU is there. Sizes are tiny, and what needs a GPU is made up."""

import json
import math

import jax
import pytest
from typer.testing import CliRunner

from benchmarks import on_gpu, workers
from benchmarks.on_gpu_units import SIZES, Unit, all_units

pytestmark = pytest.mark.optax_promotion

DEVICE = dict.fromkeys(("jaxlib", "flax", "optax", "numpy", "mpx"), "1.0")
DEVICE |= {"device": "NVIDIA H200", "driver": "580", "jax": "0.11.2", "date": "2026-11-22 12:00"}
DEVICE |= {"backend": "gpu", "FLOP/s": 8e14}


def unit_of(name, *answer):
    return Unit(f"part: {name}", "casts", name, {"answer": answer}, seconds=1)


def run(function, arguments, *, timeout):
    """Answer as a worker would with what its arguments say."""
    return list(arguments["answer"])


def measure(folder, units, run=run):
    book = on_gpu.Book(folder)
    book.check(DEVICE)
    return on_gpu.measure_units(units, book, lambda: math.inf, run=run)


def test_what_fails_or_lacks_a_package_is_reported_and_stops_nothing(tmp_path):
    missing = "ModuleNotFoundError: No module named 'torch'"
    units = [unit_of("said", {"failed": "no such kernel"}), unit_of("without", {"failed": missing})]
    units += [unit_of("fine", {"what": "all is well"}), unit_of("none")]
    assert measure(tmp_path, units) == []
    found = on_gpu.Book(tmp_path).found["units"].values()
    assert [entry["status"] for entry in found] == ["failed", "failed", "done", "done"]
    printed = on_gpu.Book(tmp_path).report()
    for said in ("| part: said | failed | no such kernel |", missing, "all is well"):
        assert said in printed


def test_the_command_measures_goes_on_and_reports(tmp_path, monkeypatch):
    units = [unit_of(name, {"what": f"{name} was seen"}) for name in ("one", "two")]
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
