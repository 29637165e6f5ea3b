"""Check which products of a program that XLA compiles for a GPU are of 8-bit floats,
and what it moves.

Nothing is asked of XLA beyond its defaults. Figures are of jax 0.10.2.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import mpx
from benchmarks.reading import flash_attention
from examples.gpt.model import PRESETS, gelu
from examples.gpt.recipes import get_recipe
from tests.gpu_program.gpt2_step import BATCH, report_of_step

pytestmark = pytest.mark.optax_promotion

ROWS, WIDTH, HIDDEN = 8192, 4096, 16384
F8 = {"f8e4m3fn", "f8e4m3fn with f8e5m2", "f8e5m2 with f8e4m3fn"}


@functools.cache
def report_of_mlp(way):
    """Return the report of a perceptron with two layers and of its gradients."""

    def outputs_and_gradients(x, up, down, cotangent):
        outputs, pull = jax.vjp(
            mpx.autocast(lambda x, up, down: gelu(x @ up) @ down, way), x, up, down
        )
        return outputs.astype(jnp.bfloat16), pull(cotangent.astype(outputs.dtype))

    shape = jax.ShapeDtypeStruct
    x = shape((ROWS, WIDTH), jnp.bfloat16)
    weights = shape((WIDTH, HIDDEN), jnp.float32), shape((HIDDEN, WIDTH), jnp.float32)
    return mpx.step_report(outputs_and_gradients, x, *weights, x, target="h200")


def test_all_six_products_of_a_perceptron_and_its_gradient_are_of_8_bits(h200):
    """Two of each kind. Negative control: in bfloat16 there is none."""
    flops = report_of_mlp("fp8").flops
    assert flops.keys() == F8
    assert set(flops.values()) == {2 * 2 * ROWS * WIDTH * HIDDEN}
    assert report_of_mlp("bf16").flops.keys() == {"bf16"}


def test_a_perceptron_moves_little_more_in_8_bits_and_takes_two_thirds_of_the_time_at_most(
    h200,
):
    """Operands are read twice, for their largest number and to round them; the
    product's kernel scales the result.
    """
    fp8, bf16 = report_of_mlp("fp8"), report_of_mlp("bf16")
    assert fp8.moved_bytes < 1.15 * bf16.moved_bytes
    assert fp8.bound_seconds < 0.66 * bf16.bound_seconds


# ---- GPT-2 ----------------------------------------------------------------------------------------------------------

TOKENS = BATCH * 1024


BY_DEFAULT = dataclasses.replace(
    get_recipe("fp8"), policy=mpx.get_policy("fp8,'token_embedding'=bf16")
)


def test_all_products_of_the_linear_layers_of_gpt2_are_of_8_bits(h200):
    """Of 12 weights times the square of the width, in three products. The head and
    attention are in bfloat16.
    """
    config = dataclasses.replace(PRESETS["gpt2-1.5b"], depth=1, attention="cudnn")
    with flash_attention():
        flops = dict(report_of_step(BY_DEFAULT, config)[1].flops)
    assert flops.pop("bf16") == 3 * 2 * TOKENS * config.width * config.padded_vocabulary
    assert flops.keys() == F8
    assert set(flops.values()) == {2 * TOKENS * 12 * config.width**2}
