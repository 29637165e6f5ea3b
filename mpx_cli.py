"""The command line `mpx`: the commands, their options and help texts.

It stands outside of the package `mpx`, and a command imports what it needs when it
runs: help is shown without JAX, whose import takes most of a second.
"""

import contextlib
import pathlib
import sys
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError:
    raise SystemExit(
        "Error: the command line needs Typer and Rich: pip install typer rich"
    ) from None

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: mpx plan 7B --memory 80GB",
)


def main() -> None:
    """Run `mpx doctor | plan | explain | program | report`; the installed `mpx` calls
    this.

    Raises:
        SystemExit: always, with the exit code: 0, 1 after an error or if mpx is not
            exact, 2 for what cannot be given.
    """
    try:
        app(prog_name="mpx")
    except Exception as error:
        from mpx.tools.cli import exit_code_of, message_of

        typer.echo(f"Error: {message_of(error)}", err=True)
        raise SystemExit(exit_code_of(error)) from None


def _say_version(asked: bool) -> None:
    if asked:
        import mpx

        typer.echo(f"mpx {mpx.__version__}")
        raise typer.Exit


def _flag(name: str, help: str, **options: Any) -> Any:
    return typer.Option(name, metavar="", help=help, **options)


_AsJson = Annotated[
    bool, _flag("--json", "Write JSON to standard output, and nothing else there.")
]


@app.callback()
def _options(
    version: Annotated[
        bool,
        _flag(
            "--version",
            "Show the version and exit.",
            callback=_say_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Mixed-precision training for JAX: examine a machine, plan memory, explain a
    function, judge a step, or gradients.

    Every command takes --json. An error is one line, with exit code 2 for what cannot
    be given, else 1.
    """


@app.command(epilog="Example: mpx doctor")
def doctor(as_json: _AsJson = False) -> None:
    """Examine this machine: whether mpx is exact on it (if not, the exit code is 1),
    and what is installed.
    """
    from mpx.doctor import examine
    from mpx.tools.cli import write

    with Console(stderr=True).status("Examining ..."):
        diagnosis = examine()
    write(diagnosis, as_json)
    raise typer.Exit(not diagnosis.is_exact)


@app.command(epilog="Example: mpx plan 70B --devices 64 --fsdp --memory 80GB")
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="124M, 7B or 70e9 parameters; file.py:function, which makes them; or"
            " file.py:make as in mpx program, whose step has them as first argument."
        ),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A recipe; may be repeated."),
    ] = None,
    rule: Annotated[
        str,
        typer.Option(metavar="NAME", help="An optimizer of Optax, or file.py:name."),
    ] = "adamw",
    devices: Annotated[
        int,
        typer.Option(
            metavar="COUNT", min=1, help="Shard the state over so many (ZeRO-1)."
        ),
    ] = 1,
    fsdp: Annotated[
        bool, _flag("--fsdp", "Shard parameters and gradients, too (ZeRO-3).")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Show what is left of 80GB, 80GiB or h100."),
    ] = None,
    grad_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="Of gradients, as in mpx.value_and_grad: bf16."
        ),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Count the bytes that a training run holds under each precision recipe, before
    anything is allocated: parameters, gradients and optimizer state.
    """
    from mpx.tools import cli
    from mpx.tools.program.targets import allow_targets

    allow_targets()  # before JAX starts, for a step on devices that are not here

    options = {
        "usable_bytes": None if memory is None else cli.usable_bytes(memory),
        "recipe": recipe or [],
        "devices": devices,
        "fsdp": fsdp,
        "grad_dtype": grad_dtype,
    }
    with contextlib.redirect_stdout(sys.stderr):  # the user's code may print
        planned = cli.model(model) if ":" in model else cli.parameters(model)
        optimizer, code = cli.rule(rule)
        comparison = cli.plan(planned, optimizer, **options)
    cli.write(
        comparison,
        as_json,
        cli.plan_parts(comparison, code, model, (memory or "").strip().lower()),
    )


@app.command(
    epilog="Example: mpx explain train.py:loss "
    '"f32[16,4]" "f32[8,16]" --policy bf16 --grad'
)
def explain(
    function: Annotated[
        str, typer.Argument(help="file.py:function or module:function.")
    ],
    shapes: Annotated[
        list[str] | None,
        typer.Argument(help="Of each argument: f32[8,16], bf16[4], i32[]."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="A recipe, tf32, bf16x3, or compute=bf16. Not for autocast.",
        ),
    ] = None,
    grad: Annotated[
        bool, _flag("--grad", "Explain the gradient by the first argument.")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """Show line by line what mpx.autocast narrows in a function, what it keeps and why;
    nothing runs.
    """
    import jax

    import mpx
    from mpx.tools import cli

    with contextlib.redirect_stdout(sys.stderr):
        fun = cli.attribute(function)
        explanation = mpx.explain(jax.grad(fun) if grad else fun, policy)(
            *map(cli.shape, shapes or [])
        )
    cli.write(explanation, as_json)


@app.command(epilog="Example: mpx program train.py:make")
def program(
    function: Annotated[
        str,
        typer.Argument(
            help="file.py:make or module:make, a function without arguments that"
            " returns (step, arguments, donated): a step, a tuple of its arguments or"
            " their shapes, and the positions of donated ones, unless jax.jit returned"
            " the step."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="a100, h100, h200, b200, gb200, v5e or v6e; or this machine.",
        ),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Compile a training step, and show what it costs: memory, traffic, precision, and
    a bound of its time.

    Nothing runs, so the device need not be there. GPUs need the extra compiler, cuda12
    or cuda13.
    """
    if target is not None:
        from mpx.tools.program.targets import allow_targets

        allow_targets()  # before JAX starts
    import mpx
    from mpx.tools import cli

    with (
        Console(stderr=True).status("Compiling the step ..."),
        contextlib.redirect_stdout(sys.stderr),
    ):
        step, arguments, donated = cli.step(function)
        report = mpx.step_report(
            step, *arguments, target=target, donate_argnums=donated
        )
    cli.write(report, as_json)


@app.command(epilog="Example: mpx report gradients.npz --dtype f16")
def report(
    file: Annotated[
        pathlib.Path,
        typer.Argument(exists=True, help="Arrays: .npz, .npy or .safetensors."),
    ],
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="The format asked about.")
    ] = "f16",
    loss_scale: Annotated[
        float, typer.Option(metavar="SCALE", help="What the loss was multiplied by.")
    ] = 1.0,
    as_json: _AsJson = False,
) -> None:
    """Read arrays, and show how many become zero in a format and which loss scale they
    need.
    """
    from mpx.monitor.report import underflow_report
    from mpx.tools.cli import read_arrays, write

    write(underflow_report(read_arrays(file), dtype, loss_scale=loss_scale), as_json)
