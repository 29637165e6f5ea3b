"""Check in which dtype a training step of GPT-2 124M multiplies, in the program that XLA compiles for a GPU."""

import jax
import jax.numpy as jnp
import pytest

import mpx
from examples.gpt.model import PRESETS
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, make_program

pytestmark = pytest.mark.optax_promotion


@pytest.mark.parametrize(("recipe", "dtype"), [("bf16-split", "bf16"), ("f32", "f32"), ("tf32", "tf32")])
def test_every_product_of_a_step_is_in_the_compute_dtype(recipe, dtype, h200):
    """Six FLOPs for each weight and token, and attention: about 14 TFLOP for 16 x 1,024 tokens."""
    program = make_program(get_recipe(recipe), PRESETS["gpt2-124m"], Hyperparameters(steps=1000, learning_rate=6e-4))
    params, state = jax.eval_shape(program.init, 0)
    tokens = jax.ShapeDtypeStruct((1, 16, 1025), jnp.int32)
    report = mpx.step_report(program.train_step, params, state, tokens, target="h200", donate_argnums=(0, 1))
    assert report.flops.keys() == {dtype}
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert 6 * weights * 16 * 1024 < report.flops[dtype] < 8 * weights * 16 * 1024
    assert report.donated_bytes > 0.99 * report.output_bytes
