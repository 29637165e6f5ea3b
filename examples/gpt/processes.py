"""Join other processes in a run, stop at Ctrl-C and SIGTERM after a saved step, and end after an error.

One process handles both signals itself. Several must agree on the step, for which JAX has a protocol: it tells a
SIGTERM to any of them to all, and `reached_preemption_sync_point` names a step that none has taken yet. A process that
gets a Ctrl-C therefore sends itself a SIGTERM. That takes about a second.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import typer
from jax.experimental import multihost_utils
from rich.console import Console

SECONDS_TO_LEAVE = 5.0  # for the other processes, if they fail too


def join(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Join the processes of a run, by `jax.distributed.initialize`; no device may be in use yet.

    Without arguments JAX looks for a cluster (Slurm, Open MPI, Kubernetes, Cloud TPU). If it finds none, this process
    is alone.
    """
    arguments = (coordinator_address, num_processes, process_id)
    is_asked = any(argument is not None for argument in arguments) or "JAX_COORDINATOR_ADDRESS" in os.environ
    try:
        jax.distributed.initialize(*arguments)
    except ValueError as error:
        if is_asked:
            raise ValueError(
                f"--coordinator-address, --num-processes and --process-id must all be given where JAX finds no "
                f"cluster: {error}"
            ) from error


def prefix() -> str:
    """Return what stands before an error message: the number of this process, if there are several."""
    return f"process {jax.process_index()}: " if jax.distributed.is_initialized() else ""


def run(app: typer.Typer) -> None:
    """Run a command, and after an error end this process without waiting for other processes or threads."""
    try:
        app()
        return
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int) or code == 0:
            raise
    except BaseException:
        traceback.print_exc()
        code = 1
    if jax.distributed.is_initialized():
        # At its end Python would wait minutes for processes that do not come, and JAX abort with a code of its own.
        shutdown = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(SECONDS_TO_LEAVE)
    _end(code)  # a failed save leaves threads of Orbax, for which Python would wait


class Interruption:
    """The state of a request to stop; `console` prints what happens."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._received: int | None = None

    def is_due(self, step: int) -> bool:
        """Return whether this step is the last; all processes must ask once after each step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """Return the exit code that a shell expects after the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self._received or signal.SIGTERM)

    def receive(self, number: int, frame: Any = None) -> None:
        """Handle a signal; the second one stops at once."""
        del frame
        if self._received:
            # An exception would end the interpreter while threads still copy and write, which can end in a crash.
            self._console.show_cursor()
            _end(128 + number)
        self._received = number
        self._console.print("Finishing the step at work, then saving. Another Ctrl-C stops at once and saves nothing.")
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX handles


@contextmanager
def interruptions(console: Console) -> Iterator[Interruption]:
    """Handle both signals while the context is open, if this is the main thread: Python handles them only there."""
    interruption, before = Interruption(console), {}
    numbers = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, interruption.receive) for number in numbers}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
