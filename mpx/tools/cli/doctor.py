"""`mpx doctor`: examine this machine."""

import typer

from mpx.doctor import examine
from mpx.tools.cli import output


def run(quick: bool, full: bool, as_json: bool) -> None:
    """Examine this machine, write the verdict or everything, and exit with the diagnosis' code."""
    with output.progress_console().status("Examining ...") as status:
        diagnosis = examine(quick=quick, progress=lambda name: status.update(f"Examining {name} ..."))
    output.write(diagnosis.as_dict(), [diagnosis if full else diagnosis.verdict], as_json)
    raise typer.Exit(diagnosis.exit_code)
