"""Check what is said of programs that XLA cannot compile, and that the remedy is one."""

import jax
import jax.numpy as jnp
import pytest

import mpx
from tests.gpu_program.others import Model, loss_fn, program

pytestmark = pytest.mark.optax_promotion

# Images of 224 x 224 in patches of 16 x 16.
VIT = Model(layers=1, patch=768, words=1000, sequence=196)


def in_bfloat16(params, inputs, targets):
    """Return the gradient of a model that is cast by hand."""
    half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    return jax.grad(lambda params: loss_fn(VIT, half(params), half(inputs), targets))(
        params
    )


def test_a_product_that_triton_cannot_cut_into_tiles_is_said_with_the_flag_that_helps(
    h200,
):
    """Whatever casts the model; the same program compiles where cuBLAS multiplies."""
    del h200  # skips where nothing compiles for GPUs
    step, args, _ = program(VIT, "bf16-split")
    failure = (
        r"(?s)XLA failed: INTERNAL: Couldn't find output tile"
        r" sizes.*XLA_FLAGS=--xla_gpu_enable_triton_gemm=false"
    )
    with pytest.raises(RuntimeError, match=failure):
        mpx.step_report(step, *args, target="h200", donate_argnums=(0, 1))
    by_hand = (args[0], *args[2:])
    with pytest.raises(RuntimeError, match=failure):
        mpx.step_report(in_bfloat16, *by_hand, target="h200")
    by_cublas = jax.jit(
        in_bfloat16, compiler_options={"xla_gpu_enable_triton_gemm": False}
    )
    assert mpx.step_report(by_cublas, *by_hand, target="h200").flops.keys() == {"bf16"}
