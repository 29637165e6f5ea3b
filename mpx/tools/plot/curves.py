"""Curves over the steps of training runs: losses, loss scales, and updates that are lost."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

from mpx.monitor import ScaleHistory
from mpx.tools.plot.sheet import BLUE, CURVES, GREY, VERMILLION, add_legend, canvas, plain, round_ticks

_LINE = 0.2  # inches of height for a line of the legend

Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # by name the steps and the numbers


def losses(
    curves: Mapping[str, ArrayLike],
    *,
    steps: ArrayLike | None = None,
    reference: ArrayLike | None = None,
    reference_name: str = "f32",
    axes: Axes | None = None,
) -> Axes:
    """Draw loss curves, over a band of float32 training runs that differ in their seed only.

    A recipe whose curve stays within that band loses nothing that can be seen. A curve has a gap where the loss is
    infinite or NaN, and a cross at the last number before it.

    Args:
        curves: by name the losses of a training run, one a step; at most 20 curves.
        steps: the numbers of those steps, of all curves. None: 0, 1, 2, ... for each, so that lengths may differ.
        reference: losses of several seeds, of shape (seeds, steps), drawn as their mean and a band of one standard
            deviation (of a sample: divided by seeds - 1) above and below; or those of one training run, without a band.
        reference_name: the name of these training runs.
        axes: the axes to draw on; those of a new figure if None.

    Returns:
        The axes.

    Raises:
        TypeError: if `curves` is not a dictionary, or `axes` not axes.
        ValueError: if there are no curves or too many, one of them is empty or not a vector, `reference` is neither
            a vector nor a matrix, or `steps` are not as many finite numbers.

    Example:
        >>> seeds = np.array([[2.0, 1.5, 1.25], [2.5, 1.5, 1.0]])
        >>> axes = losses({"bf16": [2.25, 1.5, 1.5]}, steps=[0, 10, 20], reference=seeds)
        >>> mean, bf16 = axes.get_lines()
        >>> mean.get_ydata(), bf16.get_ydata()
        (array([2.25 , 1.5  , 1.125]), array([2.25, 1.5 , 1.5 ]))
    """
    found = _checked_curves(curves, steps, "losses", "curves")
    seeds = None if reference is None else _checked_seeds(reference, steps)
    with canvas(axes, "losses", 3.2 + _LINE * len(curves)) as axes:
        if seeds is not None:
            _draw_seeds(axes, *seeds, plain(reference_name))
        _draw_curves(axes, found)
        _mark_gaps(axes, found)
        axes.set(xlabel="step", ylabel="loss")
        add_legend(axes)
    return axes


def lost_updates(
    shares: Mapping[str, ArrayLike] | ArrayLike, *, steps: ArrayLike | None = None, axes: Axes | None = None
) -> Axes:
    """Draw the share of the updates that rounding swallows, as `mpx.monitor.lost_updates` measures it.

    Args:
        shares: numbers from 0 to 1, one a step; or several such curves by name. NaN leaves a gap.
        steps: the numbers of those steps. None: 0, 1, 2, ...
        axes: the axes to draw on; those of a new figure if None.

    Returns:
        The axes.

    Raises:
        TypeError: if `axes` is not axes.
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
    highest = max(np.nanmax(values, initial=0.0) for _, values in found.values()) or 1.0
    with canvas(axes, "lost_updates", 2.6 + _LINE * len(found)) as axes:
        _draw_curves(axes, found)
        axes.set_ylim(-0.05 * highest, 1.05 * highest)  # a curve at 0 is seen above the axis
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set(xlabel="step", ylabel="updates that are lost")
        if is_named:
            add_legend(axes)
    return axes


def loss_scale(history: ScaleHistory, *, axes: Axes | None = None) -> Axes:
    """Draw the loss scale of each step, with crosses where a step was skipped.

    Args:
        history: `mpx.monitor.read_scale_history(opt_state)`.
        axes: the axes to draw on; those of a new figure if None.

    Returns:
        The axes; that of the scale is logarithmic, of base 2.

    Raises:
        TypeError: if `history` is not a `ScaleHistory`, or `axes` not axes.
        ValueError: if nothing has been recorded, or its scales cannot be drawn.

    Example:
        >>> tx = mpx.monitor.scale_history(loss_scaling(optax.sgd(0.1)))
        >>> state = tx.init(jnp.ones(2))
        >>> for gradient in (1.0, jnp.inf, 1.0):
        ...     _, state = tx.update(jnp.full(2, gradient), state)
        >>> scales, skipped = loss_scale(mpx.monitor.read_scale_history(state)).get_lines()
        >>> scales.get_ydata(), skipped.get_xdata()
        (array([32768., 32768., 16384.], dtype=float32), array([1]))
    """
    if not isinstance(history, ScaleHistory):
        raise TypeError(
            f"`loss_scale` needs `mpx.monitor.read_scale_history(opt_state)`, but got {type(history).__name__}."
        )
    steps, scales, skipped = map(np.asarray, history)
    if not steps.size:
        raise ValueError("`loss_scale`: `history` has no steps in it: nothing has been recorded yet.")
    if steps.shape != scales.shape or steps.shape != skipped.shape or not np.all(np.isfinite(scales) & (scales > 0)):
        raise ValueError("`loss_scale`: `history` must hold three vectors of one length, with finite scales above 0.")
    with canvas(axes, "loss_scale", 2.9) as axes:
        marker = "o" if len(steps) == 1 else ""  # a line needs two points
        axes.plot(steps, scales, color=BLUE, linestyle="-", drawstyle="steps-post", marker=marker, label="loss scale")
        if skipped.any():
            label = f"skipped: {skipped.sum():,} of {len(steps):,} steps"
            crosses = {"linestyle": "none", "marker": "x", "markeredgewidth": 1.6}
            axes.plot(steps[skipped], scales[skipped], color=VERMILLION, label=label, **crosses)
        axes.set_yscale("log", base=2)
        axes.set_ylim(scales.min() / 2, scales.max() * 2)
        axes.yaxis.set_major_locator(LogLocator(base=2, numticks=9))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_locator(round_ticks(integers=True))
        axes.set(xlabel="step", ylabel="loss scale")
        add_legend(axes)
    return axes


def _checked_curves(curves: Any, steps: Any, caller: str, argument: str) -> Curves:
    if not isinstance(curves, Mapping):
        raise TypeError(f"`{caller}`: `{argument}` must map names to arrays, but got {type(curves).__name__}.")
    if not 0 < len(curves) <= len(CURVES):
        raise ValueError(
            f"`{caller}`: `{argument}` must hold 1 to {len(CURVES)} curves, which is how many can be told apart, but "
            f"got {len(curves)}."
        )
    arrays = {str(name): np.asarray(values).astype(np.float64) for name, values in curves.items()}
    wrong = {name: values.shape for name, values in arrays.items() if values.ndim != 1 or not values.size}
    if wrong:
        raise ValueError(f"`{caller}`: each of `{argument}` must be a vector of numbers, but got the shapes {wrong}.")
    return {name: (_checked_steps(steps, name, len(x), caller), x) for name, x in arrays.items()}


def _checked_steps(steps: Any, name: str, count: int, caller: str) -> np.ndarray:
    """Return the numbers of the steps of a curve: 0, 1, 2, ... if none are given."""
    steps = np.arange(count) if steps is None else np.asarray(steps).astype(np.float64)
    if steps.shape != (count,) or not np.all(np.isfinite(steps)):
        raise ValueError(
            f"`{caller}`: `steps` must be a vector of {count} finite numbers, as long as {name!r}, but got {steps}."
        )
    return steps


def _checked_seeds(reference: Any, steps: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the losses of all seeds."""
    values = np.atleast_2d(np.asarray(reference).astype(np.float64))
    if values.ndim != 2 or not values.size:
        raise ValueError(f"`losses`: `reference` must have the shape (seeds, steps), but got {np.shape(reference)}.")
    return _checked_steps(steps, "reference", values.shape[1], "losses"), values


def _draw_seeds(axes: Axes, steps: np.ndarray, values: np.ndarray, name: str) -> None:
    """Draw mean and band of the seeds, with a gap where one of them has diverged."""
    values = np.where(np.isfinite(values), values, np.nan)
    mean = values.mean(axis=0)
    if len(values) > 1:
        low, high = mean - values.std(axis=0, ddof=1), mean + values.std(axis=0, ddof=1)
        label = f"{name}, ± standard deviation"
        axes.fill_between(steps, low, high, color=GREY, alpha=0.3, linewidth=0, label=label)
        name = f"{name}, mean of {len(values)} seeds"
    axes.plot(steps, mean, color=GREY, linestyle="-", linewidth=3.0, label=name)


def _draw_curves(axes: Axes, curves: Curves) -> None:
    for name, (steps, values) in curves.items():
        is_finite = np.isfinite(values)
        label = plain(name) if is_finite.any() else f"{plain(name)} (no finite number)"
        marker = "o" if is_finite.sum() == 1 else ""  # a line needs two points
        axes.plot(steps, np.where(is_finite, values, np.nan), marker=marker, markersize=4.0, label=label)
    axes.xaxis.set_major_locator(round_ticks(integers=True))


def _mark_gaps(axes: Axes, curves: Curves) -> None:
    """Mark the last finite numbers before infinite ones and NaN."""
    label = "infinite or NaN from here"
    for look, (steps, values) in zip(CURVES, curves.values(), strict=False):
        is_finite = np.isfinite(values)
        (last,) = np.nonzero(is_finite[:-1] & ~is_finite[1:])
        if last.size:
            style = {"linestyle": "none", "color": look["color"], "markeredgewidth": 2.0}
            axes.plot(steps[last], values[last], marker="X", markersize=7.0, label=label, **style)
            label = "_"  # the legend has it once
