"""List the recipes: each is a policy and a line of mpx around the same Optax rule.

A policy names the dtypes of parameters and of computation. The rule is `optax.chain(optax.clip_by_global_norm(...),
optax.adamw(...))`; one recipe brings its own AdamW. The model is the same for all.

JAX multiplies float32 matrices in TF32 on GPUs that have it, which keeps 10 bits of the mantissa. The recipe `f32` asks
for full precision and `tf32` does not. On a CPU they are the same.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np
import optax

import mpx

F32 = mpx.get_policy("params=f32,compute=f32,output=f32")
BF16 = mpx.get_policy("params=bf16,compute=bf16,output=f32")
# Parameters stay in float32, as under `torch.amp`. `params=f16` works too: `mixed_precision` then adds float32 masters.
F16 = mpx.get_policy("params=f32,compute=f16,output=f32")


def fp8_policy(fp8: mpx.Fp8) -> mpx.Policy:
    """Return the policy of linear layers in FP8. The head, whose weight is the embedding, stays in bfloat16."""
    return dataclasses.replace(BF16, overrides=(("token_embedding", "bf16"),), fp8=fp8)


# Of any size, so that the tiny model shows what is lost. The layers of GPT-2 350M are large enough anyway.
FP8 = fp8_policy(mpx.Fp8(min_extent=0))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A way to train in mixed precision."""

    name: str  # as in mpx's own table of recipes, where it stands there
    policy: mpx.Policy
    optimizer: Callable[[optax.GradientTransformation], optax.GradientTransformation]  # wraps the rule
    # Makes the rule from a schedule and the options of `optax.adamw`; clipping stands before it.
    adamw: Callable[..., optax.GradientTransformation] = optax.adamw
    # "autocast" runs the model under `mpx.autocast`; "cast" casts its parameters to the compute dtype, which all other
    # operations follow; "plain" does so with `jax.value_and_grad`, without mpx.
    compute: Literal["autocast", "cast", "plain"] = "autocast"
    # Whether `mpx.fused_update` computes the step of the optimizer, on a GPU in one kernel for each large leaf.
    fused: bool = False
    # For `jax.default_matmul_precision`. Autocast does not cast a product for which more than the default is asked.
    matmul_precision: Literal["float32"] | None = None

    @property
    def compute_dtype(self) -> str:
        """Return the dtype that the model computes in."""
        return np.dtype(self.policy.compute_dtype).name

    @property
    def attention_dtype(self) -> Literal["bfloat16", "float16"]:
        """Return the dtype of the inputs of cuDNN's attention."""
        return "float16" if self.compute_dtype == "float16" else "bfloat16"


def plain(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the rule itself. With bfloat16 parameters its state and its arithmetic are bfloat16 too."""
    return rule


# The moments of biases and norms stay float32: they are small, unless the blocks are stacked.
MOMENTS_IN_8_BITS = {"bias|scale": "f32", "mu": mpx.Blockwise8bit(), "nu": mpx.Blockwise8bit()}
FIRST_MOMENT_IN_4_BITS = MOMENTS_IN_8_BITS | {"mu": mpx.Blockwise4bit()}
ANY_PRECISION = {"use_kahan_summation": True, "momentum_dtype": "bfloat16", "variance_dtype": "bfloat16"}

RECIPES = (
    Recipe("f32", F32, plain, compute="plain", matmul_precision="float32"),
    Recipe("tf32", F32, plain, compute="plain"),
    Recipe("bf16-autocast", mpx.get_policy("params=f32,compute=bf16,output=f32"), plain),
    Recipe("bf16-naive", BF16, plain, compute="plain"),
    # float32 masters in the optimizer state; the parameters are their bfloat16 copy.
    Recipe("bf16-cast", BF16, lambda rule: mpx.mixed_precision(rule, BF16, storage="full"), compute="cast"),
    Recipe("bf16-masters", BF16, lambda rule: mpx.mixed_precision(rule, BF16, storage="full")),
    # Of the same masters only the 16 low bits are kept; the bfloat16 parameters are the others.
    Recipe("bf16-split", BF16, lambda rule: mpx.mixed_precision(rule, BF16, storage="split")),
    # Both moments in 8 bits as well: 8 bytes a parameter, 16-bit gradients included.
    Recipe(
        "bf16-split-8bit", BF16,
        lambda rule: mpx.mixed_precision(mpx.low_precision_state(rule, MOMENTS_IN_8_BITS), BF16, storage="split"),
        fused=True,
    ),
    # Masters of 24 bits, rounded at random: 7 bytes a parameter, 5 of them between two steps.
    Recipe(
        "bf16-split24-8bit", BF16,
        lambda rule: mpx.mixed_precision(
            mpx.low_precision_state(rule, MOMENTS_IN_8_BITS), BF16, storage="split24", key=jax.random.key(0)
        ),
        fused=True,
    ),
    # The first moment in 4 bits: 6.5 bytes a parameter.
    Recipe(
        "bf16-split24-4bit", BF16,
        lambda rule: mpx.mixed_precision(
            mpx.low_precision_state(rule, FIRST_MOMENT_IN_4_BITS, key=jax.random.key(1)),
            BF16, storage="split24", key=jax.random.key(0),
        ),
        fused=True,
    ),
    # The linear layers of the blocks multiply 8-bit floats, with a scale for each operand.
    Recipe("fp8", FP8, lambda rule: mpx.mixed_precision(rule, FP8, storage="split")),
    # Nothing is kept: parameters are rounded up or down at random, so that their mean is exact.
    Recipe(
        "bf16-stochastic", BF16,
        lambda rule: optax.chain(mpx.upcast(rule), mpx.stochastic_rounding(jax.random.key(0))),
    ),
    # Parameters and moments in bfloat16. The rounding error of each update is kept, and added to the next one.
    Recipe(
        "bf16-kahan", BF16, plain,
        adamw=lambda schedule, **options: mpx.any_precision_adamw(schedule, **ANY_PRECISION, **options),
    ),
    # A step that overflows is skipped and halves the scale. The default period of 2,000 good steps until the scale
    # doubles is longer than a whole comparison.
    Recipe(
        "f16-scaled", F16,
        lambda rule: mpx.mixed_precision(rule, F16, loss_scale=mpx.DynamicLossScale(period=50)),
    ),
)  # fmt: skip


def get_recipe(name: str) -> Recipe:
    """Return the recipe of a name, or raise a `ValueError` that lists all names."""
    by_name = {recipe.name: recipe for recipe in RECIPES}
    if name not in by_name:
        raise ValueError(f"no recipe is called {name!r}; there are {', '.join(by_name)}.")
    return by_name[name]
