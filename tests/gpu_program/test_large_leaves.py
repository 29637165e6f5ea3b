"""Check that a step of a leaf moves as much an element above 2**31 elements as below,
in the program for an H200.

The leaves are stacks of matrices of a Llama of 70 billion parameters. Figures are of
jax 0.10.2.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx._fused import fused_update, schedule
from tests.helpers import stepper

pytestmark = pytest.mark.optax_promotion

TX = mpx.mixed_precision(optax.adamw(1e-3, weight_decay=0.1), "bf16-split-8bit")
FUSED = mpx.fused_update(TX)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Make a program for one GPU though this machine has none, and eight CPUs."""
    monkeypatch.setattr(fused_update, "may_run_kernels", lambda interpret: True)
    monkeypatch.setattr(schedule, "are_several_in_sight", lambda: False)


def per_element(step, layers, sharding=None):
    """Return the bytes that a step moves and holds beside its arguments, an element of
    a device's part of a leaf.
    """
    params = {
        "w": jax.ShapeDtypeStruct(
            (layers, 8192, 28672), jnp.bfloat16, sharding=sharding
        )
    }
    state = jax.eval_shape(TX.init, params)
    if sharding:
        placed = lambda x: x.update(
            sharding=sharding if x.ndim > 1 else NamedSharding(sharding.mesh, P())
        )
        state = jax.tree.map(placed, state)
    report = mpx.step_report(
        step, params, state, params, target="h200", donate_argnums=(0, 1)
    )
    size = params["w"].size // (sharding.num_devices if sharding else 1)
    return report.moved_bytes / size, report.temporary_bytes / size


@pytest.mark.parametrize("layers", [8, 16])
def test_a_kernel_moves_what_it_must(h200, layers):
    params = {"w": jax.ShapeDtypeStruct((layers, 8192, 28672), jnp.bfloat16)}
    assert [row.runs for row in FUSED.plan(params).rows] == ["a kernel"]
    moved, temporary = per_element(
        lambda params, state, grads: FUSED(grads, state, params), layers
    )
    assert moved == pytest.approx(14.06, abs=0.01)
    assert temporary < 0.01


def test_each_of_eight_devices_runs_a_kernel_on_its_part_of_a_leaf_of_80_layers(h200):
    sharding = NamedSharding(
        Mesh(np.array(h200), ("data",), axis_types=(AxisType.Auto,)), P("data")
    )
    moved, temporary = per_element(
        lambda params, state, grads: FUSED(grads, state, params), 80, sharding
    )
    assert moved == pytest.approx(14.06, abs=0.01)
    assert temporary < 0.01


@pytest.mark.parametrize(("layers", "expected"), [(8, 18.4), (16, 18.4)])
def test_xla_writes_no_moment_in_float32(h200, layers, expected):
    moved, temporary = per_element(stepper(TX), layers)
    assert moved == pytest.approx(expected, abs=0.1)
    assert temporary < 0.15
