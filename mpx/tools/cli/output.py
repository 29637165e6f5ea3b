"""Write what commands found: text for people, or JSON."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console

from mpx import _tables


def write(content: Any, parts: Sequence[Any], as_json: bool) -> None:
    """Write the content as JSON, in which null stands for a number that is not finite; or the parts, for people."""
    if as_json:
        typer.echo(json.dumps(_tables.json_values(content), indent=2, allow_nan=False))
        return
    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    # Into a pipe Rich would write 80 columns, and fold the lines of an explanation.
    console = Console(width=160 if is_piped else None, highlight=False, markup=False)
    for index, part in enumerate(parts):
        console.print(*[""] * min(index, 1), part, sep="\n")


def progress_console() -> Console:
    """Return a console on standard error, for what is shown while a command works."""
    return Console(stderr=True)
