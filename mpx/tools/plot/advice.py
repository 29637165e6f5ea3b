"""What `mpx.advise` has measured, as bars."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from mpx import _errors
from mpx.tools.advise.advise import Advice, AdviceRow
from mpx.tools.plot.canvas import add_legend, axes_for, name_axes, plain
from mpx.tools.plot.themes import BLUE, GREEN, VERMILLION, bar_style, theme

_LONGEST_NAME = 44  # characters
_ROOM_FOR_WORD = 0.3  # of the length of the axis, behind infinite bars

# What is to be done with a row, and how its bar looks.
_LOOKS: dict[str, tuple[str, str]] = {
    "keep by an override": (VERMILLION, "///"),
    "keep by full_precision": (GREEN, "xxx"),
    "lower": (BLUE, ""),
}


def advice(advice: Advice, *, most_rows: int = 20, axes: Axes | None = None) -> Axes:
    """The error that each leaf or contraction causes if it alone is lowered, and which ones the advice keeps.

    Lines show the bound, and the errors with the given policy and with what is advised.

    Args:
        advice: what `mpx.advise` has returned.
        most_rows: how many to draw, those with the largest errors.
        axes: to draw on; those of a new figure if None.

    Returns:
        The axes; that of the errors is logarithmic. An infinite error has a bar beyond all others, one of 0 none.

    Raises:
        TypeError: if `advice` is no `Advice`, or `axes` no axes.
        ValueError: if it has no rows, or `most_rows` is not an integer above 0.

    Example:
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["first"] @ params["second"]) ** 2)
        >>> params = {"first": jnp.full((4, 8), 0.3), "second": jnp.full((8, 2), 0.25)}
        >>> found = advise(loss_fn, params, jnp.ones((2, 4)), get_policy("params=bf16,compute=f32"), bound=1e-5)
        >>> [name.get_text() for name in advice(found).get_yticklabels()]
        ['first', 'second']
    """
    if not isinstance(advice, Advice):
        raise TypeError(f"`advice` needs what `mpx.advise` returns, but got {type(advice).__name__}.")
    if not _errors.is_integer(most_rows) or most_rows < 1:
        raise ValueError(f"`advice`: `most_rows` must be an integer above 0, but got {most_rows!r}.")
    if not advice.rows:
        raise ValueError("`advice`: the advice has no rows, so there is nothing to draw.")
    rows, lines = advice.rows[:most_rows], _lines(advice)
    axes = axes_for(axes, "advice", (9.0, 1.4 + max(0.3 * len(rows), 1.5)))
    low, high = _limits([*[row.error for row in rows], *[error for error, _ in lines.values()]])
    is_infinite = any(math.isinf(row.error) for row in rows)
    axes.set_xscale("log")
    axes.set_xlim(low, high * (high / low) ** _ROOM_FOR_WORD if is_infinite else high)
    axes.xaxis.set_major_locator(LogLocator(numticks=9))
    axes.xaxis.set_minor_formatter(NullFormatter())
    _draw_rows(axes, rows, low, high)
    for name, (error, dashes) in lines.items():
        if math.isfinite(error) and error > 0:
            label = f"{name}: {error:.2g}"
            axes.axvline(error, color=theme().text, linewidth=1.8, linestyle=dashes, label=label, zorder=0.9)
    left_out = len(advice.rows) - len(rows)
    more = f"; {left_out:,} with smaller errors are not shown" if left_out else ""
    title = f"What each does if it alone is lowered{more}"
    name_axes(axes, x="relative error of loss or gradient, the larger one", title=title)
    add_legend(axes)
    return axes


def _treatment(row: AdviceRow) -> str:
    if not row.is_kept:
        return "lower"
    return "keep by an override" if row.kind == "leaf" else "keep by full_precision"


def _lines(advice: Advice) -> dict[str, tuple[float, Any]]:
    """Errors that are drawn as lines, and how."""
    after = advice.after if advice.after_lines is None else advice.after_lines
    return {
        "bound": (advice.bound, "solid"),
        "given policy": (advice.before.worst, (0, (5, 2))),
        "as advised": (after.worst, (0, (1.2, 1.2))),
    }


def _limits(errors: list[float]) -> tuple[float, float]:
    """Powers of ten around all errors, so that there are at least two numbers on the axis."""
    known = [error for error in errors if math.isfinite(error) and error > 0]  # the bound is one
    return 10.0 ** math.floor(math.log10(min(known) / 1.5)), 10.0 ** math.ceil(math.log10(max(known) * 1.5))


def _draw_rows(axes: Axes, rows: tuple[AdviceRow, ...], low: float, high: float) -> None:
    """The bars, and in words the errors that have no place on a logarithmic axis."""
    for name, look in _LOOKS.items():
        chosen = [i for i, row in enumerate(rows) if _treatment(row) == name]
        if chosen:
            widths = [min(rows[i].error, high) for i in chosen]
            axes.barh(chosen, widths, height=0.65, label=name, **bar_style(*look))
    for y, row in enumerate(rows):
        if row.error == 0 or math.isinf(row.error):
            word, end = ("infinite", high) if row.error else ("0", low)
            place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(word, (end, y), color=theme().text, **place)
    axes.set_yticks(range(len(rows)), [plain(_shortened(row.name)) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _shortened(name: str) -> str:
    """A name that is too long without its middle: both the beginning and the end of a path say which it is."""
    if len(name) <= _LONGEST_NAME:
        return name
    half = (_LONGEST_NAME - 1) // 2
    return f"{name[:half]}\N{HORIZONTAL ELLIPSIS}{name[-half:]}"
