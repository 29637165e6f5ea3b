"""Starts a training in several processes on this machine's CPU, as a cluster would on several machines.

Run it from the root of the repository, with the options of `examples.gpt.train` behind two dashes:

    python -m examples.gpt.launch --processes 2 --devices 4 -- --preset tiny

On machines with accelerators one process is started on each, with the same three options that this gives:

    python -m examples.gpt.train --coordinator-address HOST_OF_THE_FIRST:PORT --num-processes 2 --process-id 0

Ctrl-C and SIGTERM are passed on; a second one ends all at once. When a process fails, the others cannot go on: they are
stopped, and its exit code is that of the launcher.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

SECONDS_TO_FAIL_TOO = 20.0  # what has failed in one process often fails in all, and each should say so
SECONDS_BETWEEN_LOOKS = 0.05
MODULE = "examples.gpt.train"


def run(command: Sequence[str], count: int, environment: Mapping[str, str]) -> int:
    """Runs so many processes of a command to their end.

    Args:
        command: takes `--coordinator-address`, `--num-processes` and `--process-id`.
        count: of processes.
        environment: of each.

    Returns:
        0, or the exit code of the first that failed; 128 and the signal's number if one killed it.
    """
    address = f"127.0.0.1:{free_port()}"
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
            # In a group of its own, or a terminal would send each a Ctrl-C that the launcher sends too.
            processes.append(subprocess.Popen([*command, *flags], env=dict(environment), process_group=0))
        code = wait(processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + received[0] if len(received) > 1 else code


def wait(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Waits until all have ended, or one has failed and the others have had time to; the exit code of the first."""
    code, failed_at = 0, None
    while None in (codes := [process.poll() for process in processes]):
        failed = [each for each in codes if each]
        if failed and failed_at is None:
            code, failed_at = failed[0], time.monotonic()
        # A process that was killed leaves the others waiting for it.
        if code < 0 or (failed_at is not None and time.monotonic() - failed_at > SECONDS_TO_FAIL_TOO):
            break
        time.sleep(SECONDS_BETWEEN_LOOKS)
    code = code or next((each for each in codes if each), 0)
    return 128 - code if code < 0 else code


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment_of(devices: int) -> dict[str, str]:
    """The variables of this process, and those that make JAX take so many devices of the CPU."""
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    flags = " ".join([*kept, f"--xla_force_host_platform_device_count={devices}"])
    collectives = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    return os.environ | collectives | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


# --- The command line. ---
def main(
    options: Annotated[list[str] | None, typer.Argument(help="Of `examples.gpt.train`, behind two dashes.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="How many to start.")] = 2,
    devices: Annotated[int, typer.Option(min=1, help="Of the CPU, for each process.")] = 4,
) -> None:
    """Starts a training in several processes on this machine's CPU."""
    command = [sys.executable, "-m", MODULE, *(options or [])]
    raise typer.Exit(run(command, processes, environment_of(devices)))


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
