"""The decisions of `autocast` about a program, as data.

A plan is the list of decisions about one jaxpr whose inputs have given tags, and what
the program demands of each of them. Plans of programs inside hang below it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from mpx._autocast.precision import F32, ContractionPrecision
from mpx._autocast.rules import Rule
from mpx._autocast.tags import Tag
from mpx._jaxprs import open_jaxpr
from mpx._shardings import are_several_in_sight

# In the name stack of operations that an autocast or `full_precision` inside has
# decided about. A string, because JAX keeps nothing else of ours on an equation through
# `jit`, `grad`, `vmap` and loops.
DECIDED = "mpx:autocast"


class Demand(NamedTuple):
    """Holds what the rest of a program does to a value."""

    # the 16-bit dtype that all uses round it to; None if they differ, or use float32
    used_in: np.dtype | None = None
    # the dtype that its one use, a narrowed contraction, rounds its cotangent to
    cotangent_in: np.dtype | None = None
    # whether it goes, perhaps moved, into an activation or a loss
    is_activated: bool = False
    is_used: bool = True


UNUSED = Demand(is_used=False)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The choices of the user."""

    precision: ContractionPrecision
    rules: Mapping[str, Rule]
    # of sums that are gradients of weights; None: float32 on several devices
    reduce_dtype: np.dtype | None

    @property
    def has_wide_gradients(self) -> bool:
        """Return whether gradients of weights are unrounded float32 sums."""
        return self.precision.is_narrow and (
            are_several_in_sight()
            if self.reduce_dtype is None
            else self.reduce_dtype == np.float32
        )


class Step(NamedTuple):
    """The decision about an equation."""

    eqn: JaxprEqn
    in_tags: tuple[Tag, ...] = ()
    out_tags: tuple[Tag, ...] = ()
    # "transfer": other devices get the value in the compute dtype; "round_cotangent"
    # keeps the forward pass; "recompute" stands for several steps (see `recompute.py`);
    # "map" is kept, but narrowed by a `jax.vmap` around.
    action: Literal[
        "narrow", "enter", "keep", "round_cotangent", "transfer", "recompute", "map"
    ] = "keep"
    # In which it is narrowed, transferred, recomputed or mapped; else of no meaning.
    precision: ContractionPrecision = F32
    plans: tuple["Plan", ...] = ()  # of the programs inside, if they may be entered
    # Whether a use of its results does not round them, if it is narrowed.
    is_read_wide: bool = True
    # Why a contraction in it is kept, or runs in 16 bits and not in 8.
    reason: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The decisions about a jaxpr whose inputs have given tags."""

    jaxpr: Any  # open or closed
    steps: tuple[Step, ...]
    in_tags: tuple[Tag, ...]
    out_tags: tuple[Tag, ...]
    demands: tuple[Demand, ...]  # of its inputs

    @property
    def runs_as_traced(self) -> bool:
        """Return whether each step, here and below, just runs as traced."""
        return all(step.action == "keep" for step in self.steps)


# A step, how often it runs, and the equations around it.
PlacedStep = tuple[Step, int, tuple[JaxprEqn, ...]]


def walk(
    steps: Iterable[Step], times: int = 1, outer: tuple[JaxprEqn, ...] = ()
) -> Iterator[PlacedStep]:
    """Yield all of these steps and those of the plans inside, also of programs that are
    kept whole.
    """
    for step in steps:
        eqn = step.eqn
        inside: list[Sequence[Step]] = [plan.steps for plan in step.plans]
        if not inside and eqn.primitive.name != "pallas_call":
            inside = [
                [Step(each, reason=step.reason) for each in open_jaxpr(jaxpr).eqns]
                for jaxpr in jex_core.jaxprs_in_params(eqn.params)
            ]
        for steps_inside in inside:
            yield from walk(
                steps_inside, times * eqn.params.get("length", 1), (eqn, *outer)
            )
        if not inside:
            yield step, times, outer


# Runs a plan on values.
Run = Callable[[Plan, Sequence[Any]], list[Any]]
