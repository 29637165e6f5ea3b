"""The command line `mpx`: its commands, their options and help texts; `mpx.tools.cli` has what they do.

This file stands outside of `mpx`, whose import takes JAX's second: help is shown without it.
"""

import functools
import importlib
import pathlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

try:
    import rich as rich
    import typer
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("typer", "rich"):
        raise
    raise SystemExit("Error: the command line needs Typer and Rich: pip install 'mpx-jax[cli]'") from None


class _PlainFlags:
    """A mixin for commands: the help shows `--json`, not `--json <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]  # of the class beside this one
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_PlainFlags, TyperCommand):
    pass


class _Group(_PlainFlags, TyperGroup):
    pass


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # it would hide frames of a traceback that was asked for
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: mpx plan 7B --memory 80GB",
)


def main() -> None:
    """Run `mpx doctor | plan | explain | report`; the installed `mpx` calls this.

    Raises:
        SystemExit: always, with the exit code: 0, 1 after an error, 2 for wrong usage, 3 after a warning of the doctor.
    """
    app(prog_name="mpx")


def _say_version(asked: bool) -> None:
    if asked:
        try:
            typer.echo(f"mpx {version('mpx-jax')}")
        except PackageNotFoundError:  # run from a checkout
            typer.echo("mpx 0+unknown")
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


def _command(example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a command of a function: its options and help, and the `run` of its namesake."""

    def register(interface: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(interface)
        def command(**options: Any) -> None:
            from mpx.tools.cli import errors

            with errors.in_one_line():
                importlib.import_module(f"mpx.tools.cli.{interface.__name__}").run(**options)

        return app.command(cls=_Command, epilog=f"Example: {example}")(command)

    return register


_AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output, and nothing else there.")]


@_command("mpx doctor --quick")
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out what is timed, and so the recommendation.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Show all of it, in tables, and the recipe's code.")] = False,
    as_json: _AsJson = False,
) -> None:
    """Examine this machine: which recipe is for it, whether mpx is exact on it, and what stands in the way.

    Exit code: 0 if all is well, 1 with an error, 3 with a warning.
    """


@_command("mpx plan 7B --mesh 8 --memory 80GB")
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="How many parameters (124M, 7B, 70e9), or file.py:function or module:function, a function without "
            "arguments that makes them and is only traced."
        ),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A standard recipe, in full; may be repeated. All if left out."),
    ] = None,
    rule: Annotated[
        str,
        typer.Option(metavar="NAME", help="An optimizer of Optax, or file.py:name, an optimizer or what makes one."),
    ] = "adamw",
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICES",
            help="8, or data=8,model=2. The optimizer state is divided along the first axis (ZeRO-1), the parameters "
            "are not.",
        ),
    ] = None,
    gradient_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="f32 for gradients that leave the program. Left out: those inside one jitted step, in the narrower "
            "of the parameter's dtype and the policy's compute dtype.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="The memory of a device, 80GB or 80GiB: show what fits into it, and the largest model."
        ),
    ] = None,
    exact: Annotated[bool, typer.Option("--bytes", help="Show exact numbers of bytes, not GB (10^9 bytes).")] = False,
    hlo: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:NAME",
            help="A function of a batch size that returns (step, arguments): the training step, best as jax.jit with "
            "donate_argnums returns it, and a tuple of its arguments or their shapes. The step is compiled, not run, "
            "and the memory that XLA needs for it is shown; with --memory, the largest batch too.",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(metavar="SIZE", min=1, help="A batch size for --hlo; may be repeated.")
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Count the bytes that a training run holds under each precision recipe, before anything is allocated."""


@_command('mpx explain train.py:loss "f32[16,4]" "f32[8,16]" --policy bf16 --grad')
def explain(
    function: Annotated[str, typer.Argument(help="file.py:function or module:function.")],
    shapes: Annotated[
        list[str] | None, typer.Argument(help="A shape for each argument: f32[8,16], bf16[4], i32[].")
    ] = None,
    arguments: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:NAME", help="Instead of shapes: a function that returns a tuple of arguments or their shapes."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="bf16, f16, tf32, bf16x3, or the string of a policy (params=f32,compute=bf16). Leave it out for a "
            "function that mpx.autocast returned.",
        ),
    ] = None,
    grad: Annotated[
        bool, typer.Option("--grad", help="Explain the gradient with respect to the first argument.")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """Show line by line what mpx.autocast narrows in a function, what it keeps and why; nothing runs."""


@_command("mpx report gradients.npz --dtype f16")
def report(
    file: Annotated[
        pathlib.Path, typer.Argument(help="Arrays: .npz, .npy, .safetensors, or the folder of an Orbax checkpoint.")
    ],
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="The format asked about.")] = "f16",
    loss_scale: Annotated[
        float, typer.Option(metavar="SCALE", help="The loss scale by which these gradients were multiplied.")
    ] = 1.0,
    as_json: _AsJson = False,
) -> None:
    """Read arrays, and show how many become zero in a format and which loss scale they need."""
