"""The application: the options of `mpx` itself, and its commands."""

from typing import Annotated

import typer

import mpx
from mpx.tools.cli import doctor, errors, explain, plan, report

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # it would hide frames of a traceback that was asked for
    rich_markup_mode="rich",
    epilog="Example: mpx plan 7B",
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mpx {mpx.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Mixed-precision training for JAX: examine a machine, plan memory, explain a function, report on gradients.

    Every command takes --json. An error is one line and exit code 1; set MPX_DEBUG=1 to see its traceback.
    """


for _module in (doctor, plan, explain, report):
    _name = _module.__name__.rpartition(".")[2]
    _command = errors.with_one_line_errors(getattr(_module, _name))
    app.command(_name, epilog=f"Example: {_module.EXAMPLE}")(_command)
