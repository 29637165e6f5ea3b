"""An activation between two products is computed again in the backward pass, and
changes no bit.

Oracle of bits: the same casts written by hand, which keep the activation.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

import mpx
from tests.autocast.helpers import BF16, F16, F32, SPLIT, WHOLE, normal
from tests.helpers import all_eqns, eight_cpu_devices


def tanhs_of(fun, *args):
    """Return how often a function's gradient computes a hyperbolic tangent."""
    program = jax.make_jaxpr(jax.grad(fun))(*args)
    return sum(eqn.primitive.name == "tanh" for eqn in all_eqns(program))


# ---- bits -----------------------------------------------------------------------------------------------------------


def loss_of(fun):
    return lambda *args: jnp.cos(fun(*args)).mean()


# ---- which activations ----------------------------------------------------------------------------------------------


def layers(activate=jnp.tanh, after=lambda h: h):
    return lambda w, x: after(activate(x @ w + w[0][None])) @ w


def with_another_use(w, x):
    hidden = jnp.tanh(x @ w + w[0][None])
    return (2 * hidden) @ w + hidden


def in_float16(w, x):
    return lax.dot(
        jnp.tanh(x @ w + w[0][None]).astype(F16), w, preferred_element_type=F32
    )


def constrained(h):
    return lax.with_sharding_constraint(h, NamedSharding(eight_cpu_devices(), WHOLE))


def gathered(h):
    gather = lambda h: lax.all_gather(h, "data", tiled=True)
    return jax.shard_map(
        gather,
        mesh=eight_cpu_devices(),
        in_specs=SPLIT,
        out_specs=WHOLE,
        check_vma=False,
    )(h)


@jax.custom_jvp
def by_its_author(h):
    return jnp.tanh(h)


by_its_author.defjvp(
    lambda primals, tangents: (jnp.tanh(*primals), tangents[0] * jnp.tanh(*primals))
)

KEPT = {
    "before other devices need it": layers(after=gathered),
    "without a bias: XLA computes it in the next product": (
        lambda w, x: jnp.tanh(x @ w) @ w
    ),
    "before no product": lambda w, x: jnp.tanh(x @ w + w[0][None]),
    "of float32 numbers": lambda w, x: layers(lambda h: jnp.tanh(h * jnp.sin(x)))(w, x),
    "with another use": with_another_use,
    "in a dtype of its author": in_float16,
    "kept by a name": layers(after=lambda h: checkpoint_name(h, "hidden")),
    "after a constraint, which would communicate twice": layers(
        lambda h: jnp.tanh(constrained(h))
    ),
    "after a barrier": layers(after=lambda h: 2 * lax.optimization_barrier(h)),
    "with a derivative by its author": layers(by_its_author),
    "in a call that adds up": layers(
        jax.jit(lambda h: jnp.tanh(h) - h.mean(1, keepdims=True))
    ),
    "in a checkpoint, which computes it again itself": jax.checkpoint(layers()),
}


def gated(w, x):
    gate, value = jnp.split(x @ w + w[0][None], 2, -1)
    return (jnp.tanh(gate) * value) @ w[: w.shape[0] // 2]


COMPUTED_AGAIN = {
    "a function": layers(),
    "with a gate": gated,
    "split behind it": layers(after=lambda h: jnp.split(h, 1, -1)[0]),
    "a call": layers(lambda h: jax.nn.gelu(h, approximate=True)),
    "with a sharding": layers(after=constrained),
}


@pytest.mark.parametrize("name", COMPUTED_AGAIN)
def test_an_activation_of_a_product_with_a_bias_is_computed_again(name):
    args = normal(0, 16, 16), normal(1, 64, 16)
    assert tanhs_of(loss_of(mpx.autocast(COMPUTED_AGAIN[name], BF16)), *args) == 2


def test_an_activation_of_any_number_of_rows_is_computed_again():
    """A bias is smaller than rows without a number."""
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 8), F32)
    assert tanhs_of(loss_of(mpx.autocast(layers(), BF16)), normal(0, 8, 8), rows) == 2


@pytest.mark.parametrize("name", KEPT)
def test_other_activations_run_as_traced(name):
    args = normal(0, 16, 16), normal(1, 64, 16)
    plain = loss_of(KEPT[name])
    assert tanhs_of(mpx.autocast(plain, BF16), *args) == tanhs_of(plain, *args)


@pytest.mark.parametrize("dtype", [F32, "tf32"])
def test_nothing_is_computed_again_where_no_product_is_narrowed(dtype):
    args = normal(0, 16, 16), normal(1, 64, 16)
    assert tanhs_of(mpx.autocast(loss_of(layers()), dtype), *args) == 1


MIXED = {
    "where": lambda h, token: jnp.where(
        jnp.arange(256)[:, None] % 2 == 0, token[None], h
    ),
    "concatenate": lambda h, token: jnp.concatenate(
        [jnp.broadcast_to(token[None], (256, 8)), h]
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_weight_among_the_elements_of_an_activation_gets_a_float32_sum(name):
    """As where nothing is computed again. Negative control: in bfloat16 each of its
    cotangents is rounded.
    """
    w, x, token = normal(0, 8, 8), normal(1, 256, 8), normal(2, 8)
    fun = lambda token: jnp.sin(
        MIXED[name](jnp.tanh(x @ w + w[0][None]), token) @ w
    ).sum()
    of = lambda dtype, **options: jax.grad(
        mpx.autocast(fun, BF16, reduce_dtype=dtype, **options)
    )(token)
    np.testing.assert_allclose(of(F32), of(F32, checkpoint="everything"), rtol=2e-5)
    assert (abs(of(BF16) / of(F32) - 1) > 2e-4).any()


# ---- the trace ------------------------------------------------------------------------------------------------------


def test_activations_of_layers_that_are_alike_are_traced_once_and_others_are_not_taken_for_them():
    """Each layer has weights of its own. Not alike are those with another constant,
    function or shape.
    """

    def program(*activations):
        def fun(ws, x):
            for activate, w in zip(activations, ws, strict=True):
                x = layers(activate)(w, x)
            return x

        ws = [normal(i, 8, 8) for i in range(len(activations))]
        jaxpr = jax.make_jaxpr(mpx.autocast(fun, BF16))(ws, normal(9, 16, 8))
        return {
            id(eqn.params["jaxpr"])
            for eqn in jaxpr.jaxpr.eqns
            if eqn.primitive.name == "remat2"
        }

    assert len(program(jnp.tanh, jnp.tanh, jnp.tanh)) == 1
    assert (
        len(
            program(
                jnp.tanh, lambda h: jnp.tanh(2 * h), lambda h: jnp.tanh(3 * h), jnp.sin
            )
        )
        == 4
    )
