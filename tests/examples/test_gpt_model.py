"""The GPT of the examples: one source for every precision, sizes as published, layouts
that change no result.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.gpt.loss import mean_loss
from examples.gpt.model import GPT, PRESETS, Config
from tests.helpers import QUICKLY

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained

CONFIG = Config(
    width=32, depth=2, heads=2, context=8, vocabulary=20, vocabulary_multiple=16
)


def make(config):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return nnx.split(GPT(config, nnx.Rngs(0)))


def loss_of(config, graphdef):
    def loss_fn(params, tokens):
        model = nnx.merge(graphdef, params)
        targets = jnp.roll(tokens, 1, axis=1)
        return mean_loss(
            model.features(tokens),
            model.token_embedding[...],
            targets,
            vocabulary=config.vocabulary,
        )

    return loss_fn


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (3, 8), 0, CONFIG.vocabulary)


@pytest.fixture(scope="module")
def reference(tokens):
    """Return loss and gradients of the plain model: unrolled, nothing computed again."""
    graphdef, params = make(CONFIG)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.jit(
            jax.value_and_grad(loss_of(CONFIG, graphdef)), compiler_options=QUICKLY
        )(params, tokens)


def stacked(state):
    """Stack the gradients of unrolled blocks."""
    pure = nnx.to_pure_dict(state)
    blocks = [pure["blocks"][index] for index in sorted(pure["blocks"])]
    return pure | {"blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)}


LAYOUTS = [
    ("unrolled", "thin"), ("stacked", "none"), ("stacked", "dots"), ("scanned", "none"), ("scanned", "full")
]  # fmt: skip


@pytest.mark.parametrize(("layers", "checkpoint"), LAYOUTS)
def test_layout_and_checkpoints_change_neither_initial_weights_nor_gradients(
    layers, checkpoint, tokens, reference
):
    config = dataclasses.replace(CONFIG, layers=layers, checkpoint=checkpoint)
    graphdef, params = make(config)
    loss, gradients = jax.jit(
        jax.value_and_grad(loss_of(config, graphdef)), compiler_options=QUICKLY
    )(params, tokens)

    expected_loss, expected = reference
    assert loss == pytest.approx(float(expected_loss), rel=1e-6)
    given, expected = (nnx.to_pure_dict(gradients), nnx.to_pure_dict(expected))
    if layers != "unrolled":
        expected = stacked(reference[1])
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "layers", "count"),
    [
        ("gpt2-124m", "unrolled", 124_439_808),
        ("gpt2-124m", "scanned", 124_439_808),
        # 48 layers one by one take long to make.
        (
            "gpt2-1.5b",
            "scanned",
            1_557_611_200,
        ),
    ],
)
def test_presets_have_the_published_sizes(name, layers, count):
    """Counted from shapes, without padding."""
    config = dataclasses.replace(PRESETS[name], vocabulary_multiple=1, layers=layers)
    params = nnx.state(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0))), nnx.Param)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count
