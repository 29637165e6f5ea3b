"""`mpx doctor`: examine this machine."""

from typing import Annotated

import typer

from mpx.doctor import examine
from mpx.tools.cli import output

EXAMPLE = "mpx doctor --quick"


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out what is timed.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """Examine this machine: its devices, what works, how fast, whether mpx is exact on it, and the recipe for it.

    Exit code: 0 if all is well, 1 with an error, 3 with a warning.
    """
    with output.progress_console().status("Examining ...") as status:
        diagnosis = examine(quick=quick, progress=lambda name: status.update(f"Examining {name} ..."))
    output.write(diagnosis.as_dict(), [diagnosis], as_json)
    raise typer.Exit(diagnosis.exit_code)
