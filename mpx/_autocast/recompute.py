"""Compute an activation between two products again in the backward pass, from the first
product's 16-bit result.

Otherwise XLA keeps float32 values between the passes, such as the tanh of a GELU. It
keeps nothing where it computes the activation inside the next product: there the first
product has no bias, and the next one is not in FP8.
"""

import dataclasses
import math
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend import source_info_util

from mpx._autocast import rounding
from mpx._autocast.border import Crossing, at_border, behind_border, travels_in
from mpx._autocast.plan import Demand, Plan, Run, Settings, Step, walk
from mpx._jaxprs import Graph, count_uses, is_f32, is_literal, open_jaxpr, part_of
from mpx._primitives import facts_of


@dataclasses.dataclass(frozen=True, eq=False)
class Activation(Plan):
    """The plan of an activation, with the function that a checkpoint runs, once it has
    run.

    JAX traces and differentiates a checkpoint once for each function. So the
    activations of layers that are alike are one object.
    """

    checkpoints: list[Callable[..., Any]] = dataclasses.field(default_factory=list)


_ACTIVATIONS: weakref.WeakValueDictionary[Any, Activation] = (
    weakref.WeakValueDictionary()
)


def with_activations(plan: Plan, settings: Settings) -> Plan:
    """Return a plan with each such activation as one step, also in calls inside, but
    not in loops and checkpoints.
    """
    program = open_jaxpr(plan.jaxpr)
    uses = count_uses(program)
    graph = Graph(program)
    cheap = {i for i, step in enumerate(plan.steps) if _is_cheap(step)}

    def is_cheap(v):
        return graph.number(v) in cheap

    new: dict[int, tuple[Step, ...]] = {}  # by ids of steps
    for user in filter(_rounds_an_activation, plan.steps):
        for v in user.eqn.invars[:2]:
            found = filter(is_cheap, graph.behind([v], is_cheap))
            members = [plan.steps[i] for i in sorted(set(map(graph.number, found)))]
            activation = _activation(user, v, members, program, uses, settings)
            if activation is not None:
                new |= {id(step): () for step in members}
                new[id(members[-1])] = (activation,)

    def with_those_inside(step: Step) -> Step:
        if step.action != "enter" or step.eqn.primitive.name != "jit":
            return step
        plans = [with_activations(inside, settings) for inside in step.plans]
        return step._replace(plans=tuple(plans))

    steps = [step for old in plan.steps for step in new.get(id(old), (old,))]
    return dataclasses.replace(plan, steps=tuple(map(with_those_inside, steps)))


def _rounds_an_activation(step: Step) -> bool:
    """Return whether a step is a product, or constrains the sharding of its operand, in
    16 bits.
    """
    facts = facts_of(step.eqn)
    return (step.action == "narrow" and facts.contraction) or (
        step.action == "transfer" and facts.copies_of_operand == "one"
    )


def _is_cheap(step: Step) -> bool:
    """Return whether a step costs less to compute again than to keep, and is nothing
    that its author asked for.
    """
    eqn, facts = step.eqn, facts_of(step.eqn)
    if eqn.primitive.name == "jit":
        return len(step.plans) == 1 and all(map(_is_cheap, step.plans[0].steps))
    is_asked_for = facts.communicates or eqn.primitive.name in (
        "name",
        "optimization_barrier",
    )
    return (
        facts.cheap and not is_asked_for and step.action in ("keep", "round_cotangent")
    )


def _activation(
    user: Step,
    result: Any,
    members: list[Step],
    program: jex_core.Jaxpr,
    uses: Counter[Any],
    settings: Settings,
) -> Step | None:
    """Return the steps that lead to a result as one step; None if XLA would keep
    nothing of them in float32, or if that would round what it must not.

    The step replaces its members, so all of these have to hold:

    - Nobody else reads what a member computes: it is computed in the checkpoint alone.
    - What enters is in 16 bits in memory, where it is as large as the result: else the
      checkpoint would keep float32 values after all.
    - The result is float32, and `user`, its one use, rounds it. So to leave the
      checkpoint in 16 bits changes no value. Its cotangent is rounded there too, which
      a weight among its elements, such as a token of a mask, must not see if its
      gradient is to be a float32 sum.
    """
    # Kept for the derivative: a function such as tanh, where a bias or codes of 8 bits
    # keep XLA from computing it inside of the next product.
    is_curved = any(facts_of(step.eqn).transcendental for step, _, _ in walk(members))
    is_written = user.precision.fp8 is not None or any(
        step.action == "round_cotangent" for step in members
    )
    if not (is_curved and is_written and is_f32(result)):
        return None
    eqns = [step.eqn for step in members]
    part = part_of(program, eqns, [result])
    uses_inside = count_uses(part)  # of the result there is one, as by `user`
    if any(uses_inside[v] < uses[v] for eqn in eqns for v in eqn.outvars):
        return None
    tag_of = {
        v: tag
        for step in members
        for v, tag in zip(step.eqn.invars, step.in_tags, strict=True)
        if not is_literal(v)
    }
    in_tags = tuple(tag_of[v] for v in part.invars)
    out_tag = dict(zip(eqns[-1].outvars, members[-1].out_tags, strict=True))[result]

    def is_wide(v, tag):
        is_large = is_f32(v) and _extent(v) >= _extent(result)
        return is_large and travels_in(tag, None, settings) is None

    rounds_a_gradient = out_tag.is_argument and settings.has_wide_gradients
    if rounds_a_gradient or any(map(is_wide, part.invars, in_tags)):
        return None
    plan = Activation(
        part, tuple(members), in_tags, (out_tag,), (Demand(),) * len(in_tags)
    )
    plan = _ACTIVATIONS.setdefault(
        (user.precision, settings.has_wide_gradients, _without_names(plan)), plan
    )
    # The steps inside have name stacks of their own.
    place = eqns[-1].source_info.replace(name_stack=source_info_util.new_name_stack())
    eqn = eqns[-1].replace(invars=[*part.invars], outvars=[result], source_info=place)
    return Step(eqn, in_tags, plan.out_tags, "recompute", user.precision, (plan,))


def _without_names(plan: Plan) -> Any:
    """Return what is equal for plans that are alike but for the names of values, while
    one of them lives.
    """
    # Values are numbered by their first use, so that only what is computed counts. Of
    # what is not hashable the object counts, and of programs inside their plans: a
    # planner makes one for equal tags.
    numbers: dict[Any, int] = {}

    def known(v):
        return (
            np.asarray(v.val).tobytes()
            if is_literal(v)
            else numbers.setdefault(v, len(numbers))
        )

    def values(variables):
        return tuple((known(v), v.aval) for v in variables)

    def alike(step):
        eqn = step.eqn
        params = frozenset(
            (name, id(x) if x.__hash__ is None else x) for name, x in eqn.params.items()
        )
        place = str(eqn.source_info.name_stack), eqn.ctx
        operation = step.action, step.plans, eqn.primitive, params, place
        return operation, values(eqn.invars), values(eqn.outvars)

    inputs = values(open_jaxpr(plan.jaxpr).invars)
    return inputs, tuple(map(alike, plan.steps)), plan.in_tags, plan.out_tags


def _extent(v: Any) -> tuple[int, int]:
    """Return how large an array is: first the number of its symbolic axes
    (`jax.export`), then the others' product.
    """
    sizes = [size for size in v.aval.shape if isinstance(size, int)]
    return len(v.aval.shape) - len(sizes), math.prod(sizes)


def run_activation(
    step: Step, operands: list[Any], run_plan: Run, settings: Settings
) -> list[Any]:
    """Run an activation in a checkpoint. It enters and leaves in 16 bits: the products
    round it to them anyway.
    """
    plan: Any = step.plans[0]  # an `Activation`
    crossings = [Crossing(travels_in(tag, None, settings)) for tag in plan.in_tags]

    def activation(*operands: Any) -> Any:
        return lax.convert_element_type(
            run_plan(plan, behind_border(operands, crossings))[0], step.precision.dtype
        )

    if not plan.checkpoints:
        plan.checkpoints.append(jax.checkpoint(activation))
    result = plan.checkpoints[0](*at_border(operands, crossings))
    return [rounding.kept(lax.convert_element_type(result, np.float32), step.precision)]
