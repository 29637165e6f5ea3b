"""Report a comparison of recipes: the finished runs, their distances from float32, the table, and `precision.json`."""

import dataclasses
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
from examples.gpt import output

REFERENCE = "f32"
SMOOTHED_STEPS = 20  # the training loss of a single batch says little; the table has the mean of the last ones


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished training run: the recipe's name, the seed, and what was measured.

    `bytes_per_parameter` counts parameters, optimizer state and gradients; `compile_seconds` is the first step;
    `seconds_per_step` the median of the others (None without others). There is a
    training loss for each step, before its update. Validation losses come after `validation_steps`, from the parameters
    as stored.
    """

    recipe: str
    seed: int
    parameters: int
    bytes_per_parameter: Mapping[str, float]
    compile_seconds: float
    seconds_per_step: float | None
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

    def deviation(self) -> float | None:
        """Return the standard deviation over seeds of the last f32 loss; None without two finite losses."""
        losses = [run.validation_loss for run in self.reference_runs()]
        return statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else None

    def gaps(self, run: Run) -> list[float] | None:
        """Return the distances of the validation losses from f32's with the same seed; None if there is no such run."""
        for other in self.reference_runs():
            if other.seed == run.seed:
                return [a - b for a, b in zip(run.validation_losses, other.validation_losses, strict=True)]
        return None

    def gap(self, run: Run) -> float | None:
        """Return the last of the gaps."""
        gaps = self.gaps(run)
        return gaps[-1] if gaps else None

    def gap_in_deviations(self, run: Run) -> float | None:
        """Return the gap divided by the standard deviation over seeds."""
        gap, deviation = self.gap(run), self.deviation()
        return None if gap is None or not deviation else gap / deviation

    def mean_over_seeds(self, recipe: str, value: Callable[[Run], float | None]) -> float | None:
        """Return the mean of a value over the seeds that all recipes have; None if one of the values is."""
        seeds_of = lambda name: {run.seed for run in self.runs if run.recipe == name}
        shared = set.intersection(*(seeds_of(run.recipe) for run in self.runs))
        values = [value(run) for run in self.runs if run.recipe == recipe and run.seed in shared]
        return None if None in values else statistics.fmean(values)


# The columns of losses in the table: the measurement, its format, and whether f32 has it.
COLUMNS = {
    "train": (lambda comparison, run: run.training_loss, ".4f", True),
    "valid": (lambda comparison, run: run.validation_loss, ".4f", True),
    "gap": (Comparison.gap, "+.4f", False),
    "gap/SD": (Comparison.gap_in_deviations, "+.2f", False),
    "skips": (lambda comparison, run: run.skipped_steps, ".3g", True),
}


def table(comparison: Comparison) -> Table:
    """Return a table with one row a recipe, the mean over the seeds that all have."""
    result = Table(box=box.SIMPLE_HEAD, padding=0, caption_justify="left", caption_style="")
    result.add_column("recipe")
    for heading in ("bytes", "param", "grad", "state", *COLUMNS):
        result.add_column(heading, justify="right", no_wrap=True)
    for run in comparison.first_runs():
        size = run.bytes_per_parameter
        row = [run.recipe, f"{sum(size.values()):.1f}", *(f"{value:.1f}" for value in size.values())]
        for measured, form, of_reference in COLUMNS.values():
            mean = comparison.mean_over_seeds(run.recipe, lambda run, of=measured: of(comparison, run))
            is_known = mean is not None and (of_reference or run.recipe != REFERENCE)
            row.append(format(mean, form) if is_known else "-")
        result.add_row(*row)
    result.caption = caption(comparison)
    return result


def caption(comparison: Comparison) -> str:
    """Explain the columns of the table in words."""
    seeds, deviation = len(comparison.reference_runs()), comparison.deviation()
    if not seeds:
        known = "unknown: no f32 run has finished."
    elif deviation is None:
        known = "unknown: it takes f32 runs of two seeds or more that end with a finite loss."
    else:
        known = (
            f"the gap divided by {deviation:.4f}, the standard deviation of the final validation loss over {seeds} f32 "
            "runs, each with its own initial weights and order of batches."
        )
    return (
        "bytes: held for each parameter inside one jitted step, the sum of param, grad and state (of the optimizer). "
        f"train, valid: loss in nats per byte; train is the mean of the last {SMOOTHED_STEPS} steps. gap: validation "
        "loss minus f32's from the same seed, with the same batches and initial weights. All are means over the seeds "
        f"that every recipe has. gap/SD: {known}"
    )


def write_json(path: Path, comparison: Comparison, settings: Mapping[str, Any], *, interrupted: bool) -> None:
    """Write the contents of the table and the pictures, and what is needed to repeat them."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    content = {
        "settings": settings,
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
        "deviation": comparison.deviation(),
        "runs": [
            dataclasses.asdict(run)
            | {"training_loss": run.training_loss, "validation_loss": run.validation_loss}
            | {"gap": comparison.gap(run), "gap_in_deviations": comparison.gap_in_deviations(run)}
            for run in comparison.runs
        ],
    }
    path.write_text(output.dumps(content, indent=1) + "\n", encoding="utf-8")
