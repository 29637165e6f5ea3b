"""Run a measurement in a process of its own: a function and its arguments go in as
JSON, rows come out as JSON.

Only then is a peak of memory the peak of one program. A measurement that runs out of
memory or time, or whose compiler fails, ends its own process, and the next one finds an
empty GPU. JAX is not imported here: the process that starts the others holds no GPU.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping

from benchmarks.report import Row

LOG_CHARACTERS = 4_000  # kept of what a failed process wrote
REASON_CHARACTERS = 200


def run_worker(
    function: str,
    arguments: Row,
    *,
    timeout: float = 300.0,
    environment: Mapping[str, str] = {},
) -> list[Row]:
    """Call a function, named as `module:name`, in a new process, which is ended after
    `timeout` seconds.

    `environment` is added to the variables of this process. The function returns a row or a list of rows. After a failure there is one row, with the
    reason under "failed", the end of what was written under "log", and "stopped" if the
    time was over.
    """
    command, given = (
        [sys.executable, "-m", "benchmarks.workers"],
        json.dumps([function, arguments]),
    )
    try:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=os.environ | environment,
        )
    except subprocess.TimeoutExpired:
        return [{"failed": f"no result after {timeout:.0f} s", "stopped": True}]
    if done.returncode:
        return [
            {
                "failed": reason(done.stderr, done.returncode),
                "log": done.stderr[-LOG_CHARACTERS:],
            }
        ]
    return json.loads(done.stdout.splitlines()[-1])


def reason(complaints: str, status: int) -> str:
    """Return in one line why a process failed: the error below the last traceback, or
    the last line.
    """
    lines = [line for line in complaints.splitlines() if line.strip()]
    traceback = max(
        (i for i, line in enumerate(lines) if line.startswith("Traceback")),
        default=None,
    )
    if traceback is not None:
        line = next(
            (
                line
                for line in lines[traceback + 1 :]
                if not line.startswith((" ", "\t"))
            ),
            lines[-1],
        )
    else:
        line = lines[-1] if lines else f"the process ended with status {status}"
    return (
        line
        if len(line) <= REASON_CHARACTERS
        else line[: REASON_CHARACTERS - 3] + "..."
    )


def call(function: str, arguments: Row) -> list[Row]:
    """Call a function. Its module is imported only now: a missing package costs no
    other measurement.
    """
    module, name = function.split(":")
    found = getattr(importlib.import_module(module), name)(**arguments)
    return found if isinstance(found, list) else [found]


if __name__ == "__main__":
    print("\n" + json.dumps(call(*json.load(sys.stdin))), flush=True)
