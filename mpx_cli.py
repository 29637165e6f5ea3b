"""The command line `mpx`: the commands, their options and help texts.

It stands outside of the package `mpx`, and a command imports what it needs when it runs: help is shown without JAX,
whose import takes most of a second.
"""

import functools
import pathlib
from collections.abc import Callable
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
    """Show `--json` in the help of a command, not `--json <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]  # of the class beside this one
        for param in params:
            param.metavar = "" if getattr(param, "is_flag", False) else param.metavar
        return params


_Command = type("_Command", (_PlainFlags, TyperCommand), {})
_Group = type("_Group", (_PlainFlags, TyperGroup), {})

app = typer.Typer(
    cls=_Group,
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
    app(prog_name="mpx")


def _say_version(asked: bool) -> None:
    if asked:
        import mpx

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


def _command(example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a command of a function, whose errors are one line."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**options: Any) -> None:
            from mpx.tools.cli import errors

            with errors.in_one_line():
                function(**options)

        return app.command(cls=_Command, epilog=f"Example: {example}")(command)

    return register


_Shapes = Annotated[
    list[str] | None, typer.Argument(help="A shape for each argument of the function: f32[8,16], bf16[4], i32[].")
]
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
    from mpx.doctor import examine
    from mpx.tools.cli import output

    with output.progress_console().status("Examining ...") as status:
        diagnosis = examine(quick=quick, progress=lambda name: status.update(f"Examining {name} ..."))
    output.write(diagnosis.as_dict(), [diagnosis if full else diagnosis.verdict], as_json)
    raise typer.Exit(diagnosis.exit_code)


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
    as_json: _AsJson = False,
) -> None:
    """Count the bytes that a training run holds under each precision recipe, before anything is allocated."""
    from mpx.tools.cli import given, output, plans

    limit = None if memory is None else given.memory_bytes(memory)
    planned = given.function(model) if ":" in model else given.parameters(model)
    comparison = plans.compare(planned, rule, recipe or [], mesh, gradient_dtype)
    content = {"model": model, "rule": rule, "plans": comparison.plans}
    content |= plans.what_fits(comparison, limit) if as_json else {}
    parts = plans.tables(comparison, limit, exact)
    output.write(content, parts if gradient_dtype else [*parts, plans.CONVENTION], as_json)


@_command('mpx explain train.py:loss "f32[16,4]" "f32[8,16]" --policy bf16 --grad')
def explain(
    function: Annotated[str, typer.Argument(help="file.py:function or module:function.")],
    shapes: _Shapes = None,
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
            help="bf16, f16, tf32, bf16x3, fp8, or the string of a policy (params=f32,compute=bf16). Leave it out for "
            "a function that mpx.autocast returned.",
        ),
    ] = None,
    grad: Annotated[
        bool, typer.Option("--grad", help="Explain the gradient with respect to the first argument.")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """Show line by line what mpx.autocast narrows in a function, what it keeps and why; nothing runs."""
    import jax

    import mpx
    from mpx._autocast.transform import autocast_of
    from mpx.tools.cli import given, output

    if bool(shapes) == (arguments is not None):
        raise given.CommandError("give either the shapes of the arguments, or --arguments.")
    fun = given.function(function)
    is_autocast = autocast_of(fun) is not None
    if is_autocast and (grad or policy is not None):
        option = "--grad" if grad else "--policy"
        raise given.CommandError(f"leave out {option}: {function} is a function that mpx.autocast returned.")
    if not is_autocast and policy is None:
        raise given.CommandError(
            f"add --policy bf16 (or f16, tf32, ...): {function} is not a function of mpx.autocast."
        )
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
            "of those that are donated, unless jax.jit returned the step."
        ),
    ],
    shapes: _Shapes = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="a100, h100, h200, b200, v5e or v6e; it need not be here. This machine if left out."
        ),
    ] = None,
    donate: Annotated[
        list[int] | None,
        typer.Option(metavar="POSITION", min=0, help="An argument of a step that is donated; may be repeated."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            metavar="SIZE", min=1, help="A batch size, which the function gets as its argument; may be repeated."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="With --batch: search the largest batch that fits, to 3%; the target's if left out."
        ),
    ] = None,
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
    parts = (
        [compared]
        if largest is None
        else [compared, f"The largest batch that fits, to {programs.RESOLUTION:.0%}: {largest:,}."]
    )
    output.write(compared.as_dict() | {"largest_batch": largest}, parts, as_json)


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
    from mpx.tools.cli import arrays, output

    tree, notes = arrays.read(file)
    found = arrays.report(tree, dtype, loss_scale)
    for note in notes:
        typer.echo(f"Note: {note}", err=True)
    output.write({"file": str(file), "notes": notes, "report": found.as_dict()}, [found], as_json)
