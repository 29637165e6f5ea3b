"""Recommend a recipe for a machine, from the products that work there and their rates."""

import dataclasses
from collections.abc import Sequence

from mpx.tools.doctor.products import Product
from mpx.tools.plan.recipes import STANDARD_RECIPES, training_code

_FASTER = 1.2  # times the rate of float32: less is lost again outside of the products


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A recipe, and the reasons for it."""

    recipe: str  # its name, as in `mpx.tools.plan.STANDARD_RECIPES`
    reasons: tuple[str, ...]  # with the rates that were measured

    @property
    def policy(self) -> str:
        """The string of its policy."""
        return STANDARD_RECIPES[self.recipe].policy

    @property
    def title(self) -> str:
        """The name and the policy."""
        return f"{self.recipe} ({self.policy})"

    @property
    def code(self) -> dict[str, str]:
        """The code of a training step by library."""
        recipe = STANDARD_RECIPES[self.recipe]
        return {
            "For AdamW, with Flax Linen or any pytree": training_code(recipe, "linen"),
            "For AdamW, with Flax NNX": training_code(recipe, "nnx"),
        }


def recommend(products: Sequence[Product]) -> Recommendation | None:
    """Return the recipe for a machine; None if nothing was timed.

    It is bfloat16 where its products are faster than a float32 program's and about as fast as float16's, or where a
    float32 program rounds to bfloat16 anyway; float16 where only its products are faster; else float32.
    """
    working = {product.name: product for product in products if product.works}
    speed = {name: product.times_f32 or 0.0 for name, product in working.items()}
    bf16, f16, fp8 = (speed.get(name, 0.0) for name in ("bf16", "f16", "float8_e4m3fn"))
    memory = "`bf16-split` takes 14 bytes a parameter with AdamW, where float32 takes 16"
    range_ = "bfloat16 has the range of float32, so no loss scaling is needed"
    reason = f"bfloat16 runs at {bf16:.2g} times the rate of float32, float16 at {f16:.2g} times"
    if "bf16" in working and "f32 by default" in working and working["f32 by default"].bits == 8:
        reason = "a float32 program rounds the operands of its products to bfloat16 here anyway"
        return Recommendation("bf16-split", (reason, memory, range_))
    if not any(speed.values()):
        return None
    if bf16 >= _FASTER and bf16 >= 0.8 * f16:
        advice = "`compute=fp8` is worth a try" if fp8 >= _FASTER * bf16 else "`compute=fp8` gains nothing"
        of_fp8 = f"8-bit floats run at {fp8 / bf16:.2g} times the rate of bfloat16: {advice}"
        return Recommendation("bf16-split", (reason, memory, range_, of_fp8)[: 4 if fp8 else 3])
    if f16 >= _FASTER:
        scaling = "float16 gradients under- and overflow, so `mpx.mixed_precision` adds loss scaling"
        return Recommendation("f16-scaled", (reason, scaling))
    return Recommendation("f32", (reason, f"to save memory: {memory}") if bf16 else (reason,))
