"""List the contractions of a loss, and make some of them ask for a higher precision."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend import core as jex_core

from mpx._autocast import contraction
from mpx._autocast.explain import line_of
from mpx._autocast.plan import CastPlan
from mpx._autocast.transform import Autocast
from mpx._jaxprs import CONTRACTIONS, closed_jaxpr, open_jaxpr


class Contraction(NamedTuple):
    """A contraction of the loss: whether autocast narrows it, its FLOPs in a call, and its source line."""

    is_narrowed: bool
    flops: int
    where: str


def contractions_of(plan: CastPlan, times: int = 1, outer: tuple[Any, ...] = ()) -> Iterator[Contraction]:
    """Yield the contractions of a plan and of the plans inside, in the order of `_with_precisions`."""
    for step in plan.steps:
        eqn = step.eqn
        inner_times = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for inner in step.plans:
            yield from contractions_of(inner, inner_times, (eqn, *outer))
        if eqn.primitive.name in CONTRACTIONS:
            yield Contraction(step.action == "narrow", times * contraction.flops(eqn), line_of(eqn, outer))


def asking(record: Autocast, precisions: Sequence[lax.Precision | None]) -> Autocast:
    """Return an autocast of the same function whose contractions ask for these precisions.

    Autocast never narrows a contraction that asks for the highest precision. None leaves one as it is.
    """
    plain = dataclasses.replace(record, policy=None)

    def fun(params, batch):
        traced = plain.trace((params, batch), {})
        program = closed_jaxpr(_with_precisions(traced.plan, iter(precisions)))
        return traced.rebuild(jex_core.jaxpr_as_fun(program)(*traced.arrays))

    return dataclasses.replace(record, fun=fun)


def _with_precisions(plan: CastPlan, precisions: Iterator[lax.Precision | None]) -> Any:
    """Return the program of a plan with the precisions of its contractions exchanged."""
    eqns = []
    for step in plan.steps:
        eqn = step.eqn
        if step.plans:
            inside = [(inner.jaxpr, _with_precisions(inner, precisions)) for inner in step.plans]
            eqn = eqn.replace(params={key: _exchanged(value, inside) for key, value in eqn.params.items()})
        elif eqn.primitive.name in CONTRACTIONS:
            precision = next(precisions)
            if precision is not None:
                eqn = eqn.replace(params=eqn.params | {"precision": (precision, precision)})
        eqns.append(eqn)
    program = open_jaxpr(plan.jaxpr).replace(eqns=eqns)
    return jex_core.ClosedJaxpr(program, plan.jaxpr.consts) if hasattr(plan.jaxpr, "consts") else program


def _exchanged(value: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """Return a parameter of an equation with its programs exchanged, which are known by their identity."""
    if type(value) is tuple:  # the branches of a `cond`
        return tuple(_exchanged(item, pairs) for item in value)
    return next((new for old, new in pairs if old is value), value)
