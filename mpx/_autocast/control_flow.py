"""Enter operations that hold programs under `autocast`: loops, branches, checkpoints, calls and shard maps.

Each primitive has a `Handler` that plans and runs it. Values that 16 bits represent travel in 16 bits where that costs
no precision (`plan.travels_in`). Values that a loop carries or closes over stay float32, because their cotangents are
added up over all iterations.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx._autocast.gathered import Source, Weight, array_of, is_sent
from mpx._autocast.plan import CastPlan, Handler, Planner, Run, Settings, Step, Tag, travels_in
from mpx._autocast.wide_gradients import with_derivative_of
from mpx._jaxprs import called_jaxpr, count_uses, dtype_of, open_jaxpr, scan_counts
from mpx._primitives import PRIMITIVES, facts_of

# ---- calls


def _plan_call(eqn: JaxprEqn, tags: tuple[Tag, ...], planner: Planner) -> tuple[Any, Any]:
    plan = planner.plan(called_jaxpr(eqn), tags)
    return (plan,), plan.out_tags


def _plan_checkpoint(eqn: JaxprEqn, tags: tuple[Tag, ...], planner: Planner) -> tuple[Any, Any]:
    plan = planner.plan(eqn.params["jaxpr"], tags, eqn.outvars)
    return (plan,), plan.out_tags


def _plan_shard_map(eqn: JaxprEqn, tags: tuple[Tag, ...], planner: Planner) -> tuple[Any, Any]:
    return _plan_call(eqn, tuple(tag._replace(gradient_in=None) for tag in tags), planner)  # devices add them up


def _call_rounded_to(eqn: JaxprEqn, plans: tuple[CastPlan, ...]) -> list[np.dtype | None]:
    return list(plans[0].rounded_to)


def _run_jit(step: Step, operands: list[Any], run: Run, settings: Settings) -> Sequence[Any]:
    """Run in line, so that nothing is compiled separately. A jit that places its arrays stays a jit."""
    params, call = step.eqn.params, lambda *operands: tuple(run(step.plans[0], operands))
    shardings = [
        tuple(s if isinstance(s, jax.sharding.Sharding) else None for s in params.get(key, ()))
        for key in ("in_shardings", "out_shardings")
    ]
    if any(s is not None for side in shardings for s in side):
        call = jax.jit(call, in_shardings=shardings[0], out_shardings=shardings[1])
        return call(*[array_of(x) for x in operands])
    with jax.named_scope(f"jit({params.get('name', step.eqn.primitive.name)})"):
        return call(*operands)


def _run_checkpoint(step: Step, operands: list[Any], run: Run, settings: Settings) -> Sequence[Any]:
    """Bind the primitive itself: `jax.checkpoint` cannot say that its program is already a backward pass."""
    plan = step.plans[0]
    dtypes = _unless_weights(operands, _travel_in(plan.in_tags, plan.rounded_to, settings))
    carried = _carried_in(plan.in_tags, settings)
    parts = _with_carriers(narrowed(operands, dtypes), carried)
    leaves, tree = jax.tree.flatten(parts)
    inside = lambda *leaves: run(plan, widened(_without_carriers(tree.unflatten(leaves)), dtypes))
    program, consts = _retraced(inside, leaves)
    params, prevented = step.eqn.params | {"jaxpr": program}, step.eqn.params["prevent_cse"]
    if isinstance(prevented, tuple):  # one for each operand, which may be two arrays now
        of_parts = [is_prevented for is_prevented, x in zip(prevented, parts, strict=True) for _ in jax.tree.leaves(x)]
        params["prevent_cse"] = (*[False] * len(consts), *of_parts)
    return step.eqn.primitive.bind(*consts, *leaves, **params)


def _run_shard_map(step: Step, operands: list[Any], run: Run, settings: Settings) -> Sequence[Any]:
    """Leave operands in float32: the cotangent of an operand that all devices hold is summed over devices."""
    params = step.eqn.params
    axes = params.get("newly_manual_axes", params.get("manual_axes"))
    options = {} if axes is None else {"axis_names": axes}
    return jax.shard_map(
        lambda *operands: tuple(run(step.plans[0], operands)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        **options,
    )(*[array_of(x) for x in operands])


# ---- branches


def _plan_cond(eqn: JaxprEqn, tags: tuple[Tag, ...], planner: Planner) -> tuple[Any, Any]:
    plans = tuple(planner.plan(branch, tags[1:]) for branch in eqn.params["branches"])
    # Nobody knows which branch runs: of a result holds what holds in all of them.
    return plans, tuple(_common(*column) for column in zip(*[plan.out_tags for plan in plans], strict=True))


def _cond_rounded_to(eqn: JaxprEqn, plans: tuple[CastPlan, ...]) -> list[np.dtype | None]:
    columns = zip(*[plan.rounded_to for plan in plans], strict=True)
    return [None, *[column[0] if len(set(column)) == 1 else None for column in columns]]


def _run_cond(step: Step, operands: list[Any], run: Run, settings: Settings) -> Sequence[Any]:
    index, *operands = [x._replace(unsent=None) if is_sent(x) else array_of(x) for x in operands]
    dtypes = _travel_in(step.in_tags[1:], _cond_rounded_to(step.eqn, step.plans)[1:], settings)
    dtypes = _unless_weights(operands, dtypes)
    branches = [lambda *operands, plan=plan: tuple(run(plan, widened(operands, dtypes))) for plan in step.plans]
    operands = narrowed(operands, dtypes)
    platforms = step.eqn.params.get("branches_platforms")
    if platforms is not None:
        by_name = {
            name: branch for names, branch in zip(platforms, branches, strict=True) for name in names or ("default",)
        }
        return lax.platform_dependent(*operands, **by_name)
    if index.dtype == np.bool_:
        return lax.cond(index, branches[1], branches[0], *operands)
    return lax.switch(index, branches, *operands)


# ---- loops


def _plan_scan(eqn: JaxprEqn, tags: tuple[Tag, ...], planner: Planner) -> tuple[Any, Any]:
    consts, carry, xs = _scan_parts(eqn, tags)
    results = [*open_jaxpr(eqn.params["jaxpr"]).outvars[: len(carry)], *eqn.outvars[len(carry) :]]
    plan, carry = _loop_plan(eqn.params["jaxpr"], consts, carry, xs, planner, results)
    return (plan,), (*carry, *plan.out_tags[len(carry) :])


def _scan_rounded_to(eqn: JaxprEqn, plans: tuple[CastPlan, ...]) -> list[np.dtype | None]:
    consts, carry, xs = _scan_parts(eqn, plans[0].rounded_to)
    return [*[None] * (len(consts) + len(carry)), *xs]


def _run_scan(step: Step, operands: list[Any], run: Run, settings: Settings) -> Sequence[Any]:
    params, plan = step.eqn.params, step.plans[0]
    consts, carry, xs = _scan_parts(step.eqn, operands)
    consts, carry = ([array_of(x) for x in column] for column in (consts, carry))
    unsent = [x.unsent if isinstance(x, Weight) else None for x in xs]
    xs = [x if stack is None else stack.stack for x, stack in zip(xs, unsent, strict=True)]
    xs = [array_of(x) if is_sent(x) else x for x in xs]
    x_tags, x_rounded_to = (_scan_parts(step.eqn, column)[2] for column in (plan.in_tags, plan.rounded_to))
    x_dtypes = _unless_weights(xs, _travel_in(x_tags, x_rounded_to, settings))
    y_dtypes = [travels_in(tag, None, settings) for tag in plan.out_tags[len(carry) :]]

    handed_on = _handed_on(plan, settings)
    # Slices alone travel in 16 bits: JAX adds up the cotangents of what the body closes over or carries, in its dtype.
    x_inputs = _scan_parts(step.eqn, open_jaxpr(plan.jaxpr).invars)[2]
    widened_from = [
        dtype if stack is not None or handed_on.get(v) != dtype else None
        for v, dtype, stack in zip(x_inputs, x_dtypes, unsent, strict=True)
    ]

    def body(carry, xs):
        xs = widened(_without_carriers(xs), widened_from)
        xs = [x if stack is None else stack.sent(x) for x, stack in zip(xs, unsent, strict=True)]
        results = run(plan, [*consts, *carry, *xs])
        return results[: len(carry)], narrowed(results[len(carry) :], y_dtypes)

    # `prevent_cse=False`, as JAX advises inside of a scan: there is nothing that XLA could merge with the first pass.
    if _leaves_open_what_is_kept(plan.jaxpr):
        body = jax.checkpoint(body, policy=_is_kept, prevent_cse=False)
    options = {key: params[key] for key in ("reverse", "unroll", "_split_transpose") if key in params}
    xs = _with_carriers(narrowed(xs, x_dtypes), _carried_in(x_tags, settings))
    gradients_in = [tag.gradient_in for tag in _scan_parts(step.eqn, step.in_tags)[2]]
    xs = [
        x._replace(array=lax.convert_element_type(x.array, dtype)) if dtype and isinstance(x, Weight) else x
        for x, dtype in zip(xs, gradients_in, strict=True)
    ]
    carry, ys = lax.scan(body, carry, xs, length=params["length"], **options)
    return [*carry, *widened(ys, y_dtypes)]


def _handed_on(plan: CastPlan, settings: Settings) -> dict[Any, np.dtype | None]:
    """Return the values whose only use is a checkpoint that takes them in 16 bits, with the dtype.

    The body of a scan hands a slice of that dtype to the checkpoint unchanged. If it were widened and narrowed again,
    JAX would see a new value, and the checkpoint would keep it beside the array that the slice comes from.
    """
    uses = count_uses(open_jaxpr(plan.jaxpr))
    found = {}
    for step in plan.steps:
        if step.eqn.primitive.name == "remat2" and step.action == "enter":
            inside = step.plans[0]
            dtypes = _travel_in(inside.in_tags, inside.rounded_to, settings)
            found |= {v: dtype for v, dtype in zip(step.eqn.invars, dtypes, strict=True) if uses.get(v) == 1}
    return found


def _leaves_open_what_is_kept(jaxpr: Any) -> bool:
    """Return whether the author of a loop's body left it to JAX what is kept for the backward pass.

    A body with complex numbers is left alone too: a `jax.checkpoint` policy cannot keep them (jax 0.10 to 0.12).
    """
    program = open_jaxpr(jaxpr)
    inside = (inner for eqn in program.eqns for inner in jex_core.jaxprs_in_params(eqn.params))
    is_checkpoint = any(eqn.primitive.name == "remat2" for eqn in program.eqns)
    values = [*program.invars, *program.constvars, *(v for eqn in program.eqns for v in eqn.outvars)]
    is_complex = any(jnp.issubdtype(dtype_of(v), jnp.complexfloating) for v in values)
    return not (program.effects or is_checkpoint or is_complex) and all(map(_leaves_open_what_is_kept, inside))


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether a loop keeps a result for its backward pass, or computes it again.

    JAX keeps what derivatives need in the dtype it was traced with: float32, although it was computed from 16-bit
    results of products.
    """
    return not facts_of(primitive).cheap


def _scan_parts(eqn: JaxprEqn, columns: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Split a column with an entry for each operand: closed over by the body, carried, sliced in each iteration."""
    consts, carry = scan_counts(eqn)
    return list(columns[:consts]), list(columns[consts : consts + carry]), list(columns[consts + carry :])


def _plan_while(eqn: JaxprEqn, tags: tuple[Tag, ...], planner: Planner) -> tuple[Any, Any]:
    cond_consts, body_consts, carry = _while_parts(eqn, tags)
    body, carry = _loop_plan(eqn.params["body_jaxpr"], body_consts, carry, [], planner)
    return (planner.plan(eqn.params["cond_jaxpr"], (*cond_consts, *carry)), body), tuple(carry)


def _run_while(step: Step, operands: list[Any], run: Run, settings: Settings) -> Sequence[Any]:
    """Bind the primitive itself: `lax.while_loop` refuses the batched condition that a loop has under `vmap`."""
    cond_consts, body_consts, carry = _while_parts(step.eqn, [array_of(x) for x in operands])
    cond, new_consts = _retraced(lambda *operands: run(step.plans[0], operands), [*cond_consts, *carry])
    cond_consts = [*new_consts, *cond_consts]
    body, new_consts = _retraced(lambda *operands: run(step.plans[1], operands), [*body_consts, *carry])
    body_consts = [*new_consts, *body_consts]
    params = {
        "cond_nconsts": len(cond_consts),
        "body_nconsts": len(body_consts),
        "cond_jaxpr": jex_core.ClosedJaxpr(cond, ()),
        "body_jaxpr": jex_core.ClosedJaxpr(body, ()),
    }
    return step.eqn.primitive.bind(*cond_consts, *body_consts, *carry, **(step.eqn.params | params))


def _while_parts(eqn: JaxprEqn, columns: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    first = eqn.params["cond_nconsts"]
    second = first + eqn.params["body_nconsts"]
    return list(columns[:first]), list(columns[first:second]), list(columns[second:])


def _loop_plan(
    jaxpr: Any, consts: list[Tag], carry: list[Tag], xs: list[Tag], planner: Planner, results: Any = None
) -> tuple[CastPlan, list[Tag]]:
    """Return the plan of a loop's body, with tags of the carry that hold before and after each iteration."""
    consts, carry, xs = ([tag._replace(gradient_in=None) for tag in tags] for tags in (consts, carry, xs))
    consts = [tag._replace(is_product=False) for tag in consts]  # their cotangents are added up before they are rounded
    # A carry is what it was before the loop, and also what an iteration leaves. If these differ, the body is planned
    # again with what holds for both. That is less each time, so this ends.
    while True:
        plan = planner.plan(jaxpr, (*consts, *carry, *xs), results)
        after = [_common(*pair) for pair in zip(carry, plan.out_tags[: len(carry)], strict=True)]
        if after == carry:
            return plan, carry
        carry = after


# ---- programs and values that travel


def _retraced(function: Callable[..., Any], operands: Sequence[Any]) -> tuple[jex_core.Jaxpr, list[Any]]:
    """Return the program of a function of these operands, and the constants it takes before them."""
    program = jax.make_jaxpr(function)(*operands)
    invars = [*program.jaxpr.constvars, *program.jaxpr.invars]
    return program.jaxpr.replace(constvars=[], invars=invars), list(program.consts)


def _common(*tags: Tag) -> Tag:
    """Return what is known about a value that is one of several."""
    first = tags[0]
    return Tag(
        first.representable_in if len({tag.representable_in for tag in tags}) == 1 else None,
        first.precision if len({tag.precision for tag in tags}) == 1 else None,
        is_argument=any(tag.is_argument for tag in tags),
        is_copied=any(tag.is_copied for tag in tags),
        stored_in=first.stored_in if len({tag.stored_in for tag in tags}) == 1 else None,
        # `is_product` stays false: the contraction of one branch does not round the cotangent of the other's.
    )


def _travel_in(tags: Sequence[Tag], rounded_to: Sequence[np.dtype | None], settings: Settings) -> list[np.dtype | None]:
    return [travels_in(tag, dtype, settings) for tag, dtype in zip(tags, rounded_to, strict=True)]


def _unless_weights(values: Sequence[Any], dtypes: Sequence[np.dtype | None]) -> list[np.dtype | None]:
    """Return the dtypes of values; None for a weight, which travels as its source."""
    return [None if isinstance(x, Weight) else dtype for x, dtype in zip(values, dtypes, strict=True)]


def _carried_in(tags: Sequence[Tag], settings: Settings) -> list[np.dtype | None]:
    """Return the 16-bit dtype of each value that travels beside a carrier of its gradient; None for others."""
    return [tag.representable_in if tag.is_argument and settings.has_wide_gradients else None for tag in tags]


def _with_carriers(values: Sequence[Any], dtypes: Sequence[np.dtype | None]) -> list[Any]:
    """Return values, some of which travel in 16 bits beside a carrier of their gradient: zeros that nobody reads."""
    return [
        _with_carrier(value, dtype) if dtype is not None or isinstance(value, Weight) else value
        for value, dtype in zip(values, dtypes, strict=True)
    ]


def _with_carrier(x: Any, dtype: np.dtype | None) -> Weight:
    carrier = with_derivative_of(array_of(x), lax.full_like(array_of(x), 0))
    source = x.source if isinstance(x, Weight) else Source(lax.stop_gradient(narrowed([x], [dtype])[0]))
    return Weight(carrier, dataclasses.replace(source, like=None))


def _without_carriers(values: Sequence[Any]) -> list[Any]:
    return [_without_carrier(x) if isinstance(x, Weight) else x for x in values]


def _without_carrier(x: Weight) -> Any:
    weight = with_derivative_of(lax.convert_element_type(x.array, np.float32), x.source.again(x.source.part))
    if x.source.is_sent:  # to a checkpoint, whose backward pass does so again
        return weight
    return Weight(weight, dataclasses.replace(x.source, like=lax.convert_element_type(weight, x.source.part.dtype)))


def narrowed(values: Sequence[Any], dtypes: Sequence[np.dtype | None]) -> list[Any]:
    """Return values in the dtypes they travel in; None leaves a value unchanged."""
    pairs = zip(values, dtypes, strict=True)
    return [value if dtype is None else lax.convert_element_type(value, dtype) for value, dtype in pairs]


def widened(values: Sequence[Any], dtypes: Sequence[np.dtype | None]) -> list[Any]:
    return narrowed(values, [None if dtype is None else np.dtype(np.float32) for dtype in dtypes])


HANDLERS: dict[str, Handler] = {
    **{name: Handler(_plan_call, _call_rounded_to, _run_jit) for name, f in PRIMITIVES.items() if f.runs == "call"},
    "remat2": Handler(_plan_checkpoint, _call_rounded_to, _run_checkpoint),
    "shard_map": Handler(_plan_shard_map, None, _run_shard_map),
    "cond": Handler(_plan_cond, _cond_rounded_to, _run_cond),
    "scan": Handler(_plan_scan, _scan_rounded_to, _run_scan),
    "while": Handler(_plan_while, None, _run_while),
}
