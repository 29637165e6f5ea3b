"""Draw the ladder: the time and the memory of each rung, as they were measured or read off programs."""

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # only files are written: no display is needed
import matplotlib.pyplot as plt

import mpx.plot
from benchmarks.report import Row
from mpx.plot import BLUE, VERMILLION

CUT = 2.5  # the longest bar, in medians: float32 would make all others short, and has its number beside it


def write_picture(path: Path, rows: list[Row], title: str) -> None:
    """Write a picture of the rungs that have figures: a bar each for time and for memory.

    Times are for the tokens of one microbatch, so that rungs with several stand beside the others. A bar that is cut
    ends in an arrow.
    """
    rows = [row for row in rows if "failed" not in row]
    tokens = min(row["tokens"] for row in rows)
    times = [1e3 * tokens / row["speed"] for row in rows]
    memory = [row["peak GB"] for row in rows]
    with mpx.plot.style():
        figure, axes = plt.subplots(1, 2, sharey=True, figsize=(7.2, 1.0 + 0.3 * len(rows)), width_ratios=(3, 2))
        for ax, values, color, name in zip(
            axes, (times, memory), (BLUE, VERMILLION), (f"ms for {tokens:,} tokens", "peak of memory, GB"), strict=True
        ):
            longest = CUT * statistics.median(values)
            bars = ax.barh(range(len(rows)), [min(value, longest) for value in values], color=color, height=0.65)
            for i in [i for i, value in enumerate(values) if value > longest]:
                ax.plot(longest, i, ">", color=color, markersize=11, clip_on=False)
            labels = [f"{'  ' if value > longest else ''}{value:.3g}" for value in values]
            ax.bar_label(bars, labels, padding=3)
            ax.set(xlabel=name, xlim=(0, 1.18 * min(max(values), longest)))
            ax.spines["left"].set_visible(False)
            ax.grid(visible=False, axis="y")
            ax.tick_params(axis="y", length=0)
        axes[0].set_yticks(range(len(rows)), [row["label"] for row in rows])
        axes[0].set_ylim(len(rows) - 0.5, -0.5)
        figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
        figure.savefig(path, dpi=150)
        plt.close(figure)
