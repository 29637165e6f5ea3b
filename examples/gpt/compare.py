r"""Train one small byte-level GPT under several precision recipes, and compare the
results.

Everything but the recipe is equal: text, batches, initial weights, optimizer, schedule,
number of steps. Run it from the root of the repository:

    python -m examples.gpt.compare
    python -m examples.gpt.compare --recipes all
    python -m examples.gpt.compare --text my_folder --recipes f32,bf16-split \
        --steps 1000 --out results
    python -m examples.gpt.compare --preset gpt2-124m --batch-size 16 \
        --learning-rate 6e-4 --steps 1000

The first trains eleven times, in about four minutes on two cores with nothing else to
do; the second sixteen times. The last is for a GPU; a token is a byte there too, and
most of the vocabulary is never used. A gap is taken at seed 0 and compared with the
standard deviation of the validation loss over three f32 seeds. Without mpx an update
smaller than half the distance to the next bfloat16 is lost, and so are the finer parts
of the moments; every recipe of mpx ends where f32 ends.
"""

import math
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer
from typer import Option

import mpx
from examples.gpt import report
from examples.gpt.model import PRESETS, Config, get_preset
from examples.gpt.recipes import RECIPES, Recipe, get_recipe
from examples.gpt.text import pieces
from examples.gpt.training import Hyperparameters, Program

MAXIMUM_BYTES = 4_000_000  # the tiny model reads well below a million of them
MINIMUM_BYTES = 20_000  # of which a tenth holds a sequence of 1,024
# every tenth is held out; only the two ends of a block can share a line with the
# training part
BLOCKS = 100
PRESET = "tiny"  # 64 bytes of context: long enough to learn words and indentation
BATCH_SIZE = 8  # 512 bytes a step: on two cores more of them would mean fewer steps
VALIDATION_BATCHES = 16  # of that size, the same for every run
EVALUATIONS = 20  # points of the curves
# the training loss of a single batch says little; the table has the mean of the last
# ones
SMOOTHED_STEPS = 20
# By default XLA may leave out a rounding to 16 bits where the next operation widens the
# number again, and does so after bfloat16 products on a CPU. The comparison is of
# recipes as they are written.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
ALL_NAMES = [recipe.name for recipe in RECIPES]
DEFAULT_NAMES = (
    "f32,bf16-autocast,bf16-naive,bf16-masters,bf16-split,bf16-split-8bit,fp8,"
    "bf16-kahan,f16-scaled"
)


# --- The text. ---
def read_text(path: Path | None, maximum: int = MAXIMUM_BYTES) -> np.ndarray:
    """Read the first `maximum` bytes of a text."""
    content = bytearray()
    for piece, _ in pieces(path):
        content += piece
        if len(content) >= maximum:
            break
    if len(content) < MINIMUM_BYTES:
        raise ValueError(
            f"--text: it has {len(content):,} bytes, and at least {MINIMUM_BYTES:,} are"
            " needed."
        )
    return np.frombuffer(content[:maximum], np.uint8)


def split(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split a text in two: every tenth of `BLOCKS` blocks is held out."""
    blocks = np.array_split(text, BLOCKS)
    return np.concatenate(
        [block for i, block in enumerate(blocks) if i % 10 != 9]
    ), np.concatenate(blocks[9::10])


def random_batches(
    text: np.ndarray, shape: tuple[int, int], *, seed: int, count: int
) -> Iterator[np.ndarray]:
    """Yield `count` batches of a shape (B, T + 1)."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        starts = generator.integers(0, len(text) - shape[1] + 1, size=shape[0])
        yield windows(text, starts, shape[1])


def fixed_batches(text: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return evenly spaced sequences, the same at every call: (VALIDATION_BATCHES, B, T
    + 1).
    """
    count = VALIDATION_BATCHES * shape[0]
    starts = np.linspace(0, len(text) - shape[1], count).astype(np.int64)
    return windows(text, starts, shape[1]).reshape(VALIDATION_BATCHES, *shape)


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Return sequences (N, length): the targets are the inputs, one byte later."""
    return text[starts[:, None] + np.arange(length)]


# --- One run. ---
def bytes_per_parameter(
    recipe: Recipe, params: Any, opt_state: optax.OptState
) -> dict[str, float]:
    """Return the bytes held inside a jitted step, counted from the arrays.

    The gradient of a parameter has the narrower of the parameter's dtype and the
    compute dtype there; only gradients that leave a compiled program through
    `mpx.value_and_grad` are float32 arrays.
    """
    policy, count = recipe.policy, sum(leaf.size for leaf in jax.tree.leaves(params))

    def size(tree):
        return (
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
            / count
        )

    gradients = float(min(policy.param_dtype.itemsize, policy.compute_dtype.itemsize))
    return {
        "parameters": size(params),
        "gradients": gradients,
        "optimizer state": size(opt_state),
    }


def train_recipe(
    recipe: Recipe,
    seeds: Iterable[int],
    hyperparameters: Hyperparameters,
    text: np.ndarray,
    held_out: np.ndarray,
    tx: optax.GradientTransformation | None = None,
    *,
    config: Config = PRESETS[PRESET],
    batch_size: int = BATCH_SIZE,
) -> Iterator[report.Run]:
    """Train from seeds, which share their compiled functions, and yield the finished
    runs.

    `tx` takes the place of the recipe's optimizer.
    """
    program, steps = Program(recipe, config, hyperparameters), hyperparameters.steps
    program.tx = program.tx if tx is None else tx
    train_step = jax.jit(
        program.train_step, donate_argnums=(0, 1), compiler_options=COMPILER_OPTIONS
    )
    evaluate = jax.jit(program.evaluate, compiler_options=COMPILER_OPTIONS)
    shape = (batch_size, config.context + 1)
    validation = jax.device_put(fixed_batches(held_out, shape))
    evaluation_steps = {
        math.ceil(steps * (point + 1) / EVALUATIONS) for point in range(EVALUATIONS)
    }
    for seed in seeds:
        params, opt_state = program.init(seed)
        size = bytes_per_parameter(recipe, params, opt_state)
        losses, validation_losses = [], {}
        for step, batch in enumerate(
            random_batches(text, shape, seed=seed, count=steps), start=1
        ):
            params, opt_state, metrics = train_step(params, opt_state, batch[None])
            losses.append(metrics.loss)  # stays on the device until it is read
            if step in evaluation_steps:
                validation_losses[step] = float(evaluate(params, validation))
        yield report.Run(
            recipe=recipe.name,
            seed=seed,
            bytes_per_parameter=size,
            training_loss=statistics.fmean(map(float, losses[-SMOOTHED_STEPS:])),
            validation_steps=list(validation_losses),
            validation_losses=list(validation_losses.values()),
            skipped_steps=int(mpx.skipped_steps(opt_state)),
        )


# --- The command line. ---
def chosen_recipes(names: str) -> list[Recipe]:
    """Return the recipes of the option, f32 and at least another one, in the order of
    the table.

    "all" leaves out `tf32` where there is no such format: it would be `f32` again.
    """
    if names == "all":
        return [
            recipe
            for recipe in RECIPES
            if recipe.name != "tf32" or jax.default_backend() != "cpu"
        ]
    chosen = [
        get_recipe(name.strip()) for name in (report.REFERENCE, *names.split(","))
    ]
    if len(set(names.split(",")) - {report.REFERENCE}) == 0:
        raise ValueError(
            f"--recipes {names}: choose at least one recipe to compare with f32."
        )
    return [recipe for recipe in RECIPES if recipe in chosen]


def main(
    text: Annotated[
        Path | None,
        Option(help="File or folder to train on (4 MB); without it Python's library."),
    ] = None,
    recipes: Annotated[
        str, Option(help=f"all, or of {', '.join(ALL_NAMES)}; f32 runs anyway.")
    ] = DEFAULT_NAMES,
    steps: Annotated[int, Option(min=1, help="Training steps of a run.")] = 300,
    seeds: Annotated[
        int,
        Option(min=2, help="Seeds of f32, whose standard deviation is the yardstick."),
    ] = 3,
    recipe_seeds: Annotated[
        int, Option(min=1, help="Seeds of every other recipe.")
    ] = 1,
    learning_rate: Annotated[float, Option(help="Peak of the schedule.")] = 3e-4,
    preset: Annotated[
        str, Option(help=f"The model: one of {', '.join(PRESETS)}.")
    ] = PRESET,
    batch_size: Annotated[int, Option(min=1, help="Sequences of a step.")] = BATCH_SIZE,
    out: Annotated[
        Path, Option(help="Folder for precision.png, curves.png and precision.json.")
    ] = Path("comparison"),
) -> None:
    """Train a small GPT under each recipe with the same data and initial weights, and
    compare the results.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        chosen, config = chosen_recipes(recipes), get_preset(preset)
        hyperparameters = Hyperparameters(steps, learning_rate)
        parts = split(read_text(text))
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(
        f"{text or 'The standard library of Python'}: {len(parts[0]):,} bytes to train"
        f" on, {len(parts[1]):,} held out. {steps} steps of {batch_size} x"
        f" {config.context} bytes on {jax.devices()[0].device_kind}."
    )
    runs: list[report.Run] = []
    # A gap is to f32 of the same seed.
    counts = [
        max(seeds, recipe_seeds) if recipe.name == report.REFERENCE else recipe_seeds
        for recipe in chosen
    ]
    total, start = sum(counts), time.monotonic()
    for recipe, count in zip(chosen, counts, strict=True):
        finished = train_recipe(
            recipe,
            range(count),
            hyperparameters,
            *parts,
            config=config,
            batch_size=batch_size,
        )
        for seed in range(count):
            typer.echo(
                f"run {len(runs) + 1} of {total}: {recipe.name}, seed {seed}", nl=False
            )
            runs.append(next(finished))
            minutes = (time.monotonic() - start) / len(runs) * (total - len(runs)) / 60
            rest = f"; about {math.ceil(minutes)} min to go" if minutes else ""
            typer.echo(f": validation loss {runs[-1].validation_losses[-1]:.4f}{rest}")
    report.write(out, report.Comparison(runs))


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command()(main)

if __name__ == "__main__":
    app()
