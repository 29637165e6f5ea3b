"""Run a plan: each equation as traced or in the compute dtype, at the source line where
the user wrote it.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import convert_element_type_p

from mpx._autocast import contraction, mapped, recompute, rounding
from mpx._autocast.control_flow import HANDLERS
from mpx._autocast.plan import Plan, Run, Settings, Step
from mpx._jaxprs import (
    constants_of,
    dtype_of,
    is_f32,
    is_literal,
    open_jaxpr,
    run_equations,
    with_source_of,
)
from mpx._primitives import facts_of


def run(plan: Plan, operands: Sequence[Any], settings: Settings) -> list[Any]:
    """Return the results of a plan's program, each in the dtype it was traced with."""
    program = open_jaxpr(plan.jaxpr)
    values = dict(zip(program.constvars, constants_of(plan.jaxpr), strict=True))
    values.update(zip(program.invars, operands, strict=True))

    def read(v):
        return v.val if is_literal(v) else values[v]

    run_plan = functools.partial(run, settings=settings)  # of programs inside
    for action, steps in itertools.groupby(plan.steps, lambda step: step.action):
        if action == "keep":
            run_equations(program, [step.eqn for step in steps], values)
            continue
        for step in steps:
            run_step = (
                HANDLERS[step.eqn.primitive.name].run
                if action == "enter"
                else _ACTIONS[action]
            )
            inputs = [read(v) for v in step.eqn.invars]
            with with_source_of(step.eqn):
                results = run_step(step, inputs, run_plan, settings)
            values.update(zip(step.eqn.outvars, results, strict=True))
    return [read(v) for v in program.outvars]


def _run_narrowed(
    step: Step, operands: list[Any], run: Run, settings: Settings
) -> list[Any]:
    eqn = step.eqn
    if facts_of(eqn).contraction:
        results = [contraction.run_narrowed(step, settings, eqn, operands)]
    else:
        narrow = [
            _narrowed(x, v, eqn, step.precision.dtype)
            for x, v in zip(operands, eqn.invars, strict=True)
        ]
        results = eqn.primitive.bind(*narrow, **eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
    results = [
        _in_traced_dtype(x, v) for x, v in zip(results, eqn.outvars, strict=True)
    ]
    return [rounding.kept(x, step.precision, on_gpu=step.is_read_wide) for x in results]


def _run_if_mapped(
    step: Step, operands: list[Any], run: Run, settings: Settings
) -> list[Any]:
    # A printed program has the name of this function, where it would have all fields of
    # a partial.
    def narrow(eqn, operands):
        return contraction.run_narrowed(step, settings, eqn, operands)

    result = mapped.product(step.eqn, operands, narrow)
    return [_in_traced_dtype(result, step.eqn.outvars[0])]


def _run_transfer(
    step: Step, operands: list[Any], run: Run, settings: Settings
) -> list[Any]:
    return [contraction.transferred(step, settings, *operands)]


def _run_with_rounded_cotangent(
    step: Step, operands: list[Any], run: Run, settings: Settings
) -> list[Any]:
    result = step.eqn.primitive.bind(*operands, **step.eqn.params)
    return [contraction.with_rounded_cotangent(result, step.precision.dtype)]


_ACTIONS: dict[str, Callable[[Step, list[Any], Run, Settings], Sequence[Any]]] = {
    "map": _run_if_mapped,
    "narrow": _run_narrowed,
    "recompute": recompute.run_activation,
    "round_cotangent": _run_with_rounded_cotangent,
    "transfer": _run_transfer,
}


def _narrowed(x: Any, v: Any, eqn: JaxprEqn, dtype: np.dtype) -> Any:
    """Return an operand of an elementwise operation in the compute dtype."""
    if not is_f32(v):
        return x
    result: Any = eqn.outvars[0].aval
    if facts_of(eqn).elementwise and np.ndim(x):
        # Broadcast before rounding, so that the gradient of a bias is added up in
        # float32.
        x = jnp.broadcast_to(x, result.shape)
    return lax.convert_element_type(x, dtype)


def _in_traced_dtype(x: Any, v: Any) -> Any:
    """Return a result in the dtype it was traced with, weak or not."""
    if not v.aval.weak_type:
        return lax.convert_element_type(x, dtype_of(v))
    return convert_element_type_p.bind(
        x, new_dtype=dtype_of(v), weak_type=True, sharding=None
    )
