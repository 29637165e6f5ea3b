"""What the devices of the training example send each other."""

import re

import jax
import jax.numpy as jnp
import pytest

from examples.gpt import devices
from examples.gpt.model import Config
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, make_program
from tests.helpers import QUICKLY

pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained

CONFIG = Config(context=8, vocabulary=64, depth=1, heads=2, width=16)


def transfers(parallel, recipe="bf16-split"):
    """The collective operations of a compiled step of two microbatches: name, type, and whether it is in a loop."""
    mesh = devices.make_mesh()
    program = make_program(get_recipe(recipe), CONFIG, Hyperparameters(10, 1e-3), mesh=mesh, parallel=parallel)
    shapes = jax.eval_shape(program.init, 0)
    shardings = devices.state_shardings(mesh, *shapes, parallel)
    step = jax.jit(program.train_step, out_shardings=(*shardings, None), compiler_options=QUICKLY)
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    tokens = jax.ShapeDtypeStruct(
        (2, 16, CONFIG.context + 1), jnp.uint16, sharding=jax.NamedSharding(mesh, devices.BATCHES)
    )
    text = step.lower(*jax.tree.map(place, shapes, shardings), tokens).compile().as_text()
    found = re.findall(
        r"= \(?(.*?)\)? (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\((.*)", text
    )
    return {
        (name, kind, "while/body" in rest) for types, name, rest in found for kind in re.findall(r"(\w+)\[\d", types)
    }


def test_replicated_devices_add_up_their_gradients_in_float32_once_a_step():
    assert transfers("replicated") == {("all-reduce", "f32", False)}


@pytest.mark.parametrize("recipe", ["bf16-split", "f16-scaled"])
def test_divided_ones_get_their_part_of_the_gradients_and_send_parameters_as_they_are_stored(recipe):
    """With float32 parameters (f16 recipe) that is float32. Leaves that cannot be divided are added up whole."""
    sent = "u16" if recipe == "bf16-split" else "f32"
    assert transfers("zero", recipe) == {("reduce-scatter", "f32", False), ("all-gather", sent, False)}
