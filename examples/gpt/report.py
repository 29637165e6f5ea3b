"""Report a comparison of recipes: the finished runs, their distances from float32, a table and two pictures."""

import dataclasses
import functools
import json
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
# Chosen for a telephone: where the picture is 390 pixels wide, letters of 10.5 points are 10 pixels high.
WIDTH, TEXT = 5.6, 10.5  # inches, points
ABOVE, LINE, MARGIN = 1.8, 0.175, 1.1  # inches: above the floor, of a line of labels, and of title and axis
CARD, INK, GREY = "#FBFBF9", "#222222", "#6B6B6B"  # a card that is legible on a white page and on a dark one
NEAR, FAR = "#0072B2", "#D55E00"
LETTERS = 12  # of a line, so that labels of neighbors do not touch


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished training run."""

    recipe: str
    seed: int
    bytes_per_parameter: Mapping[str, float]  # of parameters, gradients and optimizer state
    training_loss: float  # mean over the last steps
    validation_steps: Sequence[int]
    validation_losses: Sequence[float]  # after these steps, of the parameters as stored
    skipped_steps: int


class Comparison:
    """The finished runs, and their distances from f32, which has run from two seeds at least."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.by_recipe: dict[str, list[Run]] = {}
        for run in runs:
            self.by_recipe.setdefault(run.recipe, []).append(run)
        self.references = self.by_recipe[REFERENCE]
        self.deviation = statistics.stdev(run.validation_losses[-1] for run in self.references)

    def gaps(self, run: Run) -> list[float]:
        """Return the distances of the validation losses from f32's with the same seed."""
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
    result = Table(box=box.SIMPLE_HEAD, padding=0, caption_justify="left", caption_style="")
    result.add_column("recipe")
    for heading in ("bytes", "param", "grad", "state", "train", "valid", "gap", "gap/SD", "skips"):
        result.add_column(heading, justify="right", no_wrap=True)
    for recipe, (first, *_) in comparison.by_recipe.items():
        size, mean, gap = first.bytes_per_parameter.values(), comparison.mean, comparison.gap(recipe)
        result.add_row(
            recipe,
            *(f"{value:.1f}" for value in (sum(size), *size)),
            f"{mean(recipe, lambda run: run.training_loss):.4f}",
            f"{mean(recipe, lambda run: run.validation_losses[-1]):.4f}",
            *(("-", "-") if recipe == REFERENCE else (f"{gap:+.4f}", f"{gap / comparison.deviation:+.2f}")),
            f"{mean(recipe, lambda run: run.skipped_steps):.3g}",
        )
    result.caption = (
        "bytes: held for each parameter inside one jitted step, the sum of param, grad and state (of the optimizer). "
        "train, valid: loss in nats per byte. gap: validation loss minus f32's from the same seed, with the same "
        f"batches and initial weights. gap/SD: the gap divided by {comparison.deviation:.4f}, the standard deviation "
        f"of that loss over {len(comparison.references)} f32 runs."
    )
    return result


def write(folder: Path, comparison: Comparison) -> None:
    """Print the table, and write `precision.json`, `precision.png` and `curves.png`."""
    Console().print(table(comparison))
    runs = [dataclasses.asdict(run) for runs in comparison.by_recipe.values() for run in runs]
    (folder / "precision.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    for figure, name in ((draw_precision(comparison), "precision.png"), (draw_curves(comparison), "curves.png")):
        figure.savefig(folder / name, dpi=200)
        plt.close(figure)
    typer.echo(f"Written: precision.json, precision.png and curves.png in {folder}.")


# --- The pictures. ---
class Dot(NamedTuple):
    """A recipe in the picture."""

    label: str
    size: int  # bytes a parameter
    gap: float
    color: str


def draw_precision(comparison: Comparison) -> Figure:
    """Draw a dot a recipe: how many bytes a parameter it takes, and how far its final loss is from float32's.

    Recipes near float32 lie on a floor, with their labels below; the others float above it.
    """
    dots, deviation = _dots(comparison), comparison.deviation
    near, far = ([dot for dot in dots if (dot.color == FAR) == is_far] for is_far in (False, True))
    labels = {size: [textwrap.fill(dot.label, LETTERS) for dot in near if dot.size == size] for _, size, *_ in near}
    for size in sorted(labels, reverse=True):  # a byte apart, labels have no room beside each other
        if size + 1 in labels:
            labels[size] = [""] * len("\n".join(labels[size + 1]).split("\n")) + labels[size]
    below = LINE * (2 + max("\n".join(names).count("\n") for names in labels.values()))
    figure, axes = plt.subplots(figsize=(WIDTH, ABOVE + below + MARGIN))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.06)
    figure.patch.set_alpha(0)
    card = FancyBboxPatch((0, 0), 1, 1, boxstyle="round,pad=0,rounding_size=0.03", transform=figure.transFigure)
    card.set(facecolor=CARD, edgecolor="none", zorder=-1)
    figure.add_artist(card)
    top = 1.15 * max([4 * deviation, 1e-4, *(abs(dot.gap) for dot in dots)])
    axes.set(xlim=(17.2, 6.8), ylim=(-top * below / ABOVE, top), xticks=range(16, 7, -2), facecolor="none")
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
    axes.tick_params(labelsize=TEXT, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("bytes a parameter (weights, gradients, optimizer)", fontsize=TEXT + 0.5, color=INK)
    figure.suptitle("How far above float32 does training end?", fontsize=TEXT + 3, color=INK, x=0.02, ha="left")
    axes.set_title("validation loss, nats per byte", fontsize=TEXT - 0.5, color=GREY)
    axes.axhspan(-deviation, deviation, color="#000000", alpha=0.16, linewidth=0)
    write = functools.partial(axes.annotate, textcoords="offset points", fontsize=TEXT)
    seeds = f"float32, {len(comparison.references)} seeds: ± standard deviation"
    write(seeds, (17, max([deviation, *(dot.gap for dot in near)])), xytext=(0, 7), color=GREY)
    for dot in dots:
        axes.plot(dot.size, dot.gap, "o", markersize=9, color=dot.color, markeredgecolor=CARD, zorder=3)
    for size, names in labels.items():
        write("\n".join(names), (size, 0), xytext=(0, -10), color=INK, ha="center", va="top")
    for dot in far:
        text = f"{dot.label}: {dot.gap:+.3f}"
        write(text, (dot.size, dot.gap), xytext=(-10, 0), color=FAR, weight="bold", ha="right", va="center")
    return figure


def _dots(comparison: Comparison) -> list[Dot]:
    """Return the recipes that have a finite distance from float32."""
    gaps = {recipe: comparison.gap(recipe) for recipe in comparison.by_recipe}
    gaps = {recipe: gap for recipe, gap in gaps.items() if math.isfinite(gap)}
    far = max(3 * comparison.deviation, max(map(abs, gaps.values())) / 5)
    sizes = {recipe: round(sum(runs[0].bytes_per_parameter.values())) for recipe, runs in comparison.by_recipe.items()}
    color = lambda recipe: GREY if recipe == REFERENCE else FAR if gaps[recipe] > far else NEAR
    return [Dot(recipe, sizes[recipe], gap, color(recipe)) for recipe, gap in gaps.items()]


def draw_curves(comparison: Comparison) -> Figure:
    """Draw loss curves, with the seeds of f32 as a band, and below them the gaps to f32 of the same seed."""
    with mpx.plot.style():
        figure, (losses, gaps) = plt.subplots(2, 1, figsize=(6.4, 8))
    references, deviation = comparison.references, comparison.deviation
    steps, seeds = references[0].validation_steps, np.array([run.validation_losses for run in references])
    mean, of_step = seeds.mean(axis=0), seeds.std(axis=0, ddof=1)
    losses.fill_between(
        steps, mean - of_step, mean + of_step, color=GREY, alpha=0.3, linewidth=0, label="f32, ± standard deviation"
    )
    losses.plot(steps, mean, color=GREY, linestyle="-", linewidth=3, label=f"f32, mean of {len(seeds)} seeds")
    for recipe, (first, *_) in comparison.by_recipe.items():
        if recipe != REFERENCE:
            losses.plot(steps, first.validation_losses, label=recipe)  # with a gap where they are infinite or NaN
            gaps.plot(steps, comparison.gaps(first))  # in the same color
    losses.set_title("Validation loss of the parameters as stored (nats per byte)")
    losses.set(xlabel="step", ylabel="loss")
    figure.legend(loc="outside lower center", ncols=2)
    # Logarithmic beyond a standard deviation, or all gaps but the largest would be one line.
    gaps.set_yscale("symlog", linthresh=deviation or 0.01, linscale=1.5)
    gaps.axhspan(-deviation, deviation, color=GREY, alpha=0.3, linewidth=0)
    gaps.set(xlabel="step", ylabel="gap")
    gaps.set_title("Gap to f32 of the same seed")
    return figure
