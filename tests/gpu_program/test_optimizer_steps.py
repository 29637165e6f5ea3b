"""Check what one AdamW step moves on a GPU, in the program that XLA compiles for it:
exact, so asserted.

The tensors are those of GPT-2 124M with one of its twelve layers. Gradients have the
dtype of the parameters, as inside a jitted step. Figures are of jax 0.10.2.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
from tests.helpers import stepper

pytestmark = pytest.mark.optax_promotion

WIDTH = 768
SHAPES = {
    "wte": (50304, WIDTH), "wpe": (1024, WIDTH),
    "ln_1": {"scale": (WIDTH,), "bias": (WIDTH,)}, "ln_2": {"scale": (WIDTH,), "bias": (WIDTH,)},
    "qkv": {"kernel": (WIDTH, 3 * WIDTH), "bias": (3 * WIDTH,)}, "proj": {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)},
    "fc": {"kernel": (WIDTH, 4 * WIDTH), "bias": (4 * WIDTH,)}, "out": {"kernel": (4 * WIDTH, WIDTH), "bias": (WIDTH,)},
    "ln_f": {"scale": (WIDTH,), "bias": (WIDTH,)},
}  # fmt: skip
ADAMW = optax.adamw(1e-3, weight_decay=0.1)
BF16 = "params=bf16,compute=bf16,output=f32"
BF16_MOMENTS = {"mu": "bf16", "nu": "bf16"}
RECIPES = {
    "f32": (jnp.float32, ADAMW),
    "full": (jnp.bfloat16, mpx.mixed_precision(ADAMW, BF16, storage="full")),
    "split": (jnp.bfloat16, mpx.mixed_precision(ADAMW, BF16)),
    "Kahan, bf16 moments": (
        jnp.bfloat16,
        optax.chain(
            mpx.low_precision_state(ADAMW, BF16_MOMENTS, min_size=0),
            mpx.kahan_summation(),
        ),
    ),
    "f16, loss scaling": (
        jnp.float16,
        mpx.mixed_precision(ADAMW, "params=f16,compute=f16,output=f32"),
    ),
}
# The bytes a parameter that must be read and written, and the bytes that the program
# moves.
MOVED = {
    "f32": 28.0,
    "full": 30.0,
    "split": 26.0,
    "Kahan, bf16 moments": 18.0,
    "f16, loss scaling": 32.0,
}


def report_of(dtype, tx):
    is_shape = lambda x: isinstance(x, tuple)
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), SHAPES, is_leaf=is_shape
    )

    return params, mpx.step_report(
        stepper(tx),
        params,
        jax.eval_shape(tx.init, params),
        params,
        target="h200",
        donate_argnums=(0, 1),
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_moves_what_it_must_in_one_kernel_a_tensor_without_temporaries(
    name, h200
):
    params, report = report_of(*RECIPES[name])
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert report.moved_bytes / count == pytest.approx(MOVED[name], abs=0.05)
    assert report.temporary_bytes < 0.01 * count
    large = [kernel for kernel in report.kernels if kernel.bytes > 100_000]
    per_tensor = 2 if name == "f16, loss scaling" else 1  # one looks for infinities
    assert len(large) <= per_tensor * sum(
        leaf.size > 10_000 for leaf in jax.tree.leaves(params)
    )
    assert (
        report.kernel_count <= (2 * per_tensor + 1) * len(jax.tree.leaves(params)) + 12
    )


def test_a_step_with_8_bit_moments_keeps_no_moment_in_float32(h200):
    """14.1 bytes a parameter must be moved; gradient, codes and scales are read a
    second time, for the new scales.
    """
    moments = {"mu": mpx.Blockwise8bit(), "nu": mpx.Blockwise8bit()}
    tx = mpx.mixed_precision(mpx.low_precision_state(ADAMW, moments), BF16)
    params, report = report_of(jnp.bfloat16, tx)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert report.moved_bytes / count == pytest.approx(18.4, abs=0.1)
    assert report.temporary_bytes < 0.11 * count
    assert report.kernel_count <= 4 * len(jax.tree.leaves(params))
