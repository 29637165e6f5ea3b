"""Plots of plans and of exponents, drawn by Matplotlib: `pip install matplotlib`, and
`import mpx.plot`.

Each function draws on the axes that it is given, or on a new figure, and returns the
axes, so that anything can be changed or added:
`mpx.plot.memory(plans).figure.savefig("memory.svg")`. New figures are transparent and
can be read both on paper and on a dark page; `style` makes your own figures so. No
setting of Matplotlib is changed.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import matplotlib.pyplot as plt
import numpy as np
from jax.typing import DTypeLike
from matplotlib.axes import Axes
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from mpx.monitor.fates import EXPONENTS, ExponentHistogram, edges_of, format_of
from mpx.monitor.report import UnderflowReport
from mpx.tools.plan.compare_plans import PlanComparison
from mpx.tools.plan.memory_plan import MemoryPlan
from mpx.tools.plan.rows import Kind

# Four colors of Okabe and Ito 2008, Color Universal Design, which stand out from white
# and from black by 3 to 1.
BLUE, VERMILLION, GREEN, PURPLE = COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
# This grey has the 4.5 to 1 that WCAG asks for on white, and 4.1 to 1 on #121212. No
# grey has 4.5 on both.
GREY = "#767676"

_GREY_PARTS = (
    "text.color",
    "axes.edgecolor",
    "axes.labelcolor",
    "axes.titlecolor",
    "xtick.color",
    "ytick.color",
)
_SHEET: dict[str, Any] = {
    **dict.fromkeys([*_GREY_PARTS, "grid.color"], GREY),
    **dict.fromkeys(["figure.facecolor", "axes.facecolor"], "none"),
    **dict.fromkeys(["axes.spines.top", "axes.spines.right", "legend.frameon"], False),
    **dict.fromkeys(
        ["figure.constrained_layout.use", "axes.axisbelow", "axes.grid"], True
    ),
    "axes.prop_cycle": cycler(linestyle=["-", "--", ":", "-."]) * cycler(color=COLORS),
    "axes.titlelocation": "left",
    "figure.dpi": 150,
    "grid.alpha": 0.25,
}
# inches of a new figure: on the 390 pixels of a phone, letters of 10 points then have
# 10 pixels
_WIDTH = 5.6


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Make figures in a `with` block look like the figures of `mpx.plot`.

    They are transparent, with text of a grey that can be read on white and on a dark
    page. Axes made outside of such a block keep their own look.

    Example:
        >>> import matplotlib.pyplot as plt
        >>> import mpx.plot
        >>> with mpx.plot.style():
        ...     figure, axes = plt.subplots()
        >>> figure.get_facecolor(), axes.xaxis.label.get_color()
        ((0.0, 0.0, 0.0, 0.0), '#767676')
    """
    # load the backend: inside of the block the settings that it makes would be taken
    # back
    plt.draw_if_interactive()
    with plt.style.context(_SHEET):
        yield


def _add_legend(axes: Axes) -> None:
    """Add a legend below the axes and the name of the x axis, where it hides
    nothing.
    """
    below: Any = axes.transAxes + ScaledTranslation(
        0, -36 / 72, axes.figure.dpi_scale_trans
    )
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, ncols=2)


# What stands in the same place of two bars, such as low bits and a compensation,
# differs in color, as neighbors do.
_COLORS = COLORS * 2 + (VERMILLION, GREEN, PURPLE, BLUE)
# No two kinds share a hatch, so that they can be told apart in grey.
_HATCHES = (
    "",
    "///",
    "...",
    "xxx",
    "---",
    "\\\\\\",
    "++",
    "oo",
    "--",
    "OO",
    "**",
    "+x",
)
_VISIBLE = 0.002  # of the longest bar


def memory(
    plans: PlanComparison | Mapping[str, MemoryPlan], *, axes: Axes | None = None
) -> Axes:
    """Draw the bytes a parameter that each recipe takes on one device: a bar of its
    parts, with the sum at its end.

    Args:
        plans: what `mpx.compare_plans` returns, or plans of `mpx.memory_plan` by name.
        axes: the axes to draw on; None makes a new figure.

    Returns:
        The axes. Parts that are too small to be seen are in the bars and the sums, but
        not in the legend.

    Example:
        >>> axes = memory(
        ...     {
        ...         "mine": memory_plan(
        ...             1000, mixed_precision(optax.sgd(0.1), "bf16"), "bf16"
        ...         )
        ...     }
        ... )
        >>> [bars.get_label() for bars in axes.containers]
        ['parameters', 'gradients', 'low bits']
        >>> float(axes.containers[0][0].get_width())
        2.0
    """
    by_name = plans.plans if isinstance(plans, PlanComparison) else plans
    widths = {
        kind: np.array([p.bytes_of(kind) / p.parameters for p in by_name.values()])
        for kind in get_args(Kind)
    }
    totals, left = sum(widths.values()), np.zeros(len(by_name))
    with style():
        axes = axes or plt.subplots(figsize=(_WIDTH, 2.2 + 0.3 * len(by_name)))[1]
        for i, (kind, row) in enumerate(widths.items()):
            if row.any():
                bars = axes.barh(
                    range(len(row)),
                    row,
                    0.65,
                    left,
                    label=kind if row.max() >= _VISIBLE * np.max(totals) else "_",
                    color=_COLORS[i],
                    edgecolor="white",
                    hatch=_HATCHES[i],
                    linewidth=0,
                )
                left = left + row
        axes.bar_label(bars, [f"{total:.4g}" for total in left], padding=4)
        axes.set(
            xlabel="bytes a parameter, on one device",
            xlim=(0, 1.2 * left.max()),
            ylim=(len(left) - 0.5, -0.5),
        )
        axes.set_yticks(range(len(left)), by_name)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        _add_legend(axes)
    return axes


def exponents(
    histogram: UnderflowReport | ExponentHistogram,
    dtype: DTypeLike | None = None,
    *,
    axes: Axes | None = None,
) -> Axes:
    """Draw how many numbers there are of each power of two, and which of them a format
    holds.

    A bar from 2**e to 2**(e + 1) counts the magnitudes between them, on a logarithmic
    axis. Behind the bars lie the normal and the subnormal numbers of the format: what
    is to the left becomes zero, what is to the right infinite. A report's numbers are
    also drawn in outline, moved to the right by the loss scale that it recommends.

    Args:
        histogram: what `mpx.underflow_report(grads)` returns or
            `mpx.monitor.exponent_histogram()` measures.
        dtype: the format: f16, bf16, f32, float8_e4m3fn or float8_e5m2. None: that of
            the report, or f16.
        axes: the axes to draw on; None makes a new figure.

    Raises:
        ValueError: if no number is nonzero and finite, or the format is another one.

    Example:
        >>> axes = exponents(
        ...     underflow_report(jnp.array([2.0**-30, 2.0**-20, 1.5 * 2.0**-20]))
        ... )
        >>> [(int(bar.get_x()), int(bar.get_height())) for bar in axes.containers[0]]
        [(-30, 1), (-20, 2)]
    """
    own, shift = "f16", 0
    if isinstance(histogram, UnderflowReport):
        own, shift = histogram.dtype, round(math.log2(histogram.recommended_scale))
        histogram = histogram.histogram
    dtype = format_of(own if dtype is None else dtype, "exponents")
    counts = np.asarray(histogram.counts)
    (places,) = np.nonzero(counts)
    if not places.size:
        raise ValueError(
            "`exponents`: the histogram holds no nonzero finite numbers, so there is"
            " nothing to draw."
        )
    heights, places = counts[places], places + EXPONENTS[0]
    # Where float32 ends, nothing finite is infinite.
    subnormal, normal, infinite = np.minimum(
        np.log2(edges_of(dtype)[1:4].view(np.float32)), EXPONENTS.stop
    )
    with style():
        axes = axes or plt.subplots(figsize=(_WIDTH, 4.2))[1]
        for start, end, alpha, label in (
            (normal, infinite, 0.25, f"normal in {dtype}"),
            (subnormal, normal, 0.1, "subnormal: fewer bits"),
        ):
            axes.axvspan(start, end, color=BLUE, alpha=alpha, linewidth=0, label=label)
        axes.bar(places, heights, 1.0, align="edge", color=GREEN, label="numbers")
        if shift:
            label, moved = f"numbers times $2^{{{shift}}}$", places + shift
            look: Any = {"fill": False, "edgecolor": VERMILLION, "label": label}
            axes.bar(moved, heights, 1.0, align="edge", **look)
        shown = [subnormal, infinite, *places, *places + 1, *places + shift + 1]
        axes.set(xlabel="magnitude", xlim=(min(shown) - 2, max(shown) + 2))
        axes.set(ylabel="how many", yscale="log", ylim=(0.5, 2 * heights.max()))
        title = (
            f"{int(counts.sum()):,} numbers, besides {int(histogram.zeros):,} zeros and"
            f" {int(histogram.nonfinite):,} infinite or NaN"
        )
        axes.set_title(title, fontsize="medium")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.xaxis.set_major_formatter("$2^{{{x:g}}}$")
        _add_legend(axes)
    return axes
