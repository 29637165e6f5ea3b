"""Trains one small byte-level GPT under a dozen precision recipes, and compares what comes out.

Everything but the recipe is equal: text, batches, initial weights, rule, schedule, number of steps. Run it from the
root of the repository:

    python -m examples.gpt.compare
    python -m examples.gpt.compare --text my_folder --recipes f32,bf16-split --steps 1000 --out results

The defaults take less than 8 minutes on two cores of an Intel Xeon with AVX-512 that do other work too, and end like
this, with jax 0.10.2, flax 0.12.8, optax 0.2.8 and the standard library of Python 3.11.7:

                                                    ms/ tokens                         gap/
    recipe                        param state grad step     /s  train  valid     gap spread skips
    f32                             4.0   8.0  4.0 67.5  7,586 2.4042 2.3829       -      -     0
    f32 + bf16 autocast             4.0   8.0  2.1 51.7  9,908 2.4043 2.3830 +0.0001  +0.03     0
    bf16, no care                   2.0   4.0  2.0 78.8  6,499 2.4728 2.4559 +0.0731 +19.44     0
    bf16 + f32 masters, cast once   2.0  12.0  2.0 84.2  6,079 2.4045 2.3831 +0.0002  +0.05     0
    bf16 + f32 masters              2.0  12.0  2.1 53.0  9,663 2.4044 2.3830 +0.0001  +0.02     0
    bf16 + split masters            2.0  10.0  2.1 66.5  7,694 2.4044 2.3829 -0.0000  -0.01     0
    bf16 + split + 8-bit moments    2.0   4.1  2.1 70.2  7,294 2.4037 2.3822 -0.0007  -0.18     0
    bf16 + Kahan                    2.0  10.0  2.1 66.2  7,732 2.4045 2.3830 +0.0001  +0.04     0
    bf16 + stochastic rounding      2.0   8.0  2.1 49.3 10,376 2.4037 2.3826 -0.0003  -0.08     0
    bf16 + AnyPrecision AdamW       2.0   6.0  2.1 43.4 11,787 2.4044 2.3830 +0.0001  +0.04     0
    f16 + dynamic loss scaling      4.0   8.0  2.1 44.8 11,429 2.4046 2.3828 -0.0001  -0.03     4

The gap is taken at seed 0 and divided by the standard deviation of the validation loss over three f32 seeds, 0.0038.
Without care an update of less than half the distance to the next bfloat16 is lost, and so are the finer parts of the
optimizer's moments; every recipe of mpx ends where f32 ends. Times are no guide to a GPU.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

import mpx
from examples.gpt import output, report
from examples.gpt import text as text_of
from examples.gpt.loader import prefetch
from examples.gpt.model import PRESETS
from examples.gpt.recipes import RECIPES, Recipe, get_recipe
from examples.gpt.training import Hyperparameters, Program, make_program

# --- Settings: what the command line offers has its defaults in `main`, what AdamW takes in `Hyperparameters`. ---
HEAD_SIZE = PRESETS["tiny"].width // PRESETS["tiny"].heads
CONTEXT = PRESETS["tiny"].context  # bytes; long enough to learn words and indentation
BATCH_SIZE = 8  # 512 bytes a step: on two cores more of them would mean fewer steps
VALIDATION_BATCHES = 16  # 8,192 bytes, the same for every run
EVALUATIONS = 20  # points of the curves
STEPS_PER_REPORT = 10  # the loop waits for the device this often, to show a loss and take a time
# By default XLA may leave out a rounding to 16 bits where the next operation widens the number again, and does so
# after bfloat16 products on a CPU. The recipes shall be compared as they are written.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
ALL_NAMES = [recipe.name for recipe in RECIPES]
FIXED_SETTINGS = {
    "context": CONTEXT,
    "batch_size": BATCH_SIZE,
    "validation_batches": VALIDATION_BATCHES,
    "compiler_options": COMPILER_OPTIONS,
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all runs of a comparison have in common."""

    steps: int
    seeds: int
    recipe_seeds: int
    width: int
    depth: int
    learning_rate: float


# --- One recipe, made ready to run. ---
def make_compiled(recipe: Recipe, settings: Settings) -> Program:
    """Model, optimizer and training step; each function is compiled when it is first called, and serves every seed."""
    config = dataclasses.replace(
        PRESETS["tiny"], width=settings.width, depth=settings.depth, heads=settings.width // HEAD_SIZE
    )
    program = make_program(recipe, config, Hyperparameters(settings.steps, settings.learning_rate))
    return dataclasses.replace(
        program,
        train_step=jax.jit(program.train_step, donate_argnums=(0, 1), compiler_options=COMPILER_OPTIONS),
        evaluate=jax.jit(program.evaluate, compiler_options=COMPILER_OPTIONS),
    )


def bytes_per_parameter(program: Program, params: Any, opt_state: optax.OptState) -> dict[str, float]:
    """What is held between and during steps, counted from the arrays.

    Gradients count in the dtype in which the backward pass delivers them: that of the parameters, and under autocast
    that of the contractions, but float32 for embeddings and norms. `mpx.value_and_grad` hands them on as float32;
    inside one compiled step that is an operation on the way to the optimizer, which the compiler may fuse with the
    reading, and no array that the step returns.
    """
    batch = jax.ShapeDtypeStruct((BATCH_SIZE, CONTEXT + 1), np.uint8)
    backward = jax.make_jaxpr(lambda *given: program.gradients(*given)[1])(params, opt_state, batch).jaxpr
    source = {eqn.outvars[0]: eqn.invars[0] for eqn in backward.eqns if eqn.primitive.name == "convert_element_type"}
    delivered = [source.get(gradient, gradient).aval for gradient in backward.outvars]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {
        "parameters": sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / count,
        "optimizer state": sum(leaf.nbytes for leaf in jax.tree.leaves(opt_state)) / count,
        "gradients": sum(gradient.size * gradient.dtype.itemsize for gradient in delivered) / count,
    }


# --- One run. ---
def train(
    program: Program,
    seed: int,
    settings: Settings,
    training_text: np.ndarray,
    validation: jax.Array,
    on_report: Callable[[int, float, float | None], None],
) -> report.Run:
    """Trains from one seed; `on_report` hears of steps done, the loss, and tokens a second (None at first)."""
    params, opt_state = program.init(seed)
    size = bytes_per_parameter(program, params, opt_state)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    batches = text_of.random_batches(
        training_text, seed=seed, count=settings.steps, batch_size=BATCH_SIZE, context=CONTEXT
    )
    evaluation_steps = {math.ceil(settings.steps * (point + 1) / EVALUATIONS) for point in range(EVALUATIONS)}
    losses, validation_losses, seconds, compile_seconds = [], {}, [], 0.0
    start, timed_from = time.perf_counter(), 0
    for step, batch in enumerate(prefetch(batches), start=1):
        params, opt_state, metrics = program.train_step(params, opt_state, batch[None])
        losses.append(metrics.loss)  # stays on the device until somebody asks
        if step > 1 and step % STEPS_PER_REPORT and step not in evaluation_steps:
            continue
        loss = float(metrics.loss)  # waits for the device
        if step == 1:
            compile_seconds = time.perf_counter() - start
        else:
            seconds.append((time.perf_counter() - start) / (step - timed_from))
        on_report(step, loss, BATCH_SIZE * CONTEXT / seconds[-1] if seconds else None)
        if step in evaluation_steps:
            validation_losses[step] = float(program.evaluate(params, validation))
        start, timed_from = time.perf_counter(), step
    seconds_per_step = statistics.median(seconds) if seconds else None
    return report.Run(
        recipe=program.recipe.name,
        seed=seed,
        parameters=count,
        bytes_per_parameter=size,
        compile_seconds=compile_seconds,
        seconds_per_step=seconds_per_step,
        tokens_per_second=BATCH_SIZE * CONTEXT / seconds_per_step if seconds_per_step else None,
        training_losses=[float(loss) for loss in losses],
        validation_steps=list(validation_losses),
        validation_losses=list(validation_losses.values()),
        skipped_steps=int(mpx.skipped_steps(opt_state)),
        loss_scale=float(mpx.get_loss_scale(opt_state).loss_scale),
    )


# --- All runs. ---
def train_all(
    recipes: list[Recipe], settings: Settings, training_text: np.ndarray, held_out: np.ndarray, progress: Progress
) -> Iterator[report.Run]:
    """Yields the finished runs one by one: f32 from every seed, for the spread, and the others from the first ones."""
    seeds_of = lambda recipe: settings.seeds if recipe.name == report.REFERENCE else settings.recipe_seeds
    plan = [(recipe, seeds_of(recipe)) for recipe in recipes]
    fixed = text_of.fixed_batches(held_out, count=VALIDATION_BATCHES, batch_size=BATCH_SIZE, context=CONTEXT)
    validation = jax.device_put(fixed)
    total = sum(seeds for _, seeds in plan) * settings.steps
    everything = progress.add_task("all runs", total=total, loss="", speed="")
    for recipe, seeds in plan:
        program = make_compiled(recipe, settings)
        for seed in range(seeds):
            name = f"{recipe.label}, seed {seed}" if seeds > 1 else recipe.label
            task = progress.add_task(name, total=settings.steps, loss="compiling" if seed == 0 else "", speed="")
            on_report = _Reporter(progress, task, everything)
            yield train(program, seed, settings, training_text, validation, on_report)


@dataclasses.dataclass
class _Reporter:
    """Moves the bar of one run and that of all."""

    progress: Progress
    task: TaskID
    everything: TaskID
    done: int = 0

    def __call__(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        speed = "" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"
        self.progress.update(self.task, completed=step, loss=f"loss {loss:.3f}", speed=speed)
        self.progress.advance(self.everything, step - self.done)
        self.done = step


# --- The command line. ---
def chosen_recipes(names: list[str]) -> list[Recipe]:
    """The recipes of a repeated or comma-separated option, in the order of the table."""
    wanted = [name.strip() for name in itertools.chain.from_iterable(item.split(",") for item in names)]
    wanted = [name for name in wanted if name]
    try:
        if not wanted:
            raise ValueError(f"no recipe is named; there are {', '.join(ALL_NAMES)}.")
        chosen = [get_recipe(name) for name in wanted]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--recipes") from error
    return [recipe for recipe in RECIPES if recipe in chosen]


def default_names() -> list[str]:
    """All recipes, but `tf32` where there is no such format: it would be `f32` a second time."""
    return [name for name in ALL_NAMES if name != "tf32" or jax.default_backend() != "cpu"]


def _require_folder(out: Path) -> None:
    try:
        output.require_folder(out)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error


def main(
    text: Annotated[
        Path | None,
        typer.Option(
            help="File or folder to train on, of which the first 4 MB are used; without it Python's standard library."
        ),
    ] = None,
    recipes: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(ALL_NAMES)}; separated by commas or in several options.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps a run.")] = 400,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the f32 run; their spread is the yardstick.")] = 3,
    recipe_seeds: Annotated[int, typer.Option(min=1, help="Seeds of every other recipe, of those of f32.")] = 1,
    width: Annotated[int, typer.Option(min=1, help=f"Of the model; a multiple of {HEAD_SIZE}.")] = 128,
    depth: Annotated[int, typer.Option(min=1, help="Blocks of the model.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule.")] = 3e-4,
    out: Annotated[Path, typer.Option(help="Folder for precision.png and precision.json.")] = Path(),
) -> None:
    """Trains a small GPT under each recipe with the same data and initial weights, and compares the results."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a file has room for the whole table
    chosen = chosen_recipes(recipes or default_names())
    if width % HEAD_SIZE:
        raise typer.BadParameter(f"must be a multiple of {HEAD_SIZE}, but is {width}.", param_hint="--width")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise typer.BadParameter(f"must be positive, but is {learning_rate}.", param_hint="--learning-rate")
    if recipe_seeds > seeds:
        raise typer.BadParameter(
            f"must be at most `--seeds`, {seeds}, but is {recipe_seeds}: a gap is to f32 of the same seed.",
            param_hint="--recipe-seeds",
        )
    try:
        read = text_of.read_text(text)
        training_text, held_out = text_of.split(np.frombuffer(read.content, np.uint8), CONTEXT)
    except text_of.TextError as error:
        raise typer.BadParameter(str(error), param_hint="--text") from error
    _require_folder(out)
    settings = Settings(steps, seeds, recipe_seeds, width, depth, learning_rate)
    console.print(
        f"{read.name}: {len(training_text):,} bytes to train on, {len(held_out):,} held out. "
        f"{steps} steps of {BATCH_SIZE} x {CONTEXT} bytes on {jax.devices()[0].device_kind}.",
        markup=False,
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    runs, interrupted = [], False
    try:
        with Progress(*columns, console=console, refresh_per_second=4) as progress:
            for run in train_all(chosen, settings, training_text, held_out, progress):
                runs.append(run)
    except KeyboardInterrupt:
        interrupted = True
    if not runs:
        console.print("Stopped before a run had finished: nothing is written.")
        raise typer.Exit(130)
    comparison = report.Comparison(runs)
    console.print(report.table(comparison))
    described = (
        dataclasses.asdict(settings)
        | dataclasses.asdict(Hyperparameters(steps, learning_rate))
        | {"recipes": [recipe.name for recipe in chosen]}
        | FIXED_SETTINGS
    )
    source = {"name": read.name, "bytes": len(read.content), "sha256": read.sha256, "held_out_bytes": len(held_out)}
    report.write_json(out / "precision.json", comparison, described, source, interrupted=interrupted)
    report.write_plot(out / "precision.png", comparison)
    console.print(f"Written: {out / 'precision.json'}, {out / 'precision.png'}", soft_wrap=True, markup=False)
    if interrupted:
        finished = ", ".join(f"{run.recipe} (seed {run.seed})" for run in runs)
        console.print(f"Stopped before the end. Finished and kept: {finished}.")
        raise typer.Exit(130)


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
