"""Report a comparison of recipes: the table, `precision.png` and `precision.json`."""

import dataclasses
import functools
import importlib.metadata
import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.table import Table

import mpx
import mpx.plot
from examples.gpt import output
from examples.gpt.output import plt
from examples.gpt.recipes import RECIPES

REFERENCE = "f32"
LABELS = {recipe.name: recipe.label for recipe in RECIPES}
SMOOTHED_STEPS = 20  # the training loss of a single batch says little; the table has the mean of the last ones


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished training run: the recipe's name, the seed, and what was measured.

    `bytes_per_parameter` counts parameters, optimizer state and gradients; `compile_seconds` is the first step;
    `seconds_per_step` the median of the others (None without others). Training losses are those of every step, before
    its update; validation losses those of the parameters as stored, after `validation_steps`.
    """

    recipe: str
    seed: int
    parameters: int
    bytes_per_parameter: Mapping[str, float]
    compile_seconds: float
    seconds_per_step: float | None
    tokens_per_second: float | None
    training_losses: Sequence[float]
    validation_steps: Sequence[int]
    validation_losses: Sequence[float]
    skipped_steps: int
    loss_scale: float

    @property
    def training_loss(self) -> float:
        """Return the mean over the last steps."""
        return statistics.fmean(self.training_losses[-SMOOTHED_STEPS:])

    @property
    def validation_loss(self) -> float:
        """Return the last validation loss."""
        return self.validation_losses[-1]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The finished runs, and their distances from f32."""

    runs: Sequence[Run]

    def first_runs(self) -> list[Run]:
        """Return the runs of seed 0, which all recipes have."""
        return [run for run in self.runs if run.seed == 0]

    def reference_runs(self) -> list[Run]:
        """Return the runs of f32, one a seed."""
        return [run for run in self.runs if run.recipe == REFERENCE]

    def spread(self) -> float | None:
        """Return the standard deviation of the last f32 validation loss over seeds; None without two finite losses."""
        losses = [run.validation_loss for run in self.reference_runs()]
        return statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else None

    def gaps(self, run: Run) -> list[float] | None:
        """Return the validation losses minus those of f32 with the same seed; None if there is no such run."""
        for other in self.reference_runs():
            if other.seed == run.seed:
                return [a - b for a, b in zip(run.validation_losses, other.validation_losses, strict=True)]
        return None

    def gap(self, run: Run) -> float | None:
        """Return the last of the gaps."""
        gaps = self.gaps(run)
        return gaps[-1] if gaps else None

    def gap_in_spreads(self, run: Run) -> float | None:
        """Return the gap in units of the spread."""
        gap, spread = self.gap(run), self.spread()
        return None if gap is None or not spread else gap / spread

    def mean_over_seeds(self, recipe: str, value: Callable[[Run], float | None]) -> float | None:
        """Return the mean of a value over the seeds that all recipes have; None if one of the values is."""
        seeds_of = lambda name: {run.seed for run in self.runs if run.recipe == name}
        shared = set.intersection(*(seeds_of(run.recipe) for run in self.runs))
        values = [value(run) for run in self.runs if run.recipe == recipe and run.seed in shared]
        return None if None in values else statistics.fmean(values)


def table(comparison: Comparison) -> Table:
    """Return a table with one row a recipe, the mean over the seeds that all have."""
    result = Table(box=box.SIMPLE_HEAD, padding=0, caption_justify="left", caption_style="")
    result.add_column("recipe", vertical="bottom")
    headings = ("param", "state", "grad", "ms/\nstep", "tokens\n/s", "train", "valid", "gap", "gap/\nspread", "skips")
    for heading in headings:
        result.add_column(heading, justify="right", no_wrap=True)
    number = lambda value, form: "-" if value is None else format(value, form)
    for run in comparison.first_runs():
        mean = functools.partial(comparison.mean_over_seeds, run.recipe)
        is_reference = run.recipe == REFERENCE
        result.add_row(
            LABELS[run.recipe],
            *(number(value, ".1f") for value in run.bytes_per_parameter.values()),
            number(mean(lambda run: run.seconds_per_step and run.seconds_per_step * 1000), ".1f"),
            number(mean(lambda run: run.tokens_per_second), ",.0f"),
            number(mean(lambda run: run.training_loss), ".4f"),
            number(mean(lambda run: run.validation_loss), ".4f"),
            number(None if is_reference else mean(comparison.gap), "+.4f"),
            number(None if is_reference else mean(comparison.gap_in_spreads), "+.2f"),
            number(mean(lambda run: run.skipped_steps), ".3g"),
        )
    result.caption = caption(comparison)
    return result


def caption(comparison: Comparison) -> str:
    """Explain the columns of the table in words."""
    text = (
        "param, state, grad: bytes per parameter of parameters, optimizer state and gradients. train, valid: loss in "
        f"nats per byte; train is the mean of the last {SMOOTHED_STEPS} steps. gap: validation loss minus that of f32 "
        "from the same seed, which means the same batches and the same initial weights (rounded to 16 bits where "
        "parameters are stored so). All are means over the seeds that every recipe has. gap/spread: "
    )
    seeds, spread = len(comparison.reference_runs()), comparison.spread()
    if seeds == 0:
        return text + "no f32 run has finished, so there are no gaps."
    if spread is None:
        return text + "not known, since it takes f32 runs of two seeds or more that end with a finite loss."
    return text + (
        f"the gap divided by the f32 seed-to-seed spread, {spread:.4f}: the standard deviation of the final validation "
        f"loss over {seeds} f32 runs, each with its own initial weights and order of batches. An estimate from {seeds} "
        "seeds is rough."
    )


def write_json(
    path: Path, comparison: Comparison, settings: Mapping[str, Any], text: Mapping[str, Any], *, interrupted: bool
) -> None:
    """Write the contents of the table and the plot, and what is needed to repeat them."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    content = {
        "settings": settings,
        "text": text,
        "versions": {"python": platform.python_version(), "mpx": mpx.__version__}
        | {name: importlib.metadata.version(name) for name in packages},
        "device": {
            "platform": jax.devices()[0].platform,
            "kind": jax.devices()[0].device_kind,
            "machine": platform.machine(),
            "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "interrupted": interrupted,
        "caption": caption(comparison),
        "spread": comparison.spread(),
        "runs": [
            dataclasses.asdict(run)
            | {"label": LABELS[run.recipe], "training_loss": run.training_loss, "validation_loss": run.validation_loss}
            | {"gap": comparison.gap(run), "gap_in_spreads": comparison.gap_in_spreads(run)}
            for run in comparison.runs
        ],
    }
    path.write_text(output.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_plot(path: Path, comparison: Comparison) -> None:
    """Plot loss curves, with the spread of f32 as a band, and below them the gaps to f32 of the same seed."""
    first, references = comparison.first_runs(), comparison.reference_runs()
    figure, (losses, gaps) = plt.subplots(2, 1, figsize=(10, 9), layout="constrained")
    steps = first[0].validation_steps
    seeds = [run.validation_losses for run in references] if len(references) > 1 else None
    curves = {LABELS[run.recipe]: run.validation_losses for run in first if not (seeds and run in references)}
    mpx.plot.losses(curves or {"f32, seed 0": seeds[0]}, steps=steps, reference=seeds, axes=losses)
    losses.set_title("Validation loss of the parameters as stored (nats per byte)", loc="left")
    others = {LABELS[run.recipe]: comparison.gaps(run) for run in first if run not in references}
    if references and others:
        mpx.plot.losses(others, steps=steps, axes=gaps)
        gaps.set_ylabel("gap")
        # Logarithmic beyond a spread, or all gaps but the largest would be one line.
        gaps.set_yscale("symlog", linthresh=comparison.spread() or 0.01, linscale=1.5)
        gaps.axhspan(-(comparison.spread() or 0), comparison.spread() or 0, color="#000000", alpha=0.12, linewidth=0)
    gaps.set_title("Gap to f32 of the same seed", loc="left")
    output.save_plot(figure, path)
