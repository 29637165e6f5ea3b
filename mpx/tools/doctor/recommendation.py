"""Recommend a recipe for a machine, from the products that work there and their rates."""

import dataclasses
from collections.abc import Sequence

from mpx.tools.doctor.products import Product

_BF16 = "params=bf16,compute=bf16,output=f32"
_F16 = "params=f32,compute=f16,output=f32"
_F32 = "params=f32,compute=f32,output=f32"
_FASTER = 1.2  # times the rate of float32: less is lost again outside of the products


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A recipe, and the reasons for it.

    Attributes:
        policy: the string of its policy.
        reasons: what speaks for it, with the rates that were measured.
    """

    policy: str
    reasons: tuple[str, ...]

    @property
    def code(self) -> str:
        """Return the code to write, with a loss `loss_fn(params, batch)`."""
        return f"""\
policy = mpx.get_policy("{self.policy}")
loss_fn = mpx.autocast(loss_fn, policy)
params = policy.cast_to_param(params)
tx = mpx.mixed_precision(optax.adamw(3e-4), policy)
opt_state = tx.init(params)
grad_fn = mpx.value_and_grad(loss_fn, mpx.get_loss_scale(opt_state))  # in each step
loss, grads = grad_fn(params, batch)"""


def recommend(products: Sequence[Product]) -> Recommendation | None:
    """Return the recipe for a machine; None if it is not known, since nothing was timed.

    It is bfloat16 where its products are faster than those of a float32 program and about as fast as those of float16,
    or where a float32 program rounds to bfloat16 anyway; float16 where only its products are faster; else float32.
    """
    working = {product.name: product for product in products if product.works}
    speed = {name: product.times_f32 or 0.0 for name, product in working.items()}
    bf16, f16 = speed.get("bf16", 0.0), speed.get("f16", 0.0)
    memory = f'"{_BF16}" takes 14 bytes a parameter with AdamW, where float32 takes 16'
    range_ = "bfloat16 has the range of float32, so no loss scaling is needed"
    reason = f"bfloat16 runs at {bf16:.2g} times the rate of float32, float16 at {f16:.2g} times"
    if "bf16" in working and "f32 by default" in working and working["f32 by default"].bits == 8:
        reason = "a float32 program rounds the operands of its products to bfloat16 here anyway"
        return Recommendation(_BF16, (reason, memory, range_))
    if not any(speed.values()):
        return None
    if bf16 >= _FASTER and bf16 >= 0.8 * f16:
        return Recommendation(_BF16, (reason, memory, range_, *_of_8_bits(speed)))
    if f16 >= _FASTER:
        scaling = "float16 gradients under- and overflow, so `mpx.mixed_precision` adds loss scaling"
        return Recommendation(_F16, (reason, scaling))
    return Recommendation(_F32, (reason, f"to save memory: {memory}") if bf16 else (reason,))


def _of_8_bits(speed: dict[str, float]) -> tuple[str, ...]:
    """Say whether products of 8-bit floats are faster than those in bfloat16."""
    if not speed.get("float8_e4m3fn"):
        return ()
    times = speed["float8_e4m3fn"] / speed["bf16"]
    advice = "`compute=fp8` is worth a try" if times >= _FASTER else "`compute=fp8` gains nothing"
    return (f"8-bit floats run at {times:.2g} times the rate of bfloat16: {advice}",)
