"""Axes to draw on, and how they look."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mpx.tools.plot.themes import theme


def axes_for(axes: Any, caller: str, size: tuple[float, float]) -> Axes:
    """The given axes, or those of a new figure of so many inches, in the colours of the theme."""
    if axes is not None and not isinstance(axes, Axes):
        raise TypeError(
            f"`{caller}`: `axes` must be a Matplotlib Axes or None, but got {type(axes).__name__}. "
            "`plt.subplots(layout='constrained')` returns a figure and its axes."
        )
    page = theme().page
    if axes is None:
        _, axes = plt.subplots(figsize=size, layout="constrained")
        page = page or "none"
    if page is not None:
        axes.figure.set_facecolor(page)
        axes.set_facecolor(page)
    _tidy(axes)
    return axes


def _tidy(axes: Axes) -> None:
    """Two spines and a faint grid behind the data."""
    color = theme().text
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(color)
    axes.tick_params(which="both", color=color, labelcolor=color)
    axes.grid(color=color, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)


def name_axes(axes: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """The texts around axes, in the colour of the theme."""
    axes.set_xlabel(x, color=theme().text)
    axes.set_ylabel(y, color=theme().text)
    axes.set_title(title, loc="left", fontsize="medium", color=theme().text)


def round_ticks(*, integers: bool) -> MaxNLocator:
    """A few multiples of 1, 2 or 5 times a power of ten."""
    return MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=integers)


def add_legend(axes: Axes, handles: Sequence[Any] | None = None) -> None:
    """To the right of the axes, where it hides nothing."""
    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        frameon=False,
        labelcolor=theme().text,
        handlelength=3.2,  # long enough for every line style
    )


def plain(text: str) -> str:
    """Text of the user as it is: no formula between dollars, and a leading underscore does not hide it."""
    text = text.replace("$", r"\$")
    return f"\N{ZERO WIDTH SPACE}{text}" if text.startswith("_") else text


def power_of_two(exponent: float) -> str:
    """2**exponent as a formula."""
    return f"$2^{{{exponent:g}}}$"
