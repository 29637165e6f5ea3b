"""Tell what a program demands of each of its values: one pass over its plan, from the
end to the start.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx._autocast.control_flow import HANDLERS
from mpx._autocast.plan import UNUSED, Demand, Step
from mpx._autocast.rules import DEFAULT_RULES
from mpx._autocast.tags import is_cast_to_16_bits, is_smaller
from mpx._jaxprs import called_jaxpr, dtype_of, is_f32, is_literal, open_jaxpr
from mpx._primitives import facts_of, is_call

_UNKNOWN = Demand()


def with_demands(
    program: jex_core.Jaxpr, steps: Sequence[Step]
) -> tuple[tuple[Step, ...], dict[Any, Demand]]:
    """Return the steps of a program, and what is demanded of each value.

    `product + bias` rounds its cotangent only where the sum goes into an activation or
    a loss. Elsewhere XLA adds up the bias's gradient in the kernel that computes the
    cotangent, and a barrier would cost one more.
    """
    found = dict.fromkeys([v for v in program.outvars if not is_literal(v)], _UNKNOWN)
    decided = []
    for step in reversed(steps):
        results = [found.get(v, _UNKNOWN) for v in step.eqn.outvars]
        if step.action == "round_cotangent" and not _are_activated(step.eqn, results):
            step = step._replace(action="keep")
        if step.action == "narrow":
            is_read_wide = any(d.used_in != step.precision.dtype for d in results)
            step = step._replace(is_read_wide=is_read_wide)
        decided.append(step)
        for v, demand in zip(step.eqn.invars, _of_operands(step, results), strict=True):
            if not is_literal(v):
                found[v] = _of_both(found[v], demand) if v in found else demand
    return tuple(reversed(decided)), found


def _of_both(use: Demand, other: Demand) -> Demand:
    """Return what two uses demand: cotangents of several uses are added up before
    anything rounds them.
    """
    used_in = use.used_in if use.used_in == other.used_in else None
    return Demand(used_in, None, use.is_activated or other.is_activated)


def _of_operands(step: Step, results: list[Demand]) -> list[Demand]:
    """Return what a step demands of its operands, from what is demanded of its
    results.
    """
    eqn, facts = step.eqn, facts_of(step.eqn)
    are_activated = _are_activated(eqn, results)
    if step.plans:
        inside = HANDLERS[eqn.primitive.name].demands(eqn, step.plans)
        # A loop or a branch counts as an activation: nobody follows its results to the
        # value.
        return [
            d._replace(is_activated=are_activated or d.is_activated or not is_call(eqn))
            for d in inside
        ]
    # It runs as traced, so of dtypes nothing is known. But an activation inside counts.
    if is_call(eqn):
        program = open_jaxpr(called_jaxpr(eqn))
        _, inside = with_demands(program, list(map(Step, program.eqns)))
        return [
            Demand(is_activated=are_activated or inside.get(v, UNUSED).is_activated)
            for v in program.invars
        ]
    # An activation or a loss is anything but a sum, a contraction, or what moves
    # values.
    is_sum = (
        facts.contraction or facts.linear or eqn.primitive.name in ("add", "add_any")
    )
    moves = DEFAULT_RULES.get(eqn.primitive.name) == "follow"
    demand = Demand(is_activated=are_activated if moves else not is_sum)
    if step.action == "narrow":
        narrowed_to = step.precision.dtype if step.precision.is_narrow else None
        demand = demand._replace(used_in=narrowed_to, cotangent_in=narrowed_to)
        # An elementwise operation in 16 bits rounds the cotangents of a bias before
        # they are added up, not after.
        return [
            demand._replace(cotangent_in=None)
            if not facts.contraction and is_smaller(v, eqn.outvars[0])
            else demand
            for v in eqn.invars
        ]
    if is_cast_to_16_bits(eqn):
        return [demand._replace(used_in=dtype_of(eqn.outvars[0]))]
    # What only moves elements demands of its operand what is demanded of its result. Of
    # a cotangent only if no element is copied: copies are added up on the way back.
    if len(results) == 1:
        used_in = (
            results[0].used_in if facts.moves in ("same", "moved", "received") else None
        )
        cotangent_in = (
            results[0].cotangent_in if facts.copies_of_operand == "one" else None
        )
        demand = demand._replace(used_in=used_in, cotangent_in=cotangent_in)
    return [demand] * len(eqn.invars)


def _are_activated(eqn: JaxprEqn, results: list[Demand]) -> bool:
    return any(
        demand.is_activated and is_f32(v)
        for v, demand in zip(eqn.outvars, results, strict=True)
    )
