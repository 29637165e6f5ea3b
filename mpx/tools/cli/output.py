"""What commands write to standard output: tables for people, or JSON."""

import json
import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from mpx.tools import json_values

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output, and nothing else there.")]

_WIDTH_OF_PIPES = 160  # Rich takes 80, in which the numbers of a large model would be folded


def show(*results: Any) -> None:
    """Prints results for people, with an empty line between two of them."""
    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(width=_WIDTH_OF_PIPES if is_piped else None, highlight=False, markup=False)
    for index, result in enumerate(results):
        if index:
            console.print()
        console.print(result)


def show_json(content: Any) -> None:
    """Prints JSON, which has no NaN and no infinity: null stands for them."""
    typer.echo(json.dumps(json_values.plain(content), indent=2, allow_nan=False))


def note(text: str) -> None:
    """Says on standard error what the reader of a result must know."""
    typer.echo(f"Note: {text}", err=True)


def progress_console() -> Console:
    """For what is shown while a command works."""
    return Console(stderr=True)
