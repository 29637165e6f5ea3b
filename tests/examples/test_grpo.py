"""Check the example of reinforcement learning: sampler and trainer compute the same
numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from examples import grpo

pytestmark = pytest.mark.optax_promotion

ROWS = 32
TOKENS = np.random.default_rng(0).integers(0, grpo.DIGITS, (ROWS, grpo.LENGTH))


def whole(model, params, dtype):
    return model(params, TOKENS, grpo.empty_cache(ROWS, dtype), 0)[0]


def token_by_token(model, params, dtype):
    cache, logits = grpo.empty_cache(ROWS, dtype), []
    for at in range(grpo.LENGTH):
        found, cache = model(params, TOKENS[:, at : at + 1], cache, at)
        logits.append(found)
    return jnp.concatenate(logits, axis=1)


def distance(logits, others):
    """Return the mean difference of log probabilities."""
    return float(
        jnp.abs(jax.nn.log_softmax(logits) - jax.nn.log_softmax(others)).mean()
    )


@pytest.mark.parametrize("recipe", ["bf16-autocast", "bf16-split", "f16-scaled"])
def test_a_sampler_and_a_trainer_agree(recipe):
    """Prefill, decoding, and the loss with its gradient. A control: a sampler without
    autocast is off by much more.
    """
    policy = mpx.get_policy(recipe)
    params, dtype = (
        policy.cast_to_param(grpo.init_params(jax.random.key(0))),
        policy.compute_dtype,
    )
    model = mpx.autocast(grpo.logits_and_cache, recipe, as_they_are=2)

    def loss(params):
        logits = whole(model, params, dtype)
        return (jax.nn.log_softmax(logits) ** 2).mean(), logits

    trained = jax.jit(mpx.value_and_grad(loss, mpx.StaticLossScale(8.0), has_aux=True))(
        params
    )[0][1]
    run = jax.jit(model)
    sampled, prefilled = token_by_token(run, params, dtype), whole(run, params, dtype)
    assert max(distance(sampled, trained), distance(sampled, prefilled)) < 5e-5
    in_f32 = jax.tree.map(lambda x: x.astype("float32"), params)
    unrounded = token_by_token(jax.jit(grpo.logits_and_cache), in_f32, "float32")
    assert distance(unrounded, trained) > 10 * max(distance(sampled, trained), 1e-5)


@pytest.mark.slow
def test_the_step_samples_answers_and_learns_from_their_rewards():
    start, step = grpo.make_step("bf16-split")
    params, opt_state = start(jax.random.key(0))
    for key in jax.random.split(jax.random.key(2), 20):
        params, opt_state, reward, distance_of_ratio = step(params, opt_state, key)
        assert distance_of_ratio < 1e-3
    assert reward > 0.14  # 0.1 by chance
