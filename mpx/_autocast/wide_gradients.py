"""Contractions in the compute dtype whose gradients are unrounded float32 sums.

JAX gives a gradient the dtype of its operand. So the derivative in the direction of an
operand that wants a float32 gradient is a primitive of its own, which holds the program
of the contraction and is linear in its first operand. JAX transposes it, but the result
is float32. The contraction itself stays what it is: checkpoints and tools recognize it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from mpx._jaxprs import is_f32, is_literal, propagate
from mpx._primitives import facts_of


def contract(
    eqn: JaxprEqn, operands: list[Any], dtype: np.dtype, wide: Sequence[bool]
) -> jax.Array:
    """Run a contraction with its first two operands rounded to `dtype`; `wide` says
    which get float32 gradients.
    """
    params = eqn.params | {"preferred_element_type": dtype}

    def product(lhs: Any, rhs: Any, *rest: Any) -> Any:
        # Each use rounds its own copy. A shared copy would add up the cotangents of its
        # uses in 16 bits.
        narrow = [lax.convert_element_type(x, dtype) for x in (lhs, rhs)]
        return eqn.primitive.bind(*narrow, *rest, **params)

    if not any(wide):
        return product(*operands)

    # The derivative is `t_lhs @ rhs + lhs @ t_rhs`. Each term is linear in its tangent,
    # and its transpose is the gradient of that operand. So the term of an operand that
    # wants a float32 gradient is a `_derivative`. The other one is as JAX has it.
    def with_tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
        result, rest = product(*primals), primals[2:]
        lhs, rhs = (lax.convert_element_type(x, dtype) for x in primals[:2])
        in_directions = (
            (product, rhs),
            (lambda x, lhs, *rest: product(lhs, x, *rest), lhs),
        )
        parts = [
            (_derivative_of(function, is_wide=True) if is_wide else function)(
                t, other, *rest
            )
            for t, (function, other), is_wide in zip(
                tangents[:2], in_directions, wide, strict=True
            )
            if not isinstance(t, SymbolicZero)
        ]
        return result, sum(parts[1:], parts[0])

    differentiable = jax.custom_jvp(product)
    differentiable.defjvp(with_tangents, symbolic_zeros=True)
    return differentiable(*operands)


def _derivative_of(
    function: Callable[..., Any], *, is_wide: bool
) -> Callable[..., Any]:
    """Return a function that is linear in its first operand, with a transpose that adds
    up in float32 if `is_wide`.
    """
    return lambda *operands: _derivative.bind(
        *operands, program=jax.make_jaxpr(function)(*operands), is_wide=is_wide
    )


def run_program(*operands: Any, program: ClosedJaxpr, **_: Any) -> Any:
    """Return the one result of a program that a primitive holds."""
    return jaxpr_as_fun(program)(*operands)[0]


def _derivative_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any
) -> Any:
    """Differentiate once more: alike along `x`, and as JAX does along the other
    operand.
    """
    (x, other, *rest), (of_x, of_other, *_) = primals, tangents
    parts = []
    if type(of_x) is not ad.Zero:
        parts.append(_derivative.bind(of_x, other, *rest, **params))
    if type(of_other) is not ad.Zero:
        # The other operand is in 16 bits here, and so is its gradient.
        def along(t, x, y, *rest):
            return jax.jvp(lambda y: run_program(x, y, *rest, **params), (y,), (t,))[1]

        parts.append(_derivative_of(along, is_wide=False)(of_other, x, other, *rest))
    return _derivative.bind(*primals, **params), sum(parts[1:], parts[0])


def _derivative_batched(
    operands: list[Any], axes: list[int | None], program: ClosedJaxpr, is_wide: bool
) -> tuple[Any, int]:
    """Batch as JAX batches the contraction itself, so that a weight without a batch
    gets one gradient.
    """
    batched = jax.vmap(functools.partial(run_program, program=program), axes)
    return _derivative_of(batched, is_wide=is_wide)(*operands), 0


def _derivative_transposed(
    cotangent: Any, x: Any, *others: Any, program: ClosedJaxpr, is_wide: bool
) -> list[Any]:
    """Run JAX's transpose of the program; if `is_wide`, with a float32 result of the
    contraction in it.
    """
    # The transpose of a narrow product is one of the same operands, in 16 bits, whose
    # result has 16 bits too. Only the dtype of that result is changed, so nothing that
    # is added up is rounded.
    nothing = [None] * len(others)
    if type(cotangent) is ad.Zero:
        return [None, *nothing]
    pull = jax.linear_transpose(
        lambda x: run_program(x, *others, program=program), x.aval
    )
    if not is_wide:
        return [*pull(cotangent), *nothing]
    transposed = jax.make_jaxpr(pull)(cotangent)
    return [evaluated(transposed, [cotangent], _bound_in_f32), *nothing]


def evaluated(
    program: ClosedJaxpr,
    operands: Any,
    contracted: Callable[[JaxprEqn, list[Any]], Any],
) -> Any:
    """Return the result of a program whose contractions are computed by a function of
    the equation and its operands.
    """
    constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))

    def run(eqn: JaxprEqn, operands: list[Any]) -> Any:
        if facts_of(eqn).contraction:
            return [contracted(eqn, operands)]
        results = eqn.primitive.bind(*operands, **eqn.params)
        return results if eqn.primitive.multiple_results else [results]

    return propagate(
        program, operands, run, lambda v: v.val if is_literal(v) else constants[v]
    )[0]


def _bound_in_f32(eqn: JaxprEqn, operands: list[Any]) -> jax.Array:
    """Bind a contraction of 16-bit operands with a float32 result."""
    params = eqn.params | {"preferred_element_type": np.dtype(np.float32)}
    bound = functools.partial(eqn.primitive.bind, **params)
    return _derivative_of(bound, is_wide=False)(*operands)


def _run_on_cpu(*operands: Any, program: ClosedJaxpr, **_: bool) -> Any:
    """Widen the operands of float32 sums, which changes no term: XLA on a CPU (jax
    0.10, 0.11) cannot run them all.
    """

    def contracted(eqn: JaxprEqn, operands: list[Any]) -> Any:
        if is_f32(eqn.outvars[0]):
            operands = [
                *(lax.convert_element_type(x, np.float32) for x in operands[:2]),
                *operands[2:],
            ]
        return eqn.primitive.bind(*operands, **eqn.params)

    return evaluated(program, operands, contracted)


def primitive_of_a_program(name: str) -> Primitive:
    """Return a primitive that runs the program which is one of its parameters."""
    primitive = Primitive(name)
    primitive.def_impl(run_program)
    primitive.def_abstract_eval(lambda *_, program, **__: program.out_avals[0])
    lowered = mlir.lower_fun(run_program, multiple_results=False)
    mlir.register_lowering(primitive, lowered)
    return primitive


_derivative = primitive_of_a_program("narrow_product_derivative")
ad.primitive_jvps[_derivative] = _derivative_jvp
ad.primitive_transposes[_derivative] = _derivative_transposed
batching.primitive_batchers[_derivative] = _derivative_batched
mlir.register_lowering(
    _derivative, mlir.lower_fun(_run_on_cpu, multiple_results=False), platform="cpu"
)
