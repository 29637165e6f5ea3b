"""Tell autocast functions which parameters the gradient around them differentiates.

JAX gives a gradient the dtype of its parameter. So `mpx.value_and_grad` differentiates
with respect to float32 views of 16-bit parameters, and hands the function the
parameters themselves, made of the views. An autocast function that gets such a
parameter takes the view instead, and no gradient is rounded on the way.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from mpx import _errors, _trees
from mpx._jaxprs import open_jaxpr, propagate, propagate_inside
from mpx._primitives import is_call


@dataclasses.dataclass(frozen=True)
class View:
    """A parameter that is differentiated in float32."""

    narrow: Any  # the parameter as the user has it, in 16 bits or in float32
    wide: Any
    # the 16-bit dtype that its gradient is rounded to, if it may be early
    gradient_in: np.dtype | None = None
    # One entry for each autocast function that took it: the 16-bit dtype that this
    # function rounds its gradient to.
    rounded_to: list[np.dtype | None] = dataclasses.field(default_factory=list)

    @property
    def stored_in(self) -> np.dtype | None:
        """The 16-bit dtype that has its values, or None."""
        return None if self.narrow is self.wide else self.narrow.dtype


@dataclasses.dataclass(frozen=True)
class Differentiation:
    """The gradient that is being computed."""

    # Raises if float16 needs a loss scale and has none.
    require_scale: Callable[[], None]
    views: dict[int, View]  # by ids of the narrow arrays, of outer gradients too
    # What got cotangents, found in the backward pass: autocast functions, at arguments
    # without a view, and parameters in 16 bits, with the dtype.
    functions: set[str] = dataclasses.field(default_factory=set)
    parameters: dict[str, np.dtype] = dataclasses.field(default_factory=dict)

    def warn(self, trace: Callable[[], Any]) -> None:
        """Warn if a parameter in 16 bits goes into an autocast function at an argument
        without a view.

        `trace` returns the program, and is called only if that may be.
        """
        if not (self.functions and self.parameters):
            return
        found = _hidden_parameters(trace())
        pairs = sorted(pair for pair in found if pair[0] in self.parameters)
        if not pairs:
            return
        names = list(dict.fromkeys(name for name, _ in pairs))
        _errors.warn(
            f"`value_and_grad`: gradients are rounded to {self.parameters[names[0]]},"
            f" because the autocast function `{min(function for _, function in pairs)}`"
            " does not get the parameters themselves (of arguments:"
            f" {_errors.listed(names, 3)}): a `jax.checkpoint`, a solver or a `jax.jit`"
            " around a part of the loss hides them, or the loss takes parts of them,"
            " casts them or computes with them first. Put `autocast` around the whole"
            " loss, and the transformation inside of it."
        )


_CURRENT: contextvars.ContextVar[Differentiation | None] = contextvars.ContextVar(
    "differentiation", default=None
)


@contextlib.contextmanager
def differentiating(require_scale: Callable[[], None]) -> Iterator[Differentiation]:
    """Let autocast functions that run inside take the views that are added, and note
    those that get others.
    """
    outer = _CURRENT.get()
    current = Differentiation(require_scale, dict(outer.views) if outer else {})
    token = _CURRENT.set(current)
    try:
        yield current
    finally:
        _CURRENT.reset(token)


def views_of(leaves: Sequence[Any], name: str) -> tuple[list[View | None], list[Any]]:
    """Return the views of arguments of an autocast function that have one, and the
    arguments that it runs on.
    """
    views = current.views if (current := _CURRENT.get()) else {}
    is_mixed = any(view.stored_in for view in views.values())
    # Tracers of 16 bits are watched without a gradient too: a `jax.jit` traced now may
    # be differentiated later.
    is_watched = _trees.is_floating if is_mixed else _trees.is_narrower

    def given(x: Any, view: View | None) -> Any:
        if view is not None:
            return view.wide
        if not (isinstance(x, Tracer) and is_watched(x)):
            return x
        return _watched.bind(x, function=name, parameter="")

    found = [views.get(id(leaf)) for leaf in leaves]
    return found, list(map(given, leaves, found))


def parameter(wide: Any, dtype: np.dtype | None, name: str) -> Any:
    """Return the parameter of a view. A cotangent that comes back to it, and not to the
    view, is noted.
    """
    is_wide = dtype is not None and wide.dtype != dtype
    if not is_wide:
        return wide
    return _watched.bind(wide.astype(dtype), function="", parameter=name)


def _note(cotangent: Any, _: Any, function: str, parameter: str) -> list[Any]:
    if (current := _CURRENT.get()) and function:
        current.functions.add(function)
    elif current:
        current.parameters[parameter] = cotangent.dtype
    return [cotangent]


_watched = Primitive("cotangent_watched")
_watched.def_impl(lambda x, **_: x)
_watched.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_watched, _note)
batching.primitive_batchers[_watched] = lambda x, at, **params: (
    _watched.bind(*x, **params),
    at[0],
)
mlir.register_lowering(_watched, lambda _, x, **__: [x])


def _hidden_parameters(program: Any) -> set[tuple[str, str]]:
    """Return which parameters go into which autocast functions at arguments without a
    view, as pairs of names.
    """
    found: set[tuple[str, str]] = set()

    def rule(eqn: JaxprEqn, operands: list[frozenset[str]]) -> Sequence[frozenset[str]]:
        names = frozenset[str]().union(*operands)
        if eqn.primitive is _watched and eqn.params["function"]:
            found.update((name, eqn.params["function"]) for name in names)
        elif eqn.primitive is _watched:
            names |= {eqn.params["parameter"]}
        # Calls and branches are followed value by value. Of all else, such as a loop,
        # each operand may go into each value inside.
        if is_call(eqn) or eqn.primitive.name == "cond":
            inside = propagate_inside(eqn, operands, rule, lambda _: frozenset())
            return [frozenset().union(*of_branches) for of_branches in inside]
        for inner in jex_core.jaxprs_in_params(eqn.params):
            names = names.union(*results_of(inner, names))
        return [names] * len(eqn.outvars)

    def results_of(program: Any, names: frozenset[str]) -> list[frozenset[str]]:
        """Return the names that go into each result, if they go into each input."""
        inputs = [names] * len(open_jaxpr(program).invars)
        return propagate(program, inputs, rule, lambda _: frozenset())

    results_of(program, frozenset())
    return found


def view_of(leaf: Any) -> Any:
    """Return the float32 view that an outer gradient has of a parameter, or else the
    leaf itself.
    """
    current = _CURRENT.get()
    view = current.views.get(id(leaf)) if current else None
    return view.wide if view else leaf


def needing_a_scale(values: list[Any], name: str) -> list[Any]:
    """Return the results of a float16 function unchanged; to differentiate them needs a
    loss scale, or warns.
    """

    def with_warning(primals, tangents):
        if current := _CURRENT.get():
            current.require_scale()
        else:
            _errors.warn(
                f"`autocast`: `{name}` computes in float16 and is differentiated"
                " without a loss scale, so gradients below 6e-8 become zero."
                " Differentiate it with `mpx.value_and_grad(fun,"
                " mpx.get_loss_scale(opt_state))`. If your caller calls `jax.grad`,"
                " two settings belong together: `autocast(...,"
                " loss_scale=mpx.StaticLossScale(2.0**12))`, which scales and"
                " unscales, and `mixed_precision(...,"
                " loss_scale=mpx.NoOpLossScale())`, which must not unscale again. If"
                " it scales the loss itself, as Flax's `DynamicScale` does, or wants"
                " no scale, both are `mpx.NoOpLossScale()`."
            )
        return primals[0], tangents[0]

    identity = jax.custom_jvp(lambda values: values)
    identity.defjvp(with_warning)
    numbers, put = _trees.partition_leaves(values, _trees.is_inexact)
    return put(identity(numbers))


def with_cotangents_times(arrays: list[Any], factor: ArrayLike) -> list[Any]:
    """Return the arrays, whose cotangents are multiplied by a number in float32.

    The rule is one of reverse mode alone: tangents would have to be multiplied too,
    which only shrinks them in float16.
    """
    identity = jax.custom_vjp(lambda arrays: arrays)

    def multiplied(x):
        return (_trees.at_least_float32(x) * factor).astype(x.dtype)

    identity.defvjp(
        lambda arrays: (arrays, None),
        lambda _, cotangents: (jax.tree.map(multiplied, cotangents),),
    )
    numbers, put = _trees.partition_leaves(arrays, _trees.is_inexact)
    return put(identity(numbers))
