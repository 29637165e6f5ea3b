"""Run a plan: each equation as traced or in the compute dtype, at the source line where the user wrote it."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import convert_element_type_p

from mpx._autocast import contraction, mapped, recompute
from mpx._autocast.control_flow import HANDLERS
from mpx._autocast.gathered import Source, Unsent, Weight, array_of, is_sent, of_a_slice
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


def run(plan: CastPlan, operands: Sequence[Any], settings: Settings, *, gathers_again: bool | None = None) -> list[Any]:
    """Return the results of a plan's program, each in the dtype it was traced with.

    `gathers_again` is false where a checkpoint around the program does so already; None: as the user says.
    """
    if gathers_again is None:
        gathers_again = settings.gather_again
    arrays = [array_of(x) for x in operands]
    if not plan.changes:
        return jex_core.jaxpr_as_fun(closed_jaxpr(plan.jaxpr))(*arrays)
    program = open_jaxpr(plan.jaxpr)
    values = dict(zip(program.constvars, constants_of(plan.jaxpr), strict=True))
    values.update(zip(program.invars, arrays, strict=True))
    read = lambda v: v.val if is_literal(v) else values[v]
    weights = {v: x for v, x in zip(program.invars, operands, strict=True) if isinstance(x, Weight)}
    with_source = lambda v: weights[v]._replace(array=values[v]) if not is_literal(v) and v in weights else read(v)
    kept: list[JaxprEqn] = []
    for step in plan.steps:
        if step.action == "keep":
            kept.append(step.eqn)
            if _places_each_element_once(step.eqn) and step.eqn.invars[0] in weights:
                source = weights[step.eqn.invars[0]].source.then(functools.partial(_bound, step.eqn))
                weights[step.eqn.outvars[0]] = Weight(None, source)
            continue
        run_equations(program, kept, values)
        kept = []
        with with_source_of(step.eqn):
            operands = [with_source(v) for v in step.eqn.invars]
            results = _run_step(step, operands, settings, gathers_again)
            if step.action == "transfer" and gathers_again and step.in_tags[0].is_argument:
                unsent = _unsent(step, operands[0], settings)
                weights[step.eqn.outvars[0]] = Weight(results[0], _source(step, operands[0], settings), unsent)
        values.update(zip(step.eqn.outvars, results, strict=True))
    run_equations(program, kept, values)
    return [read(v) for v in program.outvars]


def _run_step(step: Step, operands: list[Any], settings: Settings, gathers_again: bool) -> Sequence[Any]:
    eqn, precision = step.eqn, step.precision
    if step.action == "narrow" and facts_of(eqn).contraction:
        operands = [x._replace(unsent=None) if is_sent(x) else array_of(x) for x in operands]
    elif step.action not in ("enter", "transfer"):
        operands = [array_of(x) for x in operands]
    # The backward pass of a checkpoint begins with its forward pass, which gathers; that of a loop is another loop.
    inside = {"remat2": False, "scan": None}.get(eqn.primitive.name, gathers_again)
    inner_run = lambda plan, operands: run(plan, operands, settings, gathers_again=inside)
    if step.action == "recompute":
        return recompute.run_activation(step, operands, inner_run, settings)
    if step.action == "enter":
        return HANDLERS[eqn.primitive.name].run(step, operands, inner_run, settings)
    if step.action == "round_cotangent":
        dtype = next(tag.representable_in for tag in step.in_tags if tag.is_product)
        assert dtype is not None, "a product is in a 16-bit dtype"
        return [contraction.with_rounded_cotangent(eqn.primitive.bind(*operands, **eqn.params), dtype)]
    assert precision is not None, "a narrowed step has a precision"
    if step.action == "transfer":
        return [_transferred(step, settings, array_of(operands[0]))]
    if facts_of(eqn).contraction:
        wants_wide = settings.has_wide_gradients and precision.is_narrow
        (wide_lhs, lhs), (wide_rhs, rhs) = (
            (wants_wide and tag.is_argument and dtype_of(v) == np.float32, tag.in_memory or precision.dtype)
            for v, tag in zip(eqn.invars[:2], step.in_tags[:2], strict=True)
        )
        narrow = lambda eqn, operands: contraction.run_narrowed(
            eqn, operands, precision, (wide_lhs, wide_rhs), (lhs, rhs)
        )
        results = [mapped.product(eqn, operands, narrow) if step.action == "map" else narrow(eqn, operands)]
    else:
        narrow = [_narrowed(x, v, eqn, precision.dtype) for x, v in zip(operands, eqn.invars, strict=True)]
        results = eqn.primitive.bind(*narrow, **eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
    return [_as_traced(x, v) for x, v in zip(results, eqn.outvars, strict=True)]


def _transferred(step: Step, settings: Settings, x: jax.Array) -> jax.Array:
    assert step.precision is not None, "a transfer has a precision"
    wants_wide = settings.has_wide_gradients and not step.in_tags[0].is_product
    return contraction.transferred(step.eqn, x, step.precision.dtype, wants_wide)


def _source(step: Step, operand: Any, settings: Settings) -> Source:
    """Return the source of a weight that other devices send."""
    assert step.precision is not None, "a transfer has a precision"
    dtype = step.in_tags[0].in_memory or step.precision.dtype
    like = lax.convert_element_type(array_of(operand), dtype)
    source = operand.source if isinstance(operand, Weight) else Source(lax.stop_gradient(like), like)
    return source.then(functools.partial(_transferred, step, settings), sends=True)


def _unsent(step: Step, operand: Any, settings: Settings) -> Unsent | None:
    """Return a stack of weights before it is sent, if slices can be sent one by one."""
    eqn = of_a_slice(step.eqn)
    if eqn is None:
        return None
    of_slice = step._replace(eqn=eqn)
    sent = lambda x: Weight(_transferred(of_slice, settings, array_of(x)), _source(of_slice, x, settings))
    return Unsent(operand, sent)


def _places_each_element_once(eqn: JaxprEqn) -> bool:
    """Return whether an equation moves all elements of its one operand. Parts of a weight are kept, not sent again."""
    return facts_of(eqn).copies_of_operand == "one" and len(eqn.invars) == 1 and not is_literal(eqn.invars[0])


def _bound(eqn: JaxprEqn, x: jax.Array) -> Any:
    with with_source_of(eqn):
        return eqn.primitive.bind(x, **eqn.params)


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
