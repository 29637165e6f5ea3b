"""The loss scale over time."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from mpx.monitor import ScaleHistory
from mpx.tools.plot.sheet import BLUE, VERMILLION, add_legend, canvas, round_ticks


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
