"""Several processes as one run, by `jax.distributed`: how they find each other, and how one of them leaves."""

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import jax
import typer

SECONDS_TO_LEAVE = 5.0  # for the other processes, if they fail too


def join(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the processes of a run; nothing may have touched a device yet.

    Without any argument JAX looks for a cluster (Slurm, Open MPI, Kubernetes, Cloud TPU), and asks for an address where
    it finds none: then this process is alone.

    Args:
        coordinator_address: host and port of process 0.
        num_processes: of the whole run.
        process_id: of this one, from 0.

    Raises:
        ValueError: if only some are given and JAX finds no cluster that has the others, or they do not fit.
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


def is_joined() -> bool:
    """Whether this is one of several processes, or could be."""
    return jax.distributed.is_initialized()


def fail(message: str, code: int = 1) -> NoReturn:
    """Ends the program with an error, by default one that is no fault of its options."""
    name = f"process {jax.process_index()}: " if is_joined() else ""
    typer.echo(f"Error: {name}{message}", err=True)
    leave(code)


def run(app: typer.Typer) -> None:
    """Runs a command. After an error nothing is waited for: a save that failed leaves threads of Orbax, which wait."""
    try:
        app()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code and not is_joined():
            _end(end.code)
        raise


@contextmanager
def together() -> Iterator[None]:
    """Ends this process at once after an error, so that the others, which wait for it, can be stopped."""
    try:
        yield
    except typer.Exit:
        raise
    except BaseException as error:
        if not is_joined():
            raise
        if isinstance(error, typer.BadParameter):
            fail(error.format_message(), error.exit_code)
        traceback.print_exc()
        leave(1)


def leave(code: int) -> NoReturn:
    """Ends this process. Of several it does not wait long for the others, which may wait for it without end."""
    if not is_joined():
        raise typer.Exit(code)
    # At its end Python would wait minutes for processes that fail to come, and JAX abort with a code of its own.
    shutdown = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(SECONDS_TO_LEAVE)
    _end(code)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
