import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpx
from tests.helpers import QUICKLY
from tests.inspect.test_masters import KEEPERS, NESTINGS, trained

pytestmark = pytest.mark.optax_promotion


@pytest.mark.parametrize("nesting", sorted(NESTINGS.keys() - {"loss scaling"}))
def test_the_loss_scale_is_found_in_any_nesting(nesting):
    _, state = trained(
        NESTINGS[nesting](
            mpx.loss_scaling(KEEPERS["full"](), mpx.StaticLossScale(2.0**7))
        ),
        steps=1,
    )
    assert float(mpx.get_loss_scale(state).loss_scale) == 2.0**7
    assert int(mpx.skipped_steps(state)) == 0


PARAMS = {"embed": jnp.ones(2), "head": jnp.ones(2)}
SEARCHING = mpx.loss_scaling(optax.sgd(0.1), mpx.DynamicLossScale(2.0**3, period=2))
FIXED = mpx.loss_scaling(optax.sgd(0.1), mpx.StaticLossScale(2.0**7))


@functools.cache
def jitted(tx):
    return jax.jit(tx.update, compiler_options=QUICKLY)


def after(tx, pattern, bad_leaves=("head",)):
    """Return the state after good (True) and bad steps, in which the named leaves are
    NaN.
    """
    state = tx.init(PARAMS)
    for finite in pattern:
        grads = {
            name: jnp.full(2, 1.0 if finite or name not in bad_leaves else jnp.nan)
            for name in PARAMS
        }
        _, state = jitted(tx)(grads, state)
    return state


def message(state, **options):
    with pytest.raises(mpx.StuckError) as error:
        mpx.check_health(state, **options)
    return str(error.value)


def test_ten_steps_skipped_in_a_row_at_the_smallest_scale_are_too_many():
    """Three steps from 8 down to 1, and nine more at 1: one less than ten. Bad batches
    now and then are healthy.
    """
    mpx.check_health(after(SEARCHING, [False] * 12))
    text = message(after(SEARCHING, [False] * 13))
    assert (
        "10 steps in a row were skipped at a loss scale of 1, which does not shrink any"
        " further (13 skipped" in text
    )
    mpx.check_health(after(SEARCHING, [False] * 13 + [True]))
    mpx.check_health(after(FIXED, ([False] * 9 + [True]) * 3))


def test_the_first_bad_gradient_is_named_if_a_tree_like_the_gradients_is_given():
    state = after(SEARCHING, [False] * 13)
    text = message(state, params=PARAMS)
    assert "the first gradient that was infinite or NaN was 'head'.\n" in text
    assert "go back to the last checkpoint and lower the learning rate" in text
    assert "allow the scale" not in text
    assert message(state, params=jax.eval_shape(lambda: PARAMS)) == text
    both = after(FIXED, [False] * 10, bad_leaves=("embed", "head"))
    assert "was 'embed'.\n" in message(both, params=PARAMS)
    # No scale has been tried but this one.
    assert "allow the scale to go below 128" in message(both)
    # What has no gradient does not count.
    params = {
        "embed": jnp.ones(2),
        "ids": jnp.arange(3),
        "name": "layer",
        "w": jnp.ones(2),
    }
    assert "NaN was 'w'.\n" in message(state, params=params)


def test_without_a_fitting_tree_its_number_is_told_and_how_to_see_its_name():
    state = after(SEARCHING, [False] * 13)
    number = "was number 1 (from 0, in the order of `jax.tree.leaves`)"
    for params in (None, {"embed": jnp.ones(2)}):
        text = message(state, params=params)
        assert (
            f"{number}; `check_health(opt_state, params=params)` tells its name, for a"
            " tree like the g" in text
        )


def test_it_looks_into_the_state_of_an_nnx_optimizer_and_names_its_parameters():
    model = nnx.Sequential(
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 1, rngs=nnx.Rngs(1))
    )
    optimizer = nnx.Optimizer(
        model,
        mpx.loss_scaling(optax.adam(1e-2), mpx.DynamicLossScale(1.0)),
        wrt=nnx.Param,
    )

    @nnx.jit
    def step(model, optimizer, factor):
        loss = lambda model: (
            (model(jnp.ones((1, 2))) ** 2).sum()
            + factor * model.layers[1].bias.get_value().sum()
        )
        optimizer.update(model, nnx.grad(loss)(model))

    mpx.check_health(optimizer.opt_state)
    for factor in (1.0, np.inf, np.inf):
        step(model, optimizer, jnp.float32(factor))
    text = message(
        optimizer.opt_state, max_stuck_steps=2, params=nnx.state(model, nnx.Param)
    )
    assert "NaN was 'layers/1/bias'.\n" in text
    assert mpx.get_loss_scale(optimizer.opt_state) == mpx.DynamicLossScale(1.0)


def test_a_rule_behind_a_loss_scale_is_seen_in_the_state():
    """Its moments change in the steps that are skipped, also under a scale of 1."""
    behind = lambda *scale: optax.chain(
        mpx.loss_scaling(optax.identity(), *scale), optax.adam(1e-3)
    ).init(PARAMS)
    text = r"(?s)`check_health`: a rule behind `loss_scaling` keeps a state.*'1/0/mu"
    for scale in ((), (mpx.NoOpLossScale(),)):
        with pytest.raises(ValueError, match=text):
            mpx.check_health(behind(*scale))
    mpx.check_health(
        optax.chain(mpx.loss_scaling(optax.adam(1e-3)), optax.zero_nans()).init(PARAMS)
    )
