"""Plans of recipes and their tables, for `mpx plan`."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from mpx._parallel.placement import sharded_spec
from mpx.tools.plan.compare_plans import SENDS, PlanComparison, compare_plans
from mpx.tools.plan.memory_plan import evaluate
from mpx.tools.plan.recipes import STANDARD_RECIPES, training_code


def fraction() -> float:
    """Return the part of a GPU's memory that JAX takes."""
    return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))


def compare(
    model: Any,
    rule: optax.GradientTransformation,
    names: Sequence[str],
    devices: int,
    fsdp: bool,
    gradient_dtype: str | None,
) -> PlanComparison:
    """Plan the recipes with these names (all if `names` is empty), with options as the command line gives them."""
    unknown = [name for name in names if name not in STANDARD_RECIPES]
    if unknown:
        raise ValueError(f"there is no recipe {unknown[0]!r}. The recipes are: {'; '.join(STANDARD_RECIPES)}.")
    if fsdp and devices == 1:
        raise ValueError("--fsdp shards parameters over devices: say over how many, as in --devices 64.")
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    sharding: dict[str, Any] = {"mesh": mesh, "axis": "data"} if devices > 1 else {}
    model = evaluate(model)
    if fsdp:
        sharded = lambda p: sharded_spec(np.shape(p), PartitionSpec(), mesh, "data")
        specs = PartitionSpec("data") if isinstance(model, int) else jax.tree.map(sharded, model)
        sharding = {"mesh": mesh, "axis": None, "param_specs": specs}
    recipes = {name: STANDARD_RECIPES[name] for name in names} or None
    return compare_plans(model, rule, recipes, gradient_dtype=gradient_dtype, **sharding)


def content(comparison: PlanComparison, limit: int | None) -> dict[str, Any]:
    """Return for JSON the plans, and which of them fit into some bytes, and their largest models."""
    if limit is None:
        return {"plans": comparison}
    plans = comparison.plans.items()
    fits = {name: plan.total_bytes_a_device <= limit for name, plan in plans}
    largest = {name: plan.largest_model(limit) for name, plan in plans}
    return {"plans": comparison, "usable_bytes": limit, "fits": fits, "largest_models": largest}


def parts(comparison: PlanComparison, limit: int | None, fsdp: bool, gradient_dtype: str | None) -> Iterator[Any]:
    """Yield the table of several recipes, or the parts of one; and the code of the only one, or of one that fits."""
    plans, is_sharded = comparison.plans, any(plan.devices > 1 for plan in comparison.plans.values())
    if len(plans) == 1:
        yield from plans.values()
    if limit is not None or len(plans) > 1:
        yield comparison.table(memory_bytes=limit)
        if is_sharded:
            yield SENDS
    fit = [name for name, plan in plans.items() if limit is None or plan.total_bytes_a_device <= limit]
    if limit is not None:
        yield f"What fits, fits into {fraction():.0%} of the memory: XLA_PYTHON_CLIENT_MEM_FRACTION, 75% by default."
    if not fit:
        yield "Nothing fits: take another recipe, or more devices, or shard parameters too (--devices N --fsdp)."
    elif limit is not None or len(plans) == 1:
        name = "bf16-split" if "bf16-split" in fit else fit[0]
        recipe, sharding = STANDARD_RECIPES[name], "fsdp" if fsdp else "zero1" if is_sharded else "none"
        yield f"{name}: {recipe.purpose}. For AdamW, with Flax Linen or any pytree:"
        yield training_code(recipe, "linen", sharding)
        yield "For AdamW, with Flax NNX:"
        yield training_code(recipe, "nnx", sharding)
    if gradient_dtype is None:
        yield "Without activations. Gradients are those in one jitted step; --gradient-dtype f32: those that leave it."
