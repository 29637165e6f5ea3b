"""Compare the memory of precision recipes, for one model and one optimizer."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax

from mpx import _errors, _tables
from mpx._recipes import mixed_precision
from mpx._stored.blockwise import Blockwise8bit
from mpx._transforms.kahan_summation import kahan_summation
from mpx._transforms.low_precision_state import low_precision_state
from mpx._transforms.stochastic_rounding import stochastic_rounding
from mpx._transforms.upcast import upcast
from mpx.tools.plan.memory_plan import MemoryPlan, evaluate, memory_plan
from mpx.tools.plan.units import digits, shown, unit_for

_F32, _BF16, _F16 = (f"params={dtype},compute={dtype},output=f32" for dtype in ("f32", "bf16", "f16"))
_MOMENTS = "mu|nu|trace|momentum|exp_avg|exp_avg_sq|sum_of_squares"


@dataclasses.dataclass(frozen=True)
class PrecisionRecipe:
    """A way to train in some precision, with any rule.

    Attributes:
        policy: the string of a `Policy`.
        wrap: a function that puts wrappers around a rule.
        formats_moments: True if it stores the rule's moments in fewer bits, and so needs a rule that has moments.
    """

    policy: str
    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    formats_moments: bool = False


_split = lambda rule: mixed_precision(rule, _BF16)
_kahan = lambda rule: optax.chain(upcast(rule), kahan_summation())
_stochastic = lambda rule: optax.chain(upcast(rule), stochastic_rounding(jax.random.key(0)))
_8_bits = lambda rule: low_precision_state(rule, {_MOMENTS: Blockwise8bit()})
_16_bits = lambda rule: low_precision_state(rule, {_MOMENTS: "bf16"}, min_size=0)

STANDARD_RECIPES: Mapping[str, PrecisionRecipe] = {
    "f32": PrecisionRecipe(_F32, lambda rule: rule),
    "f32, bf16 autocast": PrecisionRecipe("params=f32,compute=bf16,output=f32", lambda rule: rule),
    "bf16, f32 masters": PrecisionRecipe(_BF16, lambda rule: mixed_precision(rule, _BF16, storage="full")),
    "bf16, split masters": PrecisionRecipe(_BF16, _split),
    "bf16, split masters, 8-bit moments": PrecisionRecipe(
        _BF16, lambda rule: _split(_8_bits(rule)), formats_moments=True
    ),
    "bf16, Kahan": PrecisionRecipe(_BF16, _kahan),
    "bf16, Kahan, bf16 moments": PrecisionRecipe(_BF16, lambda rule: _kahan(_16_bits(rule)), formats_moments=True),
    "bf16, stochastic rounding": PrecisionRecipe(_BF16, _stochastic),
    "f16, f32 masters, loss scaling": PrecisionRecipe(_F16, lambda rule: mixed_precision(rule, _F16)),
}


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

    def table(self, *, exact: bool = False, memory_bytes: int | None = None) -> _tables.Table:
        """Return a line for each recipe: its parts and the bytes a parameter.

        Numbers are in GB, or less if they are small; in bytes if `exact`. Given the memory of a device, a line says
        whether the recipe fits and how large a model would. Parts are left out where they do not fit into 80 columns:
        of exact numbers, and beside a memory.
        """
        plans = self.plans.values()
        unit = unit_for([plan.total_bytes_a_device for plan in plans], exact)
        in_unit = lambda numbers: [shown(number, unit) for number in numbers]
        columns = {"recipe": list(self.plans)}
        if not exact and memory_bytes is None:
            columns["params"] = in_unit(p.bytes_of("parameters") + p.bytes_of("not trained") for p in plans)
            columns["grads"] = in_unit(p.bytes_of("gradients") + p.bytes_of("copy of gradients") for p in plans)
            columns["optimizer"] = in_unit(p.state_bytes_a_device for p in plans)
        columns["total"] = in_unit(p.total_bytes_a_device for p in plans)
        if not exact or memory_bytes is None:
            columns["a param"] = [digits(p.bytes_a_parameter) for p in plans]
        if memory_bytes is not None:
            largest = [p.largest_model(memory_bytes) for p in plans]
            columns["fits"] = ["yes" if p.total_bytes_a_device <= memory_bytes else "no" for p in plans]
            columns["largest model"] = [f"{n:,}" if exact else f"{digits(n / 1e9)}B" for n in largest]
        lines = zip(*columns.values(), strict=True)
        return _tables.Table(next(iter(plans)).title(unit), [tuple(columns), *lines], range(1, len(columns)))

    def _parts(self) -> Iterator[_tables.Table]:
        yield self.table()


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
        recipes: the recipes by their names. None: `STANDARD_RECIPES`, without those that store moments in fewer bits
            if the rule keeps no moments.
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
        >>> for name, plan in compare_plans(2**20).plans.items():
        ...     print(f"{plan.bytes_a_parameter:6.3f} {name}")
        16.000 f32
        14.000 f32, bf16 autocast
        16.000 bf16, f32 masters
        14.000 bf16, split masters
         8.031 bf16, split masters, 8-bit moments
        14.000 bf16, Kahan
        10.000 bf16, Kahan, bf16 moments
        12.000 bf16, stochastic rounding
        16.000 f16, f32 masters, loss scaling
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
    """Return the standard recipes, without those that format moments if the rule has none."""
    rows = memory_plan(model, rule).rows
    has_moments = any(row.name in _MOMENTS.split("|") and row.kind.endswith("moment") for row in rows)
    return {name: recipe for name, recipe in STANDARD_RECIPES.items() if has_moments or not recipe.formats_moments}
