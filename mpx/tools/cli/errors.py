"""Errors in one line, those of the user's own functions with the line at which they arose."""

import contextlib
import functools
import os
import pathlib
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import typer

_LONGEST = 600  # characters of a message
_OWN_FOLDER = pathlib.Path(__file__).parents[1]
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


class CommandError(Exception):
    """What the user can mend; the message says all of it."""


def with_one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose errors are one line on standard error and exit code 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if _is_debugging():
                raise
            typer.echo(f"Error: {message_of(error)}", err=True)
            raise typer.Exit(1) from None

    return wrapped


def message_of(error: BaseException) -> str:
    """One line; that of an error which was not raised for a user begins with its type."""
    text = textwrap.shorten(str(error), _LONGEST, placeholder=" ...")
    if isinstance(error, (CommandError, ValueError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def users_code() -> Iterator[None]:
    """For what the user wrote: its prints go to standard error, since standard output is for the result.

    Raises:
        CommandError: for what that code raises, with the line of it.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        frame = _users_frame(error)
        if _is_debugging() or frame is None:
            raise
        text = textwrap.shorten(str(error), _LONGEST, placeholder=" ...")
        where = f"{os.path.relpath(frame.filename)}:{frame.lineno} ({frame.name})"
        raise CommandError(f"{where}: `{frame.line}` raised {type(error).__name__}: {text}") from error


def _users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame in a file that is the user's own."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if _is_users(frame.filename)), None)


def _is_users(file: str) -> bool:
    path = pathlib.Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(_STANDARD_LIBRARY)
    return not (installed or file.startswith("<") or path.is_relative_to(_OWN_FOLDER))


def _is_debugging() -> bool:
    return bool(os.environ.get("MPX_DEBUG"))
