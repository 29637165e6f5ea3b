"""Draw a comparison of recipes: final losses against bytes a parameter, and the losses over the steps."""

import functools
import math
import textwrap
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import mpx.plot
from examples.gpt import output
from examples.gpt.output import plt
from examples.gpt.report import REFERENCE, Comparison

# Chosen for a telephone: where the picture is 390 pixels wide, letters of 10.5 points are 10 pixels high.
WIDTH, TEXT = 5.6, 10.5  # inches, points
ABOVE, LINE, MARGIN = 1.8, 0.175, 1.1  # inches: above the floor, of a line of labels, and of title and axis
CARD, INK, GREY = "#FBFBF9", "#222222", "#6B6B6B"  # a card that is legible on a white page and on a dark one
NEAR, FAR = "#0072B2", "#D55E00"
LETTERS = 12  # of a line, so that labels of neighbors do not touch


class Dot(NamedTuple):
    """A recipe in the picture."""

    label: str
    size: int  # bytes a parameter
    gap: float
    color: str


def write_pictures(folder: Path, comparison: Comparison) -> None:
    """Write `precision.png`, final losses against bytes a parameter, and `curves.png`."""
    figure = draw_precision(comparison)
    figure.savefig(folder / "precision.png", dpi=200)
    plt.close(figure)
    output.save_plot(draw_curves(comparison), folder / "curves.png")


# --- Bytes and final losses. ---
def draw_precision(comparison: Comparison) -> Figure:
    """Draw a dot a recipe: how many bytes a parameter it takes, and how far its final loss is from float32's.

    Recipes near float32 lie on a floor, with their labels below; the others float above it.
    """
    dots, deviation = _dots(comparison), comparison.deviation() or 0.0
    near, far = ([dot for dot in dots if (dot.color == FAR) == is_far] for is_far in (False, True))
    labels = {size: [textwrap.fill(dot.label, LETTERS) for dot in near if dot.size == size] for _, size, *_ in near}
    below = LINE * (2 + max(("\n".join(names).count("\n") for names in labels.values()), default=0))
    figure, axes = plt.subplots(figsize=(WIDTH, ABOVE + below + MARGIN))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.06)
    _draw_card(figure)
    top = 1.15 * max([4 * deviation, 1e-4, *(abs(dot.gap) for dot in dots)])
    axes.set(xlim=(17.2, 6.8), ylim=(-top * below / ABOVE, top), xticks=range(16, 7, -2), facecolor="none")
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
    axes.tick_params(labelsize=TEXT, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("bytes a parameter (weights, gradients, optimizer)", fontsize=TEXT + 0.5, color=INK)
    figure.suptitle("How far above float32 does training end?", fontsize=TEXT + 3, color=INK, x=0.02, ha="left")
    axes.set_title("validation loss, nats per byte", fontsize=TEXT - 0.5, color=GREY)
    axes.axhspan(-deviation, deviation, color="#000000", alpha=0.16, linewidth=0)
    seeds = f"float32, {len(comparison.reference_runs())} seeds: ± standard deviation" if deviation else "float32"
    floor = max([deviation, *(dot.gap for dot in near)])
    write = functools.partial(axes.annotate, textcoords="offset points", fontsize=TEXT)
    write(seeds, (17, floor), xytext=(0, 7), color=GREY)
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
    gaps = {run.recipe: comparison.mean_over_seeds(run.recipe, comparison.gap) for run in comparison.first_runs()}
    gaps = {recipe: gap for recipe, gap in gaps.items() if gap is not None and math.isfinite(gap)}
    far = max(3 * (comparison.deviation() or 0.0), max(map(abs, gaps.values()), default=0.0) / 5)
    sizes = {run.recipe: round(sum(run.bytes_per_parameter.values())) for run in comparison.first_runs()}
    color = lambda recipe: GREY if recipe == REFERENCE else FAR if gaps[recipe] > far else NEAR
    return [Dot(recipe, sizes[recipe], gap, color(recipe)) for recipe, gap in gaps.items()]


def _draw_card(figure: Figure) -> None:
    """Draw a background with round corners; outside of it the picture is transparent."""
    figure.patch.set_alpha(0)
    card = FancyBboxPatch((0, 0), 1, 1, boxstyle="round,pad=0,rounding_size=0.03", transform=figure.transFigure)
    card.set(facecolor=CARD, edgecolor="none", zorder=-1)
    figure.add_artist(card)


# --- The steps. ---
def draw_curves(comparison: Comparison) -> Figure:
    """Draw loss curves, with the seeds of f32 as a band, and below them the gaps to f32 of the same seed."""
    first, references = comparison.first_runs(), comparison.reference_runs()
    figure, (losses, gaps) = plt.subplots(2, 1, figsize=(6.4, 8), layout="constrained")
    steps = first[0].validation_steps
    seeds = [run.validation_losses for run in references] if len(references) > 1 else None
    curves = {run.recipe: run.validation_losses for run in first if not (seeds and run in references)}
    mpx.plot.losses(curves or {"f32, seed 0": seeds[0]}, steps=steps, reference=seeds, axes=losses)
    losses.set_title("Validation loss of the parameters as stored (nats per byte)", loc="left")
    figure.legend(*losses.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    losses.get_legend().remove()
    others = {run.recipe: comparison.gaps(run) for run in first if run not in references}
    if references and others:
        deviation = comparison.deviation() or 0.0
        mpx.plot.losses(others, steps=steps, axes=gaps).get_legend().remove()  # in the colors of the other axes
        gaps.set_ylabel("gap")
        # Logarithmic beyond a standard deviation, or all gaps but the largest would be one line.
        gaps.set_yscale("symlog", linthresh=deviation or 0.01, linscale=1.5)
        gaps.axhspan(-deviation, deviation, color="#000000", alpha=0.12, linewidth=0)
    gaps.set_title("Gap to f32 of the same seed", loc="left")
    return figure
