"""Tell autocast functions which parameters the gradient around them differentiates.

JAX gives a gradient the dtype of its parameter. So `mpx.value_and_grad` differentiates with respect to float32 views of
16-bit parameters, and hands the function the parameters themselves, made of the views. An autocast function that gets
such a parameter takes the view instead, and no gradient is rounded on the way.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from mpx import _errors, _trees


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
    views: dict[int, View]  # by ids of the narrow arrays, of outer gradients too
    # What the backward pass met: autocast functions with a cotangent for an argument that is no parameter, and
    # parameters with a cotangent in 16 bits.
    functions: list[str] = dataclasses.field(default_factory=list)
    rounded: dict[str, np.dtype] = dataclasses.field(default_factory=dict)


_CURRENT: contextvars.ContextVar[Differentiation | None] = contextvars.ContextVar("differentiation", default=None)


@contextlib.contextmanager
def differentiating(require_scale: Callable[[], None]) -> Iterator[None]:
    """Let autocast functions that run inside take views; warn if a gradient goes from one through 16 bits instead."""
    outer = _CURRENT.get()
    current = Differentiation(require_scale, {} if outer is None else dict(outer.views))
    token = _CURRENT.set(current)
    try:
        yield
    finally:
        _CURRENT.reset(token)
    if current.functions and current.rounded:
        names, dtype = list(current.rounded), next(iter(current.rounded.values()))
        _errors.warn(
            f"`value_and_grad`: gradients are rounded to {dtype}, because the autocast function "
            f"`{current.functions[0]}` does not get the parameters themselves ({_errors.listed(names, 3)}): a "
            "`jax.checkpoint`, a solver or a `jax.jit` around a part of the loss hides them, or the loss takes a part "
            f"of them, casts them or computes in {dtype} with them first. Put `autocast` around the whole loss, or the "
            "transformation inside of it (of a solver: `autocast` around the loss too)."
        )


def offer(views: Sequence[View]) -> None:
    """Let autocast functions take these views in the gradient that is being computed."""
    current = _CURRENT.get()
    assert current is not None, "a gradient is being computed"
    current.views.update({id(view.narrow): view for view in views})


def views_of(leaves: Sequence[Any], name: str) -> tuple[list[View | None], list[Any]]:
    """Return the views of arguments of an autocast function that have one, and the arguments that it runs on."""
    current = _CURRENT.get()
    views = {} if current is None else current.views
    has_narrow = any(view.narrow is not view.wide for view in views.values())
    # Outside of a gradient too: a `jax.jit` may keep this program for one.
    hides = lambda x: isinstance(x, Tracer) and (_trees.is_narrower(x) or (has_narrow and _trees.is_floating(x)))
    found = [views.get(id(leaf)) for leaf in leaves]
    others = [_seen.bind(x, function=name, parameter=None) if hides(x) else x for x in leaves]
    return found, [x if view is None else view.wide for x, view in zip(others, found, strict=True)]


def narrowed(x: jax.Array, dtype: np.dtype, name: str) -> jax.Array:
    """Return the parameter of a float32 view. A cotangent that comes to it, and not to the view, has 16 bits."""
    return _seen.bind(x.astype(dtype), function=None, parameter=name)


def _see(cotangent: Any, x: Any, function: str | None, parameter: str | None) -> list[Any]:
    current = _CURRENT.get()
    if current is not None and function is not None:
        current.functions.append(function)
    if current is not None and parameter is not None:
        current.rounded[parameter] = cotangent.dtype
    return [cotangent]


_seen = Primitive("cotangent_seen")  # an identity, linear in both modes, which tells of a cotangent that comes back
_seen.def_impl(lambda x, **_: x)
_seen.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_seen, _see)
batching.primitive_batchers[_seen] = lambda x, at, **params: (_seen.bind(*x, **params), at[0])
mlir.register_lowering(_seen, lambda _, x, **__: [x])


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
            _errors.warn(
                f"`autocast`: `{name}` computes in float16 and is differentiated without a loss scale, so gradients "
                "below 6e-8 become zero. Differentiate it with `mpx.value_and_grad(fun, "
                "mpx.get_loss_scale(opt_state))`. If your caller calls `jax.grad`, pass "
                "`loss_scale=mpx.StaticLossScale(2.0**12)` to `autocast`; if it scales the loss itself, as Flax's "
                "`DynamicScale` does, or wants no scale, `loss_scale=mpx.NoOpLossScale()`."
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
