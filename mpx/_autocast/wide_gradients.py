"""Contractions in the compute dtype whose gradients are unrounded float32 sums.

JAX gives a gradient the dtype of its operand. So the derivative in the direction of an operand that wants a float32
gradient is a primitive of its own, linear in that operand, whose transpose is the contraction with a float32 result.
The contraction itself stays what it is: checkpoints and tools recognize it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from mpx._jaxprs import is_literal, propagate
from mpx._primitives import facts_of


def contract(eqn: JaxprEqn, operands: list[Any], dtype: np.dtype, wide: tuple[bool, bool]) -> jax.Array:
    """Run a contraction with its first two operands rounded to `dtype`; `wide` says which get float32 gradients."""
    params = {**eqn.params, "contraction": eqn.primitive, "dtype": dtype}

    @jax.custom_jvp
    def product(*operands):
        return _bound(*operands, **params)

    def with_tangents(primals, tangents):
        lhs, rhs, *rest = primals
        narrow = [lax.convert_element_type(x, dtype) for x in (lhs, rhs)]
        functions = [_derivative.bind if is_wide else _bound for is_wide in wide]
        parts = [
            functions[position](t, narrow[1 - position], *rest, **params, position=position)
            for position, t in enumerate(tangents[:2])
            if not isinstance(t, SymbolicZero)
        ]
        return _bound(*narrow, *rest, **params), sum(parts[1:], parts[0])

    product.defjvp(with_tangents, symbolic_zeros=True)
    return product(*operands)


def _bound(x: Any, other: Any, *rest: Any, contraction: Primitive, dtype: Any, position: int = 0, **params: Any) -> Any:
    """Bind a contraction in `dtype`, with `x` as its operand number `position` and the other operand rounded too."""
    operands = [lax.convert_element_type(operand, dtype) for operand in (x, other)]
    return contraction.bind(*_in_order(operands, position), *rest, **(params | {"preferred_element_type": dtype}))


def _in_order(operands: list[Any], position: int) -> list[Any]:
    return operands if position == 0 else operands[::-1]


def _type(x: Any, other: Any, *rest: Any, contraction: Primitive, dtype: Any, position: int, **params: Any) -> Any:
    operands = [operand.update(dtype=dtype) for operand in (x, other)]
    params |= {"preferred_element_type": dtype}
    return contraction.abstract_eval(*_in_order(operands, position), *rest, **params)[0]


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any) -> tuple[Any, Any]:
    """Differentiate once more: in the direction of `x` alike, in others as JAX does."""
    (x, *others), (of_x, *of_others) = primals, tangents
    value = _derivative.bind(*primals, **params)
    parts = [] if type(of_x) is ad.Zero else [_derivative.bind(of_x, *others, **params)]
    if type(of_others[0]) is not ad.Zero:
        parts.append(jax.jvp(lambda other: _bound(x, other, *others[1:], **params), others[:1], of_others[:1])[1])
    return value, sum(parts[1:], parts[0])


def _transposed(cotangent: Any, x: Any, other: Any, *rest: Any, **params: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [None] * (2 + len(rest))
    pull = jax.linear_transpose(lambda x: _bound(x, other, *rest, **params), x.aval.update(dtype=params["dtype"]))
    gradient = _summed_in_f32(pull, cotangent)
    return [lax.convert_element_type(gradient, x.aval.dtype), *[None] * (1 + len(rest))]


def _summed_in_f32(pullback: Callable[..., Any], cotangent: jax.Array) -> jax.Array:
    """Run the transpose of a contraction so that the contraction inside it has a float32 result."""
    program = jax.make_jaxpr(lambda cotangent: pullback(cotangent)[0])(cotangent)
    return _rebound(program, [cotangent], _bound_in_f32)


def _bound_in_f32(eqn: JaxprEqn, operands: list[Any]) -> jax.Array:
    """Bind a contraction of 16-bit operands with a float32 result."""
    has_batch = eqn.primitive.name == "dot_general" and any(eqn.params["dimension_numbers"][1])
    alone = (lambda x: x) if has_batch else _unfused.bind
    params = eqn.params | {"preferred_element_type": np.dtype(np.float32)}
    return alone(eqn.primitive.bind(*map(alone, operands), **params))


def _batched(operands: list[Any], axes: list[int | None], **params: Any) -> tuple[Any, int]:
    """Batch as JAX batches the contraction itself, so that a weight without a batch gets one gradient."""
    (x, other, *rest), position = operands, params["position"]
    in_order = lambda pair: [*_in_order(list(pair[:2]), position), *pair[2:]]
    own = {key: value for key, value in params.items() if key not in ("contraction", "dtype", "position")}
    batched = jax.vmap(lambda *operands: params["contraction"].bind(*operands, **own), in_order(axes))

    def bind(eqn: JaxprEqn, operands: list[Any]) -> Any:
        lhs, rhs, *rest = operands
        new = {**eqn.params, "contraction": eqn.primitive, "dtype": params["dtype"], "position": position}
        return _derivative.bind(*_in_order([lhs, rhs], position), *rest, **new)

    narrow = [lax.convert_element_type(operand, params["dtype"]) for operand in (x, other)]
    program = jax.make_jaxpr(batched)(*in_order([*narrow, *rest]))
    return _rebound(program, in_order(operands), bind), 0  # not the rounded `x`: rounding has a transpose that rounds


def _rebound(program: ClosedJaxpr, operands: list[Any], bind: Callable[[JaxprEqn, list[Any]], jax.Array]) -> jax.Array:
    """Run a program of one result, with `bind` for its contraction."""
    constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))

    def run(eqn: JaxprEqn, operands: list[Any]) -> Any:
        if facts_of(eqn).contraction:
            return [bind(eqn, operands)]
        results = eqn.primitive.bind(*operands, **eqn.params)
        return results if eqn.primitive.multiple_results else [results]

    return propagate(program, operands, run, lambda v: v.val if is_literal(v) else constants[v])[0]


_derivative = Primitive("narrow_product_derivative")
_derivative.def_impl(_bound)
_derivative.def_abstract_eval(_type)
ad.primitive_jvps[_derivative] = _jvp
ad.primitive_transposes[_derivative] = _transposed
batching.primitive_batchers[_derivative] = _batched
mlir.register_lowering(_derivative, mlir.lower_fun(_bound, multiple_results=False))

# XLA on a CPU (jax 0.10, 0.11) would fuse a transposition before or after, and cannot run the fused product. It can run
# a product with a batch so, but behind a barrier that one ends the process. On other devices there is no barrier:
# behind one XLA would not turn an all-reduce and a slice into a reduce-scatter.
_unfused = Primitive("unfused_on_cpu")
_unfused.def_impl(lambda x: x)
_unfused.def_abstract_eval(lambda x: x)
ad.deflinear2(_unfused, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_unfused] = lambda operands, axes: (operands[0], axes[0])
mlir.register_lowering(_unfused, lambda _, x: [x])
mlir.register_lowering(_unfused, mlir.lower_fun(lax.optimization_barrier, multiple_results=False), platform="cpu")


def with_derivative_of(x: jax.Array, value: jax.Array) -> jax.Array:
    """Return a value of the type of `x` with the derivative of `x` in place of its own, of any order.

    A primitive, because JAX drops custom derivatives where it differentiates a loop or a checkpoint twice.
    """
    return _replaced.bind(value, x)


def _batched_replaced(operands: list[Any], axes: list[int | None]) -> tuple[Any, int]:
    (size,) = {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}
    stacked = [
        jnp.broadcast_to(x[None], (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    return _replaced.bind(*stacked), 0


_replaced = Primitive("value_with_derivative_of")
_replaced.def_impl(lambda value, x: value)
_replaced.def_abstract_eval(lambda value, x: x)
ad.primitive_jvps[_replaced] = lambda primals, tangents: (_replaced.bind(*primals), tangents[1])
batching.primitive_batchers[_replaced] = _batched_replaced
mlir.register_lowering(_replaced, lambda _, value, x: [value])
