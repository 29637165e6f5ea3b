"""Which recipe suits a machine: from what works there, and how fast."""

import dataclasses
from collections.abc import Sequence

from mpx.tools.doctor.arithmetic import Product
from mpx.tools.doctor.measuring import MatmulRate

_FASTER = 1.2  # times the rate of float32: less is lost again outside of the products


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A recipe, and why.

    Attributes:
        recipe: in words.
        policy: the string of its policy.
        reasons: what speaks for it, with the numbers that were measured.
        code: what to write, with a loss `loss_fn(params, batch)`.
        alternative: a second recipe for another purpose, if there is one.
    """

    recipe: str
    policy: str
    reasons: tuple[str, ...]
    code: str
    alternative: "Recommendation | None" = None


def recommend(products: Sequence[Product], rates: Sequence[MatmulRate]) -> Recommendation:
    """The recipe for a machine.

    bfloat16 where its products are faster than those of a float32 program, and about as fast as those of float16, or
    where a float32 program rounds to it anyway; float16 where only those are faster; float32 where none are, and
    bfloat16 beside it for its memory.

    Args:
        products: what works.
        rates: how fast; empty if that was not measured.

    Example:
        >>> products = [Product(name, name, True) for name in ("f32", "bf16", "f16")]
        >>> rates = [MatmulRate("f32", 8192, 8.0), MatmulRate("bf16", 8192, 3.0), MatmulRate("f16", 8192, 50.0)]
        >>> recommend(products, rates).policy
        'params=f32,compute=f16,output=f32'
    """
    working = {product.name for product in products if product.works}
    speed = _speeds(rates)
    bf16, f16 = (speed.get(name, 0.0) if name in working else 0.0 for name in ("bf16", "f16"))
    if not speed:
        reason = "how fast products are was not measured; whether 16 bits are faster here is open"
        return _bfloat16(reason) if "bf16" in working else _float32(f"products in bfloat16 do not work here; {reason}")
    if bf16 and any(product.name == "f32 by default" and product.bits == 8 for product in products):
        return _bfloat16(
            "a float32 program rounds the operands of its products to the 8 bits of bfloat16 here, unless it asks for "
            "more",
            _times("bfloat16", bf16),
        )
    if bf16 >= _FASTER and bf16 >= 0.8 * f16:
        tf32 = speed.get("tf32", 0.0) / speed.get("f32", 1.0)
        finer = (
            f'where bfloat16 is too coarse, `mpx.autocast(loss_fn, "tf32")` runs products at {tf32:.2g} times the rate '
            "of those with all bits of float32"
        )
        return _bfloat16(_times("bfloat16", bf16), *([finer] if tf32 >= _FASTER else []))
    if f16 >= _FASTER:
        return _float16(_times("float16", f16), _times("bfloat16", bf16))
    plain = _float32(_times("bfloat16", bf16), _times("float16", f16), "so 16 bits do not make a training faster here")
    return dataclasses.replace(plain, alternative=_bfloat16(_times("bfloat16", bf16))) if bf16 else plain


def _speeds(rates: Sequence[MatmulRate]) -> dict[str, float]:
    """Rates, as multiples of that of a float32 program as jax runs it if nothing else is asked for."""
    known = {rate.name: rate.teraflops for rate in rates if rate.teraflops is not None}
    float32 = known.get("f32 by default", known.get("f32"))
    return {name: teraflops / float32 for name, teraflops in known.items()} if float32 else {}


def _times(dtype: str, speed: float) -> str:
    if not speed:
        return f"products in {dtype} do not work here"
    return f"products in {dtype} run at {speed:.2g} times the rate of those of a float32 program"


def _bfloat16(*reasons: str) -> Recommendation:
    return _recipe(
        "bfloat16 weights and products, float32 masters in 2 more bytes",
        "params=bf16,compute=bf16,output=f32",
        "split",
        *reasons,
        "weights, low bits of the masters, Adam's moments and gradients take 14 bytes a parameter, float32 takes 16 "
        "(8 with `mpx.Blockwise8bit` moments)",
        "bfloat16 has the range of float32, so no loss scaling is needed",
    )


def _float16(*reasons: str) -> Recommendation:
    return _recipe(
        "float32 weights, float16 products, dynamic loss scaling",
        "params=f32,compute=f16,output=f32",
        "full",
        *reasons,
        "float16 gradients under- and overflow, so `mpx.mixed_precision` adds loss scaling",
    )


def _float32(*reasons: str) -> Recommendation:
    code = "tx = optax.adamw(3e-4)\nloss, grads = jax.value_and_grad(loss_fn)(params, batch)  # in the step"
    return Recommendation("float32", "params=f32,compute=f32,output=f32", reasons, code)


def _recipe(recipe: str, policy: str, storage: str, *reasons: str) -> Recommendation:
    lines = [
        f'policy = mpx.get_policy("{policy}")',
        "loss_fn = mpx.autocast(loss_fn, policy)",
        "tx = mpx.mixed_precision(optax.adamw(3e-4), policy)",
        "loss, grads = mpx.value_and_grad(loss_fn, mpx.get_loss_scale(opt_state))(params, batch)  # in the step",
    ]
    if storage == "split":
        lines[2] = 'tx = mpx.mixed_precision(optax.adamw(3e-4), policy, storage="split")'
        lines.insert(3, "params = policy.cast_to_param(params)  # before tx.init(params)")
    return Recommendation(recipe, policy, reasons, "\n".join(lines))
