"""Write results: into a folder that was checked before, as JSON without NaN, as plots of one look."""

import json
import math
import tempfile
from collections.abc import Mapping
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
    return json.dumps(_without_nan(content), indent=indent, allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_plot(figure: Figure, path: Path) -> None:
    """Write a figure with a faint grid and two spines an axis, and forget it."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)
