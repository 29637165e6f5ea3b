"""Compare the memory of precision recipes, for one model and one optimizer."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import optax

from mpx import _errors, _tables
from mpx.tools.plan.memory_plan import MemoryPlan, evaluate, memory_plan
from mpx.tools.plan.recipes import MOMENTS, STANDARD_RECIPES, PrecisionRecipe
from mpx.tools.plan.units import digits, shown, unit_for

SENDS = "Sends: bytes a parameter and step, of weights that are gathered and gradients that devices add up."


@dataclasses.dataclass(frozen=True)
class PlanComparison(_tables.Result):
    """Hold the plans of several recipes; prints as a table of what one device holds, with `rich.print` too.

    Attributes:
        plans: the plans by the names of their recipes.
    """

    plans: Mapping[str, MemoryPlan]

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers of each plan by the name of its recipe, for JSON."""
        return _tables.json_values(self.plans)

    def table(self, *, memory_bytes: int | None = None) -> _tables.Table:
        """Return a line for each recipe: its parts and the bytes a parameter, in GB, or less if they are small.

        Given the memory of a device, a line says whether the recipe fits and how large a model would, in place of the
        parts: all of it does not fit into 80 columns.
        """
        plans = self.plans.values()
        unit = unit_for([plan.total_bytes_a_device for plan in plans])
        in_unit = lambda numbers: [shown(number, unit) for number in numbers]
        columns = {"recipe": list(self.plans)}
        if memory_bytes is None:
            columns["params"] = in_unit(p.bytes_of("parameters") + p.bytes_of("not trained") for p in plans)
            columns["grads"] = in_unit(p.bytes_of("gradients") for p in plans)
            columns["optimizer"] = in_unit(p.state_bytes_a_device for p in plans)
        columns["total"] = in_unit(p.total_bytes_a_device for p in plans)
        columns["a param"] = [digits(p.bytes_a_parameter) for p in plans]
        if any(p.devices > 1 for p in plans):
            columns["sends"] = [digits(p.gathered_bytes_a_parameter + p.summed_bytes_a_parameter) for p in plans]
        if memory_bytes is not None:
            columns["fits"] = ["yes" if p.total_bytes_a_device <= memory_bytes else "no" for p in plans]
            columns["largest model"] = [f"{digits(p.largest_model(memory_bytes) / 1e9)}B" for p in plans]
        lines = zip(*columns.values(), strict=True)
        return _tables.Table(next(iter(plans)).title(unit), [tuple(columns), *lines], range(1, len(columns)))

    def _parts(self) -> Iterator[_tables.Table | str]:
        yield self.table()
        if any(plan.devices > 1 for plan in self.plans.values()):
            yield SENDS


def compare_plans(
    model: Any,
    rule: optax.GradientTransformation | None = None,
    recipes: Mapping[str, PrecisionRecipe] | None = None,
    **options: Any,
) -> PlanComparison:
    """Count the bytes that a training run holds under several recipes.

    Args:
        model: as in `memory_plan`.
        rule: any Optax transformation without wrappers, which the recipes add; `optax.adamw` if None.
        recipes: the recipes by their names. None: `STANDARD_RECIPES`; if the rule keeps no moments, without the recipes
            that store moments in fewer bits.
        options: the keyword arguments of `memory_plan`: `gradient_dtype`, `mesh`, `axis`, `param_specs`...

    Returns:
        A `PlanComparison`.

    Raises:
        TypeError: if `rule` is not a transformation, or a recipe is not a `PrecisionRecipe`.
        ValueError: if there are no recipes; and as `memory_plan`.

    Example:
        >>> kahan = PrecisionRecipe("bf16", lambda rule: optax.chain(rule, kahan_summation()))
        >>> print(compare_plans(1000, optax.sgd(0.1), {"Kahan": kahan}))
        Memory to train 1,000 parameters, in bytes
        recipe  params  grads  optimizer  total  a param
        Kahan    2,000  2,000      2,000  6,000    6.000
        >>> round(compare_plans(2**20).plans["bf16-split24-4bit"].bytes_a_parameter, 3)
        6.547
    """
    rule = optax.adamw(1e-3) if rule is None else _errors.as_transformation(rule, "compare_plans")
    model = evaluate(model)
    chosen = _recipes_for(rule, model) if recipes is None else recipes
    if not isinstance(chosen, Mapping) or not all(isinstance(x, PrecisionRecipe) for x in chosen.values()):
        raise TypeError(f"`compare_plans`: `recipes` must map names to `PrecisionRecipe`s, but got {recipes!r}.")
    if not chosen:
        raise ValueError("`compare_plans`: `recipes` is empty, so nothing would be compared.")
    plans = {name: memory_plan(model, x.wrap(rule), x.policy, **options) for name, x in chosen.items()}
    return PlanComparison(plans)


def _recipes_for(rule: optax.GradientTransformation, model: Any) -> dict[str, PrecisionRecipe]:
    """Return the standard recipes; for a rule without moments, only the ones that format no moments."""
    rows = memory_plan(model, rule).rows
    has_moments = any(row.name in MOMENTS.split("|") and row.kind.endswith("moment") for row in rows)
    return {name: recipe for name, recipe in STANDARD_RECIPES.items() if has_moments or not recipe.formats_moments}
