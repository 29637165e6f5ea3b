"""Write results: into a folder that was checked before, as JSON without NaN, as plots of one look."""

import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # only files are written: no display is needed
import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def require_folder(folder: Path) -> None:
    """Make the folder for the results, and raise if it cannot be written to, before time is spent on them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # permissions alone do not tell
            pass
    except OSError as error:
        raise ValueError(f"--out: cannot write into the folder {folder}: {error.strerror}.") from error


def dumps(content: Any, *, indent: int | None = None) -> str:
    """Return JSON; null stands for NaN and infinities, which JSON does not have."""
    without_nan = json.loads(json.dumps(content), parse_constant=lambda name: None)
    return json.dumps(without_nan, indent=indent, allow_nan=False)


def save_plot(figure: Figure, path: Path) -> None:
    """Write a figure with a faint grid and two spines an axis, and forget it."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)
