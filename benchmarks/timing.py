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
from jax import lax

import mpx
from benchmarks.reading import compiled_figures
from benchmarks.report import Row, judged

SIDES = ("other", "mpx")  # that which mpx stands beside, and mpx
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
MOST = 1.03  # times as long as by hand
LOOP_STEPS = {"gpu": 256}  # steps of a program with a loop; elsewhere a few

# The columns of two steps that were timed in turn, and of what their programs say.
COLUMNS = {
    "other, ms": "{other[ms]:.3f}",
    "mpx, ms": "{mpx[ms]:.3f}",
    "mpx / other": "{ratio:.3f}",
    "95%": "{low:.3f} to {high:.3f}",
    "target": "{target}",
    "by separate calls, ms": "{other[calls ms]:.3f}, {mpx[calls ms]:.3f}",
    "moved, GB": "{other[moved GB]:.4g}, {mpx[moved GB]:.4g}",
    "moved in the loop, GB": "{other[loop GB]:.4g}, {mpx[loop GB]:.4g}",
    "kernels": "{other[kernels]:,}, {mpx[kernels]:,}",
    "temporaries, GB": "{other[temporary GB]:.3g}, {mpx[temporary GB]:.3g}",
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


def in_a_loop(step: Callable, count: int) -> Callable:
    """Return the function that makes so many steps, one program in which the host has
    no part: what they take is the device's time.
    """

    def steps(state: Any, data: Any) -> Any:
        def one(_: jax.Array, state: Any) -> Any:
            # The barrier ties the data to the state. Without it XLA may compute before
            # the loop what depends on the data alone.
            return step(*lax.optimization_barrier((state, data)))

        return lax.fori_loop(0, count, one, state)

    return steps


def paired_times(
    steps: Sequence[Callable],
    make_states: Callable,
    data: Sequence[Any],
    starts: int,
    turns: int,
    calls: int,
) -> tuple[list[float], list[float]]:
    """Return milliseconds a call of two steps in turn, A B B A, after two turns of
    warm-up from each start.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for start in range(starts):
        states = list(make_states())
        for turn in range(-2, turns):
            for side in (0, 1) if (start + turn) % 2 else (1, 0):
                begin = time.perf_counter()
                for _ in range(calls):
                    states[side] = steps[side](states[side], data[side])
                jax.block_until_ready(states[side])
                if turn >= 0:
                    times[side].append(1e3 * (time.perf_counter() - begin) / calls)
    return times


def compare(
    steps: Sequence[Callable],
    make_states: Callable,
    data: Sequence[Any],
    *,
    starts: int,
    turns: int,
    gpu_calls: int = 1,
    judge: bool = True,
) -> Row:
    """Time two compiled steps in turn, that of mpx second, and read their programs;
    return a row for `COLUMNS`.

    Each is called with its state, which it may donate, and its data. Fresh states are
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
    return row | judged_times(row, times, turns, judge)


def compare_in_loops(
    steps: Sequence[Callable],
    loops: Sequence[Callable],
    count: int,
    make_states: Callable,
    data: Sequence[Any],
    **options: Any,
) -> Row:
    """Return the row of `compare` with the times of loops of `count` such steps in
    place of the times by separate calls, which stand beside.

    A call of a loop takes the host as long as a call of a step, so that a step has a
    `count`-th of it.
    """
    row = compare(steps, make_states, data, **options)
    starts, turns = options["starts"], options["turns"]
    times = [
        [ms / count for ms in calls]
        for calls in paired_times(loops, make_states, data, starts, turns, 1)
    ]
    for side, loop, ms in zip(SIDES, loops, times, strict=True):
        row[side] |= {"calls ms": row[side]["ms"], "ms": statistics.median(ms)}
        row[side]["loop GB"] = compiled_figures(loop)["moved GB"] / count
    return row | judged_times(row, times, turns, options["judge"])


def judged_times(
    row: Row, times: Sequence[list[float]], turns: int, judge: bool
) -> Row:
    """Return the ratio of the times of two sides, that to the bound, and the target."""
    found = ratio(times[1], times[0], turns)
    if bound := row["mpx"].get("bound ms"):
        found["mpx / bound"] = row["mpx"]["ms"] / bound
    return found | ({"target": judged(found["ratio"], most=MOST)} if judge else {})


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
