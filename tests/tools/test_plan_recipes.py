"""The table of recipes: every one trains."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
from mpx.tools.plan import STANDARD_RECIPES

pytestmark = pytest.mark.optax_promotion

X = jnp.linspace(-1, 1, 32 * 64, dtype=jnp.float32).reshape(32, 64)
PARAMS = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}


@pytest.mark.filterwarnings("ignore:`autocast`. no matrix product:UserWarning")  # this model is small for FP8
@pytest.mark.parametrize("name", STANDARD_RECIPES)
def test_a_recipe_trains_parameters_of_its_dtype(name):
    recipe = STANDARD_RECIPES[name]
    policy, tx = mpx.get_policy(recipe.policy), recipe.wrap(optax.adamw(1e-2))
    params = policy.cast_to_param(PARAMS)
    state = tx.init(params)
    assert recipe.purpose
    mpx.check_chain(tx)
    mixed_loss_fn = mpx.autocast(lambda params, x: jnp.mean((x @ params["w"] + params["b"][None] - x) ** 2), policy)

    @jax.jit
    def train_step(params, state):
        loss, grads = mpx.value_and_grad(mixed_loss_fn, mpx.get_loss_scale(state))(params, X)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(3):
        params, state, loss = train_step(params, state)
        losses.append(loss)
    assert losses[2] < losses[0]
    assert {p.dtype for p in jax.tree.leaves(params)} == {policy.param_dtype}
