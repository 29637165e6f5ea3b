"""Answers the jobs of `benchmarks.on_gpu` and `benchmarks.programs`, one job in a process.

Each job imports what it needs when it begins, so that a missing package costs only the jobs that need it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.workers import Result, serve

FAILURES = 20  # lines of failed tests that are kept


def answer(job: dict[str, Any]) -> Result:
    """Do one job: its kind, and the arguments of the function of this kind."""
    return JOBS[job["kind"]](**{name: value for name, value in job.items() if name != "kind"})


def time_recipe(recipe: str, tensors: str, scale: int, starts: int, turns: int) -> Result:
    """Time one optimizer step with mpx beside the same step by hand."""
    from benchmarks import optimizer_step

    shapes = optimizer_step.make_shapes(tensors, scale)
    bandwidth = optimizer_step.copy_bandwidth() if optimizer_step.on_gpu() else None
    row = optimizer_step.measure(recipe, optimizer_step.make_data(shapes), bandwidth, starts, turns)
    return {"title": optimizer_step.title_of(tensors, shapes), "copy bandwidth, GB/s": bandwidth} | row


def read_recipe(recipe: str, tensors: str, scale: int, target: str) -> Result:
    """Read the programs of one optimizer step for a device that need not be here."""
    from benchmarks import optimizer_step

    return optimizer_step.read(recipe, optimizer_step.make_shapes(tensors, scale), target)


def time_torch_optimizers(tensors: str, scale: int, turns: int, calls: int) -> Result:
    """Time Torch's optimizers on the same tensors."""
    from benchmarks import adamw_in_torch, optimizer_step

    shapes = optimizer_step.make_shapes(tensors, scale)
    rows = adamw_in_torch.torch_times({"shapes": list(shapes.values()), "turns": turns, "calls": calls})
    return {"rows": [{"title": optimizer_step.title_of(tensors, shapes)} | row for row in rows]}


def time_autocast(form: str, params: str, size: str, starts: int, turns: int) -> Result:
    """Time one form of autocast beside the same model cast by hand."""
    from benchmarks import autocast

    found = autocast.measure_steps(autocast.SIZES[size], autocast.DTYPES[params], False, starts, turns, [form])
    return {"rows": [{"params": params, "size": size} | row for row in found]}


def measure_accuracy(params: str, half: str, seeds: int, steps: int) -> Result:
    """Measure the errors of autocast's gradients beside those by hand."""
    from benchmarks import autocast

    return {"rows": autocast.measure_accuracy(seeds=seeds, trained_steps=steps, dtypes=[(params, half)])}


def time_overhead(dtype: str, size: list[int] | None, starts: int, turns: int) -> Result:
    """Time a training step, and the optimizer alone, beside the same by hand."""
    from benchmarks import overhead

    return {"rows": overhead.measure_steps(dtype, size and tuple(size), starts, turns)}


def time_casts() -> Result:
    """Time casts of many arrays, first in fresh processes, before this one takes a GPU's memory."""
    from benchmarks import overhead

    first = overhead.measure_first_calls()
    return {"rows": [overhead.measure_many_leaves(), first]}


def train(recipe: str, steps: int, seeds: int) -> Result:
    """Train the small model of `examples.gpt.compare` with one recipe, from several seeds."""
    import dataclasses

    import numpy as np
    from rich.progress import Progress

    from examples.gpt import compare, text
    from examples.gpt.recipes import get_recipe

    settings = compare.Settings(steps=steps, seeds=seeds, recipe_seeds=seeds)
    parts = text.split(np.frombuffer(text.read_text(None), np.uint8), compare.CONTEXT)
    runs = compare.train_all([get_recipe(recipe)], settings, *parts, Progress(disable=True))
    return {"rows": [dataclasses.asdict(run) for run in runs]}


def run_tests(path: str) -> Result:
    """Run the tests of a file or folder; what failed is named."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", path]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # some tests start processes of their own
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    counts = {
        what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1] if lines else "")
    }
    if not counts and done.returncode != 5:  # 5: all tests there are deselected
        raise RuntimeError(f"pytest did not run: {(done.stderr or done.stdout)[-1000:]}")
    bad = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"tests": path, "counts": counts, "failures": bad[:FAILURES]}


def see_doctor() -> Result:
    """Ask `mpx doctor` what this machine can do."""
    from mpx.doctor import examine

    found = examine()
    return found.as_dict() | {"text": str(found)}


JOBS: dict[str, Callable[..., Result]] = {
    "recipe": time_recipe,
    "recipe program": read_recipe,
    "torch optimizers": time_torch_optimizers,
    "autocast": time_autocast,
    "accuracy": measure_accuracy,
    "overhead": time_overhead,
    "casts": time_casts,
    "training": train,
    "tests": run_tests,
    "doctor": see_doctor,
}

if __name__ == "__main__":
    serve(answer)
