"""Check gradients that are added up in float32, rounded once, and kept in bfloat16."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpx
from tests.helpers import all_eqns, assert_same_bits, cases

pytestmark = [pytest.mark.many_devices, pytest.mark.optax_promotion]

SHAPE = (3, 64, 64)
WEIGHTS = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32) / 8
INPUTS = np.random.default_rng(1).normal(size=(32, 64)).astype(np.float32)

everywhere = lambda w: jax.sharding.reshard(w, P())
layer = lambda w, x: jnp.tanh(x @ w)
two_uses = lambda w, x: layer(everywhere(w).T, layer(everywhere(w), x))


def scanned(body, x, weights):
    return jax.lax.scan(lambda x, w: (body(w, x), None), x, weights)[0]


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return (
            layer(
                everywhere(
                    self.param(
                        "w", nn.initializers.zeros_init(), SHAPE[1:], jnp.bfloat16
                    )
                ),
                x,
            ),
            None,
        )


class OfNNX(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)

    def __call__(self, x):
        return layer(everywhere(self.w[...]), x)


def linen(w, x):
    layers = nn.scan(
        nn.remat(OfLinen),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=SHAPE[0],
    )
    return jnp.mean(layers().apply({"params": {"w": w}}, x, None)[0] ** 2)


def of_nnx(model, x):
    layers = nnx.scan(
        nnx.remat(lambda x, model: model(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
    )
    return jnp.mean(layers(x, model) ** 2)


LOSSES = {
    "a scan": lambda w, x: jnp.mean(
        scanned(lambda w, x: layer(everywhere(w), x), x, w) ** 2
    ),
    "two uses in a layer": lambda w, x: jnp.mean(scanned(two_uses, x, w) ** 2),
    "a checkpoint": lambda w, x: jnp.mean(scanned(jax.checkpoint(two_uses), x, w) ** 2),
    "Linen": linen,
    "NNX": lambda w, x: of_nnx(OfNNX(w), x),
    "gathered before": lambda w, x: jnp.mean(scanned(layer, x, everywhere(w)) ** 2),
}
TWO_SCANS = lambda w, x: jnp.mean(scanned(two_uses, scanned(two_uses, x, w), w) ** 2)


@pytest.fixture
def args():
    with jax.set_mesh(
        jax.make_mesh(
            (8,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")
        )
    ):
        yield (
            jax.device_put(jnp.asarray(WEIGHTS, jnp.bfloat16), P(None, "data")),
            jax.device_put(INPUTS, P("data")),
        )


def dtypes_of_loops(gradient, args):
    """Return the dtypes of stacks that loops of the backward pass make: gradients."""
    scans = [
        eqn
        for eqn in all_eqns(jax.make_jaxpr(gradient)(*args))
        if eqn.primitive.name == "scan"
    ]
    return {
        str(v.aval.dtype)
        for eqn in scans
        if eqn.params["reverse"]
        for v in eqn.outvars
        if v.aval.shape == SHAPE
    }


@pytest.mark.parametrize(
    "name", cases([*LOSSES, "two scans"], ["gathered before", "two scans"])
)
def test_a_gradient_in_bfloat16_is_the_float32_gradient_rounded_once(args, name):
    """Two scans of one stack add up two float32 gradients before they are rounded."""
    loss = mpx.autocast((LOSSES | {"two scans": TWO_SCANS})[name], "bf16")
    exact = mpx.grad(loss)(*args)
    # So there is something to round.
    assert jnp.mean(exact == exact.astype(jnp.bfloat16).astype(jnp.float32)) < 0.01
    assert_same_bits(
        mpx.grad(loss, grad_dtype="bf16")(*args), exact.astype(jnp.bfloat16)
    )


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "gathered before"])
def test_no_loop_makes_a_float32_gradient_of_a_stack_that_is_wanted_in_bfloat16(
    args, name
):
    loss = mpx.autocast(LOSSES[name], "bf16")
    assert "float32" not in dtypes_of_loops(mpx.grad(loss, grad_dtype="bf16"), args)
    assert "float32" in dtypes_of_loops(mpx.grad(loss), args)


def test_an_nnx_model_that_is_differentiated_itself_has_no_float32_gradient_of_a_stack_either(
    args,
):
    def gradient(dtype):
        grad = mpx.grad(
            mpx.autocast(of_nnx, "bf16"), grad_dtype=dtype, transform=nnx.value_and_grad
        )
        return lambda w, x: jax.tree.leaves(grad(OfNNX(w), x))[0]

    assert dtypes_of_loops(gradient("bf16"), args) == {"bfloat16"}
    assert_same_bits(
        gradient("bf16")(*args), gradient("f32")(*args).astype(jnp.bfloat16)
    )
