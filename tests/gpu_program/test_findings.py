"""Check what findings say of programs for GPUs: of faults that users write, and nothing where there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.tools.program import target_devices

pytestmark = [pytest.mark.many_devices, pytest.mark.optax_promotion]

F32, BF16, F8 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn
everywhere = lambda w: jax.sharding.reshard(w, P())


def on(devices, shape, dtype=F32, spec=None):
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Explicit,))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec or P()))


def found(step, *args, target="h200", donate=0):
    """Return the beginnings of the findings of a program."""
    return [finding.what for finding in mpx.step_report(step, *args, target=target, donate_argnums=donate).findings]


def descent(loss):
    return lambda w, x: jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), w, jax.grad(loss)(w, x))


def two_layers(gathered):
    """Return a loss of two layers in bfloat16, cast by hand, whose weights `gathered` makes whole."""

    def loss(w, x):
        for weight in w:
            x = jnp.tanh(x.astype(BF16) @ gathered(weight)).astype(F32)
        return jnp.mean(x)

    return loss


def sharded(devices):
    weights = [on(devices, shape, spec=P("data")) for shape in ((2048, 8192), (8192, 2048))]
    return weights, on(devices, (4096, 2048), spec=P("data"))


def used_in_float32_too(w, x):
    hidden = x.astype(BF16) @ everywhere(w[0]).astype(BF16)
    return jnp.mean(hidden.astype(F32)) + jnp.sum(jnp.sin(everywhere(w[0])) ** 2)


SUMS = "Devices add up arrays of the shapes of weights in bf16"
PARTS = "Every device gets a whole sum and keeps a part of it"


@pytest.mark.parametrize(
    ("loss", "beginnings"),
    [
        (
            two_layers(lambda w: everywhere(w).astype(BF16)),
            [SUMS, PARTS, "Devices send float32 arrays that are rounded to bf16 right after"],
        ),
        (two_layers(lambda w: everywhere(w.astype(BF16))), [SUMS]),
        (used_in_float32_too, [SUMS, PARTS, "Devices gather float32 arrays that are used in float32"]),
    ],
    ids=["cast after", "cast before", "used in float32 too"],
)
def test_weights_that_are_gathered(h200, loss, beginnings):
    """Plain JAX adds up the gradients of a bfloat16 weight in bfloat16."""
    findings = found(descent(loss), *sharded(h200))
    assert [what[: len(beginning)] for what, beginning in zip(findings, beginnings, strict=True)] == beginnings


def closes_over_float32(w, x):
    return jnp.mean((jnp.tanh(x @ w) @ np.ones((2048, 2048), np.float32)).astype(BF16) @ w)


def has_cotangents_in_float32(w, x):
    """The cotangent of a float32 result is float32, and so are both products of the backward pass."""
    return jnp.mean(jax.nn.gelu(jnp.dot(x, w, preferred_element_type=F32)) ** 2)


@pytest.mark.parametrize("loss", [closes_over_float32, has_cotangents_in_float32])
def test_products_in_float32_among_those_of_bfloat16(h200, loss):
    args = on(h200[:1], (2048, 2048), BF16), on(h200[:1], (4096, 2048), BF16)
    (product,) = found(descent(loss), *args)
    assert "of all FLOPs multiply float32 numbers" in product
    assert found(descent(mpx.autocast(loss, "bf16")), *args) == []


def test_a_product_that_a_gpu_has_not_runs_in_another_dtype(h200):
    del h200  # skips where nothing compiles for GPUs
    product = lambda a, b: jnp.dot(a, b, preferred_element_type=F32)
    args = lambda target: [on(target_devices(target, 1), (1024, 1024), F8)] * 2
    (finding,) = found(product, *args("a100"), target="a100", donate=())
    assert finding.startswith("A product of f8e4m3fn runs in ")
    assert found(product, *args("h200"), donate=()) == []


def test_a_step_that_calls_python_is_refused_for_a_device_that_is_not_here(h200):
    def step(w):
        jax.debug.print("{}", w.sum())
        return w

    with pytest.raises(RuntimeError, match="calls Python while it runs"):
        found(step, on(h200[:1], (8, 8)))
