"""Decide what `autocast` does to each equation of a program, before anything runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx._autocast import contraction, fp8
from mpx._autocast import precision as precisions
from mpx._autocast.border import travels_in
from mpx._autocast.control_flow import HANDLERS
from mpx._autocast.demand import with_demands
from mpx._autocast.plan import DECIDED, UNUSED, Demand, Plan, Settings, Step
from mpx._autocast.precision import ContractionPrecision
from mpx._autocast.rules import DEFAULT_RULES
from mpx._autocast.tags import (
    UNKNOWN,
    Tag,
    is_smaller,
    tag_of_elements,
    tags_of_results,
)
from mpx._jaxprs import (
    count_uses,
    is_f32,
    is_literal,
    open_jaxpr,
    propagate,
    with_results_read,
)
from mpx._primitives import facts_of


class Planner:
    """Plans jaxprs, each once for the same tags."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._constants_in = (
            settings.precision.dtype if settings.precision.is_narrow else None
        )
        self._plans: dict[Any, Plan] = {}

    def plan(
        self, jaxpr: Any, in_tags: tuple[Tag, ...], results: Sequence[Any] | None = None
    ) -> Plan:
        """Return the plan of an open or closed jaxpr whose inputs have these tags.

        `results` are the variables of its results around it: nobody reads a `DropVar`.
        """
        is_read = tuple(
            not isinstance(v, jex_core.DropVar)
            for v in results or open_jaxpr(jaxpr).outvars
        )
        # The program that is planned holds the jaxpr, so that no other gets this id.
        key = id(jaxpr), in_tags, is_read
        if key not in self._plans:
            self._plans[key] = self._make_plan(
                with_results_read(jaxpr, is_read), in_tags, {}
            )
        return self._plans[key]

    def _make_plan(
        self, jaxpr: Any, in_tags: tuple[Tag, ...], transfers: Mapping[int, np.dtype]
    ) -> Plan:
        """Plan a jaxpr. `transfers` has the 16-bit dtypes of values that go to other
        devices, by ids of equations.
        """
        steps: list[Step] = []
        program = open_jaxpr(jaxpr)
        uses = count_uses(program)

        def as_used(v: Any, tag: Tag) -> Tag:
            """Return the tag of a use of a value: cotangents of several are added up
            before anything rounds them.
            """
            if is_literal(v) or uses[v] < 2:
                return tag
            return tag._replace(is_product=False, gradient_in=None)

        def decide(eqn: JaxprEqn, tags: list[Tag]) -> tuple[Tag, ...]:
            transfer_in = transfers.get(id(eqn))
            tags = list(map(as_used, eqn.invars, tags))
            # The program inside need not compute what nobody reads.
            if eqn.primitive.name in HANDLERS:
                results = [
                    v if uses[v] else jex_core.DropVar(v.aval) for v in eqn.outvars
                ]
                eqn = eqn.replace(outvars=results)
            steps.append(self._step(eqn, tuple(tags), transfer_in))
            return steps[-1].out_tags

        found = propagate(jaxpr, in_tags, decide, lambda v: UNKNOWN)
        out_tags = tuple(map(as_used, program.outvars, found))
        decided, demands = with_demands(program, steps)
        new = _narrow_transfers(decided, demands)
        # What is used of a value is known from the end of the program, its tag from the
        # start. A value that will be narrowed before its transfer is representable
        # after it, which may change decisions behind it: so once more. This ends, since
        # each time there are more such transfers.
        if new:
            return self._make_plan(jaxpr, in_tags, {**transfers, **new})
        of_inputs = tuple(demands.get(v, UNUSED) for v in program.invars)
        return Plan(jaxpr, decided, in_tags, out_tags, of_inputs)

    def _step(
        self, eqn: JaxprEqn, tags: tuple[Tag, ...], transfer_in: np.dtype | None
    ) -> Step:
        # Values that are moved are followed through an island of full precision too: it
        # decides about what is computed in it, not about where values come from.
        name = eqn.primitive.name
        rule = self.settings.rules.get(name, "keep")
        if rule == "follow":
            return self._moved(eqn, tags, transfer_in)
        if _is_decided(eqn):
            return _as_traced(
                eqn, tags, "decided by an autocast or full_precision inside"
            )
        if rule == "enter":
            return self._entered(eqn, tags)
        if rule == "narrow":
            return self._narrowed(eqn, tags)
        # The user's table turns off a default rule. Without a default there is nothing
        # to tell.
        if name in DEFAULT_RULES:
            return _as_traced(eqn, tags, f"the rule for {name} is {rule}")
        product_in = _product_with_a_bias(eqn, tags) if name == "add" else None
        if product_in is not None:
            precision = precisions.precision_of_dtype(product_in)
            return Step(eqn, tags, (UNKNOWN,), "round_cotangent", precision)
        reason = f"autocast does not enter {name}"
        if facts_of(eqn).runs == "custom":
            reason = "a custom derivative belongs to the function that its author wrote"
        return _as_traced(eqn, tags, reason)

    def _moved(
        self, eqn: JaxprEqn, tags: tuple[Tag, ...], transfer_in: np.dtype | None
    ) -> Step:
        """Plan an operation that moves values. Two of them may move 16 bits in place of
        float32: a transfer to other devices, and a name that a checkpoint keeps.
        """
        results = tags_of_results(eqn, tags, self._constants_in)
        action, dtype = "transfer", transfer_in
        if transfer_in is not None:
            results = (results[0]._replace(representable_in=transfer_in),)
        elif eqn.primitive.name == "name" and not _is_decided(eqn):
            action, dtype = "narrow", travels_in(results[0], None, self.settings)
        if dtype is None:
            return Step(eqn, tags, results)
        return Step(eqn, tags, results, action, precisions.precision_of_dtype(dtype))

    def _entered(self, eqn: JaxprEqn, tags: tuple[Tag, ...]) -> Step:
        """Plan an operation that holds programs. Its literal operands may be
        representable.
        """
        tags = tuple(
            tag_of_elements(eqn, [(v, tag)], v, self._constants_in)
            if is_literal(v)
            else tag
            for v, tag in zip(eqn.invars, tags, strict=True)
        )
        plans, out_tags = HANDLERS[eqn.primitive.name].plan(eqn, tags, self.plan)
        # Where nothing changes inside, there is nothing to rebuild: the operation runs
        # as traced.
        action = "keep" if all(plan.runs_as_traced for plan in plans) else "enter"
        return Step(eqn, tags, out_tags, action, plans=plans)

    def _narrowed(self, eqn: JaxprEqn, tags: tuple[Tag, ...]) -> Step:
        asked = precisions.widest(tag.precision for tag in tags)
        precision = asked or self.settings.precision
        in_16_bits = precisions.precision_of_dtype(precision.dtype)  # without FP8
        reason = _why_kept(eqn, tags, precision, is_override=asked is not None)
        if precision.is_narrow and contraction.may_be_mapped(eqn, reason, tags):
            reason = (
                f"{reason}; narrowed where a `jax.vmap` around makes a matrix of it"
            )
            kept = _as_traced(eqn, tags, reason)
            return kept._replace(action="map", precision=in_16_bits)
        if reason is not None:
            return _as_traced(eqn, tags, reason)
        is_product = facts_of(eqn).contraction
        why_16_bits = None
        if precision.fp8 is not None:
            why_16_bits = (
                fp8.why_not(eqn, precision.fp8)
                if is_product
                else "FP8 is for matrix products"
            )
            precision = precision if why_16_bits is None else in_16_bits
        elif asked and self.settings.precision.fp8 is not None:
            why_16_bits = f"an override of the policy asks for {precision.name}"
        narrow = Tag(precision.dtype, is_product=is_product)
        out_tags = tuple(
            narrow if precision.is_narrow and is_f32(v) else UNKNOWN
            for v in eqn.outvars
        )
        return Step(eqn, tags, out_tags, "narrow", precision, reason=why_16_bits)


def _narrow_transfers(
    steps: Sequence[Step], demands: Mapping[Any, Demand]
) -> dict[int, np.dtype]:
    """Return the equations, by id, that transfer in float32 what all uses round to a
    16-bit dtype, or what such a dtype has and other devices send, with the dtype.
    """
    found = {}
    for step in steps:
        # A sum over devices moves nothing, and what is chosen (`pmax`) is chosen in
        # float32.
        facts = facts_of(step.eqn)
        sends = facts.communicates and facts.moves in ("same", "received")
        if not sends or step.action != "keep" or len(step.eqn.invars) != 1:
            continue
        dtype = demands.get(step.eqn.outvars[0], UNUSED).used_in
        has = step.in_tags[0].representable_in
        if dtype is None and facts.moves == "received":
            dtype = has
        if is_f32(step.eqn.invars[0]) and dtype is not None and has in (None, dtype):
            found[id(step.eqn)] = dtype
    return found


def _is_decided(eqn: JaxprEqn) -> bool:
    return DECIDED in str(eqn.source_info.name_stack)


def _as_traced(eqn: JaxprEqn, tags: tuple[Tag, ...], reason: str) -> Step:
    return Step(eqn, tags, (UNKNOWN,) * len(eqn.outvars), reason=reason)


def _why_kept(
    eqn: JaxprEqn,
    tags: tuple[Tag, ...],
    precision: ContractionPrecision,
    *,
    is_override: bool,
) -> str | None:
    """Return why what the table narrows is not narrowed to a precision, which an
    override of the policy may ask for; or None.
    """
    if precision.name == "tf32" and precision.is_plain:
        return "this device has no TF32"
    if precision.is_plain and is_override:
        return "an override of the policy asks for f32"
    if precision.is_plain:
        return f"{precision.name} is asked for"
    if precision == precisions.F16 and any(
        tag.is_cast and tag.representable_in == precisions.BF16.dtype for tag in tags
    ):
        return "f16 has not the range of what the program keeps in bf16"
    if facts_of(eqn).contraction:
        return contraction.why_kept(eqn, precision, tags)
    if not precision.is_narrow:
        return f"{precision.name} is for contractions"
    has_float32 = any(map(is_f32, eqn.invars)) and all(map(is_f32, eqn.outvars))
    return None if has_float32 else "operands and results are not float32"


def _product_with_a_bias(eqn: JaxprEqn, tags: tuple[Tag, ...]) -> np.dtype | None:
    """Return the dtype of the narrowed contraction to whose result an addition adds a
    bias, copies of a smaller array; None if it does not.

    The contraction rounds the cotangent. XLA would write it in float32 too, to add up
    the bias's gradient.
    """
    result, pairs = eqn.outvars[0], list(zip(eqn.invars, tags, strict=True))
    for (v, tag), (other, of_other) in zip(pairs, pairs[::-1], strict=True):
        is_repeated = of_other.is_copied or is_smaller(other, result)
        is_product = tag.is_product and not is_smaller(v, result)
        if is_product and is_repeated and not is_literal(other):
            return tag.representable_in
    return None
