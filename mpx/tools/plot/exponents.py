"""Exponents of numbers against the ranges of formats."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike, DTypeLike
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from mpx._loss_scale import is_power_of_two
from mpx.tools.monitor.exponents import EXPONENTS, ExponentHistogram, Range, range_of
from mpx.tools.monitor.underflow import UnderflowReport
from mpx.tools.plot.sheet import BLUE, GREEN, GREY, ON_COLOR, VERMILLION, add_legend, canvas

_USUAL_FORMATS = ("f16", "bf16", "f32")
_NARROW = 64  # doublings from the smallest to the largest number: a format of fewer is shown as a whole
_MOST_TICKS = 7
_ROOM_FOR_RANGE, _ROOM_FOR_NAME = 0.32, 0.15  # parts of the width that the words on a bar need


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
        formats: f16, bf16, f32, float8_e4m3fn or float8_e5m2, one or several. None: f16, bf16 and f32, and before
            them that of the report.
        scale: a power of two, at which the numbers are drawn too, in outline. None: that which the report recommends;
            1 draws none.
        axes: the axes to draw on; those of a new figure if None.

    Returns:
        The axes of the histogram; those of the ranges are `axes.child_axes[0]`.

    Raises:
        TypeError: if `histogram` is neither, or `axes` not axes.
        ValueError: if no number is nonzero and finite, a format is none of these or there is none, or `scale` is not a
            power of two.

    Example:
        >>> axes = exponents(underflow_report(jnp.array([2.0**-30, 2.0**-20, 1.5 * 2.0**-20])), scale=2**10)
        >>> [(int(bar.get_x()), int(bar.get_height())) for bar in axes.containers[0]]
        [(-30, 1), (-20, 2)]

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), figure 3.
    """
    report = histogram if isinstance(histogram, UnderflowReport) else None
    counts, zeros, nonfinite = _checked(histogram if report is None else report.histogram)
    ranges = _checked_ranges(formats, () if report is None else (report.dtype,))
    if scale is None:
        scale = 1.0 if report is None else report.recommended_scale
    shift = _checked_shift(scale)
    strip_height = 0.08 * len(ranges)
    height = 0.95 - strip_height  # of the histogram, with a gap below the strip
    with canvas(axes, "exponents", (9.0, 3.3 + 0.3 * len(ranges))) as axes:
        handles = _draw_histogram(axes, counts, shift)
        _set_counts_axis(axes, counts, height)
        axes.set_xlim(_limits(counts, shift, ranges))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 4, 8, 10], integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda exponent, _: _power_of_two(exponent)))
        for limit in (ranges[0].nonzero_from, ranges[0].infinite_from):
            axes.axvline(math.log2(limit), ymax=height, color=GREY, linestyle=(0, (1, 1.5)), zorder=0.9)
        _draw_ranges(axes.inset_axes((0.0, 1 - strip_height, 1.0, strip_height), sharex=axes), ranges)
        axes.set_title(f"{counts.sum():,.12g} numbers; besides {zeros:,.12g} zero, {nonfinite:,.12g} infinite or NaN")
        axes.set_xlabel("magnitude")
        axes.set_ylabel("how many", y=height / 2)  # beside the counts, not beside the names of the formats
        normal = Patch(facecolor=BLUE, edgecolor=BLUE, label="normal")
        subnormal = Patch(facecolor="none", edgecolor=BLUE, label="subnormal: fewer bits")
        add_legend(axes, [*handles, normal, subnormal])
    return axes


def _checked(histogram: Any) -> tuple[np.ndarray, float, float]:
    """Return counts by exponent, zeros, and infinities and NaN."""
    if not isinstance(histogram, ExponentHistogram):
        raise TypeError(
            "`exponents` needs an `UnderflowReport` or an `ExponentHistogram`, but got "
            f"{type(histogram).__name__}. Of a histogram by groups, draw one group at a time."
        )
    counts = np.asarray(histogram.counts).astype(np.float64)
    if counts.shape != (len(EXPONENTS),):
        raise ValueError(f"`exponents`: a histogram has {len(EXPONENTS)} counts, but got the shape {counts.shape}.")
    if not np.all(np.isfinite(counts)) or not np.any(counts > 0):
        raise ValueError("`exponents`: the histogram holds no nonzero finite numbers, so there is nothing to draw.")
    return counts, float(histogram.zeros), float(histogram.nonfinite)


def _checked_ranges(formats: Any, first: tuple[np.dtype, ...]) -> list[Range]:
    if formats is None:
        formats = (*first, *_USUAL_FORMATS)
    elif isinstance(formats, str) or not isinstance(formats, Sequence) or not formats:
        raise ValueError(f"`exponents`: `formats` must be a list of dtypes, such as ['f16'], but got {formats!r}.")
    return list(dict.fromkeys(range_of(dtype, "exponents") for dtype in formats))


def _checked_shift(scale: Any) -> int:
    """Return how many powers of two a scale moves numbers by."""
    number = float(np.asarray(scale)) if np.ndim(scale) == 0 else math.nan
    if not is_power_of_two(number):
        raise ValueError(f"`exponents`: `scale` must be a number that is a power of two, but got {scale!r}.")
    return math.frexp(number)[1] - 1


def _draw_histogram(axes: Axes, counts: np.ndarray, shift: int) -> list[Any]:
    """Draw the numbers, filled, and as a scale moves them, in outline; return both for the legend."""
    (places,) = np.nonzero(counts)
    bars = axes.bar(places + EXPONENTS[0], counts[places], width=1.0, align="edge", color=GREEN, label="numbers")
    if not shift:
        return [bars]
    padded = np.pad(counts, 1)[places[0] : places[-1] + 3]
    edges = np.arange(places[0] - 1, places[-1] + 3) + EXPONENTS[0] + shift
    label = f"numbers times {_power_of_two(shift)}"
    return [bars, axes.stairs(padded, edges, baseline=None, color=VERMILLION, linewidth=1.6, label=label)]


def _set_counts_axis(axes: Axes, counts: np.ndarray, height: float) -> None:
    """Set a logarithmic axis from a power of ten to another over this part of the height; leave the rest empty."""
    heights = counts[counts > 0]
    bottom, top = math.floor(math.log10(heights.min() / 1.5)), math.ceil(math.log10(heights.max() * 1.5))
    axes.set_yscale("log")
    axes.set_ylim(10.0**bottom, 10.0 ** (bottom + (top - bottom) / height))
    axes.spines["left"].set_bounds(10.0**bottom, 10.0**top)
    apart = math.ceil((top - bottom) / _MOST_TICKS)
    axes.yaxis.set_major_locator(FixedLocator([10.0**decade for decade in range(bottom, top + 1, apart)]))
    axes.yaxis.set_minor_locator(NullLocator())


def _limits(counts: np.ndarray, shift: int, ranges: list[Range]) -> tuple[float, float]:
    """Return limits with all numbers, moved or not, and all narrow formats; wider ones run off both ends."""
    exponents = np.array(EXPONENTS)[counts > 0]
    spans = [(math.log2(span.nonzero_from), math.log2(span.infinite_from)) for span in ranges]
    shown = [(low, high) for low, high in spans if high - low <= _NARROW]
    shown += [(exponents[0] + move, exponents[-1] + 1 + move) for move in (0, shift)]
    return min(low for low, _ in shown) - 2, max(high for _, high in shown) + 2


def _draw_ranges(strip: Axes, ranges: list[Range]) -> None:
    """Draw a bar for each format, above the histogram and on the same axis of magnitudes."""
    strip.set_facecolor("none")
    strip.grid(visible=False)
    strip.spines[:].set_visible(False)
    strip.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
    strip.tick_params(axis="y", length=0)
    strip.set_yticks(range(len(ranges)), [str(span.dtype) for span in ranges])
    strip.set_ylim(len(ranges) - 0.5, -0.5)
    for y, span in enumerate(ranges):
        low, normal, high = (math.log2(x) for x in (span.nonzero_from, span.normal_from, span.infinite_from))
        bar = {"height": 0.7, "edgecolor": BLUE, "linewidth": 1.2}
        strip.barh(y, normal - low, left=low, facecolor="none", **bar)
        strip.barh(y, high - normal, left=normal, facecolor=BLUE, **bar)
        ends = f"{_power_of_two(round(normal))} to {_power_of_two(round(high))}"
        _write_inside(strip, y, normal, high, ("normal: " + ends, "normal"), ON_COLOR)
        _write_inside(strip, y, low, normal, ("subnormal", "subnormal"), GREY)


def _write_inside(strip: Axes, y: float, low: float, high: float, texts: tuple[str, str], color: str) -> None:
    """Write the long or the short text in the middle of the visible part of a bar, or nothing without room."""
    left, right = strip.get_xlim()
    low, high = max(low, left), min(high, right)
    room = (high - low) / (right - left)
    if room >= _ROOM_FOR_NAME:
        text = texts[0] if room >= _ROOM_FOR_RANGE else texts[1]
        strip.text((low + high) / 2, y, text, ha="center", va="center_baseline", fontsize="small", color=color)


def _power_of_two(exponent: float) -> str:
    return f"$2^{{{exponent:g}}}$"
