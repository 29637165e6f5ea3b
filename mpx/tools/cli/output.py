"""Write what commands found: text for people, or JSON."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.status import Status

from mpx import _tables


def write(content: Any, parts: Sequence[Any], as_json: bool) -> None:
    """Write the parts, for people; or the content as JSON, with null for a number that is not finite."""
    if as_json:
        typer.echo(json.dumps(_tables.json_values(content), indent=2, allow_nan=False))
        return
    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    # Into a pipe Rich would write 80 columns, and fold the lines of an explanation.
    console = Console(width=160 if is_piped else None, highlight=False, markup=False)
    for index, part in enumerate(parts):
        console.print(*[""] * min(index, 1), part, sep="\n")


def status(text: str) -> Status:
    """Show on standard error what a command is doing."""
    return Console(stderr=True).status(text)
