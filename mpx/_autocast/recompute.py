"""Let the backward pass compute activations again from 16-bit results of products, instead of keeping float32 values."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend import source_info_util

from mpx._autocast.plan import CastPlan, Settings, Step, travels_in
from mpx._jaxprs import closed_jaxpr, count_uses, dtype_of, is_literal, open_jaxpr
from mpx._primitives import facts_of


def with_chains(plan: CastPlan, settings: Settings) -> CastPlan:
    """Return a plan with each activation between two narrowed products as one step, here and in calls inside."""
    program = open_jaxpr(plan.jaxpr)
    uses = count_uses(program)
    made_by = {step.eqn.outvars[0]: step for step in plan.steps if _is_cheap(step)}
    new: dict[int, Step | None] = {}  # by ids of steps
    for product in plan.steps:
        if facts_of(product.eqn).contraction and product.action == "narrow":
            for v in filter(made_by.get, (v for v in product.eqn.invars[:2] if not is_literal(v))):
                members = [step for step in plan.steps if id(step) in _members(v, made_by)]
                if _pays(members, product) and _uses_inside(members, uses, v) and id(members[-1]) not in new:
                    chain = _chain(members, v, program, settings)
                    if chain is not None:
                        new |= {id(member): None for member in members} | {id(members[-1]): chain}
    steps = [new.get(id(step), step) for step in plan.steps]
    return dataclasses.replace(plan, steps=tuple(_with_chains_inside(step, settings) for step in steps if step))


def _with_chains_inside(step: Step, settings: Settings) -> Step:
    if step.action != "enter" or step.eqn.primitive.name != "jit":
        return step
    return step._replace(plans=tuple(with_chains(plan, settings) for plan in step.plans))


def _is_cheap(step: Step) -> bool:
    facts = facts_of(step.eqn)
    if facts.runs == "call":
        return step.eqn.primitive.name == "jit" and len(step.eqn.outvars) == 1 and all(map(_is_cheap, step.plans[0].steps))
    return facts.cheap and len(step.eqn.outvars) == 1 and step.action in ("keep", "round_cotangent")


def _members(v: Any, made_by: dict[Any, Step]) -> set[int]:
    found, pending = {}, [v]
    while pending:
        v = pending.pop()
        if not is_literal(v) and v in made_by and v not in found:
            found[v] = made_by[v]
            pending += made_by[v].eqn.invars
    return {id(step) for step in found.values()}


def _pays(members: list[Step], product: Step) -> bool:
    return ALWAYS or any(step.action == "round_cotangent" for step in members) or product.compute.fp8 is not None


def _uses_inside(members, uses, result) -> bool:
    inside = [v for step in members for v in step.eqn.invars if not is_literal(v)]
    made = [step.eqn.outvars[0] for step in members]
    return all(v is result or inside.count(v) == uses[v] for v in made)


def _chain(members: list[Step], result: Any, program: Any, settings: Settings) -> Step | None:
    made = {step.eqn.outvars[0] for step in members}
    tags = {v: tag for step in members for v, tag in zip(step.eqn.invars, step.in_tags, strict=True) if not is_literal(v) and v not in made}
    size = result.aval.size
    products = [travels_in(tag, None, settings) for tag in tags.values()]
    is_wide = [dtype is None and dtype_of(v) == np.float32 and v.aval.size == size for v, dtype in zip(tags, products)]
    if any(is_wide) or not any(products):
        return None
    eqns = [step.eqn for step in members]
    part = program.replace(constvars=[], invars=list(tags), outvars=[result], eqns=eqns, effects=set())
    nothing = (None,) * len(tags)
    plan = CastPlan(part, tuple(members), tuple(tags.values()), members[-1].out_tags, nothing, nothing)
    place = members[-1].eqn.source_info.replace(name_stack=source_info_util.new_name_stack())
    eqn = members[-1].eqn.replace(invars=list(tags), source_info=place)
    return Step(eqn, "recompute", None, plan.in_tags, plan.out_tags, (plan,))


def run_chain(step: Step, operands: Sequence[Any], run: Callable[[CastPlan, Sequence[Any]], list[Any]], settings: Settings) -> list[Any]:
    """Run a chain, and let its derivative start from 16-bit values behind a barrier, so that XLA computes it again."""
    (plan,) = step.plans

    def again(x: Any, tag: Any) -> Any:
        dtype = travels_in(tag, None, settings)
        if dtype is None:
            return x
        return lax.convert_element_type(lax.optimization_barrier(lax.convert_element_type(x, dtype)), x.dtype)

    as_traced = jex_core.jaxpr_as_fun(closed_jaxpr(plan.jaxpr))
    chain = jax.custom_jvp(lambda *operands: as_traced(*operands)[0])

    def with_tangents(primals, tangents):
        starts = tuple(again(x, tag) for x, tag in zip(primals, plan.in_tags, strict=True))
        return as_traced(*primals)[0], jax.jvp(lambda *operands: run(plan, operands)[0], starts, tuple(tangents))[1]

    chain.defjvp(with_tangents)
    return [chain(*operands)]
import os
ALWAYS = os.environ.get("ALWAYS")
