"""Time two programs in turn, with the spread of their ratio, and say where it was
measured.
"""

import importlib.metadata
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpx
from benchmarks.reading import compiled_figures
from benchmarks.report import Row, judged

SIDES = ("by hand", "mpx")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
MOST = 1.03  # times as long as by hand

# The columns of two steps that were timed in turn, and of what their programs say.
COLUMNS = {
    "by hand, ms": "{by hand[ms]:.3f}",
    "mpx, ms": "{mpx[ms]:.3f}",
    "mpx / by hand": "{ratio:.3f}",
    "95%": "{low:.3f} to {high:.3f}",
    "target": "{target}",
    "moved by hand, mpx, GB": "{by hand[moved GB]:.4g}, {mpx[moved GB]:.4g}",
    "kernels": "{by hand[kernels]:,}, {mpx[kernels]:,}",
    "temporaries, GB": "{by hand[temporary GB]:.3g}, {mpx[temporary GB]:.3g}",
    "bound, ms": "{mpx[bound ms]:.3f}",
    "mpx / bound": "{mpx / bound:.2f}",
    "note": "{left out}",
}


def own(tree: Any) -> Any:
    """Return a copy of every array."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def timed(fun: Callable, *args: Any) -> tuple[float, Any]:
    """Return the seconds until everything that a call returns is there, and what it
    returned.
    """
    start = time.perf_counter()
    result = jax.block_until_ready(fun(*args))
    return time.perf_counter() - start, result


def paired_times(
    steps: Sequence[Callable],
    make_states: Callable,
    data: Any,
    starts: int,
    turns: int,
    calls: int,
) -> tuple[list[float], list[float]]:
    """Return milliseconds of two steps in turn, A B B A, after two turns of warm-up
    from each start.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for start in range(starts):
        states = list(make_states())
        for turn in range(-2, turns):
            for side in (0, 1) if (start + turn) % 2 else (1, 0):
                begin = time.perf_counter()
                for _ in range(calls):
                    states[side] = steps[side](states[side], data)
                jax.block_until_ready(states[side])
                if turn >= 0:
                    times[side].append(1e3 * (time.perf_counter() - begin) / calls)
    return times


def compare(
    steps: Sequence[Callable],
    make_states: Callable,
    data: Any,
    *,
    starts: int,
    turns: int,
    gpu_calls: int = 1,
    judge: bool = True,
) -> Row:
    """Time two compiled steps in turn, by hand and with mpx, and read their programs;
    return a row for `COLUMNS`.

    Each is called with its state, which it may donate, and `data`. Fresh states are
    made `starts` times, in buffers of their own, since where a state lies in memory
    counts; from each there are so many timed turns. On a GPU a turn has `gpu_calls`
    steps, waited for once, so that the host is not what is measured. With `judge` there
    is a target.
    """
    calls = gpu_calls if jax.default_backend() == "gpu" else 1
    times = paired_times(steps, make_states, data, starts, turns, calls)
    sides = zip(SIDES, steps, times, strict=True)
    row: Row = {
        side: {"ms": statistics.median(ms)} | compiled_figures(step)
        for side, step, ms in sides
    }
    row |= ratio(times[1], times[0], turns)
    if bound := row["mpx"].get("bound ms"):
        row["mpx / bound"] = row["mpx"]["ms"] / bound
    return row | ({"target": judged(row["ratio"], most=MOST)} if judge else {})


def ratio(numerator: list[float], denominator: list[float], block: int = 1) -> Row:
    """Return the ratio of the medians, and the ends of its 95% interval over resampled
    blocks of turns.
    """
    a, b = (np.reshape(times, (-1, block)) for times in (numerator, denominator))
    # Pairs stay pairs.
    picks = np.random.default_rng(0).integers(len(a), size=(2000, len(a)))
    resampled = np.median(a[picks], axis=(1, 2)) / np.median(b[picks], axis=(1, 2))
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {
        "ratio": float(np.median(a) / np.median(b)),
        "low": float(low),
        "high": float(high),
    }


def conditions() -> Row:
    """Return when, where and with what the numbers were measured."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "device": jax.devices()[0].device_kind,
        "driver": driver(),
        "mpx": mpx.__version__,
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def driver() -> str:
    """Return the version of NVIDIA's driver; empty without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
