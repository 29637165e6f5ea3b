"""Hold layers whose inputs are kept in few bits against `jax.checkpoint`, in programs
for an H200 (jax 0.10.2).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx

LAYERS, ROWS, WIDTH = 12, 8192, 1024


def report_of(checkpoint, whole=lambda w: w, weights=None, rows=None, target="h200"):
    """Return the report of the gradients of scanned layers, whose weights `whole`
    gathers inside of the checkpoint.
    """

    @checkpoint
    def layer(x, w):
        return x + jax.nn.gelu(x @ whole(w["up"])) @ whole(w["down"])

    def loss(weights, x):
        return jnp.mean(
            jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0] ** 2
        )

    w = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16, sharding=weights)
    x = jax.ShapeDtypeStruct(
        (ROWS * (8 if rows else 1), WIDTH), jnp.float32, sharding=rows
    )
    gradients = mpx.value_and_grad(mpx.autocast(loss, "bf16"))
    return mpx.step_report(gradients, {"up": w, "down": w}, x, target=target)


@pytest.mark.parametrize(
    ("kept", "saved"), [("bf16", 2), (mpx.Blockwise8bit(), 3.07)], ids=str
)
def test_layers_hold_fewer_bytes_an_activation_and_compute_as_much(h200, kept, saved):
    ours, plain = (
        report_of(functools.partial(mpx.checkpoint, kept=kept, argnums=0)),
        report_of(jax.checkpoint),
    )
    found = (plain.temporary_bytes - ours.temporary_bytes) / (LAYERS * ROWS * WIDTH)
    assert found == pytest.approx(saved, abs=0.01)
    assert ours.flops == plain.flops
    assert ours.moved_bytes < plain.moved_bytes


@pytest.mark.slow
def test_a_tpu_holds_a_byte_an_activation(v5e):
    """It is 1.5 if each row is encoded by itself where that changes nothing, and 2 by
    `jax.checkpoint`.
    """
    ours = report_of(
        functools.partial(mpx.checkpoint, kept=mpx.Blockwise8bit(), argnums=0),
        target="v5e",
    )
    assert ours.temporary_bytes == pytest.approx(LAYERS * ROWS * WIDTH, rel=0.05)


@pytest.mark.many_devices
def test_weights_are_gathered_in_16_bits_as_before(h200):
    mesh = Mesh(np.array(h200), ("data",), axis_types=(AxisType.Explicit,))
    placed = {
        "weights": NamedSharding(mesh, P(None, None, "data")),
        "rows": NamedSharding(mesh, P("data")),
    }
    whole = lambda w: jax.sharding.reshard(w, P())
    with jax.set_mesh(mesh):
        ours = report_of(
            functools.partial(mpx.checkpoint, kept=mpx.Blockwise8bit(), argnums=0),
            whole,
            **placed,
        )
        plain = report_of(jax.checkpoint, whole, **placed)
    assert ours.temporary_bytes < plain.temporary_bytes - 2.9 * LAYERS * ROWS * WIDTH
    assert ours.sent_by_kind == plain.sent_by_kind
    assert {"all-gather bf16", "reduce-scatter f32"} < set(ours.sent_by_kind)
