"""Errors of commands in one line; an error in the user's code names the line where it arose."""

import contextlib
import os
import pathlib
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Iterator

import typer

_PACKAGE = pathlib.Path(__file__).parents[2]
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


class CommandError(Exception):
    """Raised for what the user can mend; the message says all of it."""


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Run a command, and show an error as one line on standard error and exit code 1."""
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        if os.environ.get("MPX_DEBUG"):
            raise
        typer.echo(f"Error: {message_of(error)}", err=True)
        raise typer.Exit(1) from None


def message_of(error: BaseException) -> str:
    """Return an error in one line, which begins with the type unless the message was written for a user."""
    text = textwrap.shorten(str(error), 600, placeholder=" ...")
    if isinstance(error, (CommandError, ValueError)) and text:
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")


@contextlib.contextmanager
def users_code() -> Iterator[None]:
    """Run the user's code: its prints go to standard error, since standard output is for the result.

    Raises:
        CommandError: for any error in that code, with the line where it arose.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if _is_users(frame.filename)), None)
        if os.environ.get("MPX_DEBUG") or frame is None:
            raise
        where = f"{os.path.relpath(frame.filename)}:{frame.lineno} ({frame.name})"
        raise CommandError(f"{where}: `{frame.line}` raised {type(error).__name__}: {error}") from error


def _is_users(file: str) -> bool:
    path = pathlib.Path(file)
    is_installed = {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(_STANDARD_LIBRARY)
    is_ours = path.is_relative_to(_PACKAGE) or path == _PACKAGE.with_name("mpx_cli.py")
    return not (is_installed or is_ours or file.startswith("<"))
