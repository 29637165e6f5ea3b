"""Ctrl-C and SIGTERM: the step at work is finished and saved before the run stops, by all processes the same one.

One process takes both signals itself. Several must agree on the step, for which JAX has a protocol: a SIGTERM to any of
them is told to all, and `reached_preemption_sync_point` names a step that none has taken yet. Ctrl-C joins it: the
process that gets one sends itself a SIGTERM. It takes about a second.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils
from rich.console import Console


class Interruption:
    """Whether a run is to stop.

    Args:
        console: says what happens.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._received: int | None = None

    def is_due(self, step: int) -> bool:
        """True if this step is the last; to be asked once after each step, by all processes."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that the signal stopped: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self._received or signal.SIGTERM)

    def receive(self, number: int, frame: Any = None) -> None:
        """Handles a signal; the second one stops at once."""
        del frame
        if self._received:
            self._stop(number)
        self._received = number
        self._console.print("Finishing the step at work, then saving. Another Ctrl-C stops at once and saves nothing.")
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX handles

    def _stop(self, number: int) -> NoReturn:
        # An exception would end the interpreter while threads still copy to the device and write the checkpoint, which
        # can end in a crash.
        self._console.show_cursor()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + number)


@contextmanager
def interruptions(console: Console) -> Iterator[Interruption]:
    """Handles both signals as long as it is open, if this is the main thread; only there does Python handle any."""
    interruption, before = Interruption(console), {}
    try:
        for number in (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, interruption.receive)
    except ValueError:  # not in the main thread, to which signals do not go anyway
        pass
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
