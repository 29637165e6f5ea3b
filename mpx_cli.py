"""The command line `mpx`: the commands, their options and help texts.

It stands outside of the package `mpx`, and a command imports what it needs when it runs: help is shown without JAX,
whose import takes most of a second.
"""

import functools
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

try:
    import rich as rich
    import typer
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("typer", "rich"):
        raise
    raise SystemExit("Error: the command line needs Typer and Rich: pip install typer rich") from None

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # it would hide frames of a traceback that was asked for
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: mpx plan 7B --memory 80GB",
)


def main() -> None:
    """Run `mpx doctor | plan | explain | program | report`; the installed `mpx` calls this.

    Raises:
        SystemExit: always, with the exit code: 0, 1 after an error, 2 for wrong usage, 3 after a warning of the doctor.
    """
    negative = next((argument for argument in sys.argv[1:] if re.match(r"-\d", argument)), None)
    if negative is not None:
        typer.echo(f"Error: {negative} looks like an option. Did you mean {negative[1:]}?", err=True)
        raise SystemExit(2)
    app(prog_name="mpx")


def _say_version(asked: bool) -> None:
    if asked:
        import mpx

        typer.echo(f"mpx {mpx.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_say_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Mixed-precision training for JAX: examine a machine, plan memory, explain a function, report on gradients.

    Every command takes --json. An error is one line and exit code 1; set MPX_DEBUG=1 to see its traceback.
    """


def _command(example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a command of a function, whose errors are one line."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**options: Any) -> None:
            from mpx.tools.cli import errors

            with errors.in_one_line():
                function(**options)

        return app.command(epilog=f"Example: {example}")(command)

    return register


_Shapes = Annotated[list[str] | None, typer.Argument(help="A shape for each argument: f32[8,16], bf16[4], i32[].")]
_AsJson = Annotated[
    bool, typer.Option("--json", metavar="", help="Write JSON to standard output, and nothing else there.")
]
_Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="The memory of a device, 80GB or 80GiB: show what fits into it.")
]


@_command("mpx doctor --quick")
def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Leave out what is timed, and so the recommendation.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", metavar="", help="Show all of it, in tables, and the recipe's code.")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """Examine this machine: which recipe is for it, whether mpx is exact on it, and what stands in the way.

    Exit code: 0 if all is well, 1 with an error, 3 with a warning.
    """
    from mpx.doctor import examine
    from mpx.tools.cli import output

    with output.status("Examining ..."):
        diagnosis = examine(quick=quick)
    output.write(diagnosis.as_dict(), [diagnosis if full else diagnosis.verdict], as_json)
    raise typer.Exit(diagnosis.exit_code)


@_command("mpx plan 70B --devices 64 --fsdp --memory 80GB")
def plan(
    model: Annotated[
        str, typer.Argument(help="How many parameters (124M, 7B, 70e9), or file.py:function, which makes them.")
    ],
    recipe: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A recipe; may be repeated.")] = None,
    rule: Annotated[str, typer.Option(metavar="NAME", help="An optimizer of Optax, or file.py:name.")] = "adamw",
    devices: Annotated[
        str | None,
        typer.Option(metavar="MESH", help="64, or data=8,model=2. The first axis shards the optimizer state (ZeRO-1)."),
    ] = None,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", metavar="", help="Shard parameters and gradients, too (ZeRO-3).")
    ] = False,
    gradient_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="f32 for gradients that leave the program.")
    ] = None,
    memory: _Memory = None,
    memory_fraction: Annotated[
        float | None,
        typer.Option(metavar="PART", min=0.01, max=1.0, help="The part of the memory that JAX uses; 0.75."),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Count the bytes that a training run holds under each precision recipe, before anything is allocated."""
    from mpx.tools.cli import given, output, plans

    if memory is None and memory_fraction is not None:
        raise given.CommandError("--memory-fraction does nothing without --memory.")
    fraction = 0.75 if memory_fraction is None else memory_fraction
    limit = None if memory is None else int(given.memory_bytes(memory) * fraction)
    planned = given.function(model) if ":" in model else given.parameters(model)
    comparison = plans.compare(planned, rule, recipe or [], devices, fsdp, gradient_dtype)
    content = {"model": model, "rule": rule, "plans": comparison.plans} | plans.what_fits(comparison, limit)
    parts = plans.tables(comparison, limit, fraction, fsdp)
    output.write(content, parts if gradient_dtype else [*parts, plans.CONVENTION], as_json)


@_command('mpx explain train.py:loss "f32[16,4]" "f32[8,16]" --policy bf16 --grad')
def explain(
    function: Annotated[str, typer.Argument(help="file.py:function or module:function.")],
    shapes: _Shapes = None,
    arguments: Annotated[
        str | None,
        typer.Option(metavar="FILE:NAME", help="A function that returns a tuple of arguments, or of shapes."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY", help="bf16, f16, tf32, bf16x3, fp8, or params=f32,compute=bf16. Not for autocast."
        ),
    ] = None,
    grad: Annotated[
        bool, typer.Option("--grad", metavar="", help="Explain the gradient by the first argument.")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """Show line by line what mpx.autocast narrows in a function, what it keeps and why; nothing runs."""
    import jax

    import mpx
    from mpx.tools.cli import given, output

    if bool(shapes) == (arguments is not None):
        raise given.CommandError("give either the shapes of the arguments, or --arguments.")
    fun = given.function(function)
    args = [given.shape(text) for text in shapes or []] if arguments is None else given.made_by(arguments)
    with given.users_code():
        explanation = mpx.explain(jax.grad(fun) if grad else fun, policy)(*args)
    output.write(explanation.as_dict(), [explanation], as_json)


@_command("mpx program train.py:step --batch 8 --batch 16")
def program(
    function: Annotated[
        str,
        typer.Argument(
            help="file.py:function or module:function: a step, with a shape for each argument; or a function that "
            "returns (step, arguments, donated): a step, a tuple of its arguments or their shapes, and the positions "
            "of donated ones, unless jax.jit returned the step."
        ),
    ],
    shapes: _Shapes = None,
    target: Annotated[
        str | None, typer.Option(metavar="NAME", help="a100, h100, h200, b200, v5e or v6e. Left out: this machine.")
    ] = None,
    donate: Annotated[
        list[int] | None, typer.Option(metavar="POSITION", min=0, help="An argument that is donated; may be repeated.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(metavar="SIZE", min=1, help="A batch size for the function; may be repeated.")
    ] = None,
    memory: _Memory = None,
    as_json: _AsJson = False,
) -> None:
    """Compile a training step, and show what it costs: memory, traffic, precision, and a bound of its time.

    Nothing runs, so the device need not be there. GPUs need the extra cuda12 or cuda13.
    """
    if target is not None:
        from mpx.tools.program import targets

        targets.allow_targets()  # before JAX starts
    from mpx.tools.cli import given, output, programs

    if shapes and batch:
        raise given.CommandError("give either shapes or --batch.")
    if (donate and not shapes) or (memory and not batch):
        raise given.CommandError("--donate does nothing without shapes, and --memory nothing without --batch.")
    if target is not None:
        programs.require_target(target)
    if not batch:
        found = programs.report(function, shapes or [], target, donate or [])
        output.write(found.as_dict(), [found], as_json)
        return
    limit = None if memory is None else given.memory_bytes(memory)
    compared, largest = programs.by_batch(function, batch, target, limit)
    fits = [] if largest is None else [f"The largest batch that fits, to {programs.RESOLUTION:.0%}: {largest:,}."]
    output.write(compared.as_dict() | {"largest_batch": largest}, [compared, *fits], as_json)


@_command("mpx report gradients.npz --dtype f16")
def report(
    file: Annotated[
        pathlib.Path, typer.Argument(help="Arrays: .npz, .npy, .safetensors, or the folder of an Orbax checkpoint.")
    ],
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="The format asked about.")] = "f16",
    loss_scale: Annotated[float, typer.Option(metavar="SCALE", help="What the loss was multiplied by.")] = 1.0,
    as_json: _AsJson = False,
) -> None:
    """Read arrays, and show how many become zero in a format and which loss scale they need."""
    from mpx.tools.cli import arrays, output

    tree, notes = arrays.read(file)
    found = arrays.report(tree, dtype, loss_scale)
    for note in notes:
        typer.echo(f"Note: {note}", err=True)
    output.write({"file": str(file), "notes": notes, "report": found.as_dict()}, [found], as_json)
