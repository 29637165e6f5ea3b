"""Compare the memory of precision recipes, for one model and one optimizer."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from mpx import _errors
from mpx._mixed_precision import mixed_precision
from mpx._policy import get_policy
from mpx._recipes import RECIPES
from mpx._tables import Result, Table, digits, shown, unit_for
from mpx.tools.plan.memory_plan import MemoryPlan, evaluate, memory_plan


@dataclasses.dataclass(frozen=True)
class PlanComparison(Result):
    """Hold the plans of several recipes; prints as a table of what one device holds.

    Numbers are in GB, or less if they are small. Given a memory, the table says what is
    left of it for activations.
    """

    plans: Mapping[str, MemoryPlan]  # by the names of their recipes
    # What training may use of a device's memory; None if nobody asks what is left.
    usable_bytes: float | None = None

    @property
    def left(self) -> dict[str, int]:
        """Return what each plan leaves for activations, as `MemoryPlan.left` says;
        nothing without a memory.
        """
        limit = self.usable_bytes
        return {
            name: plan.left(limit)
            for name, plan in self.plans.items()
            if limit is not None
        }

    def _parts(self) -> Iterator[Table | str]:
        plans, limit = self.plans.values(), self.usable_bytes
        unit = unit_for([plan.total_bytes_a_device for plan in plans])
        lines = [["recipe", "params", "grads", "optimizer", "held", "a param"]]
        for name, p in self.plans.items():
            held = (
                p.bytes_of("parameters") + p.bytes_of("not trained"),
                p.bytes_of("gradients"),
                p.state_bytes_a_device,
                p.total_bytes_a_device,
            )
            of_each = digits(p.bytes_a_parameter)
            lines.append([name, *(shown(number, unit) for number in held), of_each])
        if limit is not None:
            left = [
                "no fit" if p.is_too_large(limit) else shown(p.left(limit), unit)
                for p in plans
            ]
            for line, cell in zip(lines, ["left", *left], strict=True):
                line.append(cell)
        yield Table(next(iter(plans)).title(unit), lines, range(1, len(lines[0])))
        if limit is not None and any(p.left(limit) < 0 for p in plans):
            yield (
                "Left below 0: it fits only where XLA frees each gradient once it is"
                " used. No fit: weights and state alone are too large."
            )


def compare_plans(
    model: Any,
    rule: optax.GradientTransformation | None = None,
    recipes: Sequence[str] | None = None,
    *,
    usable_bytes: float | None = None,
    **options: Any,
) -> PlanComparison:
    """Count the bytes that a training run needs under several recipes.

    Args:
        model: as in `memory_plan`.
        rule: any Optax transformation without wrappers, which the recipes add;
            `optax.adamw` if None.
        recipes: names of recipes (see `recipes`). None: all; if the rule keeps no
            moments, without those that store moments in fewer bits.
        usable_bytes: what training may use of the memory of a device, to ask what is
            left for activations. JAX takes 75% of a GPU's.
        options: the keyword arguments of `memory_plan`: `gradient_dtype`, `mesh`,
            `axis` and `param_specs`.

    Returns:
        A `PlanComparison`.

    Raises:
        TypeError: if `rule` is not a transformation.
        ValueError: if there is no such recipe; and as `memory_plan`.

    Example:
        >>> print(compare_plans(1000, optax.sgd(0.1), ["bf16-split", "f32"]))
        Memory to train 1,000 parameters, in bytes
        recipe      params  grads  optimizer   held  a param
        bf16-split   2,000  2,000      2,000  6,000    6.000
        f32          4,000  4,000          0  8,000    8.000
    """
    rule = (
        optax.adamw(1e-3)
        if rule is None
        else _errors.as_transformation(rule, "compare_plans")
    )
    model = evaluate(model)
    if recipes is None:
        rows = memory_plan(model, rule).rows
        has_moments = any(row.kind.endswith("moment") for row in rows)
        recipes = [
            name
            for name, recipe in RECIPES.items()
            if has_moments or recipe.moments is None
        ]
    return PlanComparison(
        {name: _plan(model, rule, name, options) for name in recipes}, usable_bytes
    )


def _plan(
    model: Any, rule: optax.GradientTransformation, name: str, options: dict[str, Any]
) -> MemoryPlan:
    policy = get_policy(name)
    key = jax.random.key(0) if policy.recipe else None
    return memory_plan(model, mixed_precision(rule, policy, key=key), policy, **options)
