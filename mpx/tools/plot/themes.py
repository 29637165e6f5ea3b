"""Colours, line styles and hatches, and for which page they are."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args

Page = Literal["light", "dark"]

# Four of the eight colours of Okabe and Ito: those that stand out from white and from black by 3 to 1.
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_COLORS = (BLUE, VERMILLION, GREEN, PURPLE)
_LINE_STYLES: tuple[Any, ...] = (
    "solid",
    (0, (5, 2)),
    (0, (1.2, 1.2)),
    (0, (7, 1.5, 1.5, 1.5)),
    (0, (4, 1.5, 1.2, 1.5, 1.2, 1.5)),
)
MOST_CURVES = len(_COLORS) * len(_LINE_STYLES)
ON_COLOR = "#FFFFFF"  # hatches, and text on blue


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of what is no data.

    Attributes:
        page: the background; None is transparent.
        text: of text, axes, and curves to compare with.
    """

    page: str | None
    text: str


# No grey has the 4.5 to 1 that WCAG asks for on white and on #121212 both; this one has 4.5 on white and 4.1 there.
_EITHER = Theme(None, "#767676")
_THEMES: dict[Page, Theme] = {"light": Theme("#FFFFFF", "#262626"), "dark": Theme("#121212", "#E6E6E6")}
_theme: contextvars.ContextVar[Theme] = contextvars.ContextVar("theme of mpx.plot", default=_EITHER)


def theme() -> Theme:
    """The one that is in effect."""
    return _theme.get()


@contextlib.contextmanager
def style(page: Page) -> Iterator[None]:
    """Has all plots within a `with` block made for one page, which is then painted too.

    Without it figures are transparent, and their text is of a grey that can be read on both pages: 4.5 to 1 on white,
    as WCAG asks for, and 4.1 to 1 on a dark page (#121212). No colour has 4.5 on both. For a page that is known this
    has 15 to 1. Data have the same colours everywhere, at least 3 to 1 on both pages.

    Args:
        page: `"light"`: nearly black on white. `"dark"`: nearly white on #121212. It holds for given axes too, and
            paints the figure that they are in.

    Raises:
        ValueError: if `page` is neither.

    Example:
        >>> import mpx.plot
        >>> with mpx.plot.style("dark"):
        ...     axes = mpx.plot.losses({"bf16": [2.0, 1.5, 1.2]})
        >>> axes.xaxis.label.get_color(), axes.figure.get_facecolor()[:3] == (18 / 255,) * 3
        ('#E6E6E6', True)

    References:
        Okabe and Ito 2008, Color Universal Design (jfly.uni-koeln.de/color): the colours.
        W3C 2018, Web Content Accessibility Guidelines 2.1, 1.4.3 and 1.4.11: the contrasts of text and of graphics.
    """
    if page not in get_args(Page):
        raise ValueError(f"`style`: `page` must be 'light' or 'dark', but got {page!r}.")
    token = _theme.set(_THEMES[page])
    try:
        yield
    finally:
        _theme.reset(token)


def curve_style(index: int) -> dict[str, Any]:
    """Colour and line style of a curve; those of the first `MOST_CURVES` differ, those of neighbours in both."""
    return {"color": _COLORS[index % len(_COLORS)], "linestyle": _LINE_STYLES[index % len(_LINE_STYLES)]}


def bar_style(color: str, hatch: str) -> dict[str, Any]:
    """A filled bar with a white hatch, which has no outline."""
    return {"facecolor": color, "edgecolor": ON_COLOR, "hatch": hatch, "linewidth": 0}
