"""`mpx plan`: the memory of a training, before anything is allocated."""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

import typer

import mpx
from mpx import _tables
from mpx.tools.cli import given, output
from mpx.tools.cli.errors import CommandError, users_code

EXAMPLE = "mpx plan 7B --mesh 8 --memory 80GB"


@dataclasses.dataclass(frozen=True)
class _Largest(_tables.OldTable):
    """The largest model of each recipe that a memory holds."""

    memory_bytes: int
    models: dict[str, int]
    _texts: ClassVar[int] = 1

    def _title_and_lines(self) -> tuple[str, list[tuple[str, ...]]]:
        rows = [(name, f"{count:,}") for name, count in self.models.items()]
        title = f"Largest model in {self.memory_bytes:,} bytes a device, activations not counted"
        return title, [("recipe", "parameters"), *rows]


@dataclasses.dataclass(frozen=True)
class _Steps(_tables.OldTable):
    """What compiled steps hold while they run."""

    by_batch: dict[int, mpx.StepMemory]
    largest_batch: int | None
    _texts: ClassVar[int] = 0

    def _title_and_lines(self) -> tuple[str, list[tuple[str, ...]]]:
        names = ("arguments", "outputs", "aliased", "temporaries", "code", "peak")
        lines: list[tuple[str, ...]] = [("batch", *names)]
        for batch, memory in self.by_batch.items():
            numbers = memory.as_dict()
            lines.append((f"{batch:,}", *[f"{numbers[name]:,}" for name in names]))
        largest = "" if self.largest_batch is None else f"; the largest batch that fits is {self.largest_batch:,}"
        return f"Bytes of the compiled step on a device, by XLA{largest}", lines


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="How many parameters (124M, 7B, 70e9), or file.py:function or module:function, a function without "
            "arguments that makes them; only its shapes are evaluated."
        ),
    ],
    recipe: Annotated[
        list[str] | None, typer.Option(help="A standard recipe, in full. Several, or none for all: side by side.")
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
        str, typer.Option(help="Of the gradients; `params`: each as its parameter, as a backward pass delivers it.")
    ] = "f32",
    memory: Annotated[
        str | None,
        typer.Option(help="Of a device, 80GB or 80GiB: show the largest model that fits, and batch (--hlo)."),
    ] = None,
    hlo: Annotated[
        str | None,
        typer.Option(
            help="file.py:function, a function of a batch size that returns (step, arguments): the training step, best "
            "as jax.jit with donate_argnums returns it, and a tuple of its arguments or their shapes. It is "
            "compiled, not run, and what XLA says that it needs is shown."
        ),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="A batch size for --hlo; may be repeated.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Count what a training holds under each precision recipe, before anything is allocated."""
    recipes = _recipes(recipe or [])
    if batch and hlo is None:
        raise CommandError("--batch would do nothing without --hlo.")
    devices = None if mesh is None else given.mesh(mesh)
    limit = None if memory is None else given.memory_bytes(memory)
    planned = given.function(model) if given.is_reference(model) else given.parameters(model)
    with users_code():
        comparison = mpx.compare_plans(
            planned,
            given.rule(rule),
            recipes,
            gradient_dtype=None if gradient_dtype == "params" else gradient_dtype,
            mesh=devices,
            axis="data" if devices is None else devices.axis_names[0],
        )
        largest = None if limit is None else _largest(comparison, limit)
    steps = None if hlo is None else _steps(hlo, batch or [1], limit)
    if as_json:
        output.show_json({"model": model, "rule": rule} | _content(comparison, largest, steps))
    else:
        plans: Any = comparison if len(comparison.plans) > 1 else next(iter(comparison.plans.values()))
        output.show(*[result for result in (plans, largest, steps) if result is not None])


def _recipes(names: list[str]) -> dict[str, mpx.Recipe] | None:
    by_name = {name.lower(): name for name in mpx.STANDARD_RECIPES}
    unknown = [name for name in names if name.lower() not in by_name]
    if unknown:
        allowed = "; ".join(mpx.STANDARD_RECIPES)
        raise CommandError(f"there is no recipe {unknown[0]!r}. The standard recipes are: {allowed}.")
    chosen = [by_name[name.lower()] for name in names]
    return {name: mpx.STANDARD_RECIPES[name] for name in chosen} or None


def _largest(comparison: mpx.PlanComparison, limit: int) -> _Largest:
    return _Largest(limit, {name: plan.largest_model(limit) for name, plan in comparison.plans.items()})


def _steps(reference: str, batches: list[int], limit: int | None) -> _Steps:
    """Compiles the step for each batch, and for those that a search for the largest one asks for."""
    step_of = given.function(reference)

    with output.progress_console().status("Compiling ...") as status:

        @functools.cache
        def memory_of(batch: int) -> mpx.StepMemory:
            status.update(f"Compiling the step for a batch of {batch:,} ...")
            with users_code():
                made = step_of(batch)
                if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], (tuple, list)):
                    raise CommandError(
                        f"{reference} must return a pair of a step and a tuple of its arguments or their shapes."
                    )
                return mpx.step_memory(made[0], *made[1])

        by_batch = {batch: memory_of(batch) for batch in sorted(set(batches))}
        largest = None
        if limit is not None:
            largest = mpx.largest_that_fits(lambda n: memory_of(n).peak, limit, start=max(batches))
    return _Steps(by_batch, largest)


def _content(comparison: mpx.PlanComparison, largest: _Largest | None, steps: _Steps | None) -> dict[str, Any]:
    by_batch = {} if steps is None else steps.by_batch
    return {
        "plans": comparison.as_dict(),
        "memory_bytes": None if largest is None else largest.memory_bytes,
        "largest_models": None if largest is None else largest.models,
        "steps": [{"batch": batch} | memory.as_dict() for batch, memory in by_batch.items()],
        "largest_batch": None if steps is None else steps.largest_batch,
    }
