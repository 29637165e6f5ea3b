"""Curves over the steps of training runs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mpx.tools.plot.sheet import GREY, add_legend, canvas


def losses(
    curves: Mapping[str, ArrayLike],
    *,
    steps: ArrayLike | None = None,
    reference: ArrayLike | None = None,
    reference_name: str = "f32",
    ylabel: str = "loss",
    axes: Axes | None = None,
) -> Axes:
    """Draw loss curves, over a band of float32 training runs that differ in their seed only.

    A recipe whose curve stays within that band loses nothing that can be seen. A curve has a gap where the loss is
    infinite or NaN, and a cross at the last number before it. Loss scales and shares of lost updates are curves too:
    give their `ylabel`, and set the scale of the axes that come back.

    Args:
        curves: by name the losses of a training run, one a step.
        steps: the step numbers, for all curves. None: 0, 1, 2, ... for each, so that lengths may differ.
        reference: losses of several seeds, of shape (seeds, steps), drawn as their mean and a band of one standard
            deviation (of a sample: divided by seeds - 1) above and below; or of one training run, without a band.
        reference_name: the name of these training runs.
        ylabel: what the curves show.
        axes: the axes to draw on; None makes a new figure.

    Returns:
        The axes.

    Raises:
        ValueError: if a curve or `reference` is not as long as `steps`.

    Example:
        >>> seeds = np.array([[2.0, 1.5, 1.25], [2.5, 1.5, 1.0]])
        >>> axes = losses({"bf16": [2.25, 1.5, 1.5]}, steps=[0, 10, 20], reference=seeds)
        >>> mean, bf16 = axes.get_lines()
        >>> mean.get_ydata(), bf16.get_ydata()
        (array([2.25 , 1.5  , 1.125]), array([2.25, 1.5 , 1.5 ]))
    """
    found = {name: _checked(values, steps, name) for name, values in curves.items()}
    seeds = None if reference is None else _checked(reference, steps, reference_name)
    with canvas(axes, 3.2 + 0.2 * len(found)) as axes:
        if seeds is not None:
            _draw_seeds(axes, *seeds, reference_name)
        gaps = "infinite or NaN from here"
        for name, (at, values) in found.items():
            (line,) = axes.plot(at, values, label=name)
            (last,) = np.nonzero(np.isfinite(values[:-1]) & ~np.isfinite(values[1:]))
            if last.size:
                axes.plot(at[last], values[last], "X", color=line.get_color(), linestyle="none", label=gaps)
                gaps = "_"  # the legend has it once
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="step", ylabel=ylabel)
        add_legend(axes)
    return axes


def _checked(values: Any, steps: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the step numbers, and the numbers with NaN for infinities."""
    values = np.asarray(values).astype(np.float64)
    at = np.arange(values.shape[-1]) if steps is None else np.asarray(steps)
    if at.shape != values.shape[-1:]:
        raise ValueError(f"`losses`: `steps` has the shape {at.shape}, but {name!r} has {values.shape}.")
    return at, np.where(np.isfinite(values), values, np.nan)


def _draw_seeds(axes: Axes, steps: np.ndarray, values: np.ndarray, name: str) -> None:
    """Draw mean and band of the seeds, with a gap where one of them has diverged."""
    values = np.atleast_2d(values)
    mean = values.mean(axis=0)
    if len(values) > 1:
        deviation = values.std(axis=0, ddof=1)
        band = {"color": GREY, "alpha": 0.3, "linewidth": 0, "label": f"{name}, ± standard deviation"}
        axes.fill_between(steps, mean - deviation, mean + deviation, **band)
        name = f"{name}, mean of {len(values)} seeds"
    axes.plot(steps, mean, color=GREY, linestyle="-", linewidth=3.0, label=name)
