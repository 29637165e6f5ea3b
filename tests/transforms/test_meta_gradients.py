"""Check derivatives through steps of an optimizer: of learned rates, and of the first weights (MAML)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import BF16, F32, all_eqns, cases

pytestmark = pytest.mark.optax_promotion

KEY = jax.random.key(7)
KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (16, 8))
Y = jnp.sin(X @ jax.random.normal(KEYS[1], (8, 4)))
PARAMS = {"w": jax.random.normal(KEYS[2], (8, 4), BF16), "b": jax.random.normal(KEYS[3], (1, 4), BF16) / 4}
RATE = 0.3

momentum = functools.partial(optax.sgd, momentum=0.9)
WAYS = {  # `test_every_rule.py` has all ways to keep weights, for every rule
    "full": lambda rate: mpx.master_weights(momentum(rate)),
    "Kahan": lambda rate: optax.chain(mpx.upcast(momentum(rate)), mpx.kahan_summation()),
    "stochastic": lambda rate: optax.chain(mpx.upcast(momentum(rate)), mpx.stochastic_rounding(KEY)),
}
CODED = lambda rate: mpx.low_precision_state(momentum(rate), {"trace": mpx.Blockwise8bit()}, min_size=0)


def loss(params):
    params = jax.tree.map(lambda p: p.astype(F32), params)
    return jnp.mean((jnp.tanh(X @ params["w"] + params["b"]) - Y) ** 2)


def loss_after(make, rate, params, steps=4, change=lambda updates: updates):
    tx = make(rate)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, change(updates)), state), None

    return loss(jax.lax.scan(step, (params, tx.init(params)), length=steps)[0][0])


def error(actual, expected):
    """Return the distance of two trees, in units of the length of the second."""
    actual, expected = (
        np.concatenate([np.ravel(x).astype(F32) for x in jax.tree.leaves(t)]) for t in (actual, expected)
    )
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def meta_gradients(make, params=PARAMS, **options):
    return jax.jit(jax.grad(functools.partial(loss_after, make, **options), argnums=(0, 1)))(RATE, params)


@pytest.fixture(scope="module")
def float32():
    return meta_gradients(momentum, jax.tree.map(lambda p: p.astype(F32), PARAMS))


@pytest.mark.parametrize("way", cases(WAYS, {"full"}))
def test_a_learned_rate_and_first_weights_get_the_derivatives_of_float32(way, float32):
    """A derivative of a bfloat16 parameter is bfloat16, so each step may lose 2**-9 of it."""
    rate, weights = meta_gradients(WAYS[way])
    assert error(rate, float32[0]) < 0.01
    assert error(weights, float32[1]) < 0.03
    if way == "full":
        forward = jax.jvp(lambda rate: loss_after(WAYS[way], rate, PARAMS), (RATE,), (1.0,))[1]
        assert error(forward, float32[0]) < 0.01


def test_without_the_derivative_of_the_updates_the_bounds_are_missed(float32):
    """So it was before roundings let derivatives pass: 0 for the rate, the first order for the weights."""
    rate, weights = meta_gradients(WAYS["full"], change=jax.lax.stop_gradient)
    assert rate == 0
    assert error(weights, float32[1]) > 0.3


@pytest.mark.parametrize(
    "round",
    [
        lambda x: mpx.formats.round_to(x, "bf16"),
        lambda x: mpx.formats.round_to(x, "f16", overflow="largest"),
        lambda x: mpx.formats.stochastic_round(KEY, x, "f16").astype(F32),
        lambda x: mpx.formats.split_f32(x)[0].astype(F32),
        lambda x: mpx.formats.join_f32(*mpx.formats.split_f32(x)),
        lambda x: optax.apply_updates(jnp.bfloat16(3), mpx.states.landing_update(jnp.bfloat16(3), x, "a test")).astype(
            F32
        ),
    ],
)
def test_derivatives_pass_a_rounding_straight_through(round):
    x = jnp.float32(1.5)
    of_all = jax.jit(lambda x: (jax.vmap(jax.grad(round))(x[None]), jax.jvp(round, (x,), (2 * x,))[1]))
    assert of_all(x) == (1, 3)
    of_bits = lambda x: (x.view(np.uint32) & np.uint32(0xFFFF_0000)).view(F32)
    assert jax.grad(of_bits)(x) == 0  # the derivative of the same without a word about it


def test_codes_refuse_to_be_differentiated():
    message = r"a step of the optimizer is differentiated.* codes of `Blockwise8bit\(.*Keep this state in float32 or"
    with pytest.raises(TypeError, match=message):
        meta_gradients(CODED)
    with pytest.raises(TypeError, match=message):
        jax.jvp(lambda rate: loss_after(CODED, rate, PARAMS), (RATE,), (1.0,))


def test_ordinary_steps_hold_no_derivative_rule_that_grows_with_the_steps():
    """One call for each rounding; they are gone in the compiled program."""
    tx = WAYS["full"](RATE)
    jaxpr = jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    assert sum(eqn.primitive.name == "custom_jvp_call" for eqn in all_eqns(jaxpr)) == 2 * len(PARAMS)
