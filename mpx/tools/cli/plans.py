"""Plans of recipes and of compiled steps, and their tables, for `mpx plan`."""

import functools
from collections.abc import Mapping
from typing import Any

import mpx
from mpx._tables import Table
from mpx.tools.cli import given, output
from mpx.tools.cli.errors import CommandError, users_code
from mpx.tools.plan import STANDARD_RECIPES, PlanComparison, StepMemory
from mpx.tools.plan.units import shown, unit_for

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


def table_of_steps(steps: Mapping[int, StepMemory], largest_batch: int | None, exact: bool) -> list[Any]:
    """Return the table of the compiled steps by batch size, if there are any."""
    if not steps:
        return []
    largest = "" if largest_batch is None else f"; the largest batch that fits is {largest_batch:,}"
    rows = {size: found.as_dict() for size, found in steps.items()}
    unit = unit_for([step.peak for step in steps.values()], exact)
    lines = [(f"{size:,}", *(shown(number, unit) for number in row.values())) for size, row in rows.items()]
    title = f"Memory of the compiled step, in {unit[0]}{largest}"
    return [Table(title, [("batch", *next(iter(rows.values()))), *lines], range(7))]


def steps(reference: str, batches: list[int], limit: int | None) -> tuple[dict[int, StepMemory], int | None]:
    """Compile the step for each batch size, and return its memory by size and the largest size that fits."""
    step_of = given.function(reference)

    with output.progress_console().status("Compiling ...") as status:

        @functools.cache
        def memory_of(batch: int) -> StepMemory:
            status.update(f"Compiling the step for a batch of {batch:,} ...")
            with users_code():
                made = step_of(batch)
                if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], (tuple, list)):
                    raise CommandError(
                        f"{reference} must return a pair of a step and a tuple of its arguments or their shapes."
                    )
                return mpx.step_memory(made[0], *made[1])

        by_batch = {batch: memory_of(batch) for batch in sorted(set(batches))}
        peak = lambda batch: memory_of(batch).peak
        largest = None if limit is None else mpx.largest_that_fits(peak, limit, start=max(batches))
    return by_batch, largest
