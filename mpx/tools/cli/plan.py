"""`mpx plan`: the memory of a training run, before anything is allocated."""

import functools
from collections.abc import Mapping
from typing import Any

import mpx
from mpx._tables import Table
from mpx.tools.cli import given, output
from mpx.tools.cli.errors import CommandError, users_code
from mpx.tools.plan import STANDARD_RECIPES, PrecisionRecipe, StepMemory
from mpx.tools.plan.units import shown, unit_for

_CONVENTION = (
    "Without activations. Gradients are those inside one jitted step; --gradient-dtype f32 counts those that leave it."
)


def run(
    model: str,
    recipe: list[str] | None,
    rule: str,
    mesh: str | None,
    gradient_dtype: str | None,
    memory: str | None,
    exact: bool,
    hlo: str | None,
    batch: list[int] | None,
    as_json: bool,
) -> None:
    """Plan each recipe, and write which fit and how large a model or a batch may be."""
    recipes = _recipes(recipe or [])
    if batch and hlo is None:
        raise CommandError("--batch would do nothing without --hlo.")
    devices = None if mesh is None else given.mesh(mesh)
    limit = None if memory is None else given.memory_bytes(memory)
    planned = given.function(model) if ":" in model else given.parameters(model)
    axis = "data" if devices is None else devices.axis_names[0]
    with users_code():
        comparison = mpx.compare_plans(
            planned, given.rule(rule), recipes, gradient_dtype=gradient_dtype, mesh=devices, axis=axis
        )
    plans = comparison.plans
    largest = {} if limit is None else {name: plan.largest_model(limit) for name, plan in plans.items()}
    fits = {} if limit is None else {name: plan.total_bytes_a_device <= limit for name, plan in plans.items()}
    steps, largest_batch = ({}, None) if hlo is None else _steps(hlo, batch or [1], limit)
    parts: list[Any] = [comparison.table(exact=exact, memory_bytes=limit)] if len(plans) > 1 or limit else []
    parts += [plan.table(exact=exact) for plan in plans.values() if len(plans) == 1]
    parts += [_step_table(steps, largest_batch, exact)] if steps else []
    if gradient_dtype is None:
        parts.append(_CONVENTION)
    content = {"model": model, "rule": rule, "plans": plans, "memory_bytes": limit, "fits": fits or None}
    content |= {"largest_models": largest or None, "largest_batch": largest_batch}
    content["steps"] = [{"batch": size} | found.as_dict() for size, found in steps.items()]
    output.write(content, parts, as_json)


def _recipes(names: list[str]) -> dict[str, PrecisionRecipe] | None:
    by_name = {name.lower(): (name, recipe) for name, recipe in STANDARD_RECIPES.items()}
    for name in names:
        if name.lower() not in by_name:
            raise CommandError(f"there is no recipe {name!r}. The standard recipes are: {'; '.join(STANDARD_RECIPES)}.")
    return dict(by_name[name.lower()] for name in names) or None


def _step_table(steps: Mapping[int, StepMemory], largest_batch: int | None, exact: bool) -> Table:
    largest = "" if largest_batch is None else f"; the largest batch that fits is {largest_batch:,}"
    rows = {size: found.as_dict() for size, found in steps.items()}
    unit = unit_for([step.peak for step in steps.values()], exact)
    lines = [(f"{size:,}", *(shown(number, unit) for number in row.values())) for size, row in rows.items()]
    title = f"Memory of the compiled step, in {unit[0]}{largest}"
    return Table(title, [("batch", *next(iter(rows.values()))), *lines], range(7))


def _steps(reference: str, batches: list[int], limit: int | None) -> tuple[dict[int, StepMemory], int | None]:
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
