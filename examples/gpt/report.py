"""What a comparison leaves behind: the table, `precision.png` and `precision.json`."""

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
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter
from rich import box
from rich.table import Table

import mpx
from examples.gpt import output
from examples.gpt.recipes import RECIPES

REFERENCE = "f32"
LABELS = {recipe.name: recipe.label for recipe in RECIPES}
# Okabe and Ito's colours, which colour-blind readers can tell apart; and a line style each, since curves that agree
# lie on top of each other.
STYLES: dict[str, dict[str, Any]] = {
    "f32": {"color": "#000000", "linewidth": 3.5, "alpha": 0.35},
    "tf32": {"color": "#000000", "linewidth": 1.6, "linestyle": (0, (1, 1))},
    "bf16-autocast": {"color": "#117733", "linewidth": 1.6, "linestyle": (0, (7, 1.5, 3, 1.5))},
    "bf16-naive": {"color": "#D55E00", "linewidth": 2.0},
    "bf16-cast": {"color": "#661100", "linewidth": 1.6, "linestyle": (0, (8, 2, 2, 2))},
    "bf16-masters": {"color": "#0072B2", "linewidth": 1.6},
    "bf16-split": {"color": "#56B4E9", "linewidth": 1.6, "linestyle": (0, (5, 2))},
    "bf16-split-8bit": {"color": "#882255", "linewidth": 1.6, "linestyle": (0, (6, 1.5, 1, 1.5, 1, 1.5))},
    "bf16-kahan": {"color": "#009E73", "linewidth": 1.6, "linestyle": (0, (3, 1.5))},
    "bf16-stochastic": {"color": "#CC79A7", "linewidth": 1.6, "linestyle": (0, (1.2, 1.2))},
    "bf16-any-precision": {"color": "#999933", "linewidth": 1.6, "linestyle": (0, (1.2, 2.4))},
    "f16-scaled": {"color": "#E69F00", "linewidth": 1.6, "linestyle": (0, (4, 1.5, 1, 1.5))},
}
SMOOTHED_STEPS = 20  # the training loss of a single batch says little; the table has the mean over the last ones


@dataclasses.dataclass(frozen=True)
class Run:
    """One recipe, trained to the end from one seed.

    Attributes:
        recipe: its name.
        seed: of the initial weights and of the order of the data.
        parameters: how many the model has.
        bytes_per_parameter: of "parameters", "optimizer state" and "gradients".
        compile_seconds: the first step, which compiles.
        seconds_per_step: the median after the first step; None if there was no second one.
        tokens_per_second: at that speed.
        training_losses: of every step, before its update.
        validation_steps: after how many steps the validation loss was taken.
        validation_losses: of the parameters as they are stored.
        skipped_steps: because of gradients that were not finite.
        loss_scale: at the end.
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
        """Mean over the last steps."""
        return statistics.fmean(self.training_losses[-SMOOTHED_STEPS:])

    @property
    def validation_loss(self) -> float:
        """At the end."""
        return self.validation_losses[-1]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The finished runs, and how far each recipe ends from f32."""

    runs: Sequence[Run]

    def first_runs(self) -> list[Run]:
        """Those of seed 0, which all recipes share."""
        return [run for run in self.runs if run.seed == 0]

    def reference_runs(self) -> list[Run]:
        """Those of f32, one a seed."""
        return [run for run in self.runs if run.recipe == REFERENCE]

    def spread(self, index: int = -1) -> float | None:
        """Standard deviation over seeds of the f32 validation loss; None if there are not two seeds to compare."""
        losses = [run.validation_losses[index] for run in self.reference_runs()]
        return statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else None

    def gap(self, run: Run, index: int = -1) -> float | None:
        """Validation loss minus that of f32 with the same seed; None if there is no such run."""
        same_seed = [other for other in self.reference_runs() if other.seed == run.seed]
        return run.validation_losses[index] - same_seed[0].validation_losses[index] if same_seed else None

    def gap_in_spreads(self, run: Run) -> float | None:
        """The gap in units of the spread."""
        gap, spread = self.gap(run), self.spread()
        return None if gap is None or not spread else gap / spread

    def mean_over_seeds(self, recipe: str, value: Callable[[Run], float | None]) -> float | None:
        """The mean of a value over the seeds that all recipes share; None if one of the values is."""
        seeds_of = lambda name: {run.seed for run in self.runs if run.recipe == name}
        shared = set.intersection(*(seeds_of(run.recipe) for run in self.runs))
        values = [value(run) for run in self.runs if run.recipe == recipe and run.seed in shared]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if len(known) == len(values) else None


def table(comparison: Comparison) -> Table:
    """One row a recipe, the mean over the seeds that all have."""
    result = Table(box=box.SIMPLE_HEAD, padding=0, caption_justify="left", caption_style="")
    result.add_column("recipe", vertical="bottom")
    headings = ("param", "state", "grad", "ms/\nstep", "tokens\n/s", "train", "valid", "gap", "gap/\nspread", "skips")
    for heading in headings:
        result.add_column(heading, justify="right", no_wrap=True)
    for run in comparison.first_runs():
        mean = functools.partial(comparison.mean_over_seeds, run.recipe)
        is_reference = run.recipe == REFERENCE
        result.add_row(
            LABELS[run.recipe],
            *(_number(value, ".1f") for value in run.bytes_per_parameter.values()),
            _number(mean(lambda run: run.seconds_per_step and run.seconds_per_step * 1000), ".1f"),
            _number(mean(lambda run: run.tokens_per_second), ",.0f"),
            _number(mean(lambda run: run.training_loss), ".4f"),
            _number(mean(lambda run: run.validation_loss), ".4f"),
            _number(None if is_reference else mean(comparison.gap), "+.4f"),
            _number(None if is_reference else mean(comparison.gap_in_spreads), "+.2f"),
            _number(mean(lambda run: run.skipped_steps), ".3g"),
        )
    result.caption = caption(comparison)
    return result


def caption(comparison: Comparison) -> str:
    """What a gap and a spread are, in words."""
    seeds = len(comparison.reference_runs())
    text = (
        "param, state, grad: bytes per parameter of parameters, optimizer state and gradients. train, valid: loss in "
        f"nats per byte; train is the mean of the last {SMOOTHED_STEPS} steps. gap: validation loss minus that of f32 "
        "from the same seed, which means the same batches and the same initial weights (rounded to 16 bits where "
        "parameters are stored so). All are means over the seeds that every recipe has. gap/spread: "
    )
    spread = comparison.spread()
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
    """Everything that the table and the plot show, and what is needed to repeat them."""
    content = {
        "settings": settings,
        "text": text,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
        | {"mpx": mpx.__version__},
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
            | {
                "label": LABELS[run.recipe],
                "training_loss": run.training_loss,
                "validation_loss": run.validation_loss,
                "gap": comparison.gap(run),
                "gap_in_spreads": comparison.gap_in_spreads(run),
            }
            for run in comparison.runs
        ],
    }
    path.write_text(output.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_plot(path: Path, comparison: Comparison) -> None:
    """Loss curves on the left, gaps to f32 on the right."""
    figure, (losses, gaps) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    _plot_losses(losses, comparison)
    _plot_gaps(gaps, comparison)
    for axes in (losses, gaps):
        axes.set_xlabel("training step")
        output.tidy(axes)
    handles: dict[str, Any] = {}
    for axes in (losses, gaps):
        handles |= {line.get_label(): line for line in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    output.save_plot(figure, path)


def _plot_losses(axes: Axes, comparison: Comparison) -> None:
    for run in comparison.first_runs():
        style = STYLES[run.recipe]
        axes.plot(run.validation_steps, run.validation_losses, label=LABELS[run.recipe], **style)
    for run in comparison.reference_runs():
        if run.seed != 0:
            label = "f32, other seeds"
            axes.plot(
                run.validation_steps, run.validation_losses, color="#000000", alpha=0.35, linewidth=0.8, label=label
            )
    axes.set_title("Validation loss of the parameters as stored", loc="left")
    axes.set_ylabel("cross-entropy (nats per byte)")


def _plot_gaps(axes: Axes, comparison: Comparison) -> None:
    axes.set_title("Gap to f32 of the same seed", loc="left")
    axes.set_ylabel("validation loss minus that of f32 (nats per byte)")
    reference = [run for run in comparison.first_runs() if run.recipe == REFERENCE]
    if not reference:
        axes.text(0.5, 0.5, "no f32 run to compare with", ha="center", va="center", transform=axes.transAxes)
        return
    steps = reference[0].validation_steps
    spreads = [comparison.spread(index) for index in range(len(steps))]
    if None not in spreads:
        band = {"color": "#000000", "alpha": 0.12, "linewidth": 0}
        label = "± f32 seed-to-seed standard deviation"
        axes.fill_between(steps, [-s for s in spreads], spreads, label=label, **band)
    axes.axhline(0, **STYLES[REFERENCE])
    for run in comparison.first_runs():
        if run.recipe != REFERENCE:
            differences = [comparison.gap(run, index) for index in range(len(steps))]
            axes.plot(steps, differences, label=LABELS[run.recipe], **STYLES[run.recipe])
    axes.set_title("linear within the final spread, log beyond", loc="right", fontsize="small", color="#555555")
    # Linear within a spread, logarithmic beyond it, or all gaps but the largest would be one line.
    axes.set_yscale("symlog", linthresh=comparison.spread() or 0.01, linscale=1.5)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
