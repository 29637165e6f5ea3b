"""The training step of the examples' GPT: accumulation, weight decay, clipping, and
every recipe.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from examples.gpt.model import Config
from examples.gpt.recipes import RECIPES, get_recipe
from examples.gpt.training import Hyperparameters, Program, make_optimizer
from tests.helpers import all_eqns, types_of

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained

CONFIG = Config(
    width=32, depth=1, heads=2, context=8, vocabulary=20, vocabulary_multiple=16
)
# Three steps have no warm-up: the first one has the peak of the learning rate.
HYPERPARAMETERS = Hyperparameters(steps=3, learning_rate=1e-3)
# Such a program compiles in half the time.
QUICK = {"xla_backend_optimization_level": 0}


@functools.cache
def compiled(name):
    """Return the program of a recipe, compiled for each shape once in this file."""
    program = Program(get_recipe(name), CONFIG, HYPERPARAMETERS, loss_chunks=2)
    parts = ("init", "train_step", "token_losses", "evaluate", "logits")
    return SimpleNamespace(
        **{
            part: jax.jit(getattr(program, part), compiler_options=QUICK)
            for part in parts
        }
    )


@functools.cache
def started(name):
    return compiled(name).init(0)


def batch(seed=0, *, microbatches=1):
    """Return the same eight sequences, in so many microbatches."""
    tokens = (
        np.random.default_rng(seed)
        .integers(0, 20, (8, CONFIG.context + 1))
        .astype(np.uint16)
    )
    return tokens.reshape(microbatches, -1, CONFIG.context + 1)


@functools.cache
def trained(name):
    """Take three steps; return for each the types of its results, its metrics, and the
    number of compiled programs.
    """
    program, state = compiled(name), started(name)
    types, metrics, programs = [types_of(state)], [], []
    for seed in range(3):
        *state, of_step = program.train_step(*state, batch(seed))
        types.append(types_of(tuple(state)))
        metrics.append(of_step)
        programs.append(program.train_step._cache_size())
    return types, metrics, programs


def distance(actual, expected):
    """Return the distance of two arrays as a part of the size of the second one."""
    return np.linalg.norm(np.float64(actual) - np.float64(expected)) / np.linalg.norm(
        np.float64(expected)
    )


def by_path(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


# --- Accumulation. ---
@pytest.mark.parametrize(
    ("name", "rounding"),
    [("f32", 2**-22), ("bf16-split", 2**-8), ("f16-scaled", 2**-11)],
)
def test_four_microbatches_make_the_step_of_one_large_batch(name, rounding):
    """What differs is the rounding of the gradients of products, which are 16-bit
    numbers under autocast.
    """
    program = compiled(name)
    _, opt_state, metrics = program.train_step(*started(name), batch())
    _, split_opt_state, split_metrics = program.train_step(
        *started(name), batch(microbatches=4)
    )

    assert split_metrics.loss == pytest.approx(float(metrics.loss), rel=4 * rounding)
    assert split_metrics.gradient_norm == pytest.approx(
        float(metrics.gradient_norm), rel=4 * rounding
    )
    for moment in ("mu", "nu"):
        expected = by_path(optax.tree.get(opt_state, moment))
        for path, leaf in by_path(optax.tree.get(split_opt_state, moment)).items():
            # Of this bias the part of the keys has no gradient but for rounding: it
            # changes no attention.
            if "query_key_value" not in path or "bias" not in path:
                assert distance(leaf, expected[path]) < 8 * rounding, (moment, path)
    # Negative control: three of the four microbatches make another step.
    *_, of_three = program.train_step(
        *started(name), batch(microbatches=4)[[0, 1, 2, 2]]
    )
    assert (
        abs(of_three.gradient_norm - metrics.gradient_norm)
        > 8 * rounding * metrics.gradient_norm
    )


# --- The optimizer. ---


@pytest.mark.parametrize(("norm", "clipped"), [(0.5, 0.5), (10.0, 1.0)])
def test_gradients_are_clipped_after_they_are_unscaled(norm, clipped):
    """The first moment after one step is a tenth of the clipped gradient. Scaled, both
    norms are far above 1.
    """
    tx = make_optimizer(get_recipe("f16-scaled"), CONFIG, HYPERPARAMETERS)
    params = {"w": jnp.zeros(4)}
    opt_state = tx.init(params)
    scale = float(mpx.get_loss_scale(opt_state).loss_scale)
    assert scale * 0.5 > 1000
    gradient = jnp.full(4, norm / 2)  # of that norm
    _, opt_state = tx.update({"w": gradient * scale}, opt_state, params)

    np.testing.assert_allclose(
        optax.tree.get(opt_state, "mu")["w"], 0.1 * clipped / 2, rtol=1e-6
    )


# --- Recipes. ---
# One of each kind of arithmetic and of state: a program takes seconds to compile.
KINDS = ["bf16-naive", "bf16-stochastic", "bf16-split24-4bit", "f16-scaled"]


@pytest.mark.parametrize("name", KINDS)
def test_a_recipe_compiles_once_keeps_its_types_and_starts_from_the_same_weights(name):
    """They are rounded to bfloat16 at most: but for that the first step has the loss
    and the norm of f32.
    """
    types, metrics, programs = trained(name)
    assert programs == programs[:1] * 3
    assert all(of_step == types[0] for of_step in types)
    for of_step in metrics:
        assert {leaf.dtype for leaf in of_step} == {np.dtype(np.float32)}
        assert all(np.isfinite(of_step))
    expected = trained("f32")[1][0]
    assert metrics[0].loss == pytest.approx(float(expected.loss), rel=1e-3)
    assert metrics[0].gradient_norm == pytest.approx(
        float(expected.gradient_norm), rel=2e-2
    )


def step_of(recipe):
    """Return the program of a training step as JAX traces it."""
    program = Program(recipe, CONFIG, HYPERPARAMETERS, loss_chunks=2)
    return jax.make_jaxpr(program.train_step)(
        *jax.eval_shape(program.init, 0), batch(microbatches=2)
    ).jaxpr


def products(recipe):
    """Return the dtypes of the operands of all matrix products of a training step, and
    whether they are precise.
    """
    dots = [
        eqn for eqn in all_eqns(step_of(recipe)) if eqn.primitive.name == "dot_general"
    ]
    is_precise = lambda eqn: eqn.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
    return {
        (variable.aval.dtype.name, is_precise(eqn))
        for eqn in dots
        for variable in eqn.invars
    }


@pytest.mark.parametrize(
    "name", ["f32", "tf32", *(r.name for r in RECIPES if r.compute == "autocast")]
)
def test_all_products_of_a_recipe_have_its_dtype(name):
    """Not so of bfloat16 models without autocast: there JAX's attention has float32
    cotangents in two products.
    """
    recipe = get_recipe(name)
    of_8_bits = {"fp8": ["float8_e4m3fn", "float8_e5m2"]}.get(name, [])
    assert products(recipe) == {
        (dtype, name == "f32") for dtype in (recipe.compute_dtype, *of_8_bits)
    }
