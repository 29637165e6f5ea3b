"""Curves over the steps of a training: losses, and updates that are lost."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from mpx.tools.plot.canvas import add_legend, axes_for, name_axes, plain, round_ticks
from mpx.tools.plot.themes import MOST_CURVES, curve_style, theme

_SIZE = (8.0, 4.0)

Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # by name the steps and the numbers


def losses(
    curves: Mapping[str, ArrayLike],
    *,
    steps: ArrayLike | None = None,
    reference: ArrayLike | None = None,
    reference_name: str = "f32",
    axes: Axes | None = None,
) -> Axes:
    """Loss curves, and how far apart those of float32 lie that differ in nothing but their seed.

    A recipe whose curve stays within that band loses nothing that can be seen. Where a loss is infinite or NaN its
    curve has a gap, and a cross marks the last number before it.

    Args:
        curves: by name the losses of a training, one a step; at most 20 curves.
        steps: the numbers of those steps, of all curves. None: 0, 1, 2, ... for each, so that lengths may differ.
        reference: losses of several seeds, of shape (seeds, steps), drawn as their mean and a band of one standard
            deviation (of a sample: divided by seeds - 1) above and below.
        reference_name: what these are.
        axes: to draw on; those of a new figure if None.

    Returns:
        The axes.

    Raises:
        TypeError: if `curves` is not a dictionary, or `axes` no axes.
        ValueError: if there are no curves or too many, one of them is empty or not a vector, lengths differ, steps are
            not finite, or `reference` has not two seeds.

    Example:
        >>> seeds = np.array([[2.0, 1.5, 1.25], [2.5, 1.5, 1.0]])
        >>> axes = losses({"bf16": [2.25, 1.5, 1.5]}, steps=[0, 10, 20], reference=seeds)
        >>> mean, bf16 = axes.get_lines()
        >>> mean.get_ydata(), bf16.get_ydata()
        (array([2.25 , 1.5  , 1.125]), array([2.25, 1.5 , 1.5 ]))
    """
    found = _checked_curves(curves, steps, "losses", "curves")
    spread = None if reference is None else _checked_reference(reference, steps)
    axes = axes_for(axes, "losses", _SIZE)
    if spread is not None:
        _draw_spread(axes, *spread, plain(reference_name))
    _draw_curves(axes, found)
    _mark_gaps(axes, found)
    name_axes(axes, x="step", y="loss")
    add_legend(axes)
    return axes


def lost_updates(
    shares: Mapping[str, ArrayLike] | ArrayLike, *, steps: ArrayLike | None = None, axes: Axes | None = None
) -> Axes:
    """The share of the updates that rounding swallows, over time; as `mpx.monitor.lost_updates` measures it.

    Args:
        shares: numbers from 0 to 1, one a step; or several such curves by name. NaN leaves a gap.
        steps: the numbers of those steps. None: 0, 1, 2, ...
        axes: to draw on; those of a new figure if None.

    Returns:
        The axes.

    Raises:
        TypeError: if `axes` is no axes.
        ValueError: if a share is below 0 or above 1, and as for `losses`.

    Example:
        >>> axes = lost_updates({"bf16": [0.25, 0.5], "f32": [0.0, 0.0]}, steps=[100, 200])
        >>> [line.get_ydata() for line in axes.get_lines()]
        [array([0.25, 0.5 ]), array([0., 0.])]
    """
    is_named = isinstance(shares, Mapping)
    found = _checked_curves(shares if is_named else {"shares": shares}, steps, "lost_updates", "shares")
    wrong = [name for name, (_, values) in found.items() if np.any((values < 0) | (values > 1))]
    if wrong:
        raise ValueError(f"`lost_updates`: shares must be from 0 to 1 (or NaN), but those of {wrong} are not.")
    axes = axes_for(axes, "lost_updates", _SIZE)
    _draw_curves(axes, found)
    highest = max(np.nanmax(values, initial=0.0) for _, values in found.values())
    margin = 0.05 * (highest or 1.0)
    axes.set_ylim(-margin, (highest or 1.0) + margin)  # a curve at 0 is seen above the axis
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    name_axes(axes, x="step", y="updates that are lost")
    if is_named:
        add_legend(axes)
    return axes


def _checked_curves(curves: Any, steps: Any, caller: str, argument: str) -> Curves:
    if not isinstance(curves, Mapping):
        raise TypeError(f"`{caller}`: `{argument}` must map names to arrays, but got {type(curves).__name__}.")
    if not 0 < len(curves) <= MOST_CURVES:
        raise ValueError(
            f"`{caller}`: `{argument}` must hold 1 to {MOST_CURVES} curves, which is how many can be told apart, but "
            f"got {len(curves)}."
        )
    arrays = {str(name): _as_float64(values) for name, values in curves.items()}
    wrong = {name: values.shape for name, values in arrays.items() if values.ndim != 1 or not values.size}
    if wrong:
        raise ValueError(f"`{caller}`: each of `{argument}` must be a vector of numbers, but got the shapes {wrong}.")
    if steps is None:
        return {name: (np.arange(len(values)), values) for name, values in arrays.items()}
    steps = _checked_steps(steps, caller)
    lengths = {name: len(values) for name, values in arrays.items() if len(values) != len(steps)}
    if lengths:
        raise ValueError(
            f"`{caller}`: `steps` has {len(steps)} numbers, but of `{argument}` these have others: {lengths}."
        )
    return {name: (steps, values) for name, values in arrays.items()}


def _checked_steps(steps: Any, caller: str) -> np.ndarray:
    steps = _as_float64(steps)
    if steps.ndim != 1 or not np.all(np.isfinite(steps)):
        raise ValueError(f"`{caller}`: `steps` must be a vector of finite numbers, but got {steps}.")
    return steps


def _checked_reference(reference: Any, steps: Any) -> tuple[np.ndarray, np.ndarray]:
    """The steps and the losses of all seeds."""
    values = _as_float64(reference)
    if values.ndim != 2 or values.shape[0] < 2 or not values.shape[1]:
        raise ValueError(
            "`losses`: `reference` must have the shape (seeds, steps) with at least two seeds, of which there is a "
            f"standard deviation, but got the shape {values.shape}. A single float32 training is one of `curves`."
        )
    if steps is None:
        return np.arange(values.shape[1]), values
    steps = _checked_steps(steps, "losses")
    if len(steps) != values.shape[1]:
        raise ValueError(f"`losses`: `steps` has {len(steps)} numbers, but `reference` has {values.shape[1]} steps.")
    return steps, values


def _as_float64(values: Any) -> np.ndarray:
    return np.asarray(values).astype(np.float64)


def _draw_spread(axes: Axes, steps: np.ndarray, values: np.ndarray, name: str) -> None:
    """A seed that has diverged leaves a gap in the mean and in the band."""
    values = np.where(np.isfinite(values), values, np.nan)
    mean, deviation = values.mean(axis=0), values.std(axis=0, ddof=1)
    color = theme().text
    band = f"{name}, ± standard deviation"
    axes.fill_between(steps, mean - deviation, mean + deviation, color=color, alpha=0.3, linewidth=0, label=band)
    axes.plot(steps, mean, color=color, linewidth=3.0, label=f"{name}, mean of {len(values)} seeds")


def _draw_curves(axes: Axes, curves: Curves) -> None:
    for i, (name, (steps, values)) in enumerate(curves.items()):
        is_finite = np.isfinite(values)
        label = plain(name) if is_finite.any() else f"{plain(name)} (no finite number)"
        # A line needs two points.
        marker = "o" if is_finite.sum() == 1 else ""
        drawn = np.where(is_finite, values, np.nan)
        axes.plot(steps, drawn, linewidth=1.6, marker=marker, markersize=4.0, label=label, **curve_style(i))
    axes.xaxis.set_major_locator(round_ticks(integers=True))


def _mark_gaps(axes: Axes, curves: Curves) -> None:
    """Crosses at the last finite numbers before infinite ones and NaN."""
    label = "infinite or NaN from here"
    for i, (steps, values) in enumerate(curves.values()):
        is_finite = np.isfinite(values)
        (last,) = np.nonzero(is_finite[:-1] & ~is_finite[1:])
        if last.size:
            style = {"linestyle": "none", "color": curve_style(i)["color"], "markeredgewidth": 2.0}
            axes.plot(steps[last], values[last], marker="X", markersize=7.0, label=label, **style)
            label = "_"  # the legend has it once
