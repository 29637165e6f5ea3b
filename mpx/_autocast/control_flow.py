"""Enter operations that hold programs under `autocast`: loops, branches, checkpoints,
calls and shard maps.

Each primitive has a `Handler` that plans it, says what it demands of its operands, and
runs it. Values cross the border of a program as `border.py` says. What a loop
carries or closes over stays float32, because its cotangent is added up over all
iterations.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx._autocast.border import (
    Crossing,
    at_border,
    behind_border,
    crossing,
    travels_in,
)
from mpx._autocast.plan import Demand, Plan, Run, Settings, Step
from mpx._autocast.tags import Tag, common, shared
from mpx._jaxprs import called_jaxpr, count_uses, dtype_of, open_jaxpr, scan_counts
from mpx._primitives import PRIMITIVES, facts_of

# From a program, the tags of its inputs, and the variables of its results around it.
MakePlan = Callable[..., Plan]
Plans = tuple[Plan, ...]
Tags = tuple[Tag, ...]


class Handler(NamedTuple):
    """The functions for an operation that holds programs."""

    # From the equation, its operands' tags, and what plans a program, to the plans
    # inside and the results' tags.
    plan: Callable[[JaxprEqn, Tags, MakePlan], tuple[Plans, Tags]]
    # From the equation and the plans inside to what they demand of each operand.
    demands: Callable[[JaxprEqn, Plans], Sequence[Demand]]
    # From the step, its operands, the function that runs a plan on values, and the
    # settings to the results.
    run: Callable[[Step, list[Any], Run, Settings], Sequence[Any]]


# ---- calls


def _plan_call(eqn: JaxprEqn, tags: Tags, plan: MakePlan) -> tuple[Plans, Tags]:
    # A checkpoint need not compute what nobody reads. Results of a jit stay: each may
    # have a sharding.
    results = eqn.outvars if eqn.primitive.name == "remat2" else None
    inside = plan(called_jaxpr(eqn), tags, results)
    return (inside,), inside.out_tags


def _run_jit(
    step: Step, operands: list[Any], run: Run, settings: Settings
) -> Sequence[Any]:
    """Run in line, so that nothing is compiled separately. A jit that places its arrays
    stays a jit.
    """
    params = step.eqn.params
    placed: dict[str, Any] = {
        key: tuple(
            sharding if isinstance(sharding, jax.sharding.Sharding) else None
            for sharding in params.get(key, ())
        )
        for key in ("in_shardings", "out_shardings")
    }
    if any(map(any, placed.values())):
        call = jax.jit(lambda *xs: tuple(run(step.plans[0], xs)), **placed)
        return call(*operands)
    with jax.named_scope(f"jit({params.get('name', step.eqn.primitive.name)})"):
        return run(step.plans[0], operands)


def _run_checkpoint(
    step: Step, operands: list[Any], run: Run, settings: Settings
) -> Sequence[Any]:
    """Bind the primitive itself: `jax.checkpoint` cannot say that its program is
    already a backward pass.
    """
    plan = step.plans[0]
    crossings = _into_checkpoint(plan, settings)
    parts = at_border(operands, crossings)
    program, new = _retraced(
        lambda *parts: run(plan, behind_border(parts, crossings)), parts
    )
    params = step.eqn.params | {"jaxpr": program}
    # One for each operand, which may be two arrays now.
    if isinstance(params["prevent_cse"], tuple):
        of_leaves = [
            is_prevented
            for is_prevented, x in zip(params["prevent_cse"], parts, strict=True)
            for _ in jax.tree.leaves(x)
        ]
        params["prevent_cse"] = (*[False] * len(new), *of_leaves)
    return step.eqn.primitive.bind(*new, *jax.tree.leaves(parts), **params)


def _into_checkpoint(plan: Plan, settings: Settings) -> list[Crossing]:
    return [
        crossing(tag, demand, settings)
        for tag, demand in zip(plan.in_tags, plan.demands, strict=True)
    ]


def _plan_shard_map(eqn: JaxprEqn, tags: Tags, plan: MakePlan) -> tuple[Plans, Tags]:
    # Devices add them up.
    return _plan_call(eqn, tuple(tag._replace(gradient_in=None) for tag in tags), plan)


def _demands_of_shard_map(eqn: JaxprEqn, plans: Plans) -> Sequence[Demand]:
    return [demand._replace(cotangent_in=None) for demand in plans[0].demands]


def _run_shard_map(
    step: Step, operands: list[Any], run: Run, settings: Settings
) -> Sequence[Any]:
    """Leave operands in float32: the cotangent of an operand that all devices hold is
    summed over devices.
    """
    params = step.eqn.params
    axes = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"
    return jax.shard_map(
        lambda *operands: tuple(run(step.plans[0], operands)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=params[axes],
    )(*operands)


# ---- branches


def _plan_cond(eqn: JaxprEqn, tags: Tags, plan: MakePlan) -> tuple[Plans, Tags]:
    plans = tuple(plan(branch, tags[1:]) for branch in eqn.params["branches"])
    # Nobody knows which branch runs: of a result holds what holds in all of them.
    columns = zip(*[inside.out_tags for inside in plans], strict=True)
    return plans, tuple(map(common, columns))


def _demands_of_cond(eqn: JaxprEqn, plans: Plans) -> Sequence[Demand]:
    """Return what all branches demand; for the dtype that a value is used in, all that
    use it.
    """
    of_operands = [Demand()]
    for column in zip(*[plan.demands for plan in plans], strict=True):
        used_in = {demand.used_in for demand in column if demand.is_used}
        cotangent_in = {demand.cotangent_in for demand in column}
        of_operands.append(Demand(shared(used_in), shared(cotangent_in)))
    return of_operands


def _run_cond(
    step: Step, operands: list[Any], run: Run, settings: Settings
) -> Sequence[Any]:
    index, *operands = operands
    demands = _demands_of_cond(step.eqn, step.plans)
    _, *crossings = (
        Crossing(travels_in(tag, demand.cotangent_in, settings))
        for tag, demand in zip(step.in_tags, demands, strict=True)
    )
    branches = [
        lambda *parts, plan=plan: tuple(run(plan, behind_border(parts, crossings)))
        for plan in step.plans
    ]
    operands = at_border(operands, crossings)
    platforms = step.eqn.params.get("branches_platforms")
    if platforms is not None:
        by_name = {
            name: branch
            for names, branch in zip(platforms, branches, strict=True)
            for name in names or ("default",)
        }
        return lax.platform_dependent(*operands, **by_name)
    if index.dtype == np.bool_:
        return lax.cond(index, branches[1], branches[0], *operands)
    return lax.switch(index, branches, *operands)


# ---- loops


def _plan_scan(eqn: JaxprEqn, tags: Tags, plan: MakePlan) -> tuple[Plans, Tags]:
    consts, carry, xs = _parts(eqn, tags)
    # The next iteration reads what is carried.
    results = [*[None] * len(carry), *eqn.outvars[len(carry) :]]
    inside, carry = _loop_plan(eqn.params["jaxpr"], consts, carry, xs, plan, results)
    return (inside,), (*carry, *inside.out_tags[len(carry) :])


def _demands_of_scan(eqn: JaxprEqn, plans: Plans) -> Sequence[Demand]:
    consts, carry, xs = _parts(eqn, plans[0].demands)
    consts = [demand._replace(cotangent_in=None) for demand in consts]
    return [*consts, *[Demand()] * len(carry), *xs]


def _run_scan(
    step: Step, operands: list[Any], run: Run, settings: Settings
) -> Sequence[Any]:
    params, plan = step.eqn.params, step.plans[0]
    consts, carry, xs = _parts(step.eqn, operands)
    into = _into_scan(step, settings)
    out_of = [
        Crossing(travels_in(tag, None, settings)) for tag in plan.out_tags[len(carry) :]
    ]

    def body(carry, xs):
        results = run(plan, [*consts, *carry, *behind_border(xs, into)])
        return results[: len(carry)], at_border(results[len(carry) :], out_of)

    # JAX would stack what derivatives need in float32, for all iterations. So a body
    # whose author did not choose keeps what a policy here says.
    # `prevent_cse=False`, as JAX advises inside of a scan: there is nothing that XLA
    # could merge with the first pass.
    if _leaves_open_what_is_kept(plan.jaxpr):
        body = jax.checkpoint(body, policy=_is_kept, prevent_cse=False)
    options = {
        key: params[key]
        for key in ("reverse", "unroll", "_split_transpose")
        if key in params
    }
    carry, ys = lax.scan(
        body, carry, at_border(xs, into), length=params["length"], **options
    )
    return [*carry, *behind_border(ys, out_of)]


def _into_scan(step: Step, settings: Settings) -> list[Crossing]:
    """Return how each operand that a scan slices enters its body.

    These alone travel in 16 bits: JAX adds up the cotangents of what the body closes
    over or carries, in its dtype, over all iterations.

    A slice whose only use is a checkpoint, which it would enter in the same 16 bits, is
    handed on unchanged. If the body widened and narrowed it again, JAX would see a new
    value, and the checkpoint would keep it beside the array that the slice comes from.
    """
    plan = step.plans[0]
    program = open_jaxpr(plan.jaxpr)
    uses, into_checkpoints = count_uses(program), {}
    for inner in plan.steps:
        if inner.eqn.primitive.name == "remat2" and inner.action == "enter":
            crossings = _into_checkpoint(inner.plans[0], settings)
            into_checkpoints |= dict(zip(inner.eqn.invars, crossings, strict=True))

    operands = zip(
        program.invars, plan.in_tags, plan.demands, step.in_tags, strict=True
    )
    slices = []
    for v, tag, demand, outside in _parts(step.eqn, list(operands))[2]:
        # Tags inside have no `gradient_in`, since an iteration gives the gradient of a
        # slice. Together they are the gradient of the operand.
        into = crossing(tag, demand, settings, outside.gradient_in)
        is_handed_on = (
            uses[v] == 1
            and v in into_checkpoints
            and into_checkpoints[v].dtype == into.dtype
        )
        slices.append(into._replace(is_handed_on=is_handed_on))
    return slices


def _leaves_open_what_is_kept(jaxpr: Any) -> bool:
    """Return whether the author of a loop's body left it to JAX what is kept for the
    backward pass.

    A body with complex numbers is left alone too: a `jax.checkpoint` policy cannot keep
    them (jax 0.10 to 0.12).
    """
    program = open_jaxpr(jaxpr)
    inside = (
        inner for eqn in program.eqns for inner in jex_core.jaxprs_in_params(eqn.params)
    )
    is_checkpoint = any(eqn.primitive.name == "remat2" for eqn in program.eqns)
    values = [
        *program.invars,
        *program.constvars,
        *(v for eqn in program.eqns for v in eqn.outvars),
    ]
    is_complex = any(jnp.issubdtype(dtype_of(v), jnp.complexfloating) for v in values)
    return not (program.effects or is_checkpoint or is_complex) and all(
        map(_leaves_open_what_is_kept, inside)
    )


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether a loop keeps a result for its backward pass, or computes it again.

    JAX keeps what derivatives need in the dtype it was traced with: float32, although
    it was computed from 16-bit results of products.
    """
    return not facts_of(primitive).cheap


def _plan_while(eqn: JaxprEqn, tags: Tags, plan: MakePlan) -> tuple[Plans, Tags]:
    cond_consts, body_consts, carry = _parts(eqn, tags)
    body, carry = _loop_plan(eqn.params["body_jaxpr"], body_consts, carry, [], plan)
    return (plan(eqn.params["cond_jaxpr"], (*cond_consts, *carry)), body), tuple(carry)


def _run_while(
    step: Step, operands: list[Any], run: Run, settings: Settings
) -> Sequence[Any]:
    """Bind the primitive itself: `lax.while_loop` refuses the batched condition that a
    loop has under `vmap`.
    """
    *closed_over, carry = _parts(step.eqn, operands)
    params, operands = dict(step.eqn.params), []
    for name, plan, consts in zip(
        ("cond", "body"), step.plans, closed_over, strict=True
    ):
        program, new = _retraced(
            lambda *xs, plan=plan: run(plan, xs), [*consts, *carry]
        )
        params[f"{name}_jaxpr"] = jex_core.ClosedJaxpr(program, ())
        params[f"{name}_nconsts"] = len(new) + len(consts)
        operands += [*new, *consts]
    return step.eqn.primitive.bind(*operands, *carry, **params)


def _parts(
    eqn: JaxprEqn, column: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Split a column with an entry for each operand of a loop: what the body closes
    over, what is carried, what is sliced in each iteration; of `while` what the
    condition closes over, what the body does, what is carried.
    """
    first, second = (
        scan_counts(eqn)
        if eqn.primitive.name == "scan"
        else (eqn.params["cond_nconsts"], eqn.params["body_nconsts"])
    )
    column = list(column)
    return column[:first], column[first : first + second], column[first + second :]


def _loop_plan(
    jaxpr: Any,
    consts: list[Tag],
    carry: list[Tag],
    xs: list[Tag],
    plan: MakePlan,
    results: Any = None,
) -> tuple[Plan, list[Tag]]:
    """Return the plan of a loop's body, with tags of the carry that hold before and
    after each iteration.
    """
    consts, carry, xs = (
        [tag._replace(gradient_in=None) for tag in tags] for tags in (consts, carry, xs)
    )
    # Their cotangents are added up before they are rounded.
    consts = [tag._replace(is_product=False) for tag in consts]
    # A carry is what it was before the loop, and also what an iteration leaves. If
    # these differ, the body is planned again with what holds for both. That is less
    # each time, so this ends.
    while True:
        inside = plan(jaxpr, (*consts, *carry, *xs), results)
        ends = zip(carry, inside.out_tags[: len(carry)], strict=True)
        after = list(map(common, ends))
        if after == carry:
            return inside, carry
        carry = after


# ---- all of them


def _retraced(
    function: Callable[..., Any], operands: Sequence[Any]
) -> tuple[jex_core.Jaxpr, list[Any]]:
    """Return the program of a function of these operands, and the constants it takes
    before them.
    """
    program = jax.make_jaxpr(function)(*operands)
    invars = [*program.jaxpr.constvars, *program.jaxpr.invars]
    return program.jaxpr.replace(constvars=[], invars=invars), program.consts


_CALL = Handler(_plan_call, lambda _, plans: plans[0].demands, _run_jit)
HANDLERS: dict[str, Handler] = {
    **{name: _CALL for name, facts in PRIMITIVES.items() if facts.runs == "call"},
    "remat2": _CALL._replace(run=_run_checkpoint),
    "shard_map": Handler(_plan_shard_map, _demands_of_shard_map, _run_shard_map),
    "cond": Handler(_plan_cond, _demands_of_cond, _run_cond),
    "scan": Handler(_plan_scan, _demands_of_scan, _run_scan),
    "while": Handler(
        _plan_while, lambda eqn, _: [Demand()] * len(eqn.invars), _run_while
    ),
}
