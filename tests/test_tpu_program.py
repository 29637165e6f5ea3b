"""Check what one step of an optimizer moves on a TPU v5e, in the program that XLA
compiles for it: exact, so asserted.

XLA for a TPU fuses less than for a GPU: results of 16 and of 32 bits get a pass over
memory each, and the whole step is computed in both, unless all of them are float32
before a last conversion, or each follows from the one before. Figures are of jax 0.10.2
with libtpu 0.0.42.1. The compiler is `pip install "jax[tpu]"`; no TPU is needed.
"""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx

pytestmark = [
    pytest.mark.optax_promotion,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason='the compiler for TPUs is missing: pip install "jax[tpu]"',
    ),
]


SHAPES = {"embedding": (50304, 768), "kernel": (768, 3072), "bias": (3072,)}
ADAMW = optax.adamw(1e-3, weight_decay=0.1)
BF16_MOMENTS = {"mu": "bf16", "nu": "bf16"}
EIGHT_BITS = {"mu": mpx.Blockwise8bit(), "nu": mpx.Blockwise8bit()}


def split(inner):
    return mpx.master_weights(inner, storage="split")


def kahan(inner):
    return optax.chain(mpx.upcast(inner), mpx.kahan_summation())


def stored(inner):
    return mpx.low_precision_state(inner, BF16_MOMENTS, min_size=0)


# What is moved, bytes a parameter. Split masters and Kahan summation moved 39.9 as long
# as what they keep did not follow from the stored parameter, and 43.1 under loss
# scaling as long as it chose between numbers of 16 bits.
RECIPES = {
    "f32": (jnp.float32, ADAMW, 28),
    "full": (jnp.bfloat16, mpx.master_weights(ADAMW), 30),
    "split": (jnp.bfloat16, split(ADAMW), 26),
    "split, lion": (jnp.bfloat16, split(optax.lion(1e-3)), 18),
    "split, loss scaling": (jnp.bfloat16, mpx.loss_scaling(split(ADAMW)), 28),
    "Kahan, bf16 moments": (jnp.bfloat16, kahan(stored(ADAMW)), 18),
    "Kahan, loss scaling": (jnp.bfloat16, mpx.loss_scaling(kahan(ADAMW)), 28),
}


def report_of(dtype, tx):
    params = {
        path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in SHAPES.items()
    }

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    report = mpx.step_report(
        step, params, state, params, target="v5e", donate_argnums=(0, 1)
    )
    return sum(leaf.size for leaf in params.values()), report


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_on_a_tpu_moves_its_results_in_one_pass_without_temporaries(name):
    dtype, tx, moved = RECIPES[name]
    count, report = report_of(dtype, tx)
    assert report.moved_bytes / count == pytest.approx(moved, abs=0.05)
    assert report.temporary_bytes < 0.2 * count


def test_a_step_with_8_bit_moments_on_a_tpu_does_not_copy_its_arrays_into_views_of_blocks():
    """In views of blocks it moved 163 bytes a parameter for the embedding, and kept 20
    of temporaries.
    """
    count, report = report_of(
        jnp.bfloat16, split(mpx.low_precision_state(ADAMW, EIGHT_BITS))
    )
    assert report.moved_bytes < 17 * count
    assert report.temporary_bytes < 5 * count
