"""Bytes that a compiled step moves, as bars."""

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
from matplotlib.axes import Axes

from mpx.tools.plot.memory import draw_bars
from mpx.tools.plot.sheet import BLUE, GREEN, GREY, PURPLE, VERMILLION, canvas
from mpx.tools.program.kernels import Kind
from mpx.tools.program.step_report import ReportComparison, StepReport

_LOOKS: dict[Kind, tuple[str, str]] = {
    "products": (BLUE, ""),
    "elementwise": (GREEN, "///"),
    "reductions": (PURPLE, "..."),
    "conversions and copies": (VERMILLION, "xxx"),
    "collectives": (GREY, "---"),
    "library calls": (BLUE, "++"),
}


def traffic(report: StepReport | ReportComparison | Mapping[str, StepReport], *, axes: Axes | None = None) -> Axes:
    """Draw where the bytes of a compiled step go: what its kernels read and write, by what they do most.

    Args:
        report: a report of `mpx.step_report`, several of `mpx.tools.program.compare_reports`, or reports by name.
        axes: the axes to draw on; those of a new figure if None.

    Returns:
        The axes, with a bar for each report and the sum at its end.

    Raises:
        TypeError: if `report` is none of these, or `axes` not axes.
        ValueError: if there are no reports.

    Example:
        >>> report = step_report(lambda x: x @ x, jax.ShapeDtypeStruct((64, 64), jnp.float32))
        >>> [bars.get_label() for bars in traffic(report).containers]
        ['products']
    """
    reports = _checked_reports(report)
    gigabytes = lambda kind: np.array([r.moved_by_kind.get(kind, 0) / 1e9 for r in reports.values()])
    widths = {kind: gigabytes(kind) for kind in get_args(Kind)}
    widths = {kind: row for kind, row in widths.items() if row.any()}
    with canvas(axes, "traffic", 1.4 + 0.3 * len(reports) + 0.12 * len(widths)) as axes:
        draw_bars(axes, reports, widths, _LOOKS, suffix=" GB")
        axes.set(xlabel="GB read and written in a step")
    return axes


def _checked_reports(given: Any) -> Mapping[str, StepReport]:
    """Return reports by name; a single report has no name."""
    reports = given.reports if isinstance(given, ReportComparison) else given
    reports = {"": reports} if isinstance(reports, StepReport) else reports
    if not isinstance(reports, Mapping) or not all(isinstance(report, StepReport) for report in reports.values()):
        raise TypeError(
            "`traffic` needs what `mpx.step_report` or `mpx.tools.program.compare_reports` returns, or a dictionary "
            f"from names to reports, but got {given!r}."
        )
    if not reports:
        raise ValueError("`traffic` needs at least one report, but got none.")
    return reports
