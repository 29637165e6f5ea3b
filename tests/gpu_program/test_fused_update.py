"""Check what one AdamW step of `fused_update` moves on a GPU, in the program that XLA
compiles for it.

The tensors are those of `test_optimizer_steps.py`. Figures are of jax 0.10.2.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
from benchmarks.optimizer_step import Recipe, side_of_rule
from benchmarks.timing import in_a_loop
from mpx._fused import fused_update, schedule
from mpx._fused.partition import SMALL
from tests.gpu_program.test_optimizer_steps import ADAMW, BF16, MOVED, RECIPES, SHAPES

pytestmark = pytest.mark.optax_promotion

MOMENTS = {"mu": mpx.Blockwise8bit(), "nu": mpx.Blockwise8bit()}
EIGHT_BITS = mpx.low_precision_state(ADAMW, MOMENTS)
FOUR_BITS = mpx.low_precision_state(
    ADAMW, MOMENTS | {"mu": mpx.Blockwise4bit()}, key=jax.random.key(0)
)
IN_24_BITS = {"storage": "split24", "key": jax.random.key(1)}
STEPS = {
    **{name: (*recipe, MOVED[name]) for name, recipe in RECIPES.items() if name in ("split", "Kahan, bf16 moments")},
    "split, 8-bit": (jnp.bfloat16, mpx.mixed_precision(EIGHT_BITS, BF16), 14.1),
    "split, 8-bit, clipped": (
        jnp.bfloat16, mpx.mixed_precision(optax.chain(optax.clip_by_global_norm(1.0), EIGHT_BITS), BF16), 16.1
    ),
    "24 bits, 8-bit": (jnp.bfloat16, mpx.mixed_precision(EIGHT_BITS, BF16, **IN_24_BITS), 12.1),
    "24 bits, 4-bit": (jnp.bfloat16, mpx.mixed_precision(FOUR_BITS, BF16, **IN_24_BITS), 11.1),
}  # fmt: skip


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let `fused_update` make kernels though this machine has no GPU, and eight CPUs."""
    monkeypatch.setattr(fused_update, "may_run_kernels", lambda interpret: True)
    monkeypatch.setattr(schedule, "are_several_in_sight", lambda: False)


def report_of(dtype, tx, in_order=True):
    """Return the parameters and the report of a step that takes parameters and state in
    the order of its results.
    """
    is_shape = lambda x: isinstance(x, tuple)
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), SHAPES, is_leaf=is_shape
    )
    fused, state = mpx.fused_update(tx), jax.eval_shape(tx.init, params)
    if not in_order:
        return params, mpx.step_report(
            fused, params, state, params, target="h200", donate_argnums=(1, 2)
        )
    step = lambda params, state, grads: fused(grads, state, params)
    return params, mpx.step_report(
        step, params, state, params, target="h200", donate_argnums=(0, 1)
    )


@pytest.mark.parametrize("name", STEPS)
def test_a_step_moves_what_it_must_in_a_kernel_a_tensor(name, h200, on_a_gpu):
    """Large tensors have a kernel of mpx, small ones a kernel of XLA."""
    dtype, tx, expected = STEPS[name]
    params, report = report_of(dtype, tx)
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    assert report.moved_bytes / sum(sizes) == pytest.approx(expected, abs=0.05)
    assert report.temporary_bytes < 0.01 * sum(sizes)
    ours = [kernel for kernel in report.kernels if "triton" in kernel.operation]
    assert len(ours) == sum(size >= SMALL for size in sizes)
    # A norm by shapes; keys take a few.
    assert report.kernel_count <= len(sizes) + (23 if "clipped" in name else 11)


def test_a_loop_moves_in_each_step_what_a_step_moves(h200, on_a_gpu):
    """Nothing is computed before the loop, in which a kernel counts the steps."""
    dtype, tx, _ = STEPS["24 bits, 4-bit"]
    side = side_of_rule(Recipe(dtype, lambda: tx))
    is_shape = lambda x: isinstance(x, tuple)
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), SHAPES, is_leaf=is_shape
    )
    given = (jax.eval_shape(side.start, params), params)
    step, loop = (
        mpx.step_report(function, *given, target="h200", donate_argnums=0)
        for function in (side.step, in_a_loop(side.step, 7))
    )
    inside = [kernel for kernel in loop.kernels if kernel.times == 7]
    assert len(inside) == step.kernel_count + 1
    assert sum(kernel.bytes for kernel in inside) == pytest.approx(
        step.moved_bytes, abs=100
    )
    assert loop.moved_bytes == pytest.approx(7 * step.moved_bytes, abs=1000)


def test_results_in_another_order_than_what_is_donated_are_copied(h200, on_a_gpu):
    """JAX gives donated memory to results of the same type in turn: here that of
    moments to parameters.
    """
    params, report = report_of(*RECIPES["f32"], in_order=False)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert report.moved_bytes / count > 60
