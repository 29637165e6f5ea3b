"""What a training run holds, as bars."""

from collections.abc import Mapping
from typing import get_args

import numpy as np
from matplotlib.axes import Axes

from mpx.tools.plan.compare_plans import PlanComparison
from mpx.tools.plan.memory_plan import MemoryPlan
from mpx.tools.plan.rows import Kind
from mpx.tools.plot.sheet import BLUE, GREEN, PURPLE, VERMILLION, add_legend, canvas

_COLORS = (BLUE, VERMILLION, GREEN, PURPLE)
# No two kinds share a hatch, so that they can be told apart in grey.
_HATCHES = ("", "///", "...", "xxx", "---", "\\\\\\", "++", "oo", "--", "OO", "**", "+x")
_VISIBLE = 0.002  # of the longest bar


def memory(plans: PlanComparison | Mapping[str, MemoryPlan], *, axes: Axes | None = None) -> Axes:
    """Draw the bytes a parameter that each recipe takes on one device: a bar of its parts, with the sum at its end.

    Args:
        plans: what `mpx.compare_plans` returns, or plans of `mpx.memory_plan` by name.
        axes: the axes to draw on; None makes a new figure.

    Returns:
        The axes. Parts that are too small to be seen are in the bars and the sums, but not in the legend.

    Raises:
        TypeError: if `plans` is something else, or empty.

    Example:
        >>> axes = memory({"mine": memory_plan(1000, mixed_precision(optax.sgd(0.1), "bf16"), "bf16")})
        >>> [bars.get_label() for bars in axes.containers]
        ['parameters', 'gradients', 'low bits']
        >>> float(axes.containers[0][0].get_width())
        2.0
    """
    by_name = plans.plans if isinstance(plans, PlanComparison) else plans
    if not isinstance(by_name, Mapping) or not by_name:
        raise TypeError(f"`memory` needs what `mpx.compare_plans` returns, or plans by name, but got {plans!r}.")
    widths = {kind: np.array([p.bytes_of(kind) / p.parameters for p in by_name.values()]) for kind in get_args(Kind)}
    totals, left = sum(widths.values()), np.zeros(len(by_name))
    with canvas(axes, 2.2 + 0.3 * len(by_name)) as axes:
        for i, (kind, row) in enumerate(widths.items()):
            if row.any():
                look = {"color": _COLORS[i % 4], "edgecolor": "white", "hatch": _HATCHES[i], "linewidth": 0}
                label = kind if row.max() >= _VISIBLE * np.max(totals) else "_"
                bars = axes.barh(range(len(row)), row, 0.65, left, label=label, **look)
                left = left + row
        axes.bar_label(bars, [f"{total:.4g}" for total in left], padding=4)
        axes.set(xlabel="bytes a parameter, on one device", xlim=(0, 1.2 * left.max()), ylim=(len(left) - 0.5, -0.5))
        axes.set_yticks(range(len(left)), by_name)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        add_legend(axes, columns=2)
    return axes
