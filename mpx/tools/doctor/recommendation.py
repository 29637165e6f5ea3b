"""Recommend a recipe for a machine, from the products that work there and their rates."""

import dataclasses
from collections.abc import Sequence

from mpx.tools.doctor.products import Product

_FASTER = 1.2  # times the rate of float32: less is lost again outside of the products


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A recipe, and the reasons for it."""

    recipe: str  # its name, as in `mpx.tools.plan.STANDARD_RECIPES`
    reasons: tuple[str, ...]  # with the rates that were measured


def recommend(products: Sequence[Product]) -> Recommendation | None:
    """Return the recipe for a machine; None if nothing was timed.

    It is bfloat16 where its products are faster than a float32 program's and about as fast as float16's, or where a
    float32 program rounds to bfloat16 anyway; float16 where only its products are faster; else float32.
    """
    working = {product.name: product for product in products if not product.refusal}
    memory = "`bf16-split` takes 14 bytes a parameter with AdamW, where float32 takes 16"
    range_ = "bfloat16 has the range of float32, so no loss scaling is needed"
    float32 = working.get("f32 by default", Product("f32"))
    if "bf16" in working and float32.bits == 8:
        reason = "a float32 program rounds the operands of its products to bfloat16 here anyway"
        return Recommendation("bf16-split", (reason, memory, range_))
    if float32.teraflops is None:
        return None
    rates = {name: (product.teraflops or 0.0) / float32.teraflops for name, product in working.items()}
    bf16, f16, fp8 = (rates.get(name, 0.0) for name in ("bf16", "f16", "float8_e4m3fn"))
    reason = f"bfloat16 runs at {bf16:.2g} times the rate of float32, float16 at {f16:.2g} times"
    if bf16 >= _FASTER and bf16 >= 0.8 * f16:
        advice = "is worth a try" if fp8 >= _FASTER * bf16 else "gains nothing"
        of_fp8 = f"8-bit floats run at {fp8 / bf16:.2g} times the rate of bfloat16: `compute=fp8` {advice}"
        return Recommendation("bf16-split", (reason, memory, range_, of_fp8))
    if f16 >= _FASTER:
        scaling = "float16 gradients under- and overflow, so `mpx.mixed_precision` adds loss scaling"
        return Recommendation("f16-scaled", (reason, scaling))
    return Recommendation("f32", (reason, f"to save memory: {memory}"))
