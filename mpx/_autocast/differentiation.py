"""Tell autocast functions which parameters the gradient around them differentiates.

JAX gives a gradient the dtype of its parameter. So `mpx.value_and_grad` differentiates with respect to float32 views of
16-bit parameters, and hands the function the parameters themselves, made of the views. An autocast function that gets
such a parameter takes the view instead, and no gradient is rounded on the way.
"""

import contextlib
import contextvars
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from mpx import _trees


@dataclasses.dataclass(frozen=True)
class View:
    """A parameter that is differentiated in float32."""

    narrow: Any  # the parameter as the user has it, in 16 bits or in float32
    wide: Any
    gradient_in: np.dtype | None = None  # the 16-bit dtype that its gradient is rounded to, if it may be early
    # One entry for each autocast function that took it: the 16-bit dtype that this function rounds its gradient to.
    rounded_to: list[np.dtype | None] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Differentiation:
    """The gradient that is being computed."""

    require_scale: Callable[[], None]  # raises if float16 needs a loss scale and has none
    views: dict[int, View] = dataclasses.field(default_factory=dict)  # by ids of the narrow arrays, of outer ones too
    missed: list[tuple[str, Any]] = dataclasses.field(default_factory=list)  # functions, and arrays they got instead


_CURRENT: contextvars.ContextVar[Differentiation | None] = contextvars.ContextVar("differentiation", default=None)


@contextlib.contextmanager
def differentiating(require_scale: Callable[[], None], views: Sequence[View]) -> Iterator[None]:
    """Let the autocast functions that run inside take these views; warn if one got a parameter without its view."""
    outer = _CURRENT.get()
    inherited = {} if outer is None else outer.views
    current = Differentiation(require_scale, inherited | {id(view.narrow): view for view in views})
    token = _CURRENT.set(current)
    try:
        yield
    finally:
        _CURRENT.reset(token)
    types = {_type(view.narrow) for view in views if view.narrow is not view.wide and not view.rounded_to}
    hidden = [(name, x) for name, x in current.missed if _type(x) in types]
    if hidden:
        name, x = hidden[0]
        warnings.warn(
            f"`value_and_grad`: gradients are rounded to {x.dtype}, because the autocast function `{name}` does not "
            "get the parameters themselves: a `jax.checkpoint`, a solver or a `jax.jit` around a part of the loss "
            f"hides them, or the loss computes in {x.dtype} with them first. Put the transformation inside of "
            "`autocast` (of a solver: `autocast` around the loss too), or around `value_and_grad`.",
            UserWarning,
            stacklevel=4,
        )


def views_of(leaves: Sequence[Any], name: str) -> list[View | None]:
    """Return the views of those arguments of an autocast function that have one."""
    current = _CURRENT.get()
    if current is None:
        return [None] * len(leaves)
    views = [current.views.get(id(leaf)) for leaf in leaves]
    if not any(views):
        current.missed.extend((name, x) for x in leaves if isinstance(x, Tracer) and _trees.is_narrower(x))
    return views


def view_of(leaf: Any) -> Any:
    """Return the float32 view that an outer gradient has of a parameter, or else the leaf itself."""
    current = _CURRENT.get()
    view = None if current is None else current.views.get(id(leaf))
    return leaf if view is None else view.wide


def needing_a_scale(values: list[Any], name: str) -> list[Any]:
    """Return the results of a float16 function unchanged; to differentiate them needs a loss scale, or warns."""

    def with_warning(primals, tangents):
        current = _CURRENT.get()
        if current is not None:
            current.require_scale()
        else:
            warnings.warn(
                f"`autocast`: `{name}` computes in float16 and is differentiated without a loss scale, so gradients "
                "below 6e-8 become zero. Differentiate it with `mpx.value_and_grad(fun, "
                "mpx.get_loss_scale(opt_state))`. If your caller calls `jax.grad`, pass "
                "`loss_scale=mpx.StaticLossScale(2.0**12)` to `autocast`; if it scales the loss itself, as Flax's "
                "`DynamicScale` does, or wants no scale, `loss_scale=mpx.NoOpLossScale()`.",
                UserWarning,
                stacklevel=2,
            )
        return primals[0], tangents[0]

    identity = jax.custom_jvp(lambda values: values)
    identity.defjvp(with_warning)
    numbers, put = _trees.partition_leaves(values, lambda x: jnp.issubdtype(x.dtype, jnp.inexact))
    return put(identity(numbers))


def with_cotangents_times(arrays: list[Any], factor: ArrayLike) -> list[Any]:
    """Return the arrays, whose cotangents are multiplied by a number in float32.

    The rule is one of reverse mode alone: tangents would have to be multiplied too, which only shrinks them in float16.
    """
    identity = jax.custom_vjp(lambda arrays: arrays)
    multiplied = lambda x: (_trees.at_least_float32(x) * factor).astype(x.dtype)
    identity.defvjp(lambda arrays: (arrays, None), lambda _, cotangents: (jax.tree.map(multiplied, cotangents),))
    is_number = lambda x: jnp.issubdtype(x.dtype, jnp.inexact) and not isinstance(x, jax.Ref)
    numbers, put = _trees.partition_leaves(arrays, is_number)
    return put(identity(numbers))


def _type(x: Any) -> tuple[Any, ...]:
    return x.shape, x.dtype
