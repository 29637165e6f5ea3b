"""Check which products of a program that XLA compiles for a GPU are of 8-bit floats, and what it moves.

Nothing is asked of XLA beyond its defaults. Figures are of jax 0.10.2.
"""

import functools

import jax
import jax.numpy as jnp

import mpx
from examples.gpt.model import gelu

ROWS, WIDTH, HIDDEN = 8192, 4096, 16384
F8 = {"f8e4m3fn", "f8e4m3fn with f8e5m2", "f8e5m2 with f8e4m3fn"}


@functools.cache
def report_of_mlp(way):
    """Return the report of a perceptron with two layers and of its gradients."""

    def outputs_and_gradients(x, up, down, cotangent):
        outputs, pull = jax.vjp(mpx.autocast(lambda x, up, down: gelu(x @ up) @ down, way), x, up, down)
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


def test_row_scaling_has_products_of_one_format(h200):
    report = report_of_mlp(mpx.Fp8(scaling="row", backward="e4m3"))
    assert report.flops == {"f8e4m3fn": 6 * 2 * ROWS * WIDTH * HIDDEN}


def test_a_perceptron_takes_two_thirds_of_the_time_at_most_and_moves_more(h200):
    """Operands are read twice, for their largest number and to round them: 7.2 GB instead of 5.2 are moved.

    float32 weights are half of it. XLA writes GELU in float32 in between, where it might compute it twice.
    """
    fp8, bf16 = report_of_mlp("fp8"), report_of_mlp("bf16")
    assert fp8.moved_bytes < 1.4 * bf16.moved_bytes
    assert fp8.bound_seconds < 0.66 * bf16.bound_seconds
