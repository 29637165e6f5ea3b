"""Write results: the log of a run and its plot, JSON without NaN, plots of one look."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # only files are written: no display is needed
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

NEIGHBORS = 2  # on each side of a report, in the plot


def dumps(content: Any, *, indent: int | None = None) -> str:
    """Return JSON; null stands for NaN and infinities, which JSON does not have, and text for a path."""
    without_nan = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)
    return json.dumps(without_nan, indent=indent, allow_nan=False)


def save_plot(figure: Figure, path: Path) -> None:
    """Write a figure with a faint grid and two spines an axis, and forget it."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


# --- The log of a training run. ---
Record = Mapping[str, Any]  # a line of the log


def line_of(record: Record) -> str:
    """Return a record in one line for a terminal."""
    parts = [f"step {record['step']}: loss {record['loss']:.4f}"]
    if record["validation_loss"] is not None:
        parts.append(f"validation {record['validation_loss']:.4f}")
    parts += [f"lr {record['learning_rate']:.2e}", f"norm {record['gradient_norm']:.2f}"]
    if record["loss_scale"] != 1 or record["skipped_steps"]:
        parts.append(f"scale {record['loss_scale']:g}, {record['skipped_steps']} skipped")
    if record["seconds_per_step"]:
        parts += [f"{record['seconds_per_step'] * 1e3:,.1f} ms", f"{record['tokens_per_second']:,.0f} tokens/s"]
        parts.append(f"MFU {record['mfu']:.1%}")
    if record["memory_bytes"] is not None:
        parts.append(f"memory {record['memory_bytes'] / 1e9:.2f} GB, peak {record['peak_memory_bytes'] / 1e9:.2f} GB")
    return ", ".join(parts)


def read_log(path: Path) -> list[Record]:
    """Return the lines of a log, none if there is no file. A last line that a kill cut off is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def begin_log(path: Path, resumed_from: int) -> None:
    """Begin a log, or go on with one, without the lines of later steps, which the run repeats."""
    kept = [line for line in read_log(path) if line["step"] <= resumed_from]
    # Replaced at once, so that a run that is killed here still has its log.
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    partial.replace(path)


def write_log(path: Path, record: Record) -> None:
    """Add a line of JSON to a log."""
    with path.open("a") as file:
        file.write(dumps(record) + "\n")


def plot_log(path: Path, lines: Sequence[Record], title: str) -> None:
    """Plot losses, gradient norm and learning rate over the steps."""
    figure, (losses, norms, rates) = plt.subplots(
        3, 1, figsize=(8, 8), sharex=True, layout="constrained", height_ratios=(3, 1, 1)
    )
    column = lambda name: np.array([line[name] for line in lines], np.float64)  # null becomes NaN
    steps, training, validation = column("step"), column("loss"), column("validation_loss")
    # The loss of a single batch is noisy, so the line is a mean of neighbors.
    means = [training[max(0, i - NEIGHBORS) : i + NEIGHBORS + 1].mean() for i in range(len(training))]
    losses.plot(steps, training, color="#56B4E9", linewidth=1.0, alpha=0.4)
    losses.plot(steps, means, color="#56B4E9", linewidth=1.5, label=f"training, mean of {2 * NEIGHBORS + 1} reports")
    known = ~np.isnan(validation)
    losses.plot(steps[known], validation[known], color="#D55E00", marker=".", label="validation")
    norms.plot(steps, column("gradient_norm"), color="#0072B2", linewidth=1.0)
    rates.plot(steps, column("learning_rate"), color="#009E73", linewidth=1.5)
    losses.set_title(title, loc="left")
    losses.legend(frameon=False)
    for axes, label in ((losses, "loss (nats a token)"), (norms, "gradient norm"), (rates, "learning rate")):
        axes.set_ylabel(label)
    rates.set_xlabel("training step")
    save_plot(figure, path)
