"""List what is to be measured on a GPU, in the order of what matters most, in units of a minute or two."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import autocast_accuracy, autocast_forms, fixed_batch, ladder, optimizer_step, torch_gpt2
from benchmarks.rungs import COUNTERPARTS, EXTRAS, LADDER, TORCH_RUNGS, Rung, Setting, choose_setting
from benchmarks.workers import CALL, Result, job_of
from examples.gpt.recipes import RECIPES

FLAX = ("jax", "optax", "flax")
TESTS = Path(__file__).resolve().parents[1] / "tests"


class Unit(NamedTuple):
    """One measurement.

    Attributes:
        part: the file in which its result is kept.
        table: in which it is reported.
        name: among the results of the part.
        measure: makes the result in processes of its own.
        seconds: after which it is stopped; it does not begin with less than half of them left.
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
        autocast: the name of the size of the model in `benchmarks.autocast_forms`.
        overhead: the size of the model in `benchmarks.overhead`; None for that of the backend.
        steps: of each training of the main job.
        curve_steps: of the loss curves.
        seeds: of trainings and of errors of gradients.
        trained_steps: before errors of gradients are measured.
    """

    setting: Setting
    scale: int = 1
    starts: int = 8
    turns: int = 6
    autocast: str = "gpt2"
    overhead: tuple[int, int, int] | None = None
    steps: int = 1000
    curve_steps: int = 200
    seeds: int = 3
    trained_steps: int = 50


SIZES = {
    "gpu": Size(choose_setting("gpu")),
    "cpu": Size(choose_setting("cpu"), scale=64, autocast="tiny", curve_steps=60),
    "smallest": Size(choose_setting("cpu", steps=1, rounds=1), 512, 1, 1, "tiny", (64, 1, 8), 10, 10, 2, 5),
}


def all_units(size: Size, compiled: bool) -> list[Unit]:
    """Return all units; `compiled` says whether PyTorch compiles."""
    first = optimizer_steps(size), rungs(compiled), autocasts(size), overheads(size), trainings(size), tests()
    later = fixed_batches(), curves(size, compiled), extras(), shapes(size)
    doctor = Unit("doctor", "doctor", "doctor", call("mpx.doctor:examine"), 180.0)
    return [*itertools.chain(*first), doctor, *itertools.chain(*later)]


def call(function: str, **arguments: Any) -> Callable[[ladder.Bench], Result]:
    """Return what calls a function, named as `module:name`, in a process of its own."""
    job = job_of(function, **arguments)
    return lambda bench: bench.run(CALL, job, timeout=bench.clock.cut(bench.setting.timeout))


def optimizer_steps(size: Size) -> Iterator[Unit]:
    """Yield the optimizer steps, and those of Torch."""
    for tensors in ("one", "gpt2"):
        given = {"tensors": tensors, "scale": size.scale}
        for recipe in optimizer_step.RECIPES:
            measure = call(
                "benchmarks.optimizer_step:measure", recipe=recipe, starts=size.starts, turns=size.turns, **given
            )
            yield Unit("optimizer", "optimizer steps", f"{tensors}: {recipe}", measure, 150.0)
        measure = call("benchmarks.optimizer_step:measure_torch", turns=size.starts * size.turns, **given)
        yield Unit("optimizer", "Torch's optimizers", f"{tensors}: Torch", measure, 90.0, ("jax", "torch"))


def rungs(compiled: bool) -> Iterator[Unit]:
    """Yield the rungs, the top and the bottom one first, each with its counterpart in PyTorch."""
    seen = set()
    for rung in sorted(LADDER, key=lambda rung: rung not in (LADDER[0], LADDER[-1])):
        yield rung_unit(rung)
        other = TORCH_RUNGS[COUNTERPARTS[rung.name]]
        if other not in seen:
            seen.add(other)
            measure = lambda bench, rung=other: {"rows": torch_gpt2.measure_either(rung, bench, compiled)}
            yield Unit("ladder", "PyTorch", f"PyTorch: {other.name}", measure, 150.0, ("torch",))


def rung_unit(rung: Rung) -> Unit:
    """Return the unit of a rung of JAX."""
    return Unit("ladder", "ladder", f"JAX: {rung.name}", lambda bench: ladder.measure_rung(rung, bench), 200.0, FLAX)


def extras() -> Iterator[Unit]:
    """Yield the rungs to try out."""
    yield from map(rung_unit, EXTRAS)


def fixed_batches() -> Iterator[Unit]:
    """Yield the parts of a step at a fixed batch, in all precisions."""
    for name, part in fixed_batch.PARTS.items():
        for recipe in part.recipes:
            measure = lambda bench, part=part, recipe=recipe: fixed_batch.measure_recipe(part, recipe, bench)
            yield Unit("ladder", name, f"{name}: {recipe}", measure, 120.0, FLAX)


def curves(size: Size, compiled: bool) -> Iterator[Unit]:
    """Yield the loss curves of both libraries."""
    measure = lambda bench: {"rows": torch_gpt2.measure_curves(bench, compiled, size.curve_steps)}
    yield Unit("ladder", "curves", "curves", measure, 300.0, (*FLAX, "torch"))


def autocasts(size: Size) -> Iterator[Unit]:
    """Yield the forms of autocast beside those by hand, those with a target first, and errors of gradients."""
    forms = [name for name, form in autocast_forms.FORMS.items() if form.beside is not None]
    forms.sort(key=lambda name: not autocast_forms.FORMS[name].has_step_target)
    given = {"size": size.autocast, "update": False, "starts": size.starts, "turns": size.turns}
    for params, form in itertools.product(("f32", "bf16"), forms):
        measure = call("benchmarks.autocast:measure_steps", params=params, names=[form], **given)
        yield Unit("autocast", "autocast", f"{params}: {form}", measure, 150.0, FLAX)
    for dtypes in autocast_accuracy.ACCURACY_DTYPES:
        given = {"seeds": size.seeds, "trained_steps": size.trained_steps, "dtypes": [dtypes]}
        measure = call("benchmarks.autocast_accuracy:measure_accuracy", **given)
        yield Unit("autocast", "accuracy", f"accuracy: {', '.join(dtypes)}", measure, 150.0, FLAX)


def shapes(size: Size) -> Iterator[Unit]:
    """Yield what hardly depends on the device: residuals of autocast, and the time of tracing."""
    for params in ("f32", "bf16"):
        measure = call("benchmarks.autocast:measure_residuals", size_name=size.autocast, params_name=params)
        yield Unit("autocast", "residuals", f"residuals: {params}", measure, 120.0, FLAX)
    yield Unit("autocast", "tracing", "tracing", call("benchmarks.autocast:measure_tracing"), 200.0, FLAX)


def overheads(size: Size) -> Iterator[Unit]:
    """Yield whole training steps beside those by hand, and the casts."""
    for dtype in ("bfloat16", "float16"):
        given = {"size": size.overhead, "starts": size.starts, "turns": size.turns}
        yield Unit(
            "overhead", "overhead", dtype, call("benchmarks.overhead:measure_steps", dtype_name=dtype, **given), 150
        )
    yield Unit("overhead", "casts", "casts", call("benchmarks.overhead:measure_casts"), 300.0)


def trainings(size: Size) -> Iterator[Unit]:
    """Yield the main job: the same training under every recipe."""
    for recipe in RECIPES:
        measure = call("benchmarks.main_job:train", recipe=recipe.name, steps=size.steps, seeds=size.seeds)
        yield Unit("training", "training", recipe.name, measure, 150.0, FLAX)


def tests() -> Iterator[Unit]:
    """Yield the tests, file by file and folder by folder."""
    for path in sorted([*TESTS.glob("test_*.py"), *{path.parent for path in TESTS.glob("*/test_*.py")}]):
        measure = call("benchmarks.all_tests:run", path=str(path))
        yield Unit("tests", "tests", path.name, measure, 180.0, (*FLAX, "pytest", "hypothesis"))
