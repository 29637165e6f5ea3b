"""Check what eight GPUs send to each other in one step, in the program that XLA compiles for them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx

pytestmark = pytest.mark.optax_promotion

POLICY = mpx.get_policy("params=bf16,compute=bf16,output=f32")
LOSS = mpx.autocast(lambda params, x: jnp.mean(jnp.tanh(x @ params["a"]) @ params["b"]), POLICY)
COUNT = 512 * 2048  # elements of each of two weights


@pytest.fixture
def mesh(h200):
    return Mesh(np.array(h200), ("data",), axis_types=(AxisType.Auto,))


def report_of(tx, mesh, scatter, fused=False):
    placed = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    params = {name: placed(shape, jnp.bfloat16, P()) for name, shape in {"a": (512, 2048), "b": (2048, 512)}.items()}
    state = jax.eval_shape(tx.init, params)
    shardings = (
        mpx.zero1_shardings(params, state, mesh) if scatter else jax.tree.map(lambda _: params["a"].sharding, state)
    )
    state = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), state, shardings)

    def step(params, state, x):
        value_and_grad = mpx.value_and_grad(LOSS, mpx.get_loss_scale(state))
        loss, grads = mpx.data_parallel(value_and_grad, mesh, scatter=scatter)(params, x)
        if fused:
            return *mpx.fused_update(tx)(grads, state, params), loss
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    x = placed((2048, 512), jnp.float32, P("data"))
    return mpx.step_report(step, params, state, x, target="h200", donate_argnums=(0, 1))


def test_zero1_scatters_float32_gradients_and_gathers_16_bits_of_parameters_and_nothing_else(mesh):
    tx = mpx.zero1(mpx.mixed_precision(optax.adamw(1e-3), POLICY), mesh)
    sent = {(c.operation, c.dtype, c.bytes * c.times) for c in report_of(tx, mesh, scatter=True).collectives}
    assert sent == {
        ("reduce-scatter", "f32", 2 * 4 * (COUNT + COUNT // 8)),  # reads all, writes its part
        ("all-gather", "u16", 2 * 2 * (COUNT // 8 + COUNT)),
        ("all-reduce", "f32", 2 * 4),  # the loss
    }


def with_8_bit_moments():
    moments = dict.fromkeys(["mu", "nu"], mpx.Blockwise8bit())
    return mpx.mixed_precision(mpx.low_precision_state(optax.adamw(1e-3), moments), POLICY)


def sent(report):
    return sorted((c.operation, c.dtype, c.axes, c.bytes * c.times) for c in report.collectives)


def kernel_bytes(report):
    return sorted(k.bytes for k in report.kernels for _ in range(k.times) if "triton" in k.operation)


@pytest.mark.parametrize("scatter", [True, False], ids=["zero1", "equal parameters"])
def test_kernels_of_fused_update_run_on_each_device(mesh, scatter):
    """With zero1 each updates an eighth of two weights, and puts whole ones in place: reads 4 bytes, writes 2."""
    tx = mpx.zero1(with_8_bit_moments(), mesh) if scatter else with_8_bit_moments()
    without, fused = (report_of(tx, mesh, scatter=scatter, fused=fused) for fused in (False, True))
    assert sent(fused) == sent(without)
    # Gradients are float32 here: 4 bytes more are 2 more than with bfloat16 ones. (And a handful for scalars.)
    updated = [pytest.approx(16.0625 * COUNT / (8 if scatter else 1), rel=1e-3)] * 2
    assert kernel_bytes(fused) == updated + [6 * COUNT] * 2 * scatter
    if scatter:
        assert fused.moved_bytes < 1.01 * without.moved_bytes  # nearly all of it is to put whole parameters in place
