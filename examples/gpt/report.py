"""Report a comparison of recipes: the finished runs, their distances from float32, the table, and `precision.json`."""

import dataclasses
import functools
import importlib.metadata
import math
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
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished training run."""

    recipe: str
    seed: int
    parameters: int
    bytes_per_parameter: Mapping[str, float]  # of parameters, gradients and optimizer state
    training_losses: Sequence[float]  # of each step, before its update
    validation_steps: Sequence[int]
    validation_losses: Sequence[float]  # after these steps, of the parameters as stored
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

    def mean_over_seeds(self, recipe: str, value: Callable[[Run], float | None]) -> float | None:
        """Return the mean of a value over the seeds that all recipes have; None if one of the values is."""
        seeds_of = lambda name: {run.seed for run in self.runs if run.recipe == name}
        shared = set.intersection(*(seeds_of(run.recipe) for run in self.runs))
        values = [value(run) for run in self.runs if run.recipe == recipe and run.seed in shared]
        return None if None in values else statistics.fmean(values)


def table(comparison: Comparison) -> Table:
    """Return a table with one row a recipe, the mean over the seeds that all have."""
    result = Table(box=box.SIMPLE_HEAD, padding=0, caption_justify="left", caption_style="")
    result.add_column("recipe")
    for heading in ("bytes", "param", "grad", "state", "train", "valid", "gap", "gap/SD", "skips"):
        result.add_column(heading, justify="right", no_wrap=True)
    deviation = comparison.deviation()
    for run in comparison.first_runs():
        size, mean = run.bytes_per_parameter, functools.partial(comparison.mean_over_seeds, run.recipe)
        gap = None if run.recipe == REFERENCE else mean(comparison.gap)
        measured = [
            (mean(lambda run: run.training_loss), ".4f"),
            (mean(lambda run: run.validation_loss), ".4f"),
            (gap, "+.4f"),
            (gap / deviation if gap is not None and deviation else None, "+.2f"),
            (mean(lambda run: run.skipped_steps), ".3g"),
        ]
        row = [run.recipe, f"{sum(size.values()):.1f}", *(f"{value:.1f}" for value in size.values())]
        result.add_row(*row, *("-" if value is None else format(value, form) for value, form in measured))
    result.caption = caption(comparison)
    return result


def caption(comparison: Comparison) -> str:
    """Explain the columns of the table in words."""
    seeds, deviation = len(comparison.reference_runs()), comparison.deviation()
    known = "unknown: it takes f32 runs of two seeds or more that end with a finite loss."
    if deviation is not None:
        known = f"the gap divided by {deviation:.4f}, the standard deviation of that loss over {seeds} f32 runs."
    return (
        "bytes: held for each parameter inside one jitted step, the sum of param, grad and state (of the optimizer). "
        f"train, valid: loss in nats per byte; train is the mean of the last {SMOOTHED_STEPS} steps. gap: validation "
        "loss minus f32's from the same seed, with the same batches and initial weights. All are means over the seeds "
        f"that every recipe has. gap/SD: {known}"
    )


def write_json(path: Path, comparison: Comparison, settings: Mapping[str, Any], *, interrupted: bool) -> None:
    """Write the contents of the table and the pictures, and what is needed to repeat them."""
    content = {
        "settings": settings,
        "versions": {"python": platform.python_version(), "mpx": mpx.__version__}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "device": jax.devices()[0].device_kind,
        "interrupted": interrupted,
        "caption": caption(comparison),
        "deviation": comparison.deviation(),
        "runs": [dataclasses.asdict(run) | {"gap": comparison.gap(run)} for run in comparison.runs],
    }
    path.write_text(output.dumps(content, indent=1) + "\n", encoding="utf-8")
