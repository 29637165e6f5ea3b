"""`mpx plan`: the memory of a training run, before anything is allocated."""

import functools
from typing import Annotated, Any

import typer

import mpx
from mpx import _tables
from mpx.tools.cli import given, output
from mpx.tools.cli.errors import CommandError, users_code
from mpx.tools.plan import STANDARD_RECIPES, PrecisionRecipe, StepMemory

EXAMPLE = "mpx plan 7B --mesh 8 --memory 80GB"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="How many parameters (124M, 7B, 70e9), or file.py:function or module:function, a function without "
            "arguments that makes them and is only traced."
        ),
    ],
    recipe: Annotated[
        list[str] | None, typer.Option(help="A standard recipe, in full; may be repeated. All if left out.")
    ] = None,
    rule: Annotated[
        str, typer.Option(help="A rule of Optax by name, or file.py:name, a rule or a function that makes one.")
    ] = "adamw",
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Devices: 8, or data=8,model=2. The optimizer state is divided along the first axis (ZeRO-1), the "
            "parameters are not."
        ),
    ] = None,
    gradient_dtype: Annotated[
        str, typer.Option(help="The dtype of gradients; `params`: that of each parameter, as in the backward pass.")
    ] = "f32",
    memory: Annotated[
        str | None,
        typer.Option(help="The memory of a device, 80GB or 80GiB: show the largest model, and batch (--hlo), in it."),
    ] = None,
    hlo: Annotated[
        str | None,
        typer.Option(
            help="file.py:function, a function of a batch size that returns (step, arguments): the training step, best "
            "as jax.jit with donate_argnums returns it, and a tuple of its arguments or their shapes. The step is "
            "compiled, not run, and the memory that XLA needs for it is shown."
        ),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="A batch size for --hlo; may be repeated.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Count the bytes that a training run holds under each precision recipe, before anything is allocated."""
    recipes = _recipes(recipe or [])
    if batch and hlo is None:
        raise CommandError("--batch would do nothing without --hlo.")
    devices = None if mesh is None else given.mesh(mesh)
    limit = None if memory is None else given.memory_bytes(memory)
    planned = given.function(model) if ":" in model else given.parameters(model)
    with users_code():
        comparison = mpx.compare_plans(
            planned,
            given.rule(rule),
            recipes,
            gradient_dtype=None if gradient_dtype == "params" else gradient_dtype,
            mesh=devices,
            axis="data" if devices is None else devices.axis_names[0],
        )
    plans = comparison.plans
    models = {} if limit is None else {name: plan.largest_model(limit) for name, plan in plans.items()}
    steps, largest_batch = ({}, None) if hlo is None else _steps(hlo, batch or [1], limit)
    content = {"model": model, "rule": rule, "plans": plans, "memory_bytes": limit, "largest_models": models or None}
    rows = [{"batch": size} | memory.as_dict() for size, memory in steps.items()]
    tables: list[Any] = [comparison if len(plans) > 1 else next(iter(plans.values()))]
    if models:
        lines = [("recipe", "parameters"), *((name, f"{number:,}") for name, number in models.items())]
        tables.append(_tables.Table(f"Largest model in {limit:,} bytes a device, without activations", lines))
    if rows:
        largest = "" if largest_batch is None else f"; the largest batch that fits is {largest_batch:,}"
        lines = [tuple(rows[0]), *(tuple(f"{number:,}" for number in row.values()) for row in rows)]
        tables.append(_tables.Table(f"Bytes of the compiled step on a device{largest}", lines, right=range(7)))
    output.write(content | {"steps": rows, "largest_batch": largest_batch}, tables, as_json)


def _recipes(names: list[str]) -> dict[str, PrecisionRecipe] | None:
    by_name = {name.lower(): (name, recipe) for name, recipe in STANDARD_RECIPES.items()}
    for name in names:
        if name.lower() not in by_name:
            raise CommandError(f"there is no recipe {name!r}. The standard recipes are: {'; '.join(STANDARD_RECIPES)}.")
    return dict(by_name[name.lower()] for name in names) or None


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
