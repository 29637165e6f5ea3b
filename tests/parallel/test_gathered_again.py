"""Check that gathered weights are not kept for the backward pass, and that nothing else changes."""

import equinox as eqx
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

SIZE, LAYERS, ROWS = 64, 2, 32
WEIGHTS = np.random.default_rng(0).normal(size=(LAYERS, SIZE, SIZE)).astype(np.float32) / 8
INPUTS = np.random.default_rng(1).normal(size=(ROWS, SIZE)).astype(np.float32)

everywhere = lambda w: jax.sharding.reshard(w, P())
layer = lambda w, x: jnp.tanh(x @ w)


def with_layers(gathered, layer):
    """Return a loss of layers whose weights `gathered` takes from a stack."""

    def loss(weights, x):
        for w in gathered(weights):
            x = layer(w, x)
        return jnp.mean(x**2)

    return loss


def scanned(body, whole=lambda w: w):
    """Return a loss that scans over layers, of weights that `whole` makes of the stack."""
    return lambda weights, x: jnp.mean(jax.lax.scan(lambda x, w: (body(w, x), None), x, whole(weights))[0] ** 2)


def of_linen(w, x):
    return jnp.tanh(nn.Dense(SIZE, use_bias=False).apply({"params": {"kernel": w}}, x))


def of_nnx(w, x):
    graph, state = nnx.split(nnx.eval_shape(lambda: nnx.Linear(SIZE, SIZE, use_bias=False, rngs=nnx.Rngs(0))))
    return jnp.tanh(nnx.merge(graph, jax.tree.map(lambda _: w, state))(x))


def in_nnx_scan(weights, x):
    """Scan as Flax NNX does, which returns the weights that it got."""
    graph, state = nnx.split(nnx.eval_shape(lambda: nnx.Linear(SIZE, SIZE, use_bias=False, rngs=nnx.Rngs(0))))
    layers = nnx.merge(graph, jax.tree.map(lambda _: everywhere(weights), state))
    layer = nnx.remat(lambda linear, x: jnp.tanh(linear(x)))
    return jnp.mean(nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x) ** 2)


def of_equinox(w, x):
    linear = eqx.nn.Linear(SIZE, SIZE, use_bias=False, key=jax.random.key(0))
    return jnp.tanh(jax.vmap(eqx.tree_at(lambda linear: linear.weight, linear, w))(x))


def tied(weights, x):
    w, head = map(everywhere, weights)
    return jnp.mean((layer(w, x) @ w.T) ** 2) + jnp.mean(layer(head, x)) + jnp.sum(head[0] ** 2)


def closed_over(weights, x):
    whole = [everywhere(w) for w in weights]
    return jnp.mean(jax.lax.scan(lambda x, _: (layer(whole[1], layer(whole[0], x)), None), x, length=3)[0] ** 2)


def in_a_branch(w, x):
    return jax.lax.cond(jnp.sum(x) > 0, lambda: layer(w, x), lambda: x)


at_the_top = lambda weights: [everywhere(w) for w in weights]
in_turn = lambda layer: lambda w, x: layer(everywhere(w), x)
LOSSES = {
    "at the top": with_layers(at_the_top, layer),
    "transposed": with_layers(at_the_top, lambda w, x: jnp.tanh(x @ w.T.reshape(SIZE, SIZE))),
    "in each layer": with_layers(list, in_turn(layer)),
    "in a call": with_layers(at_the_top, jax.jit(layer)),
    "in a checkpoint": with_layers(at_the_top, jax.checkpoint(layer)),
    "in a branch": with_layers(at_the_top, in_a_branch),
    "in the body of a scan": scanned(in_turn(layer)),
    "around a checkpoint in a scan": scanned(in_turn(jax.checkpoint(layer))),
    "around a checkpoint of mpx in a scan": scanned(
        in_turn(mpx.checkpoint(layer, kept=mpx.Blockwise8bit(), argnums=1))
    ),
    "before a scan": scanned(layer, everywhere),
    "before a scan of a checkpoint": scanned(jax.checkpoint(layer), everywhere),
    "Linen": with_layers(at_the_top, of_linen),
    "NNX": with_layers(at_the_top, of_nnx),
    "a scan and checkpoints of NNX": in_nnx_scan,
    "Equinox": with_layers(at_the_top, of_equinox),
}
LAST_AXIS = P(None, None, "data")


@pytest.fixture(autouse=True)
def explicit_mesh():
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu"))):
        yield


def arrays(dtype):
    return jax.device_put(jnp.asarray(WEIGHTS, dtype), LAST_AXIS), jax.device_put(INPUTS, P("data"))


def whole_weights_kept(fun, *args):
    """Return how many whole weights, or stacks of them, the backward pass gets from the forward pass.

    In 32 bits there are zeros alone, which carry a gradient out of a checkpoint and are in no compiled program.
    """
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args))
    is_whole = lambda x: x.shape[-2:] == (SIZE, SIZE) and not any(x.sharding.spec)
    return sum(is_whole(x) and x.dtype.itemsize < 4 for x in kept)


@pytest.mark.parametrize("how", ["bf16", mpx.Fp8(min_extent=0)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", LOSSES)
def test_no_gathered_weight_is_kept_for_the_backward_pass_unless_the_user_says_so(name, how):
    args = arrays(jnp.bfloat16)
    assert whole_weights_kept(mpx.autocast(LOSSES[name], how), *args) == 0
    assert whole_weights_kept(mpx.autocast(LOSSES[name], how, gather_again=False), *args) > 0


@pytest.mark.parametrize("name", ["in a branch", "closed over by a scan"])
def test_a_weight_that_a_program_inside_takes_is_sent_in_16_bits_and_its_gradient_in_32(name):
    """A loop adds up the gradient over its iterations before it is sent."""
    loss = (LOSSES | {"closed over by a scan": closed_over})[name]
    program = jax.make_jaxpr(mpx.grad(mpx.autocast(loss, "bf16")))(*arrays(jnp.float32))
    sent = [eqn.outvars[0].aval for eqn in all_eqns(program) if eqn.primitive.name == "reshard"]
    dtypes = {(str(x.dtype), any(x.sharding.spec)) for x in sent if x.shape == (SIZE, SIZE)}
    assert dtypes == {("bfloat16", False), ("float32", True)}


WAYS = {"bf16": "bf16", "fp8": mpx.Fp8(min_extent=0)}
QUICK = [
    ("at the top", "bf16", "float32"), ("in a checkpoint", "bf16", "bfloat16"), ("before a scan", "bf16", "bfloat16"),
    ("around a checkpoint in a scan", "bf16", "float32"), ("NNX", "bf16", "float32"), ("tied", "bf16", "bfloat16"),
    ("before a scan", "fp8", "float32"),
]  # fmt: skip
CASES = [(name, "bf16", dtype) for name in [*LOSSES, "tied"] for dtype in ("float32", "bfloat16")] + QUICK[-1:]


@pytest.mark.parametrize("case", cases(CASES, QUICK), ids=", ".join)
def test_gathering_again_changes_no_bit(case):
    name, way, dtype = case
    loss, how, args = (LOSSES | {"tied": tied})[name], WAYS[way], arrays(dtype)
    of = lambda **options: mpx.value_and_grad(mpx.autocast(loss, how, **options), argnums=(0, 1))(*args)
    assert_same_bits(of(), of(gather_again=False))


@pytest.mark.parametrize(
    "name",
    cases(["tied", "before a scan", "at the top", "in a checkpoint", "in a branch", "in the body of a scan"], ["tied"]),
)
def test_second_derivatives_are_those_of_kept_weights(name):
    args = arrays(jnp.float32)

    def second_derivative(**options):
        gradient = jax.grad(mpx.autocast((LOSSES | {"tied": tied})[name], "bf16", **options))
        return jax.jvp(gradient, args, tuple(map(jnp.ones_like, args)))[1]

    assert_same_bits(second_derivative(), second_derivative(gather_again=False))


def test_models_under_vmap_gather_again_too():
    """One weight for a batch of rows, and a batch of weights."""

    def loss(weights, x):
        rows = jax.vmap(lambda x: layer(everywhere(weights[0]), x[None]))(x)
        models = jax.vmap(lambda w: layer(everywhere(w), x))(weights)
        return jnp.mean(rows**2) + jnp.mean(models**2)

    args = arrays(jnp.bfloat16)
    of = lambda **options: mpx.value_and_grad(mpx.autocast(loss, "bf16", **options))(*args)
    assert_same_bits(of(), of(gather_again=False))


def test_a_narrowed_elementwise_operation_takes_a_gathered_weight_as_an_array():
    loss = lambda weights, x: jnp.mean((x @ jnp.tanh(everywhere(weights[0]))) ** 2)
    narrowed = lambda **options: mpx.autocast(loss, "bf16", rules={"tanh": "narrow"}, **options)
    args = arrays(jnp.bfloat16)
    assert_same_bits(*[mpx.value_and_grad(narrowed(gather_again=again))(*args) for again in (True, False)])
