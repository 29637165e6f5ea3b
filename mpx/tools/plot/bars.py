"""Bytes as bars: what a training run holds, and what a compiled step moves."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
from matplotlib.axes import Axes

from mpx.tools.plan import rows
from mpx.tools.plan.compare_plans import PlanComparison
from mpx.tools.plan.memory_plan import MemoryPlan
from mpx.tools.plot.sheet import BLUE, GREEN, ON_COLOR, PURPLE, VERMILLION, add_legend, canvas, plain, round_ticks
from mpx.tools.program import kernels
from mpx.tools.program.step_report import ReportComparison, StepReport

Unit = Literal["bytes a parameter", "GB"]

# No two parts of a picture share a hatch, so that they can be told apart in grey.
_COLORS = (BLUE, VERMILLION, GREEN, PURPLE)
_HATCHES = ("", "///", "...", "xxx", "---", "\\\\\\", "++", "oo", "--", "OO", "**", "+x")
LOOKS = {
    kind: (_COLORS[i % 4], _HATCHES[i]) for kinds in (rows.Kind, kernels.Kind) for i, kind in enumerate(get_args(kinds))
}
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
        unit: `"bytes a parameter"` of the whole model, or `"GB"` (10**9 bytes), on one device.
        axes: the axes to draw on; None makes a new figure.

    Returns:
        The axes. Parts that are too small to be seen are in the bars and the sums, but not in the legend.

    Raises:
        TypeError: if `plan` is something else, or `axes` not axes.
        ValueError: if there are no plans, or `unit` is another one.

    Example:
        >>> axes = memory(memory_plan(1000, mixed_precision(optax.sgd(0.1), "bf16"), "bf16"))
        >>> [bars.get_label() for bars in axes.containers]
        ['parameters', 'gradients', 'low bits']
        >>> float(axes.containers[0][0].get_width())
        2.0
    """
    given = plan.plans if isinstance(plan, PlanComparison) else plan
    plans = _by_name(given, MemoryPlan, "`memory`", "`mpx.memory_plan` or `mpx.compare_plans`", "plan")
    if unit not in get_args(Unit):
        raise ValueError(f"`memory`: `unit` must be one of {get_args(Unit)}, but got {unit!r}.")
    in_unit = lambda kind, plan: plan.bytes_of(kind) / (1e9 if unit == "GB" else plan.parameters)
    widths = {kind: [in_unit(kind, plan) for plan in plans.values()] for kind in get_args(rows.Kind)}
    devices, counts = ({getattr(plan, name) for plan in plans.values()} for name in ("devices", "parameters"))
    label = unit if devices == {1} else f"{unit}, on each device"
    axes = _draw(axes, "memory", plans, widths, label, suffix=" GB" if unit == "GB" else "")
    models = f" of {max(counts):,} parameters" if len(counts) == 1 else ""
    where = f" on {max(devices):,} devices" if len(devices) == 1 and devices != {1} else ""
    axes.set_title(f"A training run{models}{where}", loc="right")  # the names of recipes leave little room to the left
    return axes


def traffic(report: StepReport | ReportComparison | Mapping[str, StepReport], *, axes: Axes | None = None) -> Axes:
    """Draw where the bytes of a compiled step go: what its kernels read and write, by what they do most.

    Args:
        report: a report of `mpx.step_report`, several of `mpx.tools.program.compare_reports`, or reports by name.
        axes: the axes to draw on; None makes a new figure.

    Returns:
        The axes, with a bar for each report and the sum at its end.

    Raises:
        TypeError: if `report` is something else, or `axes` not axes.
        ValueError: if there are no reports.

    Example:
        >>> report = step_report(lambda x: x @ x, jax.ShapeDtypeStruct((64, 64), jnp.float32))
        >>> [bars.get_label() for bars in traffic(report).containers]
        ['products']
    """
    given = report.reports if isinstance(report, ReportComparison) else report
    made_by = "`mpx.step_report` or `mpx.tools.program.compare_reports`"
    reports = _by_name(given, StepReport, "`traffic`", made_by, "report")
    gigabytes = lambda kind: [report.moved_by_kind.get(kind, 0) / 1e9 for report in reports.values()]
    widths = {kind: gigabytes(kind) for kind in get_args(kernels.Kind)}
    return _draw(axes, "traffic", reports, widths, "GB read and written in a step", suffix=" GB")


def _by_name(given: Any, kind: type, caller: str, made_by: str, what: str) -> Mapping[str, Any]:
    """Return plans or reports by name; a single one has no name."""
    found = {"": given} if isinstance(given, kind) else given
    if not isinstance(found, Mapping) or not all(isinstance(value, kind) for value in found.values()):
        raise TypeError(
            f"{caller} needs what {made_by} returns, or a dictionary from names to {what}s, but got {given!r}."
        )
    if not found:
        raise ValueError(f"{caller} needs at least one {what}, but got none.")
    return found


def _draw(
    axes: Axes | None, caller: str, names: Mapping[str, Any], widths: Mapping[Any, list[float]], label: str, suffix: str
) -> Axes:
    """Draw named bars of parts that lie one behind the other, with their sums."""
    parts = {kind: np.array(row) for kind, row in widths.items() if any(row)}
    totals = np.sum(list(parts.values()), axis=0)
    left = np.zeros_like(totals)
    with canvas(axes, caller, 1.4 + 0.3 * len(names) + 0.12 * len(parts)) as axes:
        for kind, row in parts.items():
            color, hatch = LOOKS[kind]
            look = {"facecolor": color, "edgecolor": ON_COLOR, "hatch": hatch, "linewidth": 0, "height": 0.65}
            shown = kind if row.max() >= _VISIBLE * totals.max() else "_"
            bars = axes.barh(range(len(row)), row, left=left, label=shown, **look)
            left = left + row
        axes.bar_label(bars, [f"{total:.4g}{suffix}" for total in totals], padding=4)
        axes.set_xlim(0, (1.35 if suffix else 1.2) * totals.max())
        axes.set_yticks(range(len(totals)), map(plain, names))
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_ylim(len(totals) - 0.5, -0.5)
        axes.xaxis.set_major_locator(round_ticks(integers=False))
        axes.set_xlabel(label)
        add_legend(axes, columns=2, side="right")
    return axes
