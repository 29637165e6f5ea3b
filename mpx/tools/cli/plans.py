"""Plans of recipes and their tables, for `mpx plan`."""

from typing import Any

import mpx
from mpx.tools.cli import given
from mpx.tools.cli.errors import CommandError, users_code
from mpx.tools.plan import STANDARD_RECIPES, PlanComparison

CONVENTION = (
    "Without activations. Gradients are those inside one jitted step; --gradient-dtype f32 counts those that leave it."
)


def compare(model: Any, rule: str, names: list[str], mesh: str | None, gradient_dtype: str | None) -> PlanComparison:
    """Plan the recipes of these names, or all if there are none, with the options as they were given."""
    by_name = {name.lower(): (name, recipe) for name, recipe in STANDARD_RECIPES.items()}
    for name in names:
        if name.lower() not in by_name:
            raise CommandError(f"there is no recipe {name!r}. The standard recipes are: {'; '.join(STANDARD_RECIPES)}.")
    recipes = dict(by_name[name.lower()] for name in names) or None
    devices = None if mesh is None else given.mesh(mesh)
    axis = "data" if devices is None else devices.axis_names[0]
    with users_code():
        return mpx.compare_plans(
            model, given.rule(rule), recipes, gradient_dtype=gradient_dtype, mesh=devices, axis=axis
        )


def what_fits(comparison: PlanComparison, limit: int | None) -> dict[str, Any]:
    """Return for JSON which recipes fit into a memory, and their largest models; None without a memory."""
    if limit is None:
        return dict.fromkeys(("memory_bytes", "fits", "largest_models"))
    plans = comparison.plans
    fits = {name: plan.total_bytes_a_device <= limit for name, plan in plans.items()}
    largest = {name: plan.largest_model(limit) for name, plan in plans.items()}
    return {"memory_bytes": limit, "fits": fits, "largest_models": largest}


def tables(comparison: PlanComparison, limit: int | None, exact: bool) -> list[Any]:
    """Return the table of several recipes, or the parts of one."""
    plans = list(comparison.plans.values())
    compared = [comparison.table(exact=exact, memory_bytes=limit)] if limit or len(plans) > 1 else []
    return compared if len(plans) > 1 else [*compared, plans[0].table(exact=exact)]
