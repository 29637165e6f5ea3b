"""Checkpoints: the same bits on any number of devices."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
from examples.gpt import checkpoints, devices
from examples.gpt.model import Config
from examples.gpt.recipes import RECIPES
from examples.gpt.training import Hyperparameters, make_optimizer
from tests.helpers import QUICKLY, assert_same_bits

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained


def placed(state, count):
    """Return the shapes of a state of which so many devices keep a part each, where it can be divided by eight."""
    mesh = jax.make_mesh((1, count, 1), devices.AXES, devices=jax.devices()[:count])
    spec = lambda leaf: jax.P("fsdp") if leaf.ndim and leaf.shape[0] % 8 == 0 else jax.P()
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec(leaf)))
    return jax.tree.map(place, state)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_two_devices_get_the_bits_of_eight_from_a_state_of_every_recipe(recipe, tmp_path):
    """After a step, whose gradients are scaled if the recipe scales the loss."""
    config = Config(width=8, depth=1, heads=1, context=8, vocabulary=16)
    tx = make_optimizer(recipe, config, Hyperparameters(20, 1e-2))
    weights = {"kernel": jax.random.normal(jax.random.key(0), (64, 64)), "bias": jnp.ones(5)}

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def after_a_step(params):
        opt_state = tx.init(params)
        grads = mpx.get_loss_scale(opt_state).scale(jax.tree.map(jnp.cos, weights))
        grads = optax.tree.cast_like(grads, params) if recipe.compute == "plain" else grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = after_a_step(recipe.policy.cast_to_param(weights))
    of_eight, of_two = placed(state, 8), placed(state, 2)
    with checkpoints.opened(tmp_path) as manager:
        divided = jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), state, of_eight)
        checkpoints.save(manager, *divided, 2, {"position": 7})
    with checkpoints.opened(tmp_path) as manager:
        assert checkpoints.newest(manager) == (2, {"position": 7})
        restored = tuple(checkpoints.restore(manager, of_two))
    assert_same_bits(jax.device_put(restored, jax.devices()[0]), state)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, of_two)
