"""Plans of recipes and their tables, for `mpx plan`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from mpx._parallel.placement import sharded_spec
from mpx.tools.cli import given
from mpx.tools.cli.errors import CommandError, users_code
from mpx.tools.plan import STANDARD_RECIPES, PlanComparison, compare_plans, training_code
from mpx.tools.plan.compare_plans import SENDS
from mpx.tools.plan.memory_plan import evaluate

CONVENTION = (
    "Without activations. Gradients are those inside one jitted step; --gradient-dtype f32 counts those that leave it."
)


def compare(
    model: Any, rule: str, names: Sequence[str], mesh: str | None, fsdp: bool, gradient_dtype: str | None
) -> PlanComparison:
    """Plan the recipes with these names (all if `names` is empty), with options as the command line gives them."""
    if fsdp and mesh is None:
        raise CommandError("--fsdp shards parameters over devices: say over how many, as in --devices 64.")
    by_name = {name.lower(): name for name in STANDARD_RECIPES}
    unknown = [name for name in names if name.lower() not in by_name]
    if unknown:
        raise CommandError(f"there is no recipe {unknown[0]!r}. The standard recipes are: {'; '.join(by_name)}.")
    recipes = {by_name[name.lower()]: STANDARD_RECIPES[by_name[name.lower()]] for name in names} or None
    options: dict[str, Any] = {"gradient_dtype": gradient_dtype}
    with users_code():
        if mesh is not None:
            devices = given.mesh(mesh)
            options |= {"mesh": devices, "axis": devices.axis_names[0]}
            if fsdp:
                model = evaluate(model)
                options |= {"axis": None, "param_specs": _fully_sharded(model, devices)}
        return compare_plans(model, given.rule(rule), recipes, **options)


def _fully_sharded(model: Any, mesh: Any) -> Any:
    """Return the specs of parameters that are sharded along the first axis of a mesh."""
    axis = mesh.axis_names[0]
    if isinstance(model, int):
        return PartitionSpec(axis)
    return jax.tree.map(lambda p: sharded_spec(np.shape(p), PartitionSpec(), mesh, axis), model)


def what_fits(comparison: PlanComparison, limit: int | None) -> dict[str, Any]:
    """Return for JSON which recipes fit into some bytes, and their largest models; None without a limit."""
    if limit is None:
        return dict.fromkeys(("usable_bytes", "fits", "largest_models"))
    plans = comparison.plans.items()
    fits = {name: plan.total_bytes_a_device <= limit for name, plan in plans}
    return {"usable_bytes": limit, "fits": fits, "largest_models": {n: plan.largest_model(limit) for n, plan in plans}}


def tables(comparison: PlanComparison, limit: int | None, fraction: float, fsdp: bool) -> list[Any]:
    """Return the table of several recipes, or the parts of one; and the code of the only one, or of one that fits."""
    plans = comparison.plans
    parts: list[Any] = [comparison.table(memory_bytes=limit)] if limit or len(plans) > 1 else []
    is_sharded = next(iter(plans.values())).devices > 1
    of_sending = [SENDS] * bool(is_sharded and parts) + ["A rematerialised layer gathers its weights twice."] * fsdp
    parts += [plan for plan in plans.values() if len(plans) == 1]
    parts += [" ".join(of_sending)] * bool(of_sending)
    shown = list(plans) if len(plans) == 1 else []
    if limit is not None:
        shown = [name for name, plan in plans.items() if plan.total_bytes_a_device <= limit]
        parts.append(
            f"What fits, fits into {fraction:.0%} of the memory. JAX takes 75% of a GPU's memory unless "
            "XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise; so does --memory-fraction here."
        )
        if not shown:
            more = "take more devices" if fsdp else "shard parameters too (--devices N --fsdp)"
            parts.append(
                f"It does not fit: try another recipe, or {more}." if len(plans) == 1 else f"No recipe fits: {more}."
            )
    if shown:
        name = "bf16-split" if "bf16-split" in shown else shown[0]
        recipe, sharding = STANDARD_RECIPES[name], "fsdp" if fsdp else "zero1" if is_sharded else "none"
        parts.append(f"{name}: {recipe.purpose}. For AdamW, with Flax Linen or any pytree:")
        parts += [training_code(recipe, "linen", sharding), "For AdamW, with Flax NNX:"]
        parts.append(training_code(recipe, "nnx", sharding))
    return parts
