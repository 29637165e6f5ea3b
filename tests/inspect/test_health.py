import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
from tests.helpers import assert_same_bits
from tests.inspect.test_masters import KEEPERS, NESTINGS, trained

pytestmark = pytest.mark.optax_promotion


@pytest.mark.parametrize("nesting", sorted(NESTINGS.keys() - {"loss scaling"}))
def test_the_loss_scale_is_found_in_any_nesting(nesting):
    _, state = trained(NESTINGS[nesting](mpx.loss_scaling(KEEPERS["full"](), mpx.StaticLossScale(2.0**7))), steps=1)
    assert float(mpx.get_loss_scale(state).loss_scale) == 2.0**7
    assert int(mpx.skipped_steps(state)) == 0


def test_without_loss_scaling_the_scale_is_one_and_no_step_was_skipped():
    state = optax.adam(1e-3).init(jnp.ones(2))
    assert mpx.get_loss_scale(state) == mpx.NoOpLossScale()
    assert_same_bits(mpx.skipped_steps(state), jnp.int32(0))


@pytest.mark.parametrize("function", [mpx.get_loss_scale, mpx.skipped_steps])
def test_several_loss_scales_are_refused(function):
    state = mpx.loss_scaling(mpx.loss_scaling(optax.sgd(1.0))).init(jnp.ones(2))
    with pytest.raises(ValueError, match="holds 2 loss scales, but one loss has one scale"):
        function(state)


def test_the_loss_scale_can_be_passed_through_jit():
    state = mpx.loss_scaling(optax.sgd(1.0)).init(jnp.ones(2))
    scale = jax.jit(lambda scale: scale.loss_scale * 2)(mpx.get_loss_scale(state))
    assert float(scale) == 2.0**16


def test_a_transformation_in_place_of_its_state_is_refused():
    with pytest.raises(TypeError, match="needs an optimizer state, but got a transformation"):
        mpx.get_loss_scale(mpx.loss_scaling(optax.sgd(1.0)))


def test_skipped_steps_counts_them():
    tx = mpx.loss_scaling(optax.sgd(1.0))
    state = tx.init(jnp.ones(2))
    for bad in (True, False, True):
        _, state = tx.update(jnp.full(2, jnp.nan if bad else 1.0), state)
    assert int(mpx.skipped_steps(state)) == 2
