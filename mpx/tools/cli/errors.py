"""Errors of commands in one line."""

import os
import pathlib
import sysconfig
import textwrap
import traceback

_PACKAGE = pathlib.Path(__file__).parents[2]
_NOT_THE_USERS = (_PACKAGE, _PACKAGE.with_name("mpx_cli.py"), pathlib.Path(sysconfig.get_path("stdlib")))


def message_of(error: BaseException) -> str:
    """Return an error in one line, with the line of the user's code where it arose, if it did there."""
    text = textwrap.shorten(str(error), 600, placeholder=" ...")
    text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    where = [f"{os.path.relpath(frame.filename)}:{frame.lineno} ({frame.name})" for frame in frames[-1:]]
    return ": ".join([*where, text])


def _is_users(file: str) -> bool:
    path = pathlib.Path(file)
    is_installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not (is_installed or file.startswith("<") or any(map(path.is_relative_to, _NOT_THE_USERS)))
