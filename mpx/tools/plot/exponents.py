"""Exponents of numbers against the ranges of formats."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike, DTypeLike
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation, blended_transform_factory

from mpx._loss_scale import is_power_of_two
from mpx.tools.monitor.exponents import EXPONENTS, ExponentHistogram, Range, range_of
from mpx.tools.monitor.underflow import UnderflowReport
from mpx.tools.plot.sheet import BLUE, GREEN, GREY, VERMILLION, add_legend, canvas

_USUAL_FORMATS = ("f16", "bf16", "f32")


def exponents(
    histogram: UnderflowReport | ExponentHistogram,
    *,
    formats: Sequence[DTypeLike] | None = None,
    scale: ArrayLike | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw how many numbers there are of each power of two, and which of them the formats hold.

    A bar from 2**e to 2**(e + 1) counts the magnitudes between them, on a logarithmic axis. Above stand the ranges of
    the formats: numbers to the left of a range become zero, to the right infinite; dotted lines show where the first
    format ends. A loss scale moves all numbers to the right.

    Args:
        histogram: what `mpx.underflow_report(grads)` returns or `mpx.monitor.exponent_histogram()` measures.
        formats: f16, bf16, f32, float8_e4m3fn or float8_e5m2, one or several. None: the report's own format, then f16,
            bf16 and f32.
        scale: a power of two, at which the numbers are drawn too, in outline. None: the one that the report recommends;
            1 draws none.
        axes: the axes to draw on; None makes a new figure.

    Returns:
        The axes of the histogram; the ranges have `axes.child_axes[0]`.

    Raises:
        TypeError: if `histogram` is neither, or `axes` not axes.
        ValueError: if no number is nonzero and finite, a format is another one, or `scale` is not a power of two.

    Example:
        >>> axes = exponents(underflow_report(jnp.array([2.0**-30, 2.0**-20, 1.5 * 2.0**-20])), scale=2**10)
        >>> [(int(bar.get_x()), int(bar.get_height())) for bar in axes.containers[0]]
        [(-30, 1), (-20, 2)]

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), figure 3.
    """
    own, recommended = [], 1.0
    if isinstance(histogram, UnderflowReport):
        own, recommended, histogram = [histogram.dtype], histogram.recommended_scale, histogram.histogram
    if not isinstance(histogram, ExponentHistogram):
        raise TypeError(
            "`exponents` needs an `UnderflowReport` or an `ExponentHistogram`, but got "
            f"{type(histogram).__name__}. Of a histogram by groups, draw one group at a time."
        )
    counts = np.asarray(histogram.counts).astype(np.float64)
    if not np.any(counts > 0):
        raise ValueError("`exponents`: the histogram holds no nonzero finite numbers, so there is nothing to draw.")
    chosen = [*own, *_USUAL_FORMATS] if formats is None else formats
    ranges = list(dict.fromkeys(range_of(dtype, "exponents") for dtype in chosen))
    shift = _checked_shift(recommended if scale is None else scale)
    with canvas(axes, "exponents", 3.9 + 0.3 * len(ranges)) as axes:
        handles = _draw_histogram(axes, counts, shift)
        places, ends = np.array(EXPONENTS)[counts > 0], np.log2((ranges[0].nonzero_from, ranges[0].infinite_from))
        # All numbers, moved or not, and the first format as a whole; wider ones run off.
        shown = [*ends, places[0], places[-1] + 1, places[0] + shift, places[-1] + 1 + shift]
        axes.set_xlim(min(shown) - 2, max(shown) + 2)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 4, 8, 10], integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda exponent, _: _power_of_two(exponent)))
        for limit in ends:
            axes.axvline(limit, color=GREY, linestyle=(0, (1, 1.5)), zorder=0.9)
        _draw_ranges(axes, ranges)
        others = f"{float(histogram.zeros):,.12g} zero, {float(histogram.nonfinite):,.12g} infinite or NaN"
        axes.set_title(f"{counts.sum():,.12g} numbers\nbesides {others}")
        axes.set(xlabel="magnitude", ylabel="how many")
        normal = Patch(facecolor=BLUE, edgecolor=BLUE, label="normal")
        subnormal = Patch(facecolor="none", edgecolor=BLUE, label="subnormal: fewer bits")
        add_legend(axes, [*handles, normal, subnormal], columns=2)
    return axes


def _checked_shift(scale: ArrayLike) -> int:
    """Return how many powers of two a scale moves numbers by."""
    number = float(np.asarray(scale)) if np.ndim(scale) == 0 else math.nan
    if not is_power_of_two(number):
        raise ValueError(f"`exponents`: `scale` must be a number that is a power of two, but got {scale!r}.")
    return math.frexp(number)[1] - 1


def _draw_histogram(axes: Axes, counts: np.ndarray, shift: int) -> list[Any]:
    """Draw the numbers, filled, and as a scale moves them, in outline; return both for the legend."""
    (places,) = np.nonzero(counts)
    heights = counts[places]
    handles: list[Any] = [axes.bar(places + EXPONENTS[0], heights, 1.0, align="edge", color=GREEN, label="numbers")]
    if shift:
        padded = np.pad(counts, 1)[places[0] : places[-1] + 3]
        edges = np.arange(places[0] - 1, places[-1] + 3) + EXPONENTS[0] + shift
        label = f"numbers times {_power_of_two(shift)}"
        handles.append(axes.stairs(padded, edges, baseline=None, color=VERMILLION, linewidth=1.6, label=label))
    axes.set_yscale("log")
    # From a power of ten to another, so that there are at least two numbers on the axis.
    low, high = np.log10([heights.min() / 1.5, heights.max() * 1.5])
    axes.set_ylim(10.0 ** np.floor(low), 10.0 ** np.ceil(high))
    return handles


def _draw_ranges(axes: Axes, ranges: list[Range]) -> None:
    """Draw a bar for each format, above the histogram and on the same axis of magnitudes."""
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
        bar = {"height": 0.7, "edgecolor": BLUE, "linewidth": 1.2}
        strip.barh(y, normal - low, left=low, facecolor="none", **bar)
        strip.barh(y, high - normal, left=normal, facecolor=BLUE, **bar)


def _power_of_two(exponent: float) -> str:
    return f"$2^{{{exponent:g}}}$"
