"""Run a plan: each equation as traced or in the compute dtype, at the source line where the user wrote it."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import convert_element_type_p

from mpx._autocast import contraction, recompute
from mpx._autocast.control_flow import HANDLERS
from mpx._autocast.plan import CastPlan, Settings, Step
from mpx._jaxprs import (
    closed_jaxpr,
    constants_of,
    dtype_of,
    is_literal,
    open_jaxpr,
    run_equations,
    with_source_of,
)
from mpx._primitives import facts_of


def run(plan: CastPlan, operands: Sequence[Any], settings: Settings) -> list[Any]:
    """Return the results of a plan's program, each in the dtype it was traced with."""
    if not plan.changes:
        return jex_core.jaxpr_as_fun(closed_jaxpr(plan.jaxpr))(*operands)
    program = open_jaxpr(plan.jaxpr)
    values = dict(zip(program.constvars, constants_of(plan.jaxpr), strict=True))
    values.update(zip(program.invars, operands, strict=True))
    read = lambda v: v.val if is_literal(v) else values[v]
    kept: list[JaxprEqn] = []
    for step in plan.steps:
        if step.action == "keep":
            kept.append(step.eqn)
            continue
        run_equations(program, kept, values)
        kept = []
        with with_source_of(step.eqn):
            results = _run_step(step, [read(v) for v in step.eqn.invars], settings)
        values.update(zip(step.eqn.outvars, results, strict=True))
    run_equations(program, kept, values)
    return [read(v) for v in program.outvars]


def _run_step(step: Step, operands: list[Any], settings: Settings) -> Sequence[Any]:
    eqn, precision = step.eqn, step.precision
    inner_run = lambda plan, operands: run(plan, operands, settings)
    if step.action == "recompute":
        return recompute.run(step, operands, inner_run, settings)
    if step.action == "enter":
        return HANDLERS[eqn.primitive.name].run(step, operands, inner_run, settings)
    if step.action == "round_cotangent":
        dtype = next(tag.representable_in for tag in step.in_tags if tag.is_product)
        assert dtype is not None, "a product is in a 16-bit dtype"
        return [contraction.with_rounded_cotangent(eqn.primitive.bind(*operands, **eqn.params), dtype)]
    assert precision is not None, "a narrowed step has a precision"
    if step.action == "transfer":
        wants_wide = settings.has_wide_gradients and not step.in_tags[0].is_product
        return [contraction.transferred(eqn, operands[0], precision.dtype, wants_wide)]
    if facts_of(eqn).contraction:
        wants_wide = settings.has_wide_gradients and precision.is_narrow
        (wide_lhs, lhs), (wide_rhs, rhs) = (
            (wants_wide and tag.is_argument and dtype_of(v) == np.float32, tag.in_memory or precision.dtype)
            for v, tag in zip(eqn.invars[:2], step.in_tags[:2], strict=True)
        )
        results = [contraction.run(eqn, operands, precision, (wide_lhs, wide_rhs), (lhs, rhs))]
    else:
        narrow = [_narrowed(x, v, eqn, precision.dtype) for x, v in zip(operands, eqn.invars, strict=True)]
        results = eqn.primitive.bind(*narrow, **eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
    return [_as_traced(x, v) for x, v in zip(results, eqn.outvars, strict=True)]


def _narrowed(x: Any, v: Any, eqn: JaxprEqn, dtype: np.dtype) -> Any:
    """Return an operand of an elementwise operation in the compute dtype."""
    if dtype_of(v) != np.float32:
        return x
    result: Any = eqn.outvars[0].aval
    if facts_of(eqn).elementwise and np.ndim(x) and x.shape != result.shape:
        # Broadcast before rounding, so that the gradient of a bias is added up in float32.
        x = jnp.broadcast_to(x, result.shape)
    return lax.convert_element_type(x, dtype)


def _as_traced(x: Any, v: Any) -> Any:
    """Return a result in the dtype it was traced with, weak or not."""
    if not v.aval.weak_type:
        return lax.convert_element_type(x, dtype_of(v))
    return convert_element_type_p.bind(x, new_dtype=dtype_of(v), weak_type=True, sharding=None)
