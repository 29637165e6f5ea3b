"""What `autocast` does to each equation of a program, decided before anything runs.

A tag goes with every value: on which 16-bit grid it is known to lie, and what is asked of contractions with it. A plan
is the list of decisions for one jaxpr with given tags; plans of nested jaxprs hang below it.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from mpx._autocast import compute as computes
from mpx._autocast import contraction
from mpx._autocast.compute import Compute
from mpx._autocast.jaxprs import dtype_of, is_literal, open_jaxpr
from mpx._autocast.rules import DEFAULT_RULES, REASONS, Rule

MARK = "mpx:autocast"  # in the name stack of what an autocast or `full_precision` inside has settled already


class Tag(NamedTuple):
    """What is known of a value.

    Attributes:
        grid: a 16-bit dtype of which it is a value, though its own dtype is float32; None if that is not known.
        compute: in what contractions with it shall run, by an override of the policy; None for the default.
        is_argument: whether arguments of the function are among its values: weights, whose gradients a user gets.
        is_copied: whether it may hold a value several times: after a broadcast, cotangents are still to be added up.
    """

    grid: np.dtype | None = None
    compute: Compute | None = None
    is_argument: bool = False
    is_copied: bool = False


UNKNOWN = Tag()
_COPYING = ("broadcast_in_dim", "broadcast_to", "gather", "tile")
BROADCASTING = ("add", "atan2", "clamp", "div", "max", "min", "mul", "pow", "rem", "select_n", "sub")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user has chosen.

    Attributes:
        compute: how contractions run.
        rules: the table.
        gradient_dtype: of the gradients of weights in contractions; None for the compute dtype.
    """

    compute: Compute
    rules: Mapping[str, Rule]
    gradient_dtype: np.dtype | None = None


class Step(NamedTuple):
    """The decision about an equation.

    Attributes:
        eqn: the equation.
        action: `lower`, `enter` or `keep`.
        compute: in what it runs, if lowered.
        in_tags: of its operands.
        out_tags: of its results.
        plans: those of the jaxprs inside, if entered.
        reason: why it is kept, if it might have been lowered; or None.
    """

    eqn: jex_core.JaxprEqn
    action: Rule
    compute: Compute | None
    in_tags: tuple[Tag, ...]
    out_tags: tuple[Tag, ...]
    plans: tuple["Plan", ...] = ()
    reason: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The decisions about a jaxpr.

    Attributes:
        jaxpr: the program, open or closed.
        steps: one for each equation.
        in_tags: of its inputs, for which this plan was made.
        out_tags: of its results.
        rounded_to: for each input the 16-bit dtype to which its cotangent is rounded in any case, because a single
            lowered contraction uses it; None where that is not so.
        changes: whether any step, here or below, does anything but run as traced.
    """

    jaxpr: Any
    steps: tuple[Step, ...]
    in_tags: tuple[Tag, ...]
    out_tags: tuple[Tag, ...]
    rounded_to: tuple[np.dtype | None, ...]
    changes: bool


class Entry(NamedTuple):
    """How a higher-order operation is planned.

    Attributes:
        plan: from the equation, its operands' tags and the planner to the plans inside and the results' tags.
        rounded_to: from the equation and the plans inside to what `Plan.rounded_to` says, for each operand.
    """

    plan: Callable[[jex_core.JaxprEqn, tuple[Tag, ...], "Planner"], tuple[tuple[Plan, ...], tuple[Tag, ...]]]
    rounded_to: Callable[[jex_core.JaxprEqn, tuple[Plan, ...]], list[np.dtype | None]]


class Planner:
    """Plans jaxprs, each one once for the same tags."""

    def __init__(self, settings: Settings, entries: Mapping[str, Entry]) -> None:
        self.settings = settings
        self._entries = entries
        self._plans: dict[tuple[int, tuple[Tag, ...]], Plan] = {}

    def plan(self, jaxpr: Any, in_tags: tuple[Tag, ...]) -> Plan:
        """The plan of an open or closed jaxpr whose inputs have these tags."""
        key = id(jaxpr), in_tags
        if key not in self._plans:
            self._plans[key] = self._make_plan(jaxpr, in_tags)
        return self._plans[key]

    def _make_plan(self, jaxpr: Any, in_tags: tuple[Tag, ...]) -> Plan:
        program = open_jaxpr(jaxpr)
        tags: dict[Any, Tag] = dict(zip(program.invars, in_tags, strict=True))
        steps = []
        for eqn in program.eqns:
            operands = tuple(UNKNOWN if is_literal(v) else tags.get(v, UNKNOWN) for v in eqn.invars)
            step = self._step(eqn, operands)
            steps.append(step)
            tags.update(zip(eqn.outvars, step.out_tags, strict=True))
        out_tags = tuple(UNKNOWN if is_literal(v) else tags.get(v, UNKNOWN) for v in program.outvars)
        return Plan(
            jaxpr,
            tuple(steps),
            in_tags,
            out_tags,
            self._rounded_to(program, steps),
            any(step.action != "keep" for step in steps),
        )

    def _step(self, eqn: jex_core.JaxprEqn, tags: tuple[Tag, ...]) -> Step:
        name = eqn.primitive.name
        rule = self.settings.rules.get(name, "keep")
        kept = REASONS.get(name, "unknown to the table")
        if DEFAULT_RULES.get(name, "keep") not in ("keep", rule):
            kept = f"the rule for {name} is {rule}"
        unknown = (UNKNOWN,) * len(eqn.outvars)
        is_settled = MARK in str(eqn.source_info.name_stack)
        if rule == "follow":
            followed = self._followed(eqn, tags)
            if name == "name" and followed[0].grid is not None and not is_settled:
                # What a policy of `jax.checkpoint` keeps by its name is kept in 16 bits.
                if travels_narrow(tags[0], None, self.settings):
                    return Step(eqn, "lower", computes.compute_of_dtype(followed[0].grid), tags, followed)
            return Step(eqn, "keep", None, tags, followed)
        if is_settled:
            return Step(eqn, "keep", None, tags, unknown, reason="settled by an autocast or full_precision inside")
        if rule == "enter":
            tags = tuple(
                self._common_tag(eqn, [(v, tag)], v) if is_literal(v) else tag
                for v, tag in zip(eqn.invars, tags, strict=True)
            )
            plans, out_tags = self._entries[name].plan(eqn, tags, self)
            action = "enter" if any(plan.changes for plan in plans) else "keep"
            return Step(eqn, action, None, tags, out_tags, plans)
        if rule == "lower" or (rule == "lower_on_grid" and self._is_on_grid(eqn, tags)):
            return self._lowered(eqn, tags)
        return Step(eqn, "keep", None, tags, unknown, reason=kept)

    def _lowered(self, eqn: jex_core.JaxprEqn, tags: tuple[Tag, ...]) -> Step:
        asked = [tag.compute for tag in tags if tag.compute is not None]
        compute = computes.widest(asked) if asked else self.settings.compute
        unknown = (UNKNOWN,) * len(eqn.outvars)
        if not compute.changes:
            reason = "an override of the policy asks for f32" if asked else f"{compute.name} is asked for"
            if compute.name == "tf32":
                reason = "this device has no TF32"
            return Step(eqn, "keep", None, tags, unknown, reason=reason)
        is_contraction = eqn.primitive.name in contraction.CONTRACTIONS
        reason = contraction.why_kept(eqn, compute) if is_contraction else _why_elementwise_kept(eqn, compute)
        if reason is not None:
            return Step(eqn, "keep", None, tags, unknown, reason=reason)
        grid = Tag(compute.dtype) if compute.is_narrow else UNKNOWN
        return Step(eqn, "lower", compute, tags, tuple(grid if _is_f32(v) else UNKNOWN for v in eqn.outvars))

    def _is_on_grid(self, eqn: jex_core.JaxprEqn, tags: tuple[Tag, ...]) -> bool:
        """Whether operands are values of the compute dtype; constants of the source code and biases are rounded."""
        if not self.settings.compute.is_narrow or not all(_is_f32(v) for v in [*eqn.invars, *eqn.outvars]):
            return False
        # A square is what norms and variances add up: there its rounding errors count.
        if eqn.primitive.name == "integer_pow" and eqn.params["y"] == 2:
            return False
        arrays = [tag for v, tag in zip(eqn.invars, tags, strict=True) if not is_literal(v)]
        on_grid = [tag.grid == self.settings.compute.dtype for tag in arrays]
        is_bias = [
            tag.is_argument and (tag.is_copied or _is_smaller(v, eqn.outvars[0]))
            for v, tag in zip(eqn.invars, tags, strict=True)
            if not is_literal(v)
        ]
        return any(on_grid) and all(lies or is_weight for lies, is_weight in zip(on_grid, is_bias, strict=True))

    def _followed(self, eqn: jex_core.JaxprEqn, tags: tuple[Tag, ...]) -> tuple[Tag, ...]:
        """The tags of results that are values of the operands."""
        if any(jex_core.jaxprs_in_params(eqn.params)):  # a scatter that applies a function
            return (UNKNOWN,) * len(eqn.outvars)
        if len(eqn.invars) == len(eqn.outvars) > 1:  # several arrays at once: each result has its operand
            return tuple(
                self._common_tag(eqn, [pair], v) for *pair, v in zip(eqn.invars, tags, eqn.outvars, strict=True)
            )
        pairs = list(zip(eqn.invars, tags, strict=True))
        return tuple(self._common_tag(eqn, pairs, v) for v in eqn.outvars)

    def _common_tag(self, eqn: jex_core.JaxprEqn, pairs: list[Any], result: Any) -> Tag:
        floats = [(v, tag) for v, tag in pairs if jnp.issubdtype(dtype_of(v), jnp.floating)]
        arrays = [_with_own_grid(v, tag) for v, tag in floats if not is_literal(v)]
        constants = [v.val for v, _ in floats if is_literal(v)]
        if eqn.params.get("fill_value") is not None:
            constants.append(eqn.params["fill_value"])
        if eqn.primitive.name == "convert_element_type" and dtype_of(eqn.invars[0]) == np.bool_:
            constants = [0.0, 1.0]
        if not _is_f32(result) or not (arrays or constants):
            grid = None
        elif arrays:
            grids = {tag.grid for tag in arrays}
            grid = grids.pop() if len(grids) == 1 else None
        else:
            grid = self.settings.compute.dtype if self.settings.compute.is_narrow else None
        if grid is not None and not all(_lies_on(value, grid) for value in constants):
            grid = None
        asked = [tag.compute for tag in arrays if tag.compute is not None]
        return Tag(
            grid,
            computes.widest(asked) if asked else None,
            is_argument=any(tag.is_argument for tag in arrays),
            is_copied=any(tag.is_copied for tag in arrays)
            or eqn.primitive.name in _COPYING
            or (
                eqn.primitive.name in BROADCASTING
                and any(_is_smaller(v, result) for v, _ in floats if not is_literal(v))
            ),
        )

    def _rounded_to(self, program: jex_core.Jaxpr, steps: list[Step]) -> tuple[np.dtype | None, ...]:
        used = [v for eqn in program.eqns for v in eqn.invars] + list(program.outvars)
        uses = Counter(v for v in used if not is_literal(v))
        rounded: dict[Any, np.dtype | None] = {}
        for step in reversed(steps):
            for v, dtype in zip(step.eqn.invars, self._operands_rounded_to(step, rounded), strict=True):
                if not is_literal(v):
                    rounded[v] = dtype if uses[v] == 1 else None
        return tuple(rounded.get(v) for v in program.invars)

    def _operands_rounded_to(self, step: Step, rounded: dict[Any, np.dtype | None]) -> list[np.dtype | None]:
        eqn = step.eqn
        if step.action == "lower" and step.compute is not None and step.compute.is_narrow:
            if eqn.primitive.name in contraction.CONTRACTIONS:
                return [step.compute.dtype] * len(eqn.invars)
            # The cotangents of a bias are rounded before they are added up, and not after.
            return [None if _is_smaller(v, eqn.outvars[0]) else step.compute.dtype for v in eqn.invars]
        if step.action == "enter":
            return self._entries[eqn.primitive.name].rounded_to(eqn, step.plans)
        # Where results are the operand's values, one for one, so are the cotangents. A broadcast adds them up.
        if eqn.primitive.name in ("reshape", "transpose", "squeeze", "rev", "copy", "name", "sharding_constraint"):
            return [rounded.get(eqn.outvars[0])] * len(eqn.invars)
        return [None] * len(eqn.invars)


def travels_narrow(tag: Tag, rounded_to: np.dtype | None, settings: Settings) -> bool:
    """Whether a value on a grid crosses the border of a nested program in 16 bits.

    Nothing is lost on the way in. On the way back its cotangent, a sum in float32 of those of all uses inside, is
    rounded once. For a weight, and for copies of one value, only if it has been rounded already: the gradients that a
    user gets lose nothing, and cotangents are rounded after they are added up.
    """
    if tag.grid is None:
        return False
    if tag.is_argument and settings.gradient_dtype is not None:
        return False
    return rounded_to == tag.grid or not (tag.is_argument or tag.is_copied)


def _why_elementwise_kept(eqn: jex_core.JaxprEqn, compute: Compute) -> str | None:
    """Why an operation that is no contraction cannot be lowered, as a user's table asks."""
    if not compute.is_narrow:
        return f"{compute.name} is for contractions"
    if not any(_is_f32(v) for v in eqn.invars) or not all(_is_f32(v) for v in eqn.outvars):
        return "operands and results are not float32"
    return None


def _is_smaller(v: Any, result: Any) -> bool:
    """Whether an operand has fewer axes, or shorter ones, than a result."""
    return v.aval.shape != result.aval.shape


def _is_f32(v: Any) -> bool:
    return dtype_of(v) == np.float32


def _with_own_grid(v: Any, tag: Tag) -> Tag:
    """A value of a 16-bit dtype lies on its grid."""
    return tag._replace(grid=np.dtype(v.aval.dtype)) if v.aval.dtype.itemsize == 2 else tag


def _lies_on(value: Any, grid: np.dtype) -> bool:
    value = np.float32(value)
    with np.errstate(over="ignore"):
        return bool(np.isnan(value)) or bool(np.float32(value.astype(grid)) == value)
