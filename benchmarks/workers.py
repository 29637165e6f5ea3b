"""Measurements in processes of their own: a job goes in as JSON, a result comes out as JSON.

`python -m benchmarks.workers` calls any function of a module with arguments that JSON can hold.

Only so is a peak of memory that of one program alone. And a job that runs out of memory or time, or whose compiler
fails, ends its own process: the next one finds an empty GPU. Neither JAX nor Torch is imported here, so that the
command that starts the processes holds no GPU, and so that neither library shares one with the other.
"""

import importlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

CALL = "benchmarks.workers"  # the module that answers what `job_of` makes
LOG_CHARACTERS = 4_000  # of what a failed process wrote, kept for the JSON file
REASON_CHARACTERS = 200

Result = dict[str, Any]  # of a job; one that failed has the reason under "failed"
Run = Callable[..., Result]  # `run_worker`, or what stands for it


def run_worker(
    module: str, job: dict[str, Any], *, timeout: float = 300.0, environment: dict[str, str] | None = None
) -> Result:
    """Runs `python -m module` with the job on its standard input, and reads the last line of its output.

    Args:
        module: which answers a job; see `serve`.
        job: what it shall do.
        timeout: seconds, after which the process is ended.
        environment: variables that the process has beside those of this one.

    Returns:
        What it answered; if it failed, `{"failed": reason, "log": the end of what it wrote}`, and `"stopped"` if it
        was ended.
    """
    if timeout <= 0:
        return {"failed": "left out: no time is left"}
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as log,
    ):
        given.write(json.dumps(job))
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env=os.environ | (environment or {}), stdin=given, stdout=out, stderr=log, process_group=0,
        )  # fmt: skip
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        written, complaints = (_read(file) for file in (out, log))
    return _result(status, written, complaints, timeout)


def _end(process: subprocess.Popen) -> None:
    """Ends the process and all that it started: Torch's compiler has workers that would outlive it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of them are gone
    process.wait()


def _read(file: Any) -> str:
    file.seek(0)
    return file.read()


def _result(status: int | None, written: str, complaints: str, timeout: float) -> Result:
    log = {"log": complaints[-LOG_CHARACTERS:]}
    if status is None:
        return {"failed": f"no result after {timeout:.0f} s", "stopped": True} | log
    if status != 0:
        return {"failed": reason(complaints, status)} | log
    try:
        answer = json.loads(written.splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    return answer if isinstance(answer, dict) else {"failed": "it printed no result"} | log


def reason(complaints: str, status: int) -> str:
    """Why a process failed, in a line: the error that ended it, which begins the last paragraph of a traceback."""
    lines = [line for line in complaints.splitlines() if line.strip()]
    traceback = max((i for i, line in enumerate(lines) if line.startswith("Traceback")), default=None)
    if traceback is not None:
        lines = [line for line in lines[traceback + 1 :] if not line.startswith((" ", "\t"))] or lines
        line = lines[0]
    else:
        line = lines[-1] if lines else f"the process ended with status {status}"
    return line if len(line) <= REASON_CHARACTERS else line[: REASON_CHARACTERS - 3] + "..."


def serve(answer: Callable[[dict[str, Any]], Result]) -> None:
    """The main program of a worker: reads the job, and prints the result as one line after all else."""
    result = answer(json.load(sys.stdin))
    print("\n" + json.dumps(result), flush=True)


def job_of(function: str, **arguments: Any) -> dict[str, Any]:
    """Return the job for this module of calling a function, named as `module:name`."""
    return {"function": function, "arguments": arguments}


def call(job: dict[str, Any]) -> Result:
    """Call the function of a job. Only then its module is imported: a missing package costs no other job."""
    module, name = job["function"].split(":")
    found = getattr(importlib.import_module(module), name)(**job["arguments"])
    if hasattr(found, "as_dict"):  # a result of mpx's tools
        return {"text": str(found)} | found.as_dict()
    return {"rows": found} if isinstance(found, list) else found


def time_rounds(run: Callable[[int], None], *, steps: int, rounds: int) -> Result:
    """Milliseconds a step, of several that are enqueued one behind another and waited for once.

    Both libraries are timed by this function. A round goes before those that count: it ends the compilation, where a
    library compiles at its first call, and brings the GPU to the clocks that it keeps.

    Args:
        run: makes so many steps and returns when all is done.
        steps: in a round.
        rounds: that count.

    Returns:
        The median under "ms", the fastest and the slowest round under "ms spread".
    """
    run(steps)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run(steps)
        times.append(1e3 * (time.perf_counter() - start) / steps)
    return {"ms": statistics.median(times), "ms spread": [min(times), max(times)], "steps": steps, "rounds": rounds}


class Clock:
    """How much of the time for a whole command is left, for commands that may run only so long."""

    def __init__(self, limit: float | None) -> None:
        self.end = None if limit is None else time.monotonic() + limit

    def cut(self, seconds: float) -> float:
        """These seconds, or what is left if that is less."""
        return min(seconds, self.left())

    def left(self) -> float:
        """Seconds that are left."""
        return math.inf if self.end is None else self.end - time.monotonic()


if __name__ == "__main__":
    serve(call)
