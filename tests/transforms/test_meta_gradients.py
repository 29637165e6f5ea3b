"""Check that derivatives pass roundings straight through, and that codes refuse them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import BF16, F32, all_eqns

pytestmark = pytest.mark.optax_promotion

KEY = jax.random.key(7)
PARAMS = {"w": jnp.ones((8, 4), BF16), "b": jnp.ones((1, 4), BF16)}


@pytest.mark.parametrize(
    "round",
    [
        lambda x: mpx.formats.round_to(x, "bf16"),
        lambda x: mpx.formats.round_to(x, "f16", overflow="largest"),
        lambda x: mpx.formats.stochastic_round(KEY, x, "f16").astype(F32),
        lambda x: mpx.formats.split_f32(x)[0].astype(F32),
        lambda x: mpx.formats.join_f32(*mpx.formats.split_f32(x)),
        lambda x: optax.apply_updates(
            jnp.bfloat16(3), mpx.states.landing_update(jnp.bfloat16(3), x, "a test")
        ).astype(F32),
    ],
)
def test_derivatives_pass_a_rounding_straight_through(round):
    x = jnp.float32(1.5)
    of_all = jax.jit(
        lambda x: (
            jax.vmap(jax.grad(round))(x[None]),
            jax.jvp(round, (x,), (2 * x,))[1],
        )
    )
    assert of_all(x) == (1, 3)
    of_bits = lambda x: (x.view(np.uint32) & np.uint32(0xFFFF_0000)).view(F32)
    # The derivative of the same without a word about it.
    assert jax.grad(of_bits)(x) == 0


def test_codes_refuse_to_be_differentiated():
    """Derivatives of what is kept otherwise, for every rule: `test_every_rule.py`."""

    def size_of_a_step(decay):
        tx = mpx.low_precision_state(
            optax.sgd(0.1, momentum=decay), {"trace": mpx.Blockwise8bit()}, min_size=0
        )
        updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
        return optax.tree.norm(updates)

    message = (
        r"a step of the optimizer is differentiated.* codes of `Blockwise8bit\(.*Keep"
        r" this state in float32 or"
    )
    for derivative in (
        jax.grad(size_of_a_step),
        lambda decay: jax.jvp(size_of_a_step, (decay,), (1.0,)),
    ):
        with pytest.raises(TypeError, match=message):
            derivative(0.3)


def test_ordinary_steps_hold_no_derivative_rule_that_grows_with_the_steps():
    """One call for each rounding; they are gone in the compiled program."""
    tx = mpx.master_weights(optax.sgd(0.3, momentum=0.9))
    jaxpr = jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    assert sum(
        eqn.primitive.name == "custom_jvp_call" for eqn in all_eqns(jaxpr)
    ) == 2 * len(PARAMS)
