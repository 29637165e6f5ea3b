"""The command line: `mpx doctor | plan | explain | report`."""

import sys


def main() -> None:
    """Runs the command line; this is what the installed `mpx` calls.

    It needs Typer and Rich, which the library itself does without, so both are imported here: without them it says in
    one line how to get them.

    Raises:
        SystemExit: always, with the command's exit code: 0, 1 after an error, 2 for wrong usage, and for `mpx doctor`
            3 after a warning.
    """
    try:
        from mpx.tools.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.stderr.write("Error: the command line needs Typer and Rich: pip install 'mpx-jax[cli]'\n")
        sys.exit(1)
    app(prog_name="mpx")
