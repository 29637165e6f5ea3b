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
    """Hold the plans of several recipes; prints as a table of what one device holds and
    needs at the peak.

    Numbers are in GB, or less if they are small. Given a memory, the table says what
    fits in place of the parts: all of it does not fit into 80 columns.
    """

    plans: Mapping[str, MemoryPlan]  # by the names of their recipes
    usable_bytes: float | None = (
        # what training may use of a device's memory; None if nobody asks what fits
        None
    )

    @property
    def fits(self) -> dict[str, str]:
        """Return whether a device can hold each plan, as `MemoryPlan.fits` says;
        nothing without a memory.
        """
        limit = self.usable_bytes
        return {
            name: p.fits(limit) for name, p in self.plans.items() if limit is not None
        }

    @property
    def largest_models(self) -> dict[str, int]:
        """Return how many parameters can be trained in the memory of a device; nothing
        without a memory.
        """
        limit = self.usable_bytes
        return {
            name: plan.largest_model(limit)
            for name, plan in self.plans.items()
            if limit is not None
        }

    def _parts(self) -> Iterator[Table | str]:
        plans = self.plans.values()
        unit = unit_for([plan.peak_bytes_a_device for plan in plans])

        def in_unit(numbers):
            return [shown(number, unit) for number in numbers]

        columns = {"recipe": list(self.plans)}
        if self.usable_bytes is None:
            columns["params"] = in_unit(
                p.bytes_of("parameters") + p.bytes_of("not trained") for p in plans
            )
            columns["grads"] = in_unit(p.bytes_of("gradients") for p in plans)
            columns["optimizer"] = in_unit(p.state_bytes_a_device for p in plans)
        columns["held"] = in_unit(p.total_bytes_a_device for p in plans)
        columns["a param"] = [digits(p.bytes_a_parameter) for p in plans]
        if has_peak := any(p.step for p in plans):
            columns["peak"] = in_unit(p.least_peak_bytes_a_device for p in plans)
            columns["up to"] = in_unit(p.peak_bytes_a_device for p in plans)
        is_sharded = any(p.devices > 1 for p in plans)
        if is_sharded:
            columns["sends"] = [
                digits(p.gathered_bytes_a_parameter + p.summed_bytes_a_parameter)
                for p in plans
            ]
        if self.usable_bytes is not None:
            columns["fits"] = [
                " ".join(fits.split()[:2]) for fits in self.fits.values()
            ]
            columns["largest"] = [
                f"{digits(count / 1e9)}B" for count in self.largest_models.values()
            ]
        lines = zip(*columns.values(), strict=True)
        yield Table(
            next(iter(plans)).title(unit),
            [tuple(columns), *lines],
            range(1, len(columns)),
        )
        for answer in sorted({fits for fits in self.fits.values() if " " in fits}):
            yield (
                f"{', '.join(name for name, fits in self.fits.items() if fits == answer)}:"
                f" {answer}."
            )
        if has_peak:
            ends = {name: plan.ends() for name, plan in self.plans.items()}
            first, *others = dict.fromkeys(ends.values())
            yield f"The peak is that of {next(iter(plans)).step}:\n{first}."
            for other in others:
                yield (
                    "With"
                    f" {', '.join(name for name, end in ends.items() if end == other)} it"
                    f" is:\n{other}."
                )
        if is_sharded:
            yield (
                "Sends: bytes a parameter and step, of weights that are gathered and"
                " gradients that devices add up."
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
        usable_bytes: what training may use of the memory of a device, to ask what fits.
            JAX takes 75% of a GPU's.
        options: the keyword arguments of `memory_plan`: `gradient_dtype`, `mesh`,
            `axis`, `param_specs`, `batch`...

    Returns:
        A `PlanComparison`.

    Raises:
        TypeError: if `rule` is not a transformation.
        ValueError: if there is no such recipe; and as `memory_plan`.

    Example:
        >>> print(compare_plans(1000, optax.sgd(0.1), ["bf16-split", "f32"], batch=0))
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
