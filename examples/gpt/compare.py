"""Train one small byte-level GPT under several precision recipes, and compare the results.

Everything but the recipe is equal: text, batches, initial weights, optimizer, schedule, number of steps. Run it from
the root of the repository:

    python -m examples.gpt.compare
    python -m examples.gpt.compare --recipes all
    python -m examples.gpt.compare --text my_folder --recipes f32,bf16-split --steps 1000 --out results

The first takes three to four minutes on two cores with nothing else to do, the second half as long again. A gap is
taken at seed 0 and compared with the standard deviation of the validation loss over three f32 seeds. Without mpx an
update smaller than half the distance to the next bfloat16 is lost, and so are the finer parts of the moments; every
recipe of mpx ends where f32 ends.
"""

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import optax
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Option

import mpx
from examples.gpt import data, pictures, report
from examples.gpt.model import PRESETS
from examples.gpt.recipes import RECIPES, Recipe, get_recipe
from examples.gpt.training import Hyperparameters, Program

MAXIMUM_BYTES = 4_000_000  # a comparison reads well below a million of them
MINIMUM_BYTES = 10_000
CONFIG = PRESETS["tiny"]
CONTEXT = CONFIG.context  # bytes; long enough to learn words and indentation
BATCH_SIZE = 8  # 512 bytes a step: on two cores more of them would mean fewer steps
VALIDATION_BATCHES = 16  # 8,192 bytes, the same for every run
EVALUATIONS = 20  # points of the curves
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
    learning_rate: Annotated[float, Option(help="Peak of the schedule.")] = 3e-4
    out: Annotated[Path, Option(help="Folder for precision.png, curves.png and precision.json.")] = Path("comparison")

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Return the schedule of all runs."""
        return Hyperparameters(self.steps, self.learning_rate)


# --- The text. ---
def read_text(path: Path | None) -> bytes:
    """Read the first `MAXIMUM_BYTES` of the documents of a path."""
    content = bytearray()
    for document in data.documents(path):
        content += document
        if len(content) >= MAXIMUM_BYTES:
            break
    if len(content) < MINIMUM_BYTES:
        raise data.DataError(f"--text: it has {len(content):,} bytes, and at least {MINIMUM_BYTES:,} are needed.")
    return bytes(content[:MAXIMUM_BYTES])


def random_batches(text: np.ndarray, *, seed: int, count: int) -> Iterator[np.ndarray]:
    """Yield `count` batches of shape (BATCH_SIZE, CONTEXT + 1)."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield windows(text, generator.integers(0, len(text) - CONTEXT, size=BATCH_SIZE))


def fixed_batches(text: np.ndarray) -> np.ndarray:
    """Return evenly spaced sequences, the same at every call: (VALIDATION_BATCHES, BATCH_SIZE, CONTEXT + 1)."""
    starts = np.linspace(0, len(text) - CONTEXT - 1, VALIDATION_BATCHES * BATCH_SIZE).astype(np.int64)
    return windows(text, starts).reshape(VALIDATION_BATCHES, BATCH_SIZE, -1)


def windows(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return sequences (N, CONTEXT + 1): the targets are the inputs, one byte later."""
    return text[starts[:, None] + np.arange(CONTEXT + 1)]


# --- One run. ---
class Steps(NamedTuple):
    """The functions of a recipe; each compiles at its first call, and serves every seed."""

    program: Program
    train_step: Callable[..., Any]
    evaluate: Callable[..., jax.Array]


def make_steps(recipe: Recipe, settings: Settings) -> Steps:
    """Return model, optimizer and training step of a recipe."""
    program = Program(recipe, CONFIG, settings.hyperparameters)
    train_step = jax.jit(program.train_step, donate_argnums=(0, 1), compiler_options=COMPILER_OPTIONS)
    return Steps(program, train_step, jax.jit(program.evaluate, compiler_options=COMPILER_OPTIONS))


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
    steps_of: Steps, seed: int, settings: Settings, training_text: np.ndarray, validation: jax.Array, progress: Progress
) -> report.Run:
    """Train from one seed."""
    program, train_step, evaluate = steps_of
    params, opt_state = program.init(seed)
    size = bytes_per_parameter(program.recipe, params, opt_state)
    batches = random_batches(training_text, seed=seed, count=settings.steps)
    evaluation_steps = {math.ceil(settings.steps * (point + 1) / EVALUATIONS) for point in range(EVALUATIONS)}
    losses, validation_losses = [], {}
    name, task = f"{program.recipe.name}, seed {seed}", progress.task_ids[-1]
    progress.update(task, description=f"{name}: compiling")
    for step, batch in enumerate(batches, start=1):
        params, opt_state, metrics = train_step(params, opt_state, batch[None])
        losses.append(metrics.loss)  # stays on the device until it is read
        if step in evaluation_steps:
            validation_losses[step] = float(evaluate(params, validation))
            progress.update(task, description=f"{name}: validation loss {validation_losses[step]:.3f}")
        progress.advance(task)
    progress.console.print(f"{name}: validation loss {validation_losses[settings.steps]:.4f}", markup=False)
    return report.Run(
        recipe=program.recipe.name,
        seed=seed,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        bytes_per_parameter=size,
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
    of_reference = max(settings.seeds, settings.recipe_seeds)  # a gap is to f32 of the same seed
    seeds_of = lambda recipe: of_reference if recipe.name == report.REFERENCE else settings.recipe_seeds
    plan = [(recipe, seeds_of(recipe)) for recipe in recipes]
    validation = jax.device_put(fixed_batches(held_out))
    progress.add_task("", total=sum(seeds for _, seeds in plan) * settings.steps)
    for recipe, seeds in plan:
        steps = make_steps(recipe, settings)
        for seed in range(seeds):
            yield train(steps, seed, settings, training_text, validation, progress)


# --- The command line. ---
def chosen_recipes(names: str) -> list[Recipe]:
    """Return the recipes of the option, in the order of the table.

    "all" leaves out `tf32` where there is no such format: it would be `f32` again.
    """
    if names == "all":
        return [recipe for recipe in RECIPES if recipe.name != "tf32" or jax.default_backend() != "cpu"]
    chosen = [get_recipe(name.strip()) for name in names.split(",")]
    return [recipe for recipe in RECIPES if recipe in chosen]


def main(**options: Any) -> None:
    """Train a small GPT under each recipe with the same data and initial weights, and compare the results."""
    console, settings = Console(), Settings(**options)
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
        chosen, hyperparameters = chosen_recipes(",".join(settings.recipes)), settings.hyperparameters
        text = read_text(settings.text)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    parts = data.split(np.frombuffer(text, np.uint8))
    source = {"name": data.name_of(settings.text), "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
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
        console.print(f"Stopped before the end; {len(runs)} runs had finished.")
    if runs:
        described = dataclasses.asdict(settings) | dataclasses.asdict(hyperparameters)
        described |= {"recipes": [recipe.name for recipe in chosen], "text": source}
        comparison = report.Comparison(runs)
        console.print(report.table(comparison))
        report.write_json(settings.out / "precision.json", comparison, described, interrupted=interrupted)
        pictures.write_pictures(settings.out, comparison)
        console.print(f"Written: precision.json, precision.png and curves.png in {settings.out}.", markup=False)
    if interrupted:
        raise typer.Exit(130)


# Typer reads the options off the signature: the fields of `Settings`, written once.
main.__signature__ = inspect.signature(Settings)
main.__annotations__ = dict(Settings.__annotations__)
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
