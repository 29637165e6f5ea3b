"""Exponents of numbers against the ranges of formats."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation, blended_transform_factory

from mpx.tools.monitor.exponents import EXPONENTS, ExponentHistogram, Range, range_of
from mpx.tools.monitor.underflow import UnderflowReport
from mpx.tools.plot.sheet import BLUE, GREEN, GREY, VERMILLION, add_legend, canvas


def exponents(
    histogram: UnderflowReport | ExponentHistogram,
    *,
    formats: Sequence[DTypeLike] = ("f16", "bf16", "f32"),
    axes: Axes | None = None,
) -> Axes:
    """Draw how many numbers there are of each power of two, and which of them the formats hold.

    A bar from 2**e to 2**(e + 1) counts the magnitudes between them, on a logarithmic axis. Above stand the ranges of
    the formats: numbers to the left of a range become zero, to the right infinite; dotted lines show where the first
    format ends. A report's numbers are also drawn in outline, moved to the right by the loss scale that it recommends.

    Args:
        histogram: what `mpx.underflow_report(grads)` returns or `mpx.monitor.exponent_histogram()` measures.
        formats: f16, bf16, f32, float8_e4m3fn or float8_e5m2, one or several; a report's own format comes first.
        axes: the axes to draw on; None makes a new figure.

    Returns:
        The axes of the histogram; the ranges have `axes.child_axes[0]`.

    Raises:
        TypeError: if `histogram` is neither.
        ValueError: if no number is nonzero and finite, or a format is another one.

    Example:
        >>> axes = exponents(underflow_report(jnp.array([2.0**-30, 2.0**-20, 1.5 * 2.0**-20])))
        >>> [(int(bar.get_x()), int(bar.get_height())) for bar in axes.containers[0]]
        [(-30, 1), (-20, 2)]

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), figure 3.
    """
    shift = 0
    if isinstance(histogram, UnderflowReport):
        formats, shift = [histogram.dtype, *formats], round(math.log2(histogram.recommended_scale))
        histogram = histogram.histogram
    if not isinstance(histogram, ExponentHistogram):
        raise TypeError(f"`exponents` needs an `UnderflowReport` or an `ExponentHistogram`, but got {histogram!r}.")
    counts = np.asarray(histogram.counts)
    (places,) = np.nonzero(counts)
    if not places.size:
        raise ValueError("`exponents`: the histogram holds no nonzero finite numbers, so there is nothing to draw.")
    ranges = list(dict.fromkeys(range_of(dtype, "exponents") for dtype in formats))
    ends = np.log2((ranges[0].nonzero_from, ranges[0].infinite_from))
    heights, places = counts[places], places + EXPONENTS[0]
    with canvas(axes, 3.9 + 0.3 * len(ranges)) as axes:
        handles: list[Any] = [axes.bar(places, heights, 1.0, align="edge", color=GREEN, label="numbers")]
        if shift:
            edges = np.arange(places[0] - 1, places[-1] + 3) + shift
            outline = np.pad(counts, 1)[places[0] - EXPONENTS[0] :][: len(edges) - 1]
            look = {"baseline": None, "color": VERMILLION, "label": f"numbers times $2^{{{shift}}}$"}
            handles.append(axes.stairs(outline, edges, **look))
        for limit in ends:
            axes.axvline(limit, color=GREY, linestyle=":", zorder=0.9)
        # All numbers, moved or not, and the first format as a whole; wider ones run off.
        shown = [*ends, *places, *places + 1, *places + shift + 1]
        axes.set(xlabel="magnitude", xlim=(min(shown) - 2, max(shown) + 2))
        axes.set(ylabel="how many", yscale="log", ylim=(0.5, 2 * heights.max()))
        others = f"{int(histogram.zeros):,} zeros and {int(histogram.nonfinite):,} infinite or NaN"
        axes.set_title(f"{int(counts.sum()):,} numbers, besides {others}", fontsize="medium")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.xaxis.set_major_formatter("$2^{{{x:g}}}$")
        _draw_ranges(axes, ranges)
        normal = Patch(facecolor=BLUE, edgecolor=BLUE, label="normal")
        subnormal = Patch(facecolor="none", edgecolor=BLUE, label="subnormal: fewer bits")
        add_legend(axes, [*handles, normal, subnormal], columns=2)
    return axes


def _draw_ranges(axes: Axes, ranges: list[Range]) -> None:
    """Draw a bar for each format, on axes above the histogram that share its magnitudes."""
    parts_of_axes: Any = axes.transAxes
    inches_above = axes.figure.dpi_scale_trans + ScaledTranslation(0, 1, parts_of_axes)
    place = blended_transform_factory(parts_of_axes, inches_above)
    strip = axes.inset_axes((0.0, 0.1, 1.0, 0.25 * len(ranges)), transform=place, sharex=axes)
    strip.grid(visible=False)
    strip.spines[:].set_visible(False)
    strip.tick_params(axis="both", which="both", length=0, labelbottom=False)
    strip.set_yticks(range(len(ranges)), [str(span.dtype) for span in ranges])
    strip.set_ylim(len(ranges) - 0.5, -0.5)
    for y, span in enumerate(ranges):
        low, normal, high = map(math.log2, span[1:])
        strip.barh(y, normal - low, 0.7, low, facecolor="none", edgecolor=BLUE)
        strip.barh(y, high - normal, 0.7, normal, facecolor=BLUE, edgecolor=BLUE)
