"""List what is to be measured on a GPU, in the order of what matters most, in units of a minute or two."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import autocast, fixed_batch, ladder, optimizer_step, torch_gpt2
from benchmarks.rungs import COUNTERPARTS, EXTRAS, LADDER, TORCH_RUNGS, Setting, choose_setting
from benchmarks.workers import Result
from examples.gpt.recipes import RECIPES

JOBS = "benchmarks.on_gpu_jobs"
FLAX = ("jax", "optax", "flax")
TESTS = Path(__file__).resolve().parents[1] / "tests"


class Unit(NamedTuple):
    """One measurement.

    Attributes:
        part: the file in which its result is kept.
        table: in which it is reported.
        name: among the results of the part.
        measure: makes the result in processes of its own.
        seconds: after which it is stopped; it does not begin with less time.
        packages: what it needs.
    """

    part: str
    table: str
    name: str
    measure: Callable[[ladder.Bench], Result]
    seconds: float = 120.0
    packages: tuple[str, ...] = ("jax", "optax")


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        setting: of GPT-2.
        scale: what the sizes of the optimizer's tensors are divided by.
        starts: fresh states of what is timed.
        turns: timed turns from each.
        autocast: the name of the size of the model in `benchmarks.autocast`.
        overhead: the size of the model in `benchmarks.overhead`; None for that of the backend.
        steps: of each training of the main job.
        seeds: of it, and of the errors of gradients.
        curve_steps: of the loss curves.
    """

    setting: Setting
    scale: int = 1
    starts: int = 8
    turns: int = 6
    autocast: str = "gpt2"
    overhead: tuple[int, int, int] | None = None
    steps: int = 1000
    seeds: int = 3
    curve_steps: int = 200


FULL = Size(choose_setting("gpu"))
# To try the command without a GPU.
SMALL = Size(choose_setting("cpu", steps=1, rounds=1), 512, 1, 1, "tiny", (64, 1, 8), 10, 2, 10)


def all_units(size: Size, compiled: bool) -> list[Unit]:
    """Return all units; `compiled` says whether PyTorch compiles."""
    options = torch_gpt2.TorchOptions(compile=compiled)
    makers = optimizer_steps(size), rungs(LADDER, options), autocasts(size), overheads(size), trainings(size), tests()
    doctor = Unit("doctor", "doctor", "doctor", job("doctor"), 180.0)
    return [unit for maker in makers for unit in maker] + [doctor, *fixed_batches(), *curves(size, options), *extras()]


def job(kind: str, **more: Any) -> Callable[[ladder.Bench], Result]:
    """Return what does a job in a process of its own."""
    run = lambda bench: bench.run(JOBS, {"kind": kind} | more, timeout=bench.clock.cut(bench.setting.timeout))
    return run


def optimizer_steps(size: Size) -> Iterator[Unit]:
    """Yield the optimizer steps, and those of Torch."""
    timed = {"scale": size.scale, "starts": size.starts, "turns": size.turns}
    for tensors in ("one", "gpt2"):
        for recipe in optimizer_step.RECIPES:
            measure = job("recipe", recipe=recipe, tensors=tensors, **timed)
            yield Unit("optimizer", "optimizer steps", f"{tensors}: {recipe}", measure, 150.0)
        calls = {"turns": size.starts * size.turns, "calls": optimizer_step.CALLS["gpu"]}
        measure = job("torch optimizers", tensors=tensors, scale=size.scale, **calls)
        yield Unit("optimizer", "Torch's optimizers", f"{tensors}: Torch", measure, 90.0, ("jax", "torch"))


def rungs(ladder_of_jax: tuple, options: torch_gpt2.TorchOptions) -> Iterator[Unit]:
    """Yield the rungs, the top and the bottom one first, each with its counterpart in PyTorch."""
    top_and_bottom = [ladder_of_jax[-1], ladder_of_jax[0]]
    seen = set()
    for rung in [*top_and_bottom, *(rung for rung in ladder_of_jax if rung not in top_and_bottom)]:
        measure = lambda bench, rung=rung: ladder.measure_rung(rung, bench)
        yield Unit("ladder", "ladder", f"JAX: {rung.name}", measure, 200.0, FLAX)
        other = TORCH_RUNGS[COUNTERPARTS[rung.name]]
        if other not in seen:
            seen.add(other)
            measure = lambda bench, rung=other: torch_gpt2.measure_torch(rung, bench, options)
            yield Unit("ladder", "PyTorch", f"PyTorch: {other.name}", measure, 150.0, ("torch",))


def extras() -> Iterator[Unit]:
    """Yield the rungs to try out."""
    for rung in EXTRAS:
        measure = lambda bench, rung=rung: ladder.measure_rung(rung, bench)
        yield Unit("ladder", "ladder", f"JAX: {rung.name}", measure, 200.0, FLAX)


def fixed_batches() -> Iterator[Unit]:
    """Yield the parts of a step at a fixed batch, in all precisions."""
    for name, part in fixed_batch.PARTS.items():
        for recipe in part.recipes:
            measure = lambda bench, part=part, recipe=recipe: fixed_batch.measure_recipe(part, recipe, bench)
            yield Unit("ladder", name, f"{name}: {recipe}", measure, 120.0, FLAX)


def curves(size: Size, options: torch_gpt2.TorchOptions) -> Iterator[Unit]:
    """Yield the loss curves of both libraries."""
    measure = lambda bench: {"rows": torch_gpt2.measure_curves(bench, options, size.curve_steps, lambda rows: None)}
    yield Unit("ladder", "curves", "curves", measure, 300.0, (*FLAX, "torch"))


def autocasts(size: Size) -> Iterator[Unit]:
    """Yield the forms of autocast beside those by hand, those with a target first, and errors of gradients."""
    forms = {name: form for name, form in autocast.FORMS.items() if form.beside is not None}
    for params in ("f32", "bf16"):
        for form in sorted(forms, key=lambda name: not forms[name].has_step_target):
            timed = {"size": size.autocast, "starts": size.starts, "turns": size.turns}
            measure = job("autocast", form=form, params=params, **timed)
            yield Unit("autocast", "autocast", f"{params}: {form}", measure, 150.0, FLAX)
    for params, half in autocast.ACCURACY_DTYPES:
        measure = job("accuracy", params=params, half=half, seeds=size.seeds, steps=5 * size.seeds)
        yield Unit("autocast", "accuracy", f"accuracy: {params}, {half}", measure, 150.0, FLAX)


def overheads(size: Size) -> Iterator[Unit]:
    """Yield whole training steps beside those by hand, and the casts."""
    for dtype in ("bfloat16", "float16"):
        timed = {"size": size.overhead, "starts": size.starts, "turns": size.turns}
        yield Unit("overhead", "overhead", dtype, job("overhead", dtype=dtype, **timed), 150.0)
    yield Unit("overhead", "casts", "casts", job("casts"), 300.0)


def trainings(size: Size) -> Iterator[Unit]:
    """Yield the main job: the same training under every recipe."""
    for recipe in RECIPES:
        measure = job("training", recipe=recipe.name, steps=size.steps, seeds=size.seeds)
        yield Unit("training", "training", recipe.name, measure, 150.0, FLAX)


def tests() -> Iterator[Unit]:
    """Yield the tests, file by file and folder by folder."""
    for path in sorted([*TESTS.glob("test_*.py"), *{path.parent for path in TESTS.glob("*/test_*.py")}]):
        yield Unit("tests", "tests", path.name, job("tests", path=str(path)), 180.0, (*FLAX, "pytest", "hypothesis"))
