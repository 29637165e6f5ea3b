"""Bytes of a training run as bars."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import numpy as np
from matplotlib.axes import Axes

from mpx.tools.plan.compare_plans import PlanComparison
from mpx.tools.plan.memory_plan import MemoryPlan
from mpx.tools.plan.rows import Kind
from mpx.tools.plot.sheet import BLUE, GREEN, GREY, ON_COLOR, PURPLE, VERMILLION, add_legend, canvas, plain, round_ticks

Unit = Literal["bytes a parameter", "GB"]

# Related parts share a color. No two share a hatch, so that they can be told apart in grey.
_LOOKS: dict[Kind, tuple[str, str]] = {
    "parameters": (BLUE, ""),
    "not trained": (BLUE, "++"),
    "gradients": (VERMILLION, "///"),
    "copy of gradients": (VERMILLION, "|||"),
    "sum of gradients": (VERMILLION, "**"),
    "masters": (GREEN, "\\\\\\"),
    "low bits": (GREEN, "..."),
    "compensation": (GREEN, "oo"),
    "average": (GREEN, "--"),
    "first moment": (PURPLE, "---"),
    "second moment": (PURPLE, "xxx"),
    "scales of blocks": (PURPLE, "OO"),
}
_OTHER = (GREY, "+x")
_VISIBLE = 0.002  # of the longest bar


def memory(
    plan: MemoryPlan | PlanComparison | Mapping[str, MemoryPlan],
    *,
    unit: Unit = "bytes a parameter",
    axes: Axes | None = None,
) -> Axes:
    """Draw what a training run holds, part by part: a bar for each recipe, with the sum at its end.

    Args:
        plan: a plan of `mpx.memory_plan` or several of `mpx.compare_plans`; or plans by name.
        unit: `"bytes a parameter"` of the whole model, or `"GB"` (10**9 bytes); both of what one device holds.
        axes: the axes to draw on; those of a new figure if None.

    Returns:
        The axes. Parts that are too small to be seen are in the bars and the sums, but not in the legend.

    Raises:
        TypeError: if `plan` is none of these, or `axes` not axes.
        ValueError: if there are no plans, or `unit` is neither.

    Example:
        >>> axes = memory(memory_plan(1000, mixed_precision(optax.sgd(0.1), "bf16"), "bf16"))
        >>> [bars.get_label() for bars in axes.containers]
        ['parameters', 'gradients', 'low bits']
        >>> float(axes.containers[0][0].get_width())
        2.0
    """
    plans = _checked_plans(plan)
    if unit not in get_args(Unit):
        raise ValueError(f"`memory`: `unit` must be one of {get_args(Unit)}, but got {unit!r}.")
    widths = {kind: _widths(plans, kind, unit) for kind in get_args(Kind)}
    widths = {kind: row for kind, row in widths.items() if row.any()}
    with canvas(axes, "memory", 1.4 + 0.3 * len(plans) + 0.12 * len(widths)) as axes:
        draw_bars(axes, plans, widths, _LOOKS, suffix=" GB" if unit == "GB" else "")
        is_whole = max(plan.devices for plan in plans.values()) == 1
        axes.set(xlabel=unit if is_whole else f"{unit}, on each device")
        axes.set_title(_title(plans), loc="right")  # the names of recipes leave little room to the left
    return axes


def _checked_plans(given: Any) -> Mapping[str, MemoryPlan]:
    """Return plans by name; a single plan has no name."""
    plans = given.plans if isinstance(given, PlanComparison) else given
    plans = {"": plans} if isinstance(plans, MemoryPlan) else plans
    if not isinstance(plans, Mapping) or not all(isinstance(plan, MemoryPlan) for plan in plans.values()):
        raise TypeError(
            "`memory` needs what `mpx.memory_plan` or `mpx.compare_plans` returns, or a dictionary from names to "
            f"plans, but got {given!r}."
        )
    if not plans:
        raise ValueError("`memory` needs at least one plan, but got none.")
    return plans


def _widths(plans: Mapping[str, MemoryPlan], kind: Kind, unit: Unit) -> np.ndarray:
    """Return the lengths of the parts of one kind, one a plan."""
    return np.array([plan.bytes_of(kind) / (1e9 if unit == "GB" else plan.parameters) for plan in plans.values()])


def draw_bars(
    axes: Axes,
    names: Iterable[str],
    widths: Mapping[Any, np.ndarray],
    looks: Mapping[Any, tuple[str, str]],
    suffix: str,
) -> None:
    """Draw named bars of parts that lie one behind the other, with their sums; `looks` are colors and hatches."""
    totals = np.sum(list(widths.values()), axis=0)
    left = np.zeros_like(totals)
    for kind, row in widths.items():
        color, hatch = looks.get(kind, _OTHER)
        look = {"facecolor": color, "edgecolor": ON_COLOR, "hatch": hatch, "linewidth": 0, "height": 0.65}
        label = kind if row.max() >= _VISIBLE * totals.max() else "_"
        bars = axes.barh(range(len(row)), row, left=left, label=label, **look)
        left = left + row
    axes.bar_label(bars, [f"{total:.4g}{suffix}" for total in totals], padding=4)
    axes.set_xlim(0, (1.35 if suffix else 1.2) * totals.max())
    axes.set_yticks(range(len(totals)), map(plain, names))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(len(totals) - 0.5, -0.5)
    axes.xaxis.set_major_locator(round_ticks(integers=False))
    add_legend(axes, columns=2, side="right")


def _title(plans: Mapping[str, MemoryPlan]) -> str:
    counts, devices = ({getattr(plan, name) for plan in plans.values()} for name in ("parameters", "devices"))
    models = f" of {counts.pop():,} parameters" if len(counts) == 1 else ""
    count = devices.pop() if len(devices) == 1 else 1
    return f"A training run{models}" + (f" on {count:,} devices" if count > 1 else "")
