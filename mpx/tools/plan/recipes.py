"""The recipes by their names, the same in README, documentation, `mpx plan` and the example."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import optax

from mpx._recipes import mixed_precision
from mpx._stored.blockwise import Blockwise4bit, Blockwise8bit
from mpx._stored.roles import Role
from mpx._stored.state_format import StateFormat
from mpx._transforms.kahan_summation import kahan_summation
from mpx._transforms.low_precision_state import low_precision_state
from mpx._transforms.stochastic_rounding import stochastic_rounding
from mpx._transforms.upcast import upcast

_F32, _BF16 = "params=f32,compute=f32,output=f32", "params=bf16,compute=bf16,output=f32"
_F32_BF16, _F32_F16 = "params=f32,compute=bf16,output=f32", "params=f32,compute=f16,output=f32"
_BF16_FP8 = "params=bf16,compute=fp8,output=f32"
MOMENTS = "mu|nu|trace|momentum|exp_avg|exp_avg_sq|sum_of_squares"  # as rules of Optax and others call them


@dataclasses.dataclass(frozen=True)
class PrecisionRecipe:
    """A way to train in some precision, with any rule."""

    policy: str  # the string of a `Policy`
    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation]  # puts wrappers around a rule
    purpose: str = ""  # what to take it for; empty if nobody says
    formats_moments: bool = False  # whether it stores moments in fewer bits, and so needs a rule that has moments


class FirstMomentsIn4Bits(Blockwise4bit):
    """Keeps second moments in 8 bits, whatever a rule calls them."""

    def for_role(self, role: Role) -> StateFormat:
        """Return the format of a field of the optimizer's state."""
        return Blockwise8bit(signed=False) if role == "second moment" else Blockwise4bit()

    def refuses(self, role: Role, shape: tuple[int, ...]) -> None:
        """Refuse nothing."""


_8_bits = lambda rule: low_precision_state(rule, {MOMENTS: Blockwise8bit()})
_4_bits = lambda rule: low_precision_state(rule, {MOMENTS: FirstMomentsIn4Bits()}, key=jax.random.key(1))
_16_bits = lambda rule: low_precision_state(rule, {MOMENTS: "bf16"}, min_size=0)
_mixed = lambda policy: lambda rule: mixed_precision(rule, policy)
_split24 = lambda rule: mixed_precision(rule, _BF16, storage="split24", key=jax.random.key(0))

STANDARD_RECIPES: Mapping[str, PrecisionRecipe] = {
    "f32": PrecisionRecipe(_F32, lambda rule: rule, "compare, or train on a CPU"),
    "bf16-autocast": PrecisionRecipe(_F32_BF16, _mixed(_F32_BF16), "keep float32 parameters"),
    "bf16-split": PrecisionRecipe(_BF16, _mixed(_BF16), "train in bfloat16: start here"),
    "bf16-split-8bit": PrecisionRecipe(
        _BF16, lambda rule: mixed_precision(_8_bits(rule), _BF16), "fit a larger model", formats_moments=True
    ),
    "bf16-split24-8bit": PrecisionRecipe(
        _BF16, lambda rule: _split24(_8_bits(rule)), "fit more still: masters of 24 bits", formats_moments=True
    ),
    "bf16-split24-4bit": PrecisionRecipe(
        _BF16, lambda rule: _split24(_4_bits(rule)), "hold the fewest bytes", formats_moments=True
    ),
    "bf16-masters": PrecisionRecipe(
        _BF16, lambda rule: mixed_precision(rule, _BF16, storage="full"), "let other code read float32 masters"
    ),
    "bf16-kahan": PrecisionRecipe(
        _BF16,
        lambda rule: optax.chain(_16_bits(rule), kahan_summation()),
        "train without masters",
        formats_moments=True,
    ),
    "bf16-stochastic": PrecisionRecipe(
        _BF16,
        lambda rule: optax.chain(upcast(rule), stochastic_rounding(jax.random.key(0))),
        "keep nothing for a parameter but a key",
    ),
    "f16-scaled": PrecisionRecipe(_F32_F16, _mixed(_F32_F16), "use a GPU without bfloat16 (V100, T4)"),
    "fp8": PrecisionRecipe(_BF16_FP8, _mixed(_BF16_FP8), "multiply large matrices in 8-bit floats (H100 and later)"),
}
