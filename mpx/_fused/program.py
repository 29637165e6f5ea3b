"""One step of an optimizer as a program without calls."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx._jaxprs import called_jaxpr, constants_of, is_literal, open_jaxpr
from mpx._primitives import is_call
from mpx._stored.blocks import returns_its_operand


def flatten(jaxpr: jex_core.ClosedJaxpr) -> tuple[jex_core.Jaxpr, dict[jex_core.Var, Any]]:
    """Inline the calls of a program; return it with the arrays that it closes over.

    Custom derivatives are lost with their calls.
    """
    equations: list[JaxprEqn] = []
    constants: dict[jex_core.Var, Any] = {}

    def enter(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        inside = open_jaxpr(jaxpr)
        known = dict(zip(inside.invars, operands, strict=True))
        for variable, value in zip(inside.constvars, constants_of(jaxpr), strict=True):
            known[variable] = jex_core.Var(variable.aval)
            constants[known[variable]] = value
        read = lambda v: v if is_literal(v) else known[v]
        for eqn in inside.eqns:
            operands = [read(v) for v in eqn.invars]
            if is_call(eqn) and not _is_placed(eqn) and not returns_its_operand(eqn):
                results = enter(called_jaxpr(eqn), operands)
            else:
                # New ones: two calls of one function share a program, and so its variables.
                results = [jex_core.Var(v.aval) for v in eqn.outvars]
                equations.append(eqn.replace(invars=operands, outvars=results))
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in inside.outvars]

    program = open_jaxpr(jaxpr)
    outputs = enter(jaxpr, program.invars)
    return program.replace(constvars=[], outvars=outputs, eqns=equations), constants


def _is_placed(eqn: JaxprEqn) -> bool:
    """Return whether a call says where its operands or results have to be."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)
