"""Entry point of the command line, which says how to get Typer and Rich where they are not installed."""

import sys


def main() -> None:
    """Run `mpx doctor | plan | explain | report`; the installed `mpx` calls this.

    Raises:
        SystemExit: always, with the exit code: 0, 1 after an error, 2 for wrong usage, 3 after a warning of the doctor.
    """
    try:
        from mpx.tools.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit("Error: the command line needs Typer and Rich: pip install 'mpx-jax[cli]'")
    app(prog_name="mpx")
