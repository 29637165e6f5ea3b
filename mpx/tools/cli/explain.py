"""`mpx explain`: the precision in which each part of a function runs."""

from typing import Any

import jax

import mpx
from mpx._autocast.transform import autocast_of
from mpx.tools.cli import given, output
from mpx.tools.cli.errors import CommandError, users_code


def run(
    function: str, shapes: list[str] | None, arguments: str | None, policy: str | None, grad: bool, as_json: bool
) -> None:
    """Explain a function for arguments of some shapes, and write the explanation."""
    if bool(shapes) == (arguments is not None):
        raise CommandError("give either the shapes of the arguments, or --arguments.")
    fun: Any = given.function(function)
    is_autocast = autocast_of(fun) is not None
    if is_autocast and (grad or policy is not None):
        option = "--grad" if grad else "--policy"
        raise CommandError(f"leave out {option}: {function} is a function that mpx.autocast returned.")
    if not is_autocast and policy is None:
        raise CommandError(f"add --policy bf16 (or f16, tf32, ...): {function} is not a function of mpx.autocast.")
    args = [given.shape(text) for text in shapes or []] if arguments is None else _made_by(arguments)
    with users_code():
        explanation = mpx.explain(jax.grad(fun) if grad else fun, policy)(*args)
    output.write(explanation.as_dict(), [explanation], as_json)


def _made_by(reference: str) -> list[Any]:
    function = given.function(reference)
    with users_code():
        made = function()
    return list(made) if type(made) in (tuple, list) else [made]  # a NamedTuple is one argument
