"""Bytes of a training as bars."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
from matplotlib.axes import Axes

from mpx.tools.plan.compare_plans import PlanComparison
from mpx.tools.plan.memory_plan import MemoryPlan
from mpx.tools.plan.rows import Kind
from mpx.tools.plot.canvas import add_legend, axes_for, name_axes, plain, round_ticks
from mpx.tools.plot.themes import BLUE, GREEN, PURPLE, VERMILLION, bar_style, theme

Unit = Literal["bytes a parameter", "GB"]

# What belongs together has a colour in common; no two have a hatch in common, which tells them apart in grey.
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
_OTHER_HATCH = "+x"
_VISIBLE = 0.002  # of the longest bar


def memory(
    plan: MemoryPlan | PlanComparison | Mapping[str, MemoryPlan],
    *,
    unit: Unit = "bytes a parameter",
    axes: Axes | None = None,
) -> Axes:
    """What a training holds, part by part: a bar for each recipe, and at its end the sum.

    Args:
        plan: of `mpx.memory_plan` or `mpx.compare_plans`; or several plans by name.
        unit: `"bytes a parameter"` of the whole model, or `"GB"` (10**9 bytes); both of what one device holds.
        axes: to draw on; those of a new figure if None.

    Returns:
        The axes. Parts that are too small to be seen are in the bars and the sums, but not in the legend.

    Raises:
        TypeError: if `plan` is none of these, or `axes` no axes.
        ValueError: if there are no plans, or `unit` is neither.

    Example:
        >>> axes = memory(memory_plan(1000, mixed_precision(optax.sgd(0.1), "bf16"), "bf16"))
        >>> [(bars.get_label(), float(bars[0].get_width())) for bars in axes.containers]
        [('parameters', 2.0), ('gradients', 4.0), ('masters', 4.0)]
        >>> [text.get_text() for text in axes.texts]
        ['10']
    """
    plans = _checked_plans(plan)
    if unit not in get_args(Unit):
        raise ValueError(f"`memory`: `unit` must be one of {get_args(Unit)}, but got {unit!r}.")
    widths = {kind: _widths(plans, kind, unit) for kind in get_args(Kind)}
    widths = {kind: row for kind, row in widths.items() if row.any()}
    totals = np.sum(list(widths.values()), axis=0)
    height = 1.0 + max(0.4 * len(plans), 0.24 * len(widths))  # the bars, or the legend beside them
    axes = axes_for(axes, "memory", (9.0, height))
    left = np.zeros(len(plans))
    for kind, row in widths.items():
        label = kind if row.max() >= _VISIBLE * totals.max() else "_"
        look = _LOOKS.get(kind, (theme().text, _OTHER_HATCH))
        axes.barh(range(len(plans)), row, left=left, height=0.65, label=label, **bar_style(*look))
        left = left + row
    _write_totals(axes, totals, unit)
    # A single plan has no name.
    axes.set_yticks(range(len(plans)), [plain(name) for name in plans] if "" not in plans else [""])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    margin = 0.5 + max(0.0, 0.5 * len(widths) - len(plans)) / 2
    axes.set_ylim(len(plans) - 1 + margin, -margin)
    axes.xaxis.set_major_locator(round_ticks(integers=False))
    name_axes(axes, x=_unit_name(plans, unit), title=_title(plans))
    add_legend(axes)
    return axes


def _checked_plans(given: Any) -> Mapping[str, MemoryPlan]:
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
    """The lengths of the parts of one kind, one a plan."""
    return np.array([plan.bytes_of(kind) / (1e9 if unit == "GB" else plan.parameters) for plan in plans.values()])


def _write_totals(axes: Axes, totals: np.ndarray, unit: Unit) -> None:
    axes.set_xlim(0, 1.12 * totals.max())
    suffix = " GB" if unit == "GB" else ""
    for y, total in enumerate(totals):
        axes.annotate(
            f"{total:.4g}{suffix}",
            (total, y),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=theme().text,
        )


def _unit_name(plans: Mapping[str, MemoryPlan], unit: Unit) -> str:
    return unit if max(plan.devices for plan in plans.values()) == 1 else f"{unit}, on each device"


def _title(plans: Mapping[str, MemoryPlan]) -> str:
    counts, devices = ({getattr(plan, name) for plan in plans.values()} for name in ("parameters", "devices"))
    models = f" of {counts.pop():,} parameters" if len(counts) == 1 else ""
    count = devices.pop() if len(devices) == 1 else 1
    return f"A training{models}" + (f" on {count:,} devices" if count > 1 else "")
