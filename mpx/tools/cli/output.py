"""Output of commands: tables for people, or JSON."""

import json
import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from mpx import _tables

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output, and nothing else there.")]


def show(*results: Any) -> None:
    """Print results for people, with an empty line between two of them."""
    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    # Into a pipe Rich would write 80 columns, and fold the numbers of a large model.
    console = Console(width=160 if is_piped else None, highlight=False, markup=False)
    for index, result in enumerate(results):
        console.print(*[""] * min(index, 1), result, sep="\n")


def show_json(content: Any) -> None:
    """Print JSON, in which null stands for a number that is not finite."""
    typer.echo(json.dumps(_tables.json_values(content), indent=2, allow_nan=False))


def progress_console() -> Console:
    """Return a console on standard error, for what is shown while a command works."""
    return Console(stderr=True)
