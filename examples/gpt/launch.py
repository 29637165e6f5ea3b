"""Start a training run in several processes on this machine's CPU, as a cluster does on several machines.

Run it from the root of the repository, with the options of `examples.gpt.train` behind two dashes:

    python -m examples.gpt.launch --processes 2 --devices 4 -- --preset tiny

Ctrl-C and SIGTERM are passed on; a second one kills all. When a process fails, the others are stopped.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

SECONDS_TO_FAIL_TOO = 20.0  # an error in one process is often an error in all, and each should print it
MODULE = "examples.gpt.train"


def run(command: Sequence[str], count: int, environment: Mapping[str, str]) -> int:
    """Run processes of a command; return 0, the exit code of the first that failed, or 128 and the signal's number."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"  # a free port
    received: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: Any) -> None:
        received.append(number)
        for process in processes:
            process.send_signal(number if len(received) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for index in range(count):
            flags = ["--coordinator-address", address, "--num-processes", str(count), "--process-id", str(index)]
            # In a group of its own, or a terminal would send a second Ctrl-C to each.
            processes.append(subprocess.Popen([*command, *flags], env=dict(environment), process_group=0))
        code = wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + received[0] if len(received) > 1 else code


def wait(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait until all have ended, or one has failed and the others have had time to; return the first exit code."""
    code, end = 0, math.inf
    # A process that was killed leaves the others waiting for it, so they get no time.
    while any(process.poll() is None for process in processes) and code >= 0 and time.monotonic() < end:
        time.sleep(0.05)
        if not code:
            code = next((process.returncode for process in processes if process.poll()), 0)
            end = time.monotonic() + SECONDS_TO_FAIL_TOO if code else end
    code = code or next((process.returncode for process in processes if process.returncode), 0)
    return 128 - code if code < 0 else code


def environment_of(devices: int) -> dict[str, str]:
    """Return the variables of this process, with those that make JAX take so many devices of the CPU."""
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    flags = " ".join([*kept, f"--xla_force_host_platform_device_count={devices}"])
    collectives = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    return os.environ | collectives | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def main(
    options: Annotated[list[str] | None, typer.Argument(help="Those of examples.gpt.train, behind two dashes.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="How many to start.")] = 2,
    devices: Annotated[int, typer.Option(min=1, help="CPU devices of each process.")] = 4,
) -> None:
    """Start a training run in several processes on this machine's CPU."""
    command = [sys.executable, "-m", MODULE, *(options or [])]
    raise typer.Exit(run(command, processes, environment_of(devices)))


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
