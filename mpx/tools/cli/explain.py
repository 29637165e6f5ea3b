"""`mpx explain`: the precision in which each part of a function runs."""

from typing import Annotated, Any

import jax
import typer

import mpx
from mpx.tools.cli import given, output
from mpx.tools.cli.errors import CommandError, users_code

EXAMPLE = 'mpx explain train.py:loss "f32[16,4]" "f32[8,16]" --policy bf16 --grad'


def explain(
    function: Annotated[str, typer.Argument(help="file.py:function or module:function.")],
    shapes: Annotated[
        list[str] | None, typer.Argument(help="A shape for each argument: f32[8,16], bf16[4], i32[].")
    ] = None,
    arguments: Annotated[
        str | None,
        typer.Option(help="Instead of shapes: file.py:function, which returns a tuple of arguments or their shapes."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="bf16, f16, tf32, bf16x3, or the string of a policy (params=f32,compute=bf16). Leave it out for a "
            "function that mpx.autocast returned."
        ),
    ] = None,
    grad: Annotated[
        bool, typer.Option("--grad", help="Explain the gradient with respect to the first argument.")
    ] = False,
    as_json: output.AsJson = False,
) -> None:
    """Show line by line what mpx.autocast narrows in a function, what it keeps and why; nothing runs."""
    if bool(shapes) == (arguments is not None):
        raise CommandError("give either the shapes of the arguments, or --arguments.")
    if grad and policy is None:
        raise CommandError("--grad needs --policy, and a function that mpx.autocast has not returned.")
    fun: Any = given.function(function)
    args = [given.shape(text) for text in shapes or []] if arguments is None else _made_by(arguments)
    with users_code():
        explanation = mpx.explain(jax.grad(fun) if grad else fun, policy)(*args)
    output.write(explanation.as_dict(), [explanation], as_json)


def _made_by(reference: str) -> list[Any]:
    function = given.function(reference)
    with users_code():
        made = function()
    return list(made) if type(made) in (tuple, list) else [made]  # a NamedTuple is one argument
