"""Memory of recipes side by side: the same model and rule, and what each recipe puts around the rule."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from mpx import _errors, _tables
from mpx._recipes import mixed_precision
from mpx._stored.blockwise import Blockwise8bit
from mpx._transforms.kahan_summation import kahan_summation
from mpx._transforms.low_precision_state import low_precision_state
from mpx._transforms.stochastic_rounding import stochastic_rounding
from mpx._transforms.upcast import upcast
from mpx.tools.plan.memory_plan import MemoryPlan, evaluated, memory_plan

_F32 = "params=f32,compute=f32,output=f32"
_AUTOCAST = "params=f32,compute=bf16,output=f32"
_BF16 = "params=bf16,compute=bf16,output=f32"
_F16 = "params=f16,compute=f16,output=f32"
_MOMENTS = ("mu", "nu", "trace", "momentum", "exp_avg", "exp_avg_sq", "sum_of_squares")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train in some precision, around any rule.

    Attributes:
        policy: the string of a `Policy`.
        wrap: what to put around a rule.
        formats_moments: whether it stores the rule's moments in fewer bits, and so needs a rule that has some.

    Example:
        >>> recipe = Recipe("params=bf16,compute=bf16,output=f32", lambda rule: optax.chain(rule, kahan_summation()))
        >>> plan = memory_plan(1000, recipe.wrap(optax.sgd(0.1)), recipe.policy)
        >>> plan.bytes_a_parameter
        8.0
    """

    policy: str
    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    formats_moments: bool = False


def _moments_in(rule: optax.GradientTransformation, chosen: Any, **options: Any) -> optax.GradientTransformation:
    return low_precision_state(rule, {"|".join(_MOMENTS): chosen}, **options)


STANDARD_RECIPES: Mapping[str, Recipe] = {
    "f32": Recipe(_F32, lambda rule: rule),
    "f32, bf16 autocast": Recipe(_AUTOCAST, lambda rule: rule),
    "bf16, f32 masters": Recipe(_BF16, lambda rule: mixed_precision(rule, _BF16)),
    "bf16, split masters": Recipe(_BF16, lambda rule: mixed_precision(rule, _BF16, storage="split")),
    "bf16, split masters, 8-bit moments": Recipe(
        _BF16,
        lambda rule: mixed_precision(_moments_in(rule, Blockwise8bit()), _BF16, storage="split"),
        formats_moments=True,
    ),
    "bf16, Kahan": Recipe(_BF16, lambda rule: optax.chain(upcast(rule), kahan_summation())),
    "bf16, Kahan, bf16 moments": Recipe(
        _BF16,
        lambda rule: optax.chain(_moments_in(rule, "bf16", min_size=0), kahan_summation()),
        formats_moments=True,
    ),
    "bf16, stochastic rounding": Recipe(
        _BF16, lambda rule: optax.chain(upcast(rule), stochastic_rounding(jax.random.key(0)))
    ),
    "f16, f32 masters, loss scaling": Recipe(_F16, lambda rule: mixed_precision(rule, _F16)),
}


@dataclasses.dataclass(frozen=True)
class PlanComparison(_tables.OldTable):
    """The plans of several recipes; prints as a table of bytes a device, with `rich.print` too.

    Attributes:
        plans: by the recipe's name.

    Example:
        >>> print(compare_plans(1000, optax.sgd(0.1), {"f32": STANDARD_RECIPES["f32"]}))
        Bytes of a training of 1,000 parameters
        recipe  parameters  gradients  optimizer    all  a parameter
        f32          4,000      4,000          0  8,000            8
    """

    plans: Mapping[str, MemoryPlan]
    _texts: ClassVar[int] = 1

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return {name: plan.as_dict() for name, plan in self.plans.items()}

    def _title_and_lines(self) -> tuple[str, list[tuple[str, ...]]]:
        first = next(iter(self.plans.values()))
        lines: list[tuple[str, ...]] = [("recipe", "parameters", "gradients", "optimizer", "all", "a parameter")]
        for name, plan in self.plans.items():
            weights = plan.bytes_of("parameters") + plan.bytes_of("not trained")
            gradients = plan.bytes_of("gradients") + plan.bytes_of("copy of gradients")
            numbers = (weights, gradients, plan.state_bytes_a_device, plan.total_bytes_a_device)
            lines.append((name, *(f"{number:,}" for number in numbers), f"{plan.bytes_a_parameter:.4g}"))
        where = f", each of {first.devices:,} devices" if first.devices > 1 else ""
        return f"Bytes of a training of {first.parameters:,} parameters{where}", lines


def compare_plans(
    model: Any,
    rule: optax.GradientTransformation | None = None,
    recipes: Mapping[str, Recipe] | None = None,
    *,
    gradient_dtype: DTypeLike | None = "float32",
    mesh: Mesh | AbstractMesh | None = None,
    axis: str | None = "data",
    param_specs: Any = None,
) -> PlanComparison:
    """Counts what a training will hold under several recipes.

    Args:
        model: as in `memory_plan`.
        rule: any Optax transformation without wrappers, for which the recipes bring theirs; `optax.adamw` if None.
        recipes: by their names. None: `STANDARD_RECIPES`, of which those that store moments in fewer bits are left out
            if the rule keeps none.
        gradient_dtype: as in `memory_plan`.
        mesh: likewise.
        axis: likewise.
        param_specs: likewise.

    Returns:
        A `PlanComparison`.

    Raises:
        TypeError: if `rule` is not a transformation, or a recipe no `Recipe`.
        ValueError: if there are no recipes; and as `memory_plan`.

    Example:
        >>> comparison = compare_plans(2**20, gradient_dtype=None)
        >>> for name, plan in comparison.plans.items():
        ...     print(f"{plan.bytes_a_parameter:6.3f} {name}")
        16.000 f32
        16.000 f32, bf16 autocast
        16.000 bf16, f32 masters
        14.000 bf16, split masters
         8.031 bf16, split masters, 8-bit moments
        14.000 bf16, Kahan
        10.000 bf16, Kahan, bf16 moments
        12.000 bf16, stochastic rounding
        16.000 f16, f32 masters, loss scaling
    """
    rule = optax.adamw(1e-3) if rule is None else _errors.as_transformation(rule, "compare_plans")
    model = evaluated(model)
    chosen = _recipes_for(rule, model) if recipes is None else recipes
    _require_recipes(chosen)
    return PlanComparison(
        {
            name: memory_plan(
                model,
                recipe.wrap(rule),
                recipe.policy,
                gradient_dtype=gradient_dtype,
                mesh=mesh,
                axis=axis,
                param_specs=param_specs,
            )
            for name, recipe in chosen.items()
        }
    )


def _recipes_for(rule: optax.GradientTransformation, model: Any) -> dict[str, Recipe]:
    """The standard recipes that a rule has a use for."""
    plan = memory_plan(model, rule)
    has_moments = any(row.name in _MOMENTS and row.kind.endswith("moment") for row in plan.rows)
    return {name: recipe for name, recipe in STANDARD_RECIPES.items() if has_moments or not recipe.formats_moments}


def _require_recipes(recipes: Any) -> None:
    if not isinstance(recipes, Mapping) or not all(isinstance(recipe, Recipe) for recipe in recipes.values()):
        raise TypeError(f"`compare_plans`: `recipes` must map names to `Recipe`s, but got {recipes!r}.")
    if not recipes:
        raise ValueError("`compare_plans`: `recipes` is empty, so nothing would be compared.")
