"""A training step of the examples' GPT on a mesh of devices: the losses of one device, and a part of everything."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import mpx
from examples.gpt import devices
from examples.gpt.model import Config
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, Program
from tests.helpers import QUICKLY

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow, pytest.mark.many_devices]  # real models are trained

CONFIG = Config(width=64, depth=1, heads=2, context=8, vocabulary=64, vocabulary_multiple=64)
CASES = {
    "f32": CONFIG,
    "bf16-split-8bit": dataclasses.replace(CONFIG, depth=2, layers="scanned", checkpoint="full"),
}
MESHES = {8: (1, 4, 2), 1: (1, 1, 1)}
STEPS = 3
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 8, CONFIG.context + 1)).astype(np.uint16)


@functools.cache
def trained(name, count):
    """Return the losses of three steps of two microbatches on so many devices, the state after them, and a report."""
    program = Program(get_recipe(name), CASES[name], Hyperparameters(STEPS, 1e-2))
    mesh = jax.make_mesh(MESHES[count], devices.AXES, devices=jax.devices()[:count])
    with jax.set_mesh(mesh):
        state = jax.jit(program.init, compiler_options=QUICKLY)(0)
        tokens = jax.device_put(TOKENS, jax.NamedSharding(mesh, devices.BATCHES))
        step = jax.jit(program.train_step, donate_argnums=(0, 1))
        report = mpx.step_report(step, *state, tokens) if count > 1 else None
        losses = []
        for _ in range(STEPS):
            *state, metrics = step(*state, tokens)
            losses.append(float(metrics.loss))
    return losses, state, report


@pytest.mark.parametrize("name", CASES)
def test_a_mesh_trains_to_the_losses_of_one_device(name):
    rounding = 2**-20 if name == "f32" else 2**-9
    losses, alone = trained(name, 8)[0], trained(name, 1)[0]
    assert losses == pytest.approx(alone, rel=rounding)
    assert alone[-1] < 0.95 * alone[0]  # Negative control: a step changes more than that


@pytest.mark.parametrize("name", CASES)
def test_each_device_keeps_a_part_of_all_large_arrays_and_gathers_no_state(name):
    """Blocks of 8-bit state that reach over devices would be found, and gradients that are added up in bfloat16."""
    _, state, report = trained(name, 8)
    large = [leaf for leaf in jax.tree.leaves(state) if leaf.size > 1000]
    assert len(large) >= 15  # five weights and two moments of each
    assert {leaf.size // leaf.addressable_shards[0].data.size for leaf in large} == {8}
    assert report.findings == ()
