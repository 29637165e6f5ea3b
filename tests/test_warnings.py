"""Warnings name the line of the user's program that has to change."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx

pytestmark = pytest.mark.optax_promotion

W = {"w": jnp.full((64, 64), 1.001)}
ADAM = optax.adam(1e-3)
MUON = mpx.low_precision_state(
    optax.contrib.muon(1e-3), {".*": mpx.Blockwise4bit()}, key=jax.random.key(0)
)


def convert():
    return mpx.convert_state(
        W, ADAM.init(W), ADAM, ADAM, policy="params=bf16,compute=bf16,output=f32"
    )


def override():
    return mpx.get_policy("bf16-split,'nope'=f32").cast_to_param(W)


CALLS = {
    "an override that matches nothing": override,
    "a cast inside of jit": lambda: jax.jit(override)(),
    "weights that a change of recipe rounds": convert,
    "momentum of Muon in 4 bits": lambda: MUON.init(W),
    "an optimizer inside of jit": lambda: jax.jit(MUON.init)(W),
    "an optimizer in a wrapper of Optax": (
        lambda: jax.eval_shape(optax.chain(optax.clip(1.0), MUON).init, W)
    ),
    "an integer loss scale": lambda: mpx.DynamicLossScale(jnp.int32(8)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_warning_names_the_line_of_the_program_that_calls(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        CALLS[call]()
    assert [warning.filename for warning in seen] == [__file__]
