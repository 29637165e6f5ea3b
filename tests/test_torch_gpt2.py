"""GPT-2 in PyTorch is the same model and the same training as in JAX."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.workers import token_batches
from examples.gpt.model import Config
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, Program

pytestmark = pytest.mark.optax_promotion

STEPS, RATE = 10, 3e-3
SMALLEST = Config(width=32, depth=1, heads=2, context=16, vocabulary=100)
SIZES = ("width", "depth", "heads", "context", "vocabulary")
CONFIG = {name: getattr(SMALLEST, name) for name in SIZES}
PARTS = token_batches(SMALLEST.vocabulary, (2, 3, 17), count=1)[0]  # two microbatches
BATCHES = token_batches(SMALLEST.vocabulary, (1, 2, 17), count=STEPS)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def in_torch(torch):
    return importlib.import_module("benchmarks.gpt2_in_torch")


def program_of(config=SMALLEST, multiple=128):
    config = dataclasses.replace(config, vocabulary_multiple=multiple)
    return Program(get_recipe("f32"), config, Hyperparameters(steps=STEPS, learning_rate=RATE))


def for_torch(params):
    """Return weights by the names that they have in the PyTorch model, whose modules are called as ours.

    `torch.nn.Linear` has the transpose of our kernel, and calls it and a norm's scale `weight`.
    """
    weights = {}
    for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(params)):
        *modules, name = (str(getattr(entry, "key", getattr(entry, "idx", ""))) for entry in path)
        value = np.asarray(leaf).T if name == "kernel" else np.asarray(leaf)
        name = "weight" if name in ("kernel", "scale") else name
        weights[".".join([*modules, name])] = np.ascontiguousarray(value)
    return weights


def trainer_of(torch, in_torch, weights, **options):
    trainer = in_torch.Trainer(CONFIG, autocast=False, **options)
    trainer.model.load_state_dict({name: torch.tensor(x) for name, x in weights.items()})
    return trainer


@functools.cache
def in_jax():
    """Return the weights of a model, and its logits and gradients of two microbatches.

    Biases and norms begin at 0 and 1, where some mistakes would not be seen, so noise is added to all weights.
    """
    program = program_of()

    @jax.jit
    def compute(parts):
        noise = lambda p: p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape)
        params = jax.tree.map(noise, program.init(3)[0])
        grads = [program.gradients(params, None, part)[1] for part in parts]
        return params, program.logits(params, parts[0, :, :-1]), jax.tree.map(lambda a, b: (a + b) / 2, *grads)

    params, logits, grads = compute(jnp.asarray(PARTS))
    return for_torch(params), np.asarray(logits), for_torch(grads)


@functools.cache
def curve_in_jax():
    """Return the losses of a training, and the weights that it begins with."""
    program = program_of()
    state = jax.jit(program.init)(0)
    weights, step, losses = for_torch(state[0]), jax.jit(program.train_step), []
    for batch in BATCHES:
        *state, metrics = step(*state, jnp.asarray(batch))
        losses.append(float(metrics.loss))
    return losses, weights


def test_logits_and_gradients_of_both_are_equal(torch, in_torch):
    weights, logits, grads = in_jax()
    trainer = trainer_of(torch, in_torch, weights)
    parts = torch.from_numpy(PARTS).long()
    theirs = trainer.model(parts[0, :, :-1]).detach().numpy()
    assert np.isneginf(logits[..., SMALLEST.vocabulary :]).all()
    assert relative_error(theirs, logits[..., : SMALLEST.vocabulary]) < 1e-5
    trainer.gradients(parts)
    found = {name: p.grad.numpy() for name, p in trainer.model.named_parameters()}
    assert found.keys() == grads.keys()
    assert {name: relative_error(found[name], grads[name]) < 1e-5 for name in grads} == dict.fromkeys(grads, True)


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def test_ten_steps_of_both_have_the_same_losses(torch, in_torch):
    """Clipping, AdamW and which weights decay: a loss that begins at 4.6 would show any of them."""
    ours, weights = curve_in_jax()
    schedule = Hyperparameters(steps=STEPS, learning_rate=RATE).schedule()

    def farthest(factor):
        rates = [factor * float(schedule(step)) for step in range(STEPS)]
        trainer = trainer_of(torch, in_torch, weights, rates=rates)
        theirs = [float(trainer.step(torch.from_numpy(batch).long())) for batch in BATCHES]
        return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))

    assert farthest(1) < 1e-4
    assert ours[-1] < ours[0] - 0.1
    assert farthest(0.5) > 1e-2  # the negative control
