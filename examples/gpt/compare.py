"""Train one small byte-level GPT under several precision recipes, and compare the results.

Everything but the recipe is equal: text, batches, initial weights, optimizer, schedule, number of steps. Run it from
the root of the repository:

    python -m examples.gpt.compare
    python -m examples.gpt.compare --recipes all
    python -m examples.gpt.compare --text my_folder --recipes f32,bf16-split --steps 1000 --out results

The first takes three to four minutes on two cores with nothing else to do, the second half as long again. A gap is
taken at seed 0 and compared with the standard deviation of the validation loss over three f32 seeds. Without mpx an
update smaller than half the distance to the next bfloat16 is lost, and so are the finer parts of the moments; every
recipe of mpx ends where f32 ends. Times are in `precision.json` only: on a CPU they are no guide to a GPU.
"""

import dataclasses
import hashlib
import inspect
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Option

import mpx
from examples.gpt import output, pictures, report
from examples.gpt import text as text_of
from examples.gpt.model import PRESETS
from examples.gpt.recipes import RECIPES, Recipe, get_recipe
from examples.gpt.training import Hyperparameters, Program, make_program

HEAD_SIZE = PRESETS["tiny"].width // PRESETS["tiny"].heads
CONTEXT = PRESETS["tiny"].context  # bytes; long enough to learn words and indentation
BATCH_SIZE = 8  # 512 bytes a step: on two cores more of them would mean fewer steps
VALIDATION_BATCHES = 16  # 8,192 bytes, the same for every run
EVALUATIONS = 20  # points of the curves
STEPS_PER_REPORT = 10  # the loop waits for the device this often, to show a loss and measure the time
# By default XLA may leave out a rounding to 16 bits where the next operation widens the number again, and does so after
# bfloat16 products on a CPU. The comparison is of recipes as they are written.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
ALL_NAMES = [recipe.name for recipe in RECIPES]
DEFAULT_NAMES = (
    "f32",
    "bf16-naive",
    "bf16-masters",
    "bf16-split",
    "bf16-split-8bit",
    "fp8",
    "bf16-kahan",
    "f16-scaled",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `examples.gpt.compare`."""

    text: Annotated[Path | None, Option(help="File or folder to train on (4 MB); without it Python's library.")] = None
    recipes: Annotated[
        list[str], Option(help=f"all, or of {', '.join(ALL_NAMES)}; separated by commas or in several options.")
    ] = DEFAULT_NAMES  # a tuple: a dataclass wants defaults that cannot change
    steps: Annotated[int, Option(min=1, help="Training steps of a run.")] = 300
    seeds: Annotated[int, Option(min=1, help="Seeds of f32, whose standard deviation is the yardstick.")] = 3
    recipe_seeds: Annotated[int, Option(min=1, help="Seeds of every other recipe.")] = 1
    width: Annotated[int, Option(min=1, help=f"Width of the model; a multiple of {HEAD_SIZE}.")] = 128
    depth: Annotated[int, Option(min=1, help="Blocks of the model.")] = 4
    learning_rate: Annotated[float, Option(help="Peak of the schedule.")] = 3e-4
    out: Annotated[Path, Option(help="Folder for precision.png, curves.png and precision.json.")] = Path("comparison")

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Return the schedule of all runs."""
        return Hyperparameters(self.steps, self.learning_rate)


# --- One run. ---
def make_compiled(recipe: Recipe, settings: Settings) -> Program:
    """Return model, optimizer and training step; a function compiles at its first call, and serves every seed."""
    config = dataclasses.replace(
        PRESETS["tiny"], width=settings.width, depth=settings.depth, heads=settings.width // HEAD_SIZE
    )
    program = make_program(recipe, config, settings.hyperparameters)
    return dataclasses.replace(
        program,
        train_step=jax.jit(program.train_step, donate_argnums=(0, 1), compiler_options=COMPILER_OPTIONS),
        evaluate=jax.jit(program.evaluate, compiler_options=COMPILER_OPTIONS),
    )


def bytes_per_parameter(recipe: Recipe, params: Any, opt_state: optax.OptState) -> dict[str, float]:
    """Return the bytes held inside a jitted step, counted from the arrays.

    The gradient of a parameter has the narrower of the parameter's dtype and the compute dtype there; only gradients
    that leave a compiled program through `mpx.value_and_grad` are float32 arrays.
    """
    policy, count = recipe.policy, sum(leaf.size for leaf in jax.tree.leaves(params))
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) / count
    gradients = float(min(policy.param_dtype.itemsize, policy.compute_dtype.itemsize))
    return {"parameters": size(params), "gradients": gradients, "optimizer state": size(opt_state)}


def train(
    program: Program,
    seed: int,
    settings: Settings,
    training_text: np.ndarray,
    validation: jax.Array,
    progress: Progress,
) -> report.Run:
    """Train from one seed."""
    params, opt_state = program.init(seed)
    size = bytes_per_parameter(program.recipe, params, opt_state)
    batches = text_of.random_batches(
        training_text, seed=seed, count=settings.steps, batch_size=BATCH_SIZE, context=CONTEXT
    )
    evaluation_steps = {math.ceil(settings.steps * (point + 1) / EVALUATIONS) for point in range(EVALUATIONS)}
    losses, validation_losses, seconds = [], {}, []
    name, task = f"{program.recipe.name}, seed {seed}", progress.task_ids[-1]
    progress.update(task, description=f"{name}: compiling")
    start, timed_from = time.perf_counter(), 0
    for step, batch in enumerate(batches, start=1):
        params, opt_state, metrics = program.train_step(params, opt_state, batch[None])
        losses.append(metrics.loss)  # stays on the device until it is read
        if step > 1 and step % STEPS_PER_REPORT and step not in evaluation_steps:
            continue
        loss = float(metrics.loss)  # waits for the device
        seconds.append((time.perf_counter() - start) / (step - timed_from))
        shown = f"{name}: loss {loss:.3f}, {BATCH_SIZE * CONTEXT / seconds[-1]:,.0f} tokens/s"
        progress.update(task, advance=step - timed_from, description=shown)
        if step in evaluation_steps:
            validation_losses[step] = float(program.evaluate(params, validation))
        start, timed_from = time.perf_counter(), step
    progress.console.print(f"{name}: validation loss {validation_losses[settings.steps]:.4f}", markup=False)
    compile_seconds, *others = seconds
    return report.Run(
        recipe=program.recipe.name,
        seed=seed,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        bytes_per_parameter=size,
        compile_seconds=compile_seconds,
        seconds_per_step=statistics.median(others) if others else None,
        training_losses=[float(loss) for loss in losses],
        validation_steps=list(validation_losses),
        validation_losses=list(validation_losses.values()),
        skipped_steps=int(mpx.skipped_steps(opt_state)),
        loss_scale=float(mpx.get_loss_scale(opt_state).loss_scale),
    )


def train_all(
    recipes: list[Recipe], settings: Settings, training_text: np.ndarray, held_out: np.ndarray, progress: Progress
) -> Iterator[report.Run]:
    """Yield the finished runs: f32 from every seed, for the deviation, the other recipes from the first seeds."""
    seeds_of = lambda recipe: settings.seeds if recipe.name == report.REFERENCE else settings.recipe_seeds
    plan = [(recipe, seeds_of(recipe)) for recipe in recipes]
    fixed = text_of.fixed_batches(held_out, count=VALIDATION_BATCHES, batch_size=BATCH_SIZE, context=CONTEXT)
    validation = jax.device_put(fixed)
    progress.add_task("", total=sum(seeds for _, seeds in plan) * settings.steps)
    for recipe, seeds in plan:
        program = make_compiled(recipe, settings)
        for seed in range(seeds):
            yield train(program, seed, settings, training_text, validation, progress)


# --- The command line. ---
def chosen_recipes(names: str) -> list[Recipe]:
    """Return the recipes of the option, in the order of the table.

    "all" leaves out `tf32` where there is no such format: it would be `f32` again.
    """
    if names == "all":
        return [recipe for recipe in RECIPES if recipe.name != "tf32" or jax.default_backend() != "cpu"]
    try:
        chosen = [get_recipe(name.strip()) for name in names.split(",") if name.strip()]
    except ValueError as error:
        raise ValueError(f"--recipes: {error}") from error
    if not chosen:
        raise ValueError(f"--recipes: no recipe is named; there are {', '.join(ALL_NAMES)}.")
    return [recipe for recipe in RECIPES if recipe in chosen]


def check(settings: Settings) -> None:
    """Raise if the options do not fit each other."""
    if settings.width % HEAD_SIZE:
        raise ValueError(f"--width must be a multiple of {HEAD_SIZE}, but is {settings.width}.")
    if settings.recipe_seeds > settings.seeds:
        raise ValueError(
            f"--recipe-seeds must be at most `--seeds`, {settings.seeds}, but is {settings.recipe_seeds}: a gap is to "
            "f32 of the same seed."
        )
    output.require_folder(settings.out)


def main(**options: Any) -> None:
    """Train a small GPT under each recipe with the same data and initial weights, and compare the results."""
    console, settings = Console(), Settings(**options)
    try:
        check(settings)
        chosen, hyperparameters = chosen_recipes(",".join(settings.recipes)), settings.hyperparameters
        text = text_of.read_text(settings.text)
        parts = text_of.split(np.frombuffer(text, np.uint8), CONTEXT)
    except (ValueError, OSError) as error:
        hint = {"param_hint": "--text"} if isinstance(error, text_of.TextError) else {}
        raise typer.BadParameter(str(error), **hint) from error
    source = {"name": text_of.name_of(settings.text), "bytes": len(text), "held_out_bytes": len(parts[1])}
    console.print(
        f"{source['name']}: {len(parts[0]):,} bytes to train on, {len(parts[1]):,} held out. "
        f"{settings.steps} steps of {BATCH_SIZE} x {CONTEXT} bytes on {jax.devices()[0].device_kind}.",
        markup=False,
    )
    runs, interrupted = [], False
    try:
        columns = (BarColumn(bar_width=20), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal) as progress:
            for run in train_all(chosen, settings, *parts, progress):
                runs.append(run)
    except KeyboardInterrupt:
        interrupted = True
    if not runs:
        console.print("Stopped before a run had finished: nothing is written.")
        raise typer.Exit(130)
    described = dataclasses.asdict(settings) | dataclasses.asdict(hyperparameters) | {
        "recipes": [recipe.name for recipe in chosen], "context": CONTEXT, "batch_size": BATCH_SIZE,
        "validation_batches": VALIDATION_BATCHES, "compiler_options": COMPILER_OPTIONS, "out": str(settings.out),
        "text": source | {"sha256": hashlib.sha256(text).hexdigest()},
    }  # fmt: skip
    comparison = report.Comparison(runs)
    console.print(report.table(comparison))
    report.write_json(settings.out / "precision.json", comparison, described, interrupted=interrupted)
    written = [settings.out / "precision.json", *pictures.write_pictures(settings.out, comparison)]
    console.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True, markup=False)
    if interrupted:
        finished = ", ".join(f"{run.recipe} (seed {run.seed})" for run in runs)
        console.print(f"Stopped before the end. Finished and kept: {finished}.")
        raise typer.Exit(130)


# Typer reads the options off the signature: the fields of `Settings`, written once.
main.__signature__ = inspect.signature(Settings)
main.__annotations__ = dict(Settings.__annotations__)
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
