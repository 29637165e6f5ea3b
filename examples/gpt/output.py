"""What the commands write: into a folder that can be written to, JSON that any reader takes, and plots of one look."""

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # only files are written: no display is needed
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def require_folder(folder: Path) -> None:
    """Makes the folder for the results, before hours are spent on them.

    Raises:
        ValueError: if it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder}: {error.strerror}.") from error
    try:
        with tempfile.TemporaryFile(dir=folder):  # permissions alone do not tell
            pass
    except OSError as error:
        raise ValueError(f"cannot write into the folder {folder}: {error.strerror}.") from error


def dumps(content: Any, *, indent: int | None = None) -> str:
    """JSON, which has no NaN and no infinity: null stands for them."""
    return json.dumps(_without_nan(content), indent=indent, allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tidy(axes: Axes) -> None:
    """Two spines and a faint grid behind the curves."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)


def save_plot(figure: Figure, path: Path) -> None:
    """Writes a figure and forgets it."""
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)
