"""Decide what `autocast` does to each equation of a program, before anything runs.

Every value has a tag: which 16-bit dtype represents it, and the precision asked for in contractions with it. A plan is
the list of decisions about one jaxpr with given tags. Plans of programs inside hang below it.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx._autocast import contraction, fp8
from mpx._autocast import precision as precisions
from mpx._autocast.precision import ContractionPrecision
from mpx._autocast.rules import DEFAULT_RULES, Rule
from mpx._jaxprs import (
    called_jaxpr,
    count_uses,
    dtype_of,
    is_literal,
    open_jaxpr,
    propagate,
    scan_counts,
    with_results_read,
)
from mpx._primitives import facts_of, is_call
from mpx._shardings import are_several_in_sight

# In the name stack of operations that an autocast or `full_precision` inside has decided about. A string, because JAX
# keeps nothing else of ours on an equation through `jit`, `grad`, `vmap` and loops.
DECIDED = "mpx:autocast"


class Tag(NamedTuple):
    """Holds what is known about a value."""

    representable_in: np.dtype | None = None  # a 16-bit dtype that has this float32 value
    precision: ContractionPrecision | None = None  # what an override of the policy asks for in contractions with it
    is_argument: bool = False  # whether it has elements of the function's arguments, whose gradients a user gets
    is_copied: bool = False  # whether an element may occur twice, so that cotangents have yet to be added up
    gradient_in: np.dtype | None = None  # the dtype that its gradient, of one use, may be rounded to once it is a sum
    stored_in: np.dtype | None = None  # the 16-bit dtype of the argument that it is, perhaps with elements written over
    is_product: bool = False  # whether it is a narrowed contraction's result: that contraction rounds its cotangent

    @property
    def in_memory(self) -> np.dtype | None:
        """The dtype of the value in memory before the program runs; None if the program computes it."""
        return self.representable_in or (np.dtype(np.float32) if self.is_argument else None)

    @property
    def is_narrow_weight(self) -> bool:
        """Return whether it has elements of an argument that is stored in 16 bits."""
        return self.is_argument and self.representable_in is not None


UNKNOWN = Tag()
_BY_ITS_AUTHOR = "a custom derivative belongs to the function that its author wrote"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The choices of the user."""

    precision: ContractionPrecision
    rules: Mapping[str, Rule]
    reduce_dtype: np.dtype | None = None  # of sums that are gradients of weights; None: float32 on several devices
    gather_again: bool = True  # whether a weight that other devices send is sent again for the backward pass

    @property
    def has_wide_gradients(self) -> bool:
        """Return whether gradients of weights are unrounded float32 sums."""
        if not self.precision.is_narrow:
            return False
        return are_several_in_sight() if self.reduce_dtype is None else self.reduce_dtype == np.float32


class Step(NamedTuple):
    """The decision about an equation."""

    eqn: JaxprEqn
    # "transfer": other devices get the value in the compute dtype; "round_cotangent" keeps the forward pass;
    # "recompute" stands for several steps (see `recompute.py`); "map" is kept, but narrowed by a `jax.vmap` around.
    action: Literal["narrow", "enter", "keep", "round_cotangent", "transfer", "recompute", "map"]
    precision: ContractionPrecision | None  # if it is narrowed, transferred, recomputed or mapped
    in_tags: tuple[Tag, ...]
    out_tags: tuple[Tag, ...]
    plans: tuple["CastPlan", ...] = ()  # of the programs inside, if they may be entered
    reason: str | None = None  # why a contraction in it is kept, or runs in 16 bits and not in 8


@dataclasses.dataclass(frozen=True, eq=False)
class CastPlan:
    """The decisions about a jaxpr whose inputs have given tags."""

    jaxpr: Any  # open or closed
    steps: tuple[Step, ...]
    in_tags: tuple[Tag, ...]
    out_tags: tuple[Tag, ...]
    # For each input the dtype that its only consumer, a narrowed contraction, rounds its cotangent to; None for other
    # inputs.
    rounded_to: tuple[np.dtype | None, ...]
    # For each input the 16-bit dtype that all its uses round it to; None if they differ, or use it in float32.
    used_in: tuple[np.dtype | None, ...]

    @property
    def changes(self) -> bool:
        """Return whether any step, here or below, does not just run as traced."""
        return any(step.action != "keep" for step in self.steps)


# A step, how often it runs, and the equations around it.
PlacedStep = tuple[Step, int, tuple[JaxprEqn, ...]]


def walk(steps: Iterable[Step], times: int = 1, outer: tuple[JaxprEqn, ...] = ()) -> Iterator[PlacedStep]:
    """Yield all of these steps and those of the plans inside, also of programs that are kept whole."""
    for step in steps:
        eqn = step.eqn
        inside = [plan.steps for plan in step.plans]
        if not inside and eqn.primitive.name != "pallas_call":
            kept = Step(eqn, "keep", None, (), (), reason=step.reason)
            jaxprs = jex_core.jaxprs_in_params(eqn.params)
            inside = [tuple(kept._replace(eqn=inner) for inner in open_jaxpr(jaxpr).eqns) for jaxpr in jaxprs]
        for steps_inside in inside:
            yield from walk(steps_inside, times * eqn.params.get("length", 1), (eqn, *outer))
        if not inside:
            yield step, times, outer


class Handler(NamedTuple):
    """The functions that plan and run an operation that holds programs."""

    # From the equation and its operands' tags to the plans of the programs inside and the results' tags.
    plan: Callable[[JaxprEqn, tuple[Tag, ...], "Planner"], tuple[tuple[CastPlan, ...], tuple[Tag, ...]]]
    # From the equation and the plans inside to the `CastPlan.rounded_to` of each operand; None if all are None.
    rounded_to: Callable[[JaxprEqn, tuple[CastPlan, ...]], list[np.dtype | None]] | None
    # From the step, its operands, the function that runs a plan on values, and the settings to the results.
    run: Callable[[Step, list[Any], "Run", Settings], Sequence[Any]]


Run = Callable[[CastPlan, Sequence[Any]], list[Any]]


class Planner:
    """Plans jaxprs, each once for the same tags."""

    def __init__(self, settings: Settings, handlers: Mapping[str, Handler]) -> None:
        self.settings = settings
        self._handlers = handlers
        self._plans: dict[tuple[int, tuple[Tag, ...], tuple[bool, ...]], CastPlan] = {}

    def plan(self, jaxpr: Any, in_tags: tuple[Tag, ...], results: Sequence[Any] | None = None) -> CastPlan:
        """Return the plan of an open or closed jaxpr whose inputs have these tags.

        `results` are the variables of its results around it: nobody reads a `DropVar`.
        """
        is_read = tuple(not isinstance(v, jex_core.DropVar) for v in results or open_jaxpr(jaxpr).outvars)
        key = id(jaxpr), in_tags, is_read  # the program that is planned holds the jaxpr, so that no other gets this id
        if key not in self._plans:
            self._plans[key] = self._make_plan(with_results_read(jaxpr, is_read), in_tags, {})
        return self._plans[key]

    def _make_plan(self, jaxpr: Any, in_tags: tuple[Tag, ...], transfers: Mapping[int, np.dtype]) -> CastPlan:
        """Plan a jaxpr. `transfers` has the 16-bit dtypes of values that go to other devices, by ids of equations."""
        steps: list[Step] = []
        program = open_jaxpr(jaxpr)
        uses = count_uses(program)
        activated = functools.cache(lambda: _going_into_functions(program))

        def used_once(variables: Sequence[Any], tags: Sequence[Tag]) -> tuple[Tag, ...]:
            """Return tags of values: with several uses, cotangents are added up before a contraction rounds them."""
            pairs = zip(variables, tags, strict=True)
            several = {"is_product": False, "gradient_in": None}
            return tuple(tag if is_literal(v) or uses[v] < 2 else tag._replace(**several) for v, tag in pairs)

        def decide(eqn: JaxprEqn, tags: list[Tag]) -> tuple[Tag, ...]:
            transfer_in = transfers.get(id(eqn))
            if eqn.primitive.name in self._handlers:
                eqn = eqn.replace(outvars=[v if uses[v] else jex_core.DropVar(v.aval) for v in eqn.outvars])
            steps.append(self._step(eqn, used_once(eqn.invars, tags), transfer_in, activated))
            return steps[-1].out_tags

        out_tags = used_once(program.outvars, propagate(jaxpr, in_tags, decide, lambda v: UNKNOWN))
        used = _used_in(program, steps)
        new = _narrow_transfers(steps, used)
        # What is used of a value is known from the end of the program, its tag from the start. A value that will be
        # narrowed before its transfer is representable after it, which may change decisions behind it: so once more.
        # This ends, since each time there are more such transfers.
        if new:
            return self._make_plan(jaxpr, in_tags, {**transfers, **new})
        used_in = tuple(used.get(v) for v in program.invars)
        return CastPlan(jaxpr, tuple(steps), in_tags, out_tags, self._rounded_to(program, steps, uses), used_in)

    def _step(
        self, eqn: JaxprEqn, tags: tuple[Tag, ...], transfer_in: np.dtype | None, activated: Callable[[], set[Any]]
    ) -> Step:
        name = eqn.primitive.name
        rule = self.settings.rules.get(name, "keep")
        is_decided = DECIDED in str(eqn.source_info.name_stack)
        if rule == "follow":
            followed = self._followed(eqn, tags)
            if transfer_in is not None:
                narrow = followed[0]._replace(representable_in=transfer_in)
                return Step(eqn, "transfer", precisions.precision_of_dtype(transfer_in), tags, (narrow,))
            # What a `jax.checkpoint` policy keeps by name is kept in 16 bits.
            dtype = travels_in(followed[0], None, self.settings) if name == "name" and not is_decided else None
            if dtype is not None:
                return Step(eqn, "narrow", precisions.precision_of_dtype(dtype), tags, followed)
            return Step(eqn, "keep", None, tags, followed)
        if is_decided:
            return _kept(eqn, tags, "decided by an autocast or full_precision inside")
        if rule == "enter":
            return self._entered(eqn, tags)
        if rule == "narrow":
            return self._narrowed(eqn, tags)
        # The user's table turns off a default rule. Without a default there is nothing to tell.
        if DEFAULT_RULES.get(name, "keep") not in ("keep", rule):
            return _kept(eqn, tags, f"the rule for {name} is {rule}")
        # If the sum goes into no function, XLA adds up the bias's gradient in the kernel that computes the cotangent,
        # and the barrier of `with_rounded_cotangent` would cost one more.
        if name == "add" and _adds_a_bias(eqn, tags) and eqn.outvars[0] in activated():
            return Step(eqn, "round_cotangent", None, tags, (UNKNOWN,))
        return _kept(eqn, tags, _BY_ITS_AUTHOR if facts_of(eqn).runs == "custom" else f"autocast does not enter {name}")

    def _entered(self, eqn: JaxprEqn, tags: tuple[Tag, ...]) -> Step:
        """Plan an operation that holds programs. Its literal operands may be representable."""
        tags = tuple(
            self._common_tag(eqn, [(v, tag)], v) if is_literal(v) else tag
            for v, tag in zip(eqn.invars, tags, strict=True)
        )
        plans, out_tags = self._handlers[eqn.primitive.name].plan(eqn, tags, self)
        # Where nothing changes inside, there is nothing to rebuild: the operation runs as traced.
        action = "enter" if any(plan.changes for plan in plans) else "keep"
        return Step(eqn, action, None, tags, out_tags, plans)

    def _narrowed(self, eqn: JaxprEqn, tags: tuple[Tag, ...]) -> Step:
        asked = [tag.precision for tag in tags if tag.precision is not None]
        precision = precisions.widest(asked) if asked else self.settings.precision
        if not precision.changes:
            reason = "an override of the policy asks for f32" if asked else f"{precision.name} is asked for"
            return _kept(eqn, tags, "this device has no TF32" if precision.name == "tf32" else reason)
        is_product, why_16_bits = facts_of(eqn).contraction, None
        reason = contraction.why_kept(eqn, precision, tags) if is_product else _why_elementwise_kept(eqn, precision)
        if reason is not None:
            if not is_product or not precision.is_narrow or not contraction.may_be_mapped(eqn, reason, tags):
                return _kept(eqn, tags, reason)
            kept = _kept(eqn, tags, f"{reason}; narrowed where a `jax.vmap` around makes a matrix of it")
            return kept._replace(action="map", precision=precision.fallback)
        if precision.fp8 is not None:
            why_16_bits = fp8.why_not(eqn, precision.fp8) if is_product else "FP8 is for matrix products"
            precision = precision if why_16_bits is None else precision.fallback
        elif asked and self.settings.precision.fp8 is not None:
            why_16_bits = f"an override of the policy asks for {precision.name}"
        narrow = Tag(precision.dtype, is_product=is_product) if precision.is_narrow else UNKNOWN
        out_tags = tuple(narrow if _is_f32(v) else UNKNOWN for v in eqn.outvars)
        return Step(eqn, "narrow", precision, tags, out_tags, reason=why_16_bits)

    def _followed(self, eqn: JaxprEqn, tags: tuple[Tag, ...]) -> tuple[Tag, ...]:
        """Return the tags of results whose elements are elements of the operands."""
        if any(jex_core.jaxprs_in_params(eqn.params)):  # a scatter that applies a function
            return (UNKNOWN,) * len(eqn.outvars)
        pairs = list(zip(eqn.invars, tags, strict=True))
        if len(eqn.invars) == len(eqn.outvars) > 1:  # several arrays at once: each result has its operand
            return tuple(self._common_tag(eqn, [pair], v) for pair, v in zip(pairs, eqn.outvars, strict=True))
        return tuple(self._common_tag(eqn, pairs, v) for v in eqn.outvars)

    def _common_tag(self, eqn: JaxprEqn, pairs: Sequence[tuple[Any, Tag]], result: Any) -> Tag:
        floats = [(v, tag) for v, tag in pairs if jnp.issubdtype(dtype_of(v), jnp.floating)]
        arrays = [(v, tag) for v, tag in floats if not is_literal(v)]
        asked = [tag.precision for _, tag in arrays if tag.precision is not None]
        facts = facts_of(eqn)
        is_broadcast = facts.elementwise and any(_is_smaller(v, result) for v, _ in arrays)
        return Tag(
            self._common_dtype(eqn, floats, result),
            precisions.widest(asked) if asked else None,
            is_argument=any(tag.is_argument for _, tag in arrays),
            is_copied=is_broadcast or facts.copies_of_operand == "many" or any(tag.is_copied for _, tag in arrays),
            stored_in=_stored_in(eqn, [tag for _, tag in pairs]) if _is_f32(result) else None,
            is_product=facts.copies_of_operand == "one" and all(tag.is_product for _, tag in arrays),
        )

    def _common_dtype(self, eqn: JaxprEqn, floats: list[tuple[Any, Tag]], result: Any) -> np.dtype | None:
        """Return the 16-bit dtype that has all elements of a result made of these operands' elements."""
        dtypes = {_dtype_that_has(v, tag) for v, tag in floats if not is_literal(v)}
        constants = [v.val for v, _ in floats if is_literal(v)]
        if eqn.params.get("fill_value") is not None:
            constants.append(eqn.params["fill_value"])
        if eqn.primitive.name == "convert_element_type" and dtype_of(eqn.invars[0]) == np.bool_:
            constants = [0.0, 1.0]
        # Constants alone, as in `jnp.where(mask, 0.0, 1.0)`, take the dtype that contractions want.
        if not dtypes and constants and self.settings.precision.is_narrow:
            dtypes = {self.settings.precision.dtype}
        dtype = dtypes.pop() if len(dtypes) == 1 and _is_f32(result) else None
        return None if dtype is None or not all(_has(dtype, value) for value in constants) else dtype

    def _rounded_to(
        self, program: jex_core.Jaxpr, steps: list[Step], uses: Counter[Any]
    ) -> tuple[np.dtype | None, ...]:
        rounded: dict[Any, np.dtype | None] = {}
        for step in reversed(steps):
            for v, dtype in zip(step.eqn.invars, self._operands_rounded_to(step, rounded), strict=True):
                if not is_literal(v):
                    rounded[v] = dtype if uses[v] == 1 else None
        return tuple(rounded.get(v) for v in program.invars)

    def _operands_rounded_to(self, step: Step, rounded: dict[Any, np.dtype | None]) -> list[np.dtype | None]:
        eqn, facts = step.eqn, facts_of(step.eqn)
        if step.action == "narrow" and step.precision is not None and step.precision.is_narrow:
            dtype = step.precision.dtype
            if facts.contraction:
                return [dtype] * len(eqn.invars)
            # An elementwise operation in 16 bits rounds the cotangents of a bias before they are added up, not after.
            return [None if _is_smaller(v, eqn.outvars[0]) else dtype for v in eqn.invars]
        of_handler = self._handlers[eqn.primitive.name].rounded_to if step.action == "enter" else None
        if of_handler is not None:
            return of_handler(eqn, step.plans)
        return [rounded.get(eqn.outvars[0]) if facts.copies_of_operand == "one" else None] * len(eqn.invars)


def _stored_in(eqn: JaxprEqn, tags: Sequence[Tag]) -> np.dtype | None:
    """Return `Tag.stored_in` of a result: as in JAX, an array that elements are written to keeps its dtype."""
    name = eqn.primitive.name
    writes = name in ("convert_element_type", "dynamic_update_slice", "scatter", "select_n")
    dtypes = {tag.stored_in for tag in (tags[1:] if name == "select_n" else tags[:1])}
    return dtypes.pop() if (writes or facts_of(eqn).copies_of_operand == "one") and len(dtypes) == 1 else None


def travels_in(tag: Tag, rounded_to: np.dtype | None, settings: Settings) -> np.dtype | None:
    """Return the 16-bit dtype that a value has while it crosses the border of a program inside, or None for its own.

    Nothing is lost on the way in. On the way back its cotangent, the float32 sum over all uses inside, is rounded once.
    For weights and for copies of one value that is allowed only if the cotangent was rounded already. So the gradients
    that a user gets lose nothing, and sums of cotangents are complete before they are rounded.
    """
    if tag.is_argument and settings.has_wide_gradients:
        return None
    is_allowed = rounded_to == tag.representable_in or not (tag.is_argument or tag.is_copied)
    return tag.representable_in if is_allowed else None


def _used_in(program: jex_core.Jaxpr, steps: Sequence[Step]) -> dict[Any, np.dtype | None]:
    """Return, for each value, the 16-bit dtype that all its uses round it to, or None. Moving a value is no use."""
    used: dict[Any, np.dtype | None] = dict.fromkeys(filter(lambda v: not is_literal(v), program.outvars))
    for step in reversed(steps):
        for v, dtype in zip(step.eqn.invars, _operands_used_in(step, used), strict=True):
            if not is_literal(v):
                used[v] = dtype if used.get(v, dtype) == dtype else None
    return used


def _operands_used_in(step: Step, used: dict[Any, np.dtype | None]) -> list[np.dtype | None]:
    eqn, plans, facts = step.eqn, step.plans, facts_of(step.eqn)
    if step.action in ("narrow", "transfer") and step.precision is not None and step.precision.is_narrow:
        return [step.precision.dtype] * len(eqn.invars)
    if facts.moves in ("same", "moved", "received") and len(eqn.outvars) == 1:
        return [used.get(eqn.outvars[0])] * len(eqn.invars)
    if eqn.primitive.name == "scan" and plans:
        consts, carry = scan_counts(eqn)
        return [*plans[0].used_in[:consts], *[None] * carry, *plans[0].used_in[consts + carry :]]
    if len(plans) == 1 and len(plans[0].used_in) == len(eqn.invars) and facts.runs != "loop":
        return list(plans[0].used_in)
    if eqn.primitive.name == "cond" and plans:
        found: list[set[Any]] = [set() for _ in eqn.invars]
        for plan in plans:
            branch = open_jaxpr(plan.jaxpr)
            uses = count_uses(branch)
            for dtypes, v, dtype in zip(found[1:], branch.invars, plan.used_in, strict=True):
                dtypes.update([dtype] if uses[v] else [])
        return [dtypes.pop() if len(dtypes) == 1 else None for dtypes in found]
    return [None] * len(eqn.invars)


def _narrow_transfers(steps: Sequence[Step], used: dict[Any, np.dtype | None]) -> dict[int, np.dtype]:
    """Return the equations, by id, that transfer in float32 what all uses round to a 16-bit dtype, with the dtype."""
    found = {}
    for step in filter(_is_wide_transfer, steps):
        dtype = used.get(step.eqn.outvars[0])
        if dtype is not None and step.in_tags[0].representable_in in (None, dtype):
            found[id(step.eqn)] = dtype
    return found


def _is_wide_transfer(step: Step) -> bool:
    """Return whether a step moves a float32 value to other devices."""
    facts = facts_of(step.eqn)
    moves_one = facts.communicates and facts.moves in ("same", "received") and len(step.eqn.invars) == 1
    return moves_one and step.action == "keep" and _is_f32(step.eqn.invars[0])


def _kept(eqn: JaxprEqn, tags: tuple[Tag, ...], reason: str) -> Step:
    return Step(eqn, "keep", None, tags, (UNKNOWN,) * len(eqn.outvars), reason=reason)


def _why_elementwise_kept(eqn: JaxprEqn, precision: ContractionPrecision) -> str | None:
    """Return why an operation other than a contraction cannot be narrowed, as a user's table asks; or None."""
    if not precision.is_narrow:
        return f"{precision.name} is for contractions"
    if not any(_is_f32(v) for v in eqn.invars) or not all(_is_f32(v) for v in eqn.outvars):
        return "operands and results are not float32"
    return None


def _adds_a_bias(eqn: JaxprEqn, tags: tuple[Tag, ...]) -> bool:
    """Return whether an addition adds a bias, copies of a smaller array, to the result of a narrowed contraction.

    The contraction rounds the cotangent. XLA would write it in float32 too, to add up the bias's gradient.
    """
    result, pairs = eqn.outvars[0], list(zip(eqn.invars, tags, strict=True))
    is_bias = lambda v, tag: not is_literal(v) and (tag.is_copied or _is_smaller(v, result))
    return any(
        tag.is_product and not _is_smaller(v, result) and is_bias(*other)
        for (v, tag), other in zip(pairs, pairs[::-1], strict=True)
    )


def _going_into_functions(program: jex_core.Jaxpr) -> set[Any]:
    """Return the values that go, perhaps moved, into an activation or a loss: anything but a sum or a contraction.

    XLA computes the cotangents of all other values in the kernels that add them up, so it does not write them twice.
    """
    found: set[Any] = set()
    for eqn in reversed(program.eqns):
        name, facts, results = eqn.primitive.name, facts_of(eqn), found.intersection(filter(_is_f32, eqn.outvars))
        if is_call(eqn):
            inner = open_jaxpr(called_jaxpr(eqn))
            inside = _going_into_functions(inner)
            found.update(v for v, w in zip(eqn.invars, inner.invars, strict=True) if w in inside and not is_literal(v))
        moves = is_call(eqn) or DEFAULT_RULES.get(name) == "follow"
        adds_up = facts.contraction or facts.linear or name in ("add", "add_any")
        if results if moves else not adds_up:
            found.update(v for v in eqn.invars if not is_literal(v))
    return found


def _is_smaller(v: Any, result: Any) -> bool:
    """Return whether an operand has fewer axes, or shorter ones, than a result."""
    return v.aval.shape != result.aval.shape


def _is_f32(v: Any) -> bool:
    return dtype_of(v) == np.float32


def _dtype_that_has(v: Any, tag: Tag) -> np.dtype | None:
    """Return the 16-bit dtype of an operand, or the one that represents its float32 values."""
    return np.dtype(dtype_of(v)) if dtype_of(v).itemsize == 2 else tag.representable_in


def _has(dtype: np.dtype, value: Any) -> bool:
    """Return whether a 16-bit dtype has a value. All of them have NaN."""
    value = np.float32(value)
    with np.errstate(over="ignore"):
        return bool(np.isnan(value)) or bool(np.float32(value.astype(dtype)) == value)
