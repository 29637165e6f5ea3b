"""List the recipes: those of mpx by name, and a few to compare them with.

The name of a recipe says the dtypes of parameters and of computation, and what
`mpx.mixed_precision` puts around the rule, which is
`optax.chain(optax.clip_by_global_norm(...), optax.adamw(...))`. The model is the same
for all.

JAX multiplies float32 matrices in TF32 on GPUs that have it, which keeps 10 bits of the
mantissa. The recipe `f32` asks for full precision and `tf32` does not. On a CPU they
are the same.
"""

import dataclasses
from typing import Any, Literal

import numpy as np
import optax

import mpx


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A way to train in mixed precision."""

    name: str
    # With the name of mpx's recipe in it, which `mpx.mixed_precision` reads.
    policy: mpx.Policy
    # "autocast" runs the model under `mpx.autocast`; "cast" casts its parameters to the
    # compute dtype, which all other operations follow; "plain" does so with
    # `jax.value_and_grad` and Optax alone, without mpx.
    compute: Literal["autocast", "cast", "plain"] = "autocast"
    loss_scale: mpx.DynamicLossScale | None = None
    # Whether `mpx.fused_update` computes the step of the optimizer, on a GPU in one
    # kernel for each large leaf.
    fused: bool = False
    # For `jax.default_matmul_precision`. Autocast does not cast a product for which
    # more than the default is asked.
    matmul_precision: Literal["float32"] | None = None

    def optimizer(
        self, rule: optax.GradientTransformation
    ) -> optax.GradientTransformation:
        """Return the rule with what the recipe puts around it. A plain one has the
        dtypes of its parameters.
        """
        if self.compute == "plain":
            return rule
        return mpx.mixed_precision(rule, self.policy, loss_scale=self.loss_scale)

    @property
    def compute_dtype(self) -> str:
        """Return the dtype that the model computes in."""
        return np.dtype(self.policy.compute_dtype).name

    @property
    def attention_dtype(self) -> Literal["bfloat16", "float16"]:
        """Return the dtype of the inputs of cuDNN's attention."""
        return "float16" if self.compute_dtype == "float16" else "bfloat16"


def of_mpx(name: str, **options: Any) -> Recipe:
    """Return a recipe that mpx has under this name."""
    return Recipe(name, mpx.get_policy(name), **options)


RECIPES = (
    of_mpx("f32", compute="plain", matmul_precision="float32"),
    Recipe("tf32", mpx.get_policy("f32"), compute="plain"),
    of_mpx("bf16-autocast"),
    Recipe(
        "bf16-naive",
        mpx.get_policy("params=bf16,compute=bf16,output=f32"),
        compute="plain",
    ),
    Recipe("bf16-cast", mpx.get_policy("bf16-masters"), compute="cast"),
    of_mpx("bf16-masters"),
    of_mpx("bf16-split"),
    of_mpx("bf16-split-8bit", fused=True),
    of_mpx("bf16-split24-8bit", fused=True),
    of_mpx("bf16-split24-4bit", fused=True),
    # Products of any size in 8 bits, so that the tiny model shows what is lost; the
    # layers of GPT-2 350M are large enough anyway. The head, whose weight is the
    # embedding, stays in bfloat16.
    Recipe(
        "fp8", mpx.get_policy("fp8,compute=fp8(min_extent=0),'token_embedding'=bf16")
    ),
    of_mpx("bf16-stochastic"),
    of_mpx("bf16-kahan"),
    # A step that overflows is skipped and halves the scale. The default period of 2,000
    # good steps until the scale doubles is longer than a whole comparison.
    of_mpx("f16-scaled", loss_scale=mpx.DynamicLossScale(period=50)),
)


def get_recipe(name: str) -> Recipe:
    """Return the recipe of a name, or raise a `ValueError` that lists all names."""
    by_name = {recipe.name: recipe for recipe in RECIPES}
    if name not in by_name:
        raise ValueError(
            f"no recipe is called {name!r}; there are {', '.join(by_name)}."
        )
    return by_name[name]
