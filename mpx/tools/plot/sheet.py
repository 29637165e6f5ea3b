"""The style sheet of all plots, and the axes that they are drawn on."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.rcsetup import cycler
from matplotlib.transforms import ScaledTranslation

# Four colors of Okabe and Ito 2008, Color Universal Design, which stand out from white and from black by 3 to 1.
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
# This grey has the 4.5 to 1 that WCAG asks for on white, and 4.1 to 1 on #121212. No grey has 4.5 on both.
GREY = "#767676"

_DASHES = ["-", "--", ":", "-.", (0, (4, 1.5, 1.2, 1.5, 1.2, 1.5))]
# Neighbors differ in color and in line style, all 20 in one of the two.
CURVES = cycler(color=[BLUE, VERMILLION, GREEN, PURPLE] * 5) + cycler(linestyle=_DASHES * 4)

_GREY_PARTS = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
_SHEET: dict[str, Any] = {
    **dict.fromkeys([*_GREY_PARTS, "grid.color"], GREY),
    "figure.facecolor": "none",
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "axes.facecolor": "none",
    "axes.prop_cycle": CURVES,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Make figures in a `with` block look like the figures of `mpx.plot`.

    They are transparent, with text of a grey that can be read on white and on a dark page. Axes made outside of such a
    block keep their own look.

    Example:
        >>> import matplotlib.pyplot as plt
        >>> import mpx.plot
        >>> with mpx.plot.style():
        ...     figure, (left, right) = plt.subplots(1, 2)
        >>> figure.get_facecolor(), mpx.plot.losses({"bf16": [2.0, 1.5]}, axes=left).xaxis.label.get_color()
        ((0.0, 0.0, 0.0, 0.0), '#767676')
    """
    plt.draw_if_interactive()  # load the backend: inside of the block the settings that it makes would be taken back
    with plt.style.context(_SHEET):
        yield


@contextlib.contextmanager
def canvas(axes: Axes | None, height: float) -> Iterator[Axes]:
    """Give the axes to draw on, in a block with the style sheet: `axes`, or new ones in a figure of this height.

    New figures are 5.6 inches wide: on the 390 pixels of a phone, letters of 10 points then have 10 pixels.
    """
    with style():
        axes = plt.subplots(figsize=(5.6, height))[1] if axes is None else axes
        axes.set_prop_cycle(CURVES)
        yield axes


def add_legend(axes: Axes, handles: Sequence[Any] | None = None, *, columns: int = 1) -> None:
    """Add a legend below the axes and the name of the x axis, where it hides nothing."""
    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
    below: Any = axes.transAxes + ScaledTranslation(0, -36 / 72, axes.figure.dpi_scale_trans)
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, ncols=columns)
