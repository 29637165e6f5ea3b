"""Report a comparison of recipes: the finished runs, their distances from float32, a
table and two pictures.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")  # only files are written: no display is needed
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import mpx.plot

REFERENCE = "f32"
# Chosen for a telephone: where the picture is 390 pixels wide, letters of 10.5 points
# are 10 pixels high.
WIDTH, TEXT = 5.6, 10.5  # inches, points
LINE, MARGIN = 0.24, 1.35  # inches: of a row, and of titles and axis
# A card that is legible on a white page and on a dark one.
CARD, INK, GREY = (
    "#FBFBF9",
    "#222222",
    "#6B6B6B",
)
NEAR, FAR = "#0072B2", "#D55E00"
# Of Optax alone that end where float32 does.
BASELINES = (
    REFERENCE,
    "tf32",
    "bf16-autocast",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished training run."""

    recipe: str
    seed: int
    # Of parameters, gradients and optimizer state.
    bytes_per_parameter: Mapping[str, float]
    training_loss: float  # mean over the last steps
    validation_steps: Sequence[int]
    validation_losses: Sequence[float]  # after these steps, of the parameters as stored
    skipped_steps: int


class Comparison:
    """The finished runs, and their distances from f32, which has run from two seeds at
    least.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.by_recipe: dict[str, list[Run]] = {}
        for run in runs:
            self.by_recipe.setdefault(run.recipe, []).append(run)
        self.references = self.by_recipe[REFERENCE]
        self.deviation = statistics.stdev(
            run.validation_losses[-1] for run in self.references
        )

    def gaps(self, run: Run) -> list[float]:
        """Return the distances of the validation losses from f32's with the same
        seed.
        """
        losses = self.references[run.seed].validation_losses
        return [a - b for a, b in zip(run.validation_losses, losses, strict=True)]

    def mean(self, recipe: str, value: Callable[[Run], float]) -> float:
        """Return the mean of a value over the seeds that all recipes have."""
        shared = min(map(len, self.by_recipe.values()))
        return statistics.fmean(value(run) for run in self.by_recipe[recipe][:shared])

    def gap(self, recipe: str) -> float:
        """Return the mean of the last of the gaps."""
        return self.mean(recipe, lambda run: self.gaps(run)[-1])


def table(comparison: Comparison) -> Table:
    """Return a table with one row a recipe, the mean over the seeds that all have."""
    result = Table(
        box=box.SIMPLE_HEAD, padding=0, caption_justify="left", caption_style=""
    )
    result.add_column("recipe")
    for heading in (
        "bytes",
        "param",
        "grad",
        "state",
        "train",
        "valid",
        "gap",
        "gap/SD",
        "skips",
    ):
        result.add_column(heading, justify="right", no_wrap=True)
    for recipe, (first, *_) in comparison.by_recipe.items():
        size, mean, gap = (
            first.bytes_per_parameter.values(),
            comparison.mean,
            comparison.gap(recipe),
        )
        result.add_row(
            recipe,
            *(f"{value:.1f}" for value in (sum(size), *size)),
            f"{mean(recipe, lambda run: run.training_loss):.4f}",
            f"{mean(recipe, lambda run: run.validation_losses[-1]):.4f}",
            *(
                ("-", "-")
                if recipe == REFERENCE
                else (f"{gap:+.4f}", f"{gap / comparison.deviation:+.2f}")
            ),
            f"{mean(recipe, lambda run: run.skipped_steps):.3g}",
        )
    result.caption = (
        "bytes: held for each parameter inside one jitted step, the sum of param, grad"
        " and state (of the optimizer). train, valid: loss in nats per byte. gap:"
        " validation loss minus f32's from the same seed, with the same batches and"
        f" initial weights. gap/SD: the gap divided by {comparison.deviation:.4f}, the"
        f" standard deviation of that loss over {len(comparison.references)} f32 runs."
    )
    return result


def write(folder: Path, comparison: Comparison) -> None:
    """Print the table, and write `precision.json`, `precision.png` and `curves.png`."""
    Console().print(table(comparison))
    runs = [
        dataclasses.asdict(run)
        for runs in comparison.by_recipe.values()
        for run in runs
    ]
    (folder / "precision.json").write_text(
        json.dumps(runs, indent=1) + "\n", encoding="utf-8"
    )
    for figure, name in (
        (draw_precision(comparison), "precision.png"),
        (draw_curves(comparison), "curves.png"),
    ):
        figure.savefig(folder / name, dpi=200)
        plt.close(figure)
    typer.echo(f"Written: precision.json, precision.png and curves.png in {folder}.")


# --- The pictures. ---
def draw_precision(comparison: Comparison) -> Figure:
    """Draw a row a recipe: a bar of the bytes a parameter that it takes, and a dot
    where it ends beside float32.
    """
    deviation = comparison.deviation
    gaps = {recipe: comparison.gap(recipe) for recipe in comparison.by_recipe}
    sizes = {
        recipe: sum(runs[0].bytes_per_parameter.values())
        for recipe, runs in comparison.by_recipe.items()
    }
    finite = [recipe for recipe, gap in gaps.items() if math.isfinite(gap)]
    # But for counts, many sizes are equal.
    rows = sorted(finite, key=lambda recipe: -round(sizes[recipe], 2))
    top = max([4 * deviation, 1e-4, *(abs(gaps[recipe]) for recipe in rows)])
    far = max(3 * deviation, top / 5)
    colors = [
        GREY if recipe in BASELINES else FAR if gaps[recipe] > far else NEAR
        for recipe in rows
    ]
    figure, (bars, dots) = plt.subplots(
        1, 2, sharey=True, figsize=(WIDTH, MARGIN + LINE * len(rows))
    )
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    figure.patch.set_alpha(0)
    card = FancyBboxPatch(
        (0, 0),
        1,
        1,
        boxstyle="round,pad=0,rounding_size=0.03",
        transform=figure.transFigure,
    )
    card.set(facecolor=CARD, edgecolor="none", zorder=-1)
    figure.add_artist(card)
    figure.suptitle(
        "What a recipe holds, and where training ends",
        fontsize=TEXT + 2,
        color=INK,
        x=0.02,
        ha="left",
    )
    for axes, title in (bars, "bytes a parameter"), (dots, "loss above float32"):
        axes.set_title(title, fontsize=TEXT, color=INK)
        axes.spines[:].set_visible(False)
        axes.tick_params(labelsize=TEXT, colors=INK, length=0)
        axes.set_facecolor("none")
    lengths = bars.barh(
        rows, [sizes[recipe] for recipe in rows], height=0.6, color=colors
    )
    bars.bar_label(
        lengths,
        [f"{sizes[recipe]:.3g}" for recipe in rows],
        padding=4,
        fontsize=TEXT,
        color=INK,
    )
    bars.set(xlim=(0, 20), xticks=[])
    bars.set_xlabel(
        "weights, gradients, state;\ngrey, orange: Optax alone",
        fontsize=TEXT - 1,
        color=GREY,
    )
    bars.invert_yaxis()
    dots.axvspan(-deviation, deviation, color="#000000", alpha=0.16, linewidth=0)
    dots.scatter(
        [gaps[recipe] for recipe in rows],
        rows,
        s=60,
        color=colors,
        edgecolor=CARD,
        zorder=3,
    )
    low = -max([0.1 * top, 1.3 * deviation, *(-1.3 * gaps[recipe] for recipe in rows)])
    dots.set(xlim=(low, 1.1 * top))
    dots.locator_params(axis="x", nbins=4)
    dots.set_xticks([tick for tick in dots.get_xticks() if low <= tick <= 1.1 * top])
    seeds = (
        "nats per byte; band: ± standard\ndeviation of"
        f" {len(comparison.references)} float32 seeds"
    )
    dots.set_xlabel(seeds, fontsize=TEXT - 1, color=GREY)
    for recipe in rows:
        if gaps[recipe] > far:
            beside = {
                "xytext": (-8, 0),
                "textcoords": "offset points",
                "ha": "right",
                "va": "center",
            }
            look = {"color": FAR, "fontsize": TEXT, "weight": "bold"}
            dots.annotate(
                f"{gaps[recipe]:+.3f}", (gaps[recipe], recipe), **beside, **look
            )
    return figure


def draw_curves(comparison: Comparison) -> Figure:
    """Draw loss curves, with the seeds of f32 as a band, and below them the gaps to f32
    of the same seed.
    """
    with mpx.plot.style():
        figure, (losses, gaps) = plt.subplots(2, 1, figsize=(6.4, 8))
    references, deviation = comparison.references, comparison.deviation
    steps, seeds = (
        references[0].validation_steps,
        np.array([run.validation_losses for run in references]),
    )
    mean, of_step = seeds.mean(axis=0), seeds.std(axis=0, ddof=1)
    losses.fill_between(
        steps,
        mean - of_step,
        mean + of_step,
        color=GREY,
        alpha=0.3,
        linewidth=0,
        label="f32, ± standard deviation",
    )
    losses.plot(
        steps,
        mean,
        color=GREY,
        linestyle="-",
        linewidth=3,
        label=f"f32, mean of {len(seeds)} seeds",
    )
    for recipe, (first, *_) in comparison.by_recipe.items():
        if recipe != REFERENCE:
            # With a gap where they are infinite or NaN.
            losses.plot(steps, first.validation_losses, label=recipe)
            gaps.plot(steps, comparison.gaps(first))  # in the same color
    losses.set_title("Validation loss of the parameters as stored (nats per byte)")
    losses.set(xlabel="step", ylabel="loss")
    figure.legend(loc="outside lower center", ncols=2)
    # Logarithmic beyond a standard deviation, or all gaps but the largest would be one
    # line.
    gaps.set_yscale("symlog", linthresh=deviation or 0.01, linscale=1.5)
    gaps.axhspan(-deviation, deviation, color=GREY, alpha=0.3, linewidth=0)
    gaps.set(xlabel="step", ylabel="gap")
    gaps.set_title("Gap to f32 of the same seed")
    return figure
