"""Decide what `autocast` does to each equation of a program, before anything runs.

A tag goes with every value: which 16-bit dtype represents it, and what is asked of contractions with it. A plan is the
list of decisions about one jaxpr with given tags; the plans of programs inside hang below it.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx._autocast import compute as computes
from mpx._autocast import contraction, fp8
from mpx._autocast.compute import Compute
from mpx._autocast.rules import DEFAULT_RULES, REASONS, Rule
from mpx._jaxprs import (
    CALLS,
    CONTRACTIONS,
    CUSTOM_CALLS,
    ELEMENTWISE,
    PERMUTATIONS,
    REPEATS,
    SUMS,
    called_jaxpr,
    count_uses,
    dtype_of,
    is_literal,
    open_jaxpr,
    propagate,
)

MARK = "mpx:autocast"  # in the name stack of operations about which an autocast or `full_precision` inside decides


class Tag(NamedTuple):
    """The facts that are known of a value."""

    representable_in: np.dtype | None = None  # a 16-bit dtype that is known to have this float32 value
    compute: Compute | None = None  # how an override of the policy wants contractions with it to run
    is_argument: bool = False  # whether it has elements of the function's arguments, whose gradients a user gets
    is_copied: bool = False  # whether it may have an element twice, so that cotangents are still to be added up
    is_product: bool = False  # whether it is a narrowed contraction's result, whose cotangent that contraction rounds

    @property
    def in_memory(self) -> np.dtype | None:
        """The dtype in which the value's numbers are in memory before anything is computed; None if they are not."""
        return self.representable_in or (np.dtype(np.float32) if self.is_argument else None)


UNKNOWN = Tag()


@dataclasses.dataclass(frozen=True)
class Settings:
    """The choices of the user."""

    compute: Compute
    rules: Mapping[str, Rule]
    gradient_dtype: np.dtype | None = None  # of gradients of weights in contractions; None for the compute dtype


class Step(NamedTuple):
    """The decision about an equation."""

    eqn: JaxprEqn
    action: Literal["narrow", "enter", "keep", "round_cotangent"]  # the last one runs as traced, forward
    compute: Compute | None  # in what it runs, if it is narrowed
    in_tags: tuple[Tag, ...]
    out_tags: tuple[Tag, ...]
    plans: tuple["CastPlan", ...] = ()  # those of the programs inside, if it holds any that may be entered
    reason: str | None = None  # why it is kept, or not in 8 bits, if it might have been


@dataclasses.dataclass(frozen=True, eq=False)
class CastPlan:
    """The decisions about a jaxpr whose inputs have given tags."""

    jaxpr: Any  # open or closed
    steps: tuple[Step, ...]
    in_tags: tuple[Tag, ...]
    out_tags: tuple[Tag, ...]
    # The 16-bit dtype to which the cotangent of each input is rounded in any case, since a single narrowed contraction
    # uses it; None where that is not so.
    rounded_to: tuple[np.dtype | None, ...]

    @property
    def changes(self) -> bool:
        """Return whether any step, here or below, does anything but run as traced."""
        return any(step.action != "keep" for step in self.steps)


class Handler(NamedTuple):
    """The functions that plan and run an operation which holds programs."""

    # From the equation and its operands' tags to the plans of the programs inside and the results' tags.
    plan: Callable[[JaxprEqn, tuple[Tag, ...], "Planner"], tuple[tuple[CastPlan, ...], tuple[Tag, ...]]]
    # From the equation and the plans inside to the `CastPlan.rounded_to` of each operand. None if these are all None.
    rounded_to: Callable[[JaxprEqn, tuple[CastPlan, ...]], list[np.dtype | None]] | None
    # From the step, its operands, the function that runs a plan on values, and the settings to the results.
    run: Callable[[Step, list[Any], "Run", Settings], Sequence[Any]]


Run = Callable[[CastPlan, Sequence[Any]], list[Any]]


class Planner:
    """Makes the plans of jaxprs, each one once for the same tags."""

    def __init__(self, settings: Settings, handlers: Mapping[str, Handler]) -> None:
        self.settings = settings
        self._handlers = handlers
        self._plans: dict[tuple[int, tuple[Tag, ...]], CastPlan] = {}

    def plan(self, jaxpr: Any, in_tags: tuple[Tag, ...]) -> CastPlan:
        """Return the plan of an open or closed jaxpr whose inputs have these tags."""
        key = id(jaxpr), in_tags
        if key not in self._plans:
            self._plans[key] = self._make_plan(jaxpr, in_tags)
        return self._plans[key]

    def _make_plan(self, jaxpr: Any, in_tags: tuple[Tag, ...]) -> CastPlan:
        steps: list[Step] = []
        program = open_jaxpr(jaxpr)
        uses = count_uses(program)

        def used_once(variables: Sequence[Any], tags: Sequence[Tag]) -> tuple[Tag, ...]:
            """Return tags of values: the cotangents of several uses are added up before a contraction rounds them."""
            pairs = zip(variables, tags, strict=True)
            return tuple(tag._replace(is_product=False) if tag.is_product and uses[v] > 1 else tag for v, tag in pairs)

        def decide(eqn: JaxprEqn, tags: list[Tag]) -> tuple[Tag, ...]:
            steps.append(self._step(eqn, used_once(eqn.invars, tags)))
            return steps[-1].out_tags

        out_tags = used_once(program.outvars, propagate(jaxpr, in_tags, decide, lambda v: UNKNOWN))
        if any(step.action == "round_cotangent" for step in steps):
            activated = _going_into_functions(program)
            steps = [
                step._replace(action="keep")
                if step.action == "round_cotangent" and step.eqn.outvars[0] not in activated
                else step
                for step in steps
            ]
        return CastPlan(jaxpr, tuple(steps), in_tags, out_tags, self._rounded_to(program, steps, uses))

    def _step(self, eqn: JaxprEqn, tags: tuple[Tag, ...]) -> Step:
        name = eqn.primitive.name
        rule = self.settings.rules.get(name, "keep")
        is_decided = MARK in str(eqn.source_info.name_stack)
        if rule == "follow":
            followed = self._followed(eqn, tags)
            # A value that a policy of `jax.checkpoint` keeps by its name is kept in 16 bits.
            dtype = travels_in(followed[0], None, self.settings) if name == "name" and not is_decided else None
            if dtype is not None:
                return Step(eqn, "narrow", computes.compute_of_dtype(dtype), tags, followed)
            return Step(eqn, "keep", None, tags, followed)
        if is_decided:
            return _kept(eqn, tags, "decided by an autocast or full_precision inside")
        if rule == "enter":
            return self._entered(eqn, tags)
        if rule == "narrow" or (rule == "narrow_if_representable" and self._is_representable(eqn, tags)):
            return self._narrowed(eqn, tags)
        if DEFAULT_RULES.get(name, "keep") not in ("keep", rule):
            return _kept(eqn, tags, f"the rule for {name} is {rule}")
        if name == "add" and _adds_a_bias(eqn, tags):
            return Step(eqn, "round_cotangent", None, tags, (UNKNOWN,), reason=REASONS[name])
        return _kept(eqn, tags, REASONS.get(name, "unknown to the table"))

    def _entered(self, eqn: JaxprEqn, tags: tuple[Tag, ...]) -> Step:
        """Plan an operation that holds programs; a literal that it is given may be representable."""
        tags = tuple(
            self._common_tag(eqn, [(v, tag)], v) if is_literal(v) else tag
            for v, tag in zip(eqn.invars, tags, strict=True)
        )
        plans, out_tags = self._handlers[eqn.primitive.name].plan(eqn, tags, self)
        action = "enter" if any(plan.changes for plan in plans) else "keep"
        return Step(eqn, action, None, tags, out_tags, plans)

    def _narrowed(self, eqn: JaxprEqn, tags: tuple[Tag, ...]) -> Step:
        asked = [tag.compute for tag in tags if tag.compute is not None]
        compute = computes.widest(asked) if asked else self.settings.compute
        if not compute.changes:
            reason = "an override of the policy asks for f32" if asked else f"{compute.name} is asked for"
            return _kept(eqn, tags, "this device has no TF32" if compute.name == "tf32" else reason)
        why_kept = contraction.why_kept if eqn.primitive.name in CONTRACTIONS else _why_elementwise_kept
        reason = why_kept(eqn, compute)
        if reason is not None:
            return _kept(eqn, tags, reason)
        is_product, why_16_bits = eqn.primitive.name in CONTRACTIONS, None
        if compute.fp8 is not None:
            why_16_bits = fp8.why_not(eqn, compute.fp8) if is_product else "FP8 is for matrix products"
            compute = compute if why_16_bits is None else compute.fallback
        elif asked and self.settings.compute.fp8 is not None:
            why_16_bits = f"an override of the policy asks for {compute.name}"
        narrow = Tag(compute.dtype, is_product=is_product) if compute.is_narrow else UNKNOWN
        out_tags = tuple(narrow if _is_f32(v) else UNKNOWN for v in eqn.outvars)
        return Step(eqn, "narrow", compute, tags, out_tags, reason=why_16_bits)

    def _is_representable(self, eqn: JaxprEqn, tags: tuple[Tag, ...]) -> bool:
        """Return whether the compute dtype has all operands, but for literals and biases, which are rounded."""
        if not self.settings.compute.is_narrow or not all(_is_f32(v) for v in [*eqn.invars, *eqn.outvars]):
            return False
        # A square is what norms and variances add up: there its rounding errors count.
        if eqn.primitive.name == "integer_pow" and eqn.params["y"] == 2:
            return False
        arrays = [(v, tag) for v, tag in zip(eqn.invars, tags, strict=True) if not is_literal(v)]
        exact = [tag.representable_in == self.settings.compute.dtype for _, tag in arrays]
        is_bias = [tag.is_argument and (tag.is_copied or _is_smaller(v, eqn.outvars[0])) for v, tag in arrays]
        return any(exact) and all(is_exact or rounds for is_exact, rounds in zip(exact, is_bias, strict=True))

    def _followed(self, eqn: JaxprEqn, tags: tuple[Tag, ...]) -> tuple[Tag, ...]:
        """Return the tags of results that are elements of the operands."""
        if any(jex_core.jaxprs_in_params(eqn.params)):  # a scatter that applies a function
            return (UNKNOWN,) * len(eqn.outvars)
        pairs = list(zip(eqn.invars, tags, strict=True))
        if len(eqn.invars) == len(eqn.outvars) > 1:  # several arrays at once: each result has its operand
            return tuple(self._common_tag(eqn, [pair], v) for pair, v in zip(pairs, eqn.outvars, strict=True))
        return tuple(self._common_tag(eqn, pairs, v) for v in eqn.outvars)

    def _common_tag(self, eqn: JaxprEqn, pairs: Sequence[tuple[Any, Tag]], result: Any) -> Tag:
        floats = [(v, tag) for v, tag in pairs if jnp.issubdtype(dtype_of(v), jnp.floating)]
        arrays = [(v, tag) for v, tag in floats if not is_literal(v)]
        asked = [tag.compute for _, tag in arrays if tag.compute is not None]
        is_broadcast = eqn.primitive.name in ELEMENTWISE and any(_is_smaller(v, result) for v, _ in arrays)
        return Tag(
            self._common_dtype(eqn, floats, result),
            computes.widest(asked) if asked else None,
            is_argument=any(tag.is_argument for _, tag in arrays),
            is_copied=is_broadcast or eqn.primitive.name in REPEATS or any(tag.is_copied for _, tag in arrays),
            is_product=eqn.primitive.name in PERMUTATIONS and all(tag.is_product for _, tag in arrays),
        )

    def _common_dtype(self, eqn: JaxprEqn, floats: list[tuple[Any, Tag]], result: Any) -> np.dtype | None:
        """Return the 16-bit dtype that has all elements of a result, which are those of these operands."""
        dtypes = {_dtype_that_has(v, tag) for v, tag in floats if not is_literal(v)}
        constants = [v.val for v, _ in floats if is_literal(v)]
        if eqn.params.get("fill_value") is not None:
            constants.append(eqn.params["fill_value"])
        if eqn.primitive.name == "convert_element_type" and dtype_of(eqn.invars[0]) == np.bool_:
            constants = [0.0, 1.0]
        if not dtypes and constants and self.settings.compute.is_narrow:
            dtypes = {self.settings.compute.dtype}
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
        eqn, name = step.eqn, step.eqn.primitive.name
        if step.action == "narrow" and step.compute is not None and step.compute.is_narrow:
            dtype = step.compute.dtype
            if name in CONTRACTIONS:
                return [dtype] * len(eqn.invars)
            # The cotangents of a bias are rounded before they are added up, and not after.
            return [None if _is_smaller(v, eqn.outvars[0]) else dtype for v in eqn.invars]
        of_handler = self._handlers[name].rounded_to if step.action == "enter" else None
        if of_handler is not None:
            return of_handler(eqn, step.plans)
        return [rounded.get(eqn.outvars[0]) if name in PERMUTATIONS else None] * len(eqn.invars)


def travels_in(tag: Tag, rounded_to: np.dtype | None, settings: Settings) -> np.dtype | None:
    """Return the 16-bit dtype in which a value crosses the border of a program inside; None if in its own.

    Nothing is lost on the way in. On the way back its cotangent, a sum in float32 of those of all uses inside, is
    rounded once. For a weight, and for copies of one value, that is allowed only if it has been rounded already: the
    gradients that a user gets lose nothing, and cotangents are rounded after they are added up.
    """
    if tag.is_argument and settings.gradient_dtype is not None:
        return None
    is_allowed = rounded_to == tag.representable_in or not (tag.is_argument or tag.is_copied)
    return tag.representable_in if is_allowed else None


def _kept(eqn: JaxprEqn, tags: tuple[Tag, ...], reason: str) -> Step:
    return Step(eqn, "keep", None, tags, (UNKNOWN,) * len(eqn.outvars), reason=reason)


def _why_elementwise_kept(eqn: JaxprEqn, compute: Compute) -> str | None:
    """Return why an operation that is no contraction cannot be narrowed, as a user's table asks; or None."""
    if not compute.is_narrow:
        return f"{compute.name} is for contractions"
    if not any(_is_f32(v) for v in eqn.invars) or not all(_is_f32(v) for v in eqn.outvars):
        return "operands and results are not float32"
    return None


def _adds_a_bias(eqn: JaxprEqn, tags: tuple[Tag, ...]) -> bool:
    """Return whether an addition adds copies of a smaller array to the result of a narrowed contraction.

    That contraction rounds the cotangent. XLA would write it in float32 too, for the sum that is the bias's gradient.
    """
    result, pairs = eqn.outvars[0], list(zip(eqn.invars, tags, strict=True))
    is_bias = lambda v, tag: not is_literal(v) and (tag.is_copied or _is_smaller(v, result))
    return any(
        tag.is_product and not _is_smaller(v, result) and is_bias(*other)
        for (v, tag), other in zip(pairs, pairs[::-1], strict=True)
    )


def _going_into_functions(program: jex_core.Jaxpr) -> set[Any]:
    """Return the values that go, moved around at most, into anything but a sum or a contraction: an activation, a loss.

    XLA makes the cotangents of the others in the kernels that add them up, and has no need to write them twice.
    """
    found: set[Any] = set()
    for eqn in reversed(program.eqns):
        name, results = eqn.primitive.name, found.intersection(filter(_is_f32, eqn.outvars))
        if name in CALLS | CUSTOM_CALLS:
            inner = open_jaxpr(called_jaxpr(eqn))
            inside = _going_into_functions(inner)
            found.update(v for v, w in zip(eqn.invars, inner.invars, strict=True) if w in inside and not is_literal(v))
        moves = name in CALLS | CUSTOM_CALLS or DEFAULT_RULES.get(name) == "follow"
        if results if moves else name not in CONTRACTIONS | SUMS | {"add"}:
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
    """Return whether a 16-bit dtype has a value; all of them have NaN."""
    value = np.float32(value)
    with np.errstate(over="ignore"):
        return bool(np.isnan(value)) or bool(np.float32(value.astype(dtype)) == value)
