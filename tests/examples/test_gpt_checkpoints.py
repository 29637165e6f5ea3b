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


def save(folder, state, step=2):
    with checkpoints.opened(folder) as manager:
        checkpoints.save(manager, *state, step, {"position": 7})


def restore(folder, shapes):
    with checkpoints.opened(folder) as manager:
        assert checkpoints.newest(manager) == (2, {"position": 7})
        return tuple(checkpoints.restore(manager, shapes))


def state_of():
    """Return all kinds of leaves that recipes have."""
    params = {"w": jnp.linspace(-1, 1, 48, dtype=jnp.bfloat16).reshape(16, 3), "b": jnp.asarray([jnp.nan, -0.0, 1e-40])}
    bits = jnp.arange(16 * 8).reshape(8, 16)
    codes = {"low bits": bits.astype(jnp.uint16), "moment": bits.astype(jnp.float8_e4m3fn)}
    return params, optax.TraceState(codes | {"count": jnp.int32(7), "key": jax.random.key(3)})


@pytest.mark.parametrize("count", [1, 2, 8])
def test_any_number_of_devices_gets_the_same_bits(tmp_path, count):
    """Of eight that have divided the state."""
    of_eight, shapes = placed(state_of(), 8), placed(state_of(), count)
    save(tmp_path, jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), state_of(), of_eight))
    restored = restore(tmp_path, shapes)
    assert_same_bits(jax.device_put(restored, jax.devices()[0]), state_of())
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, shapes)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_state_of_every_recipe_comes_back_to_the_same_bits(recipe, tmp_path):
    """After a step with random gradients, scaled if the recipe scales the loss."""
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
    save(tmp_path, state)
    assert_same_bits(restore(tmp_path, placed(state, 1)), state)
