"""What the benchmarks share: two programs timed in turn, the spread of their ratio, and where it was measured."""

import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpx


def own(tree: Any) -> Any:
    """A copy of every array."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def timed(fun: Callable, *args: Any) -> tuple[float, Any]:
    """Seconds until everything a call returns is there, and what it returned."""
    start = time.perf_counter()
    result = jax.block_until_ready(fun(*args))
    return time.perf_counter() - start, result


def timed_steps(step: Callable, state: Any, data: Any, calls: int) -> tuple[float, Any]:
    """Seconds a step, of several that are enqueued one behind another and waited for once, and the last state."""
    start = time.perf_counter()
    for _ in range(calls):
        state = step(state, data)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / calls, state


def paired_times(
    steps: Sequence[Callable], make_states: Callable, data: Any, starts: int, turns: int, calls: int = 1
) -> tuple[list[float], list[float]]:
    """Seconds a step of two steps in turn, A B B A, after two turns of warm-up from each start.

    Args:
        steps: the two, each called with its state and `data`; it may donate the state.
        make_states: the two states to start from, in buffers of their own.
        data: what both get.
        starts: how often fresh states are made: where a state lies in memory counts.
        turns: timed turns of each step from each start.
        calls: steps in a turn, waited for once.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for start in range(starts):
        states = list(make_states())
        for turn in range(-2, turns):
            for side in (0, 1) if (start + turn) % 2 else (1, 0):
                seconds, states[side] = timed_steps(steps[side], states[side], data, calls)
                if turn >= 0:
                    times[side].append(seconds)
    return times


def timed_ratio(
    steps: Sequence[Callable], make_states: Callable, data: Any, starts: int, turns: int, calls: int = 1
) -> dict[str, Any]:
    """The median milliseconds of two steps, by hand and with mpx, and their ratio; arguments as above."""
    hand, ours = paired_times(steps, make_states, data, starts, turns, calls)
    low, ratio, high = ratio_with_spread(ours, hand, turns)
    times = {"by hand ms": 1e3 * statistics.median(hand), "mpx ms": 1e3 * statistics.median(ours)}
    return times | {"ratio": ratio, "ratio 95%": [low, high]}


def ratio_with_spread(numerator: list[float], denominator: list[float], block: int = 1) -> tuple[float, float, float]:
    """The ratio of the medians, between the ends of its 95% interval over resampled blocks of turns."""
    a, b = (np.reshape(times, (-1, block)) for times in (numerator, denominator))
    picks = np.random.default_rng(0).integers(len(a), size=(2000, len(a)))  # pairs stay pairs
    resampled = np.median(a[picks], axis=(1, 2)) / np.median(b[picks], axis=(1, 2))
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(low), float(np.median(a) / np.median(b)), float(high)


def conditions(packages: Sequence[str]) -> dict[str, Any]:
    """When, where and with what the numbers were measured."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "device": jax.devices()[0].device_kind,
        "driver": driver(),
        "backend": jax.default_backend(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "mpx": mpx.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
    }


def driver() -> str:
    """The version of NVIDIA's driver; empty without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def processor() -> str:
    """The name of the CPU, where the system tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
