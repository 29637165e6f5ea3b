"""Run a measurement in a process of its own: a function and its arguments go in as JSON, rows come out as JSON.

Only then is a peak of memory the peak of one program. A measurement that runs out of memory or time, or whose compiler
fails, ends its own process, and the next one finds an empty GPU. Neither JAX nor Torch is imported here: the process
that starts the others holds no GPU, and the two libraries do not share one.
"""

import functools
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.report import Row

LOG_CHARACTERS = 4_000  # kept of what a failed process wrote
REASON_CHARACTERS = 200


def run_worker(function: str, arguments: Row, *, timeout: float = 300.0) -> list[Row]:
    """Call a function, named as `module:name`, in a new process, which is ended after `timeout` seconds.

    It returns a row or a list of rows. After a failure there is one row, with the reason under "failed", the end of
    what was written under "log", and "stopped" if the time was over.
    """
    file = functools.partial(tempfile.TemporaryFile, "w+")
    with file() as given, file() as out, file() as log:
        json.dump([function, arguments], given)
        given.seek(0)
        command = [sys.executable, "-m", "benchmarks.workers"]
        process = subprocess.Popen(command, stdin=given, stdout=out, stderr=log, process_group=0)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        written, complaints = (_read(file) for file in (out, log))
    if status == 0:
        return json.loads(written.splitlines()[-1])
    log = {"log": complaints[-LOG_CHARACTERS:]}
    if status is None:
        return [{"failed": f"no result after {timeout:.0f} s", "stopped": True} | log]
    return [{"failed": reason(complaints, status)} | log]


def _end(process: subprocess.Popen) -> None:
    """End the process and everything that it started: Torch's compiler has workers that would outlive it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of them are gone
    process.wait()


def _read(file: Any) -> str:
    file.seek(0)
    return file.read()


def reason(complaints: str, status: int) -> str:
    """Return in one line why a process failed: the error below the last traceback, or the last line."""
    lines = [line for line in complaints.splitlines() if line.strip()]
    traceback = max((i for i, line in enumerate(lines) if line.startswith("Traceback")), default=None)
    if traceback is not None:
        line = next((line for line in lines[traceback + 1 :] if not line.startswith((" ", "\t"))), lines[-1])
    else:
        line = lines[-1] if lines else f"the process ended with status {status}"
    return line if len(line) <= REASON_CHARACTERS else line[: REASON_CHARACTERS - 3] + "..."


def call(function: str, arguments: Row) -> list[Row]:
    """Call a function. Its module is imported only now: a missing package costs no other measurement."""
    module, name = function.split(":")
    found = getattr(importlib.import_module(module), name)(**arguments)
    return found if isinstance(found, list) else [found]


def time_rounds(run: Callable[[int], None], *, steps: int, rounds: int) -> Row:
    """Return milliseconds a step, of several that are enqueued one behind another and waited for once.

    JAX and PyTorch are both timed by this function. A round goes before the others: it ends the compilation, where a
    library compiles at its first call, and brings the GPU to the clocks that it keeps. `run` makes so many steps and
    returns when all is done. The median round is "ms", the fastest "low" and the slowest "high".
    """
    run(steps)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run(steps)
        times.append(1e3 * (time.perf_counter() - start) / steps)
    return {"ms": statistics.median(times), "low": min(times), "high": max(times)}


def token_batches(vocabulary: int, shape: Sequence[int], *, count: int) -> np.ndarray:
    """Return random tokens below `vocabulary`, int32 (count, *shape), the same in every process and for both libraries.

    A few are common and many are rare, as in a text. Were all common, the gradient of the embedding would be a sum into
    few rows; were none, into many: both have another speed than a training.
    """
    return (np.random.default_rng(0).zipf(1.2, size=(count, *shape)) % vocabulary).astype(np.int32)


if __name__ == "__main__":
    print("\n" + json.dumps(call(*json.load(sys.stdin))), flush=True)
