"""Smoke tests of the ladder: a rung that fails does not cost the others. What a worker answers is made up."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import gpt2_in_jax, rungs
from benchmarks.rungs import EXTRAS, LADDER, RUNGS
from benchmarks.workers import run_worker
from examples.gpt.model import PRESETS
from examples.gpt.recipes import get_recipe

pytestmark = pytest.mark.optax_promotion

PROGRAM = {
    "moved GB": 52.0, "outside GB": 26.0, "kernels": 150, "peak GB": 28.0, "temporary GB": 0.0, "flops": {},
    "compile s": 7.0, "bound ms": 10.0, "reached ms": 12.0, "reached FLOP/s": 8e14,
}  # fmt: skip
STEP = {
    "ms": 20.0, "low": 19.0, "high": 21.0, "tokens": 1000, "loss": 3.0, "flops per token": 10**6,
    "peak bytes": None, "peak bytes before": None, "program": PROGRAM,
}  # fmt: skip
TIMES = ("ms", "low", "high", "loss")


def test_a_rung_is_the_one_before_it_and_one_change():
    settings = lambda rung: {k: v for k, v in dataclasses.asdict(rung).items() if k not in ("name", "label", "after")}
    names = [rung.name for rung in LADDER]
    assert [rung.after in names[:i] for i, rung in enumerate(LADDER)] == [False] + [True] * (len(names) - 1)
    pairs = [(settings(RUNGS[rung.after]), settings(rung)) for rung in RUNGS.values() if rung.after]
    assert {len(before.items() ^ after.items()) for before, after in pairs} == {2}
    assert len(RUNGS) == len(LADDER) + len(EXTRAS)
    assert all(get_recipe(rung.recipe) for rung in RUNGS.values())


def answers(function, arguments, **options):
    """Answer as a worker would; one recipe fails."""
    name = function.partition(":")[2]
    if name == "device":
        return [{"backend": "cpu", "FLOP/s": 1e11}]
    if arguments["rung"]["name"] == "8bit":
        return [{"failed": "RESOURCE_EXHAUSTED: [out] of memory", "log": "..."}]
    found = {key: value for key, value in STEP.items() if name == "measure_step" or key not in TIMES}
    return [found | {"compiled for": "NVIDIA H200", "jax": "0.10.2"}]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise MemoryError('no [bytes] left\\nand more')", "MemoryError: no [bytes] left"),
        ("import os; os._exit(7)", "the process ended with status 7"),
    ],
)
def test_a_worker_that_fails_gives_the_reason(tmp_path, monkeypatch, code, said):
    (tmp_path / "the_worker.py").write_text(f"def answer():\n    {code}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(rungs.__file__).parents[1]}")
    (row,) = run_worker("the_worker:answer", {})
    assert row["failed"] == said


def test_operations_of_a_token_are_six_for_each_weight_and_those_of_attention():
    """GPT-2 124M: 6 (12 * 12 * 768**2 + 50,257 * 768) + 12 * 12 * 768 * 1,024."""
    assert gpt2_in_jax.flops_per_token(PRESETS["gpt2-124m"]) == 6 * 123_532_032 + 113_246_208
