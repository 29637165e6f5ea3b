"""The recipes under comparison: the same rule, and what each puts around it.

A recipe is a policy, which says how parameters are stored and in what the model computes, a way to make the model
compute in it, and a line of mpx around an ordinary Optax rule, here `optax.chain(optax.clip_by_global_norm(...),
optax.adamw(...))`. One brings its own AdamW. The model is the same for all.

On a GPU that has TF32, whose numbers have 10 bits behind the point, JAX multiplies float32 matrices in it, unless one
asks for more: the recipe `f32` does, `tf32` does not. On a CPU they are the same.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

import mpx

F32 = "params=f32,compute=f32,output=f32"
BF16 = "params=bf16,compute=bf16,output=f32"
# Parameters stay in float32 here, as under `torch.amp`: what float16 lacks is range, and gradients are what leaves it.
# `params=f16` works as well: `mixed_precision` then adds float32 masters.
F16 = "params=f32,compute=f16,output=f32"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train in some precision.

    Attributes:
        name: on the command line.
        label: in the table.
        policy: of `mpx.get_policy`.
        optimizer: what to put around a rule.
        adamw: the rule, made from a schedule and the options of `optax.adamw`; clipping goes in front of it.
        compute: how the model computes in the policy's dtype: by `mpx.autocast`, or because its parameters are `cast`
            to that dtype once, and all the rest follows. Gradients come from `jax.value_and_grad` if it is `plain`,
            and from `mpx.value_and_grad` if not.
        matmul_precision: of the products of float32 numbers, as in `jax.default_matmul_precision`. Autocast leaves a
            product alone for which more than the default is asked.
    """

    name: str
    label: str
    policy: str
    optimizer: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    adamw: Callable[..., optax.GradientTransformation] = optax.adamw
    compute: Literal["autocast", "cast", "plain"] = "autocast"
    matmul_precision: Literal["float32"] | None = None

    @property
    def compute_dtype(self) -> str:
        """What the model computes in."""
        return mpx.get_policy(self.policy).compute_dtype.name

    @property
    def attention_dtype(self) -> Literal["bfloat16", "float16"]:
        """What cuDNN's attention is given."""
        return "float16" if self.compute_dtype == "float16" else "bfloat16"


def plain(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """The rule as it is. On bfloat16 parameters its state and its arithmetic are bfloat16 too."""
    return rule


def full_masters(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """float32 masters in the optimizer state; the model's parameters are their bfloat16 copy."""
    return mpx.mixed_precision(rule, BF16)


def split_masters(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same masters, of which only the 16 bits are kept that the bfloat16 parameters lack."""
    return mpx.mixed_precision(rule, BF16, storage="split")


def split_masters_8bit_moments(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Split masters, and both moments in 8 bits: 8 bytes a parameter in all, gradients of products included."""
    moments = {"mu": mpx.Blockwise8bit(), "nu": mpx.Blockwise8bit()}
    return mpx.mixed_precision(mpx.low_precision_state(rule, moments), BF16, storage="split")


def kahan(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """No masters: what rounding cuts off an update is kept, and added to the next one."""
    return optax.chain(mpx.upcast(rule), mpx.kahan_summation())


def stochastic(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Nothing is kept: parameters are rounded up or down at random, so that the mean is right."""
    return optax.chain(mpx.upcast(rule), mpx.stochastic_rounding(jax.random.key(0)))


def any_precision_adamw(schedule: optax.Schedule, **options: Any) -> optax.GradientTransformation:
    """Pure bfloat16: moments in it, and Kahan summation instead of masters."""
    return mpx.any_precision_adamw(
        schedule, use_kahan_summation=True, momentum_dtype="bfloat16", variance_dtype="bfloat16", **options
    )


def loss_scaling(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """float16 gradients of a scaled loss; a step that overflows is skipped and the scale halved."""
    # The default period of 2,000 good steps before the scale doubles is longer than this whole training.
    return mpx.mixed_precision(rule, F16, loss_scale=mpx.DynamicLossScale(period=50))


RECIPES = (
    Recipe("f32", "f32", F32, plain, compute="plain", matmul_precision="float32"),
    Recipe("tf32", "tf32", F32, plain, compute="plain"),
    Recipe("bf16-autocast", "f32 + bf16 autocast", "params=f32,compute=bf16,output=f32", plain),
    Recipe("bf16-naive", "bf16, no care", BF16, plain, compute="plain"),
    Recipe("bf16-cast", "bf16 + f32 masters, cast once", BF16, full_masters, compute="cast"),
    Recipe("bf16-masters", "bf16 + f32 masters", BF16, full_masters),
    Recipe("bf16-split", "bf16 + split masters", BF16, split_masters),
    Recipe("bf16-split-8bit", "bf16 + split + 8-bit moments", BF16, split_masters_8bit_moments),
    Recipe("bf16-kahan", "bf16 + Kahan", BF16, kahan),
    Recipe("bf16-stochastic", "bf16 + stochastic rounding", BF16, stochastic),
    Recipe("bf16-any-precision", "bf16 + AnyPrecision AdamW", BF16, plain, any_precision_adamw),
    Recipe("f16-scaled", "f16 + dynamic loss scaling", F16, loss_scaling),
)


def get_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        ValueError: if there is none; the message lists all names.
    """
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    raise ValueError(f"no recipe is called {name!r}; there are {', '.join(recipe.name for recipe in RECIPES)}.")
