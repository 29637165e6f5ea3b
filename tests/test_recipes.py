import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.optax_promotion

RULE = optax.adamw(1e-2)


def state_types(policy, params_dtype, **options):
    """The names of the wrappers' states, outermost first."""
    state = mpx.mixed_precision(RULE, policy, **options).init({"w": jnp.ones(3, params_dtype)})
    names = []
    while hasattr(state, "inner_state"):
        names.append(type(state).__name__)
        state = state.inner_state
    return names


@pytest.mark.parametrize(
    ("policy", "params_dtype", "expected"),
    [
        ("f32", jnp.float32, []),
        ("params=f32,compute=bf16,output=f32", jnp.float32, []),
        ("params=bf16,compute=bf16,output=f32", jnp.bfloat16, ["MasterWeightsState", "UpcastState"]),
        ("params=f32,compute=f16,output=f32", jnp.float32, ["LossScalingState"]),
        ("f16", jnp.float16, ["LossScalingState", "MasterWeightsState", "UpcastState"]),
        ("params=bf16,compute=f16", jnp.bfloat16, ["LossScalingState", "MasterWeightsState", "UpcastState"]),
        ("params=f16,compute=f32,output=f32", jnp.float16, ["LossScalingState", "MasterWeightsState", "UpcastState"]),
    ],
)
def test_masters_and_loss_scaling_are_added_where_they_are_needed_only(policy, params_dtype, expected):
    assert state_types(policy, params_dtype) == expected


def test_an_override_below_float32_needs_masters_too():
    policy = mpx.get_policy("f32", overrides=(("embed", jnp.bfloat16),))
    assert state_types(policy, jnp.float32) == ["MasterWeightsState", "UpcastState"]


def test_gradients_of_float16_parameters_underflow_without_the_scale_that_they_get():
    """1e-8 has no float16 value, 1e-8 * 2**15 has."""
    params = {"w": jnp.ones(2, jnp.float16)}
    tx = mpx.mixed_precision(optax.sgd(1.0), "params=f16,compute=f32,output=f32")
    state = tx.init(params)
    loss = lambda p: (p["w"].astype(jnp.float32) * 1e-8).sum()
    assert not mpx.grad(loss)(params)["w"].any()  # negative control
    _, state = tx.update(mpx.grad(loss, mpx.get_loss_scale(state))(params), state, params)
    np.testing.assert_allclose(state.inner_state.master["w"], np.float32(1 - 1e-8), rtol=1e-7)


def test_parameters_that_nobody_has_cast_are_refused():
    tx = mpx.mixed_precision(RULE, "params=bf16,compute=bf16,output=f32")
    with pytest.raises(
        ValueError, match=r"all of those given are float32 or wider\. Cast them first: `params = policy"
    ):
        tx.init({"w": jnp.ones(3)})
    tx.init({})
    keeps_all = mpx.get_policy("bf16", overrides=(("w", jnp.float32),))
    mpx.mixed_precision(RULE, keeps_all).init({"w": jnp.ones(3)})


def test_it_is_the_same_as_the_wrappers_by_hand():
    params, grads = {"w": jnp.ones(3, jnp.float16)}, {"w": jnp.full(3, 100.0)}
    recipe = mpx.mixed_precision(RULE, "f16", loss_scale=mpx.StaticLossScale(4.0))
    by_hand = mpx.loss_scaling(mpx.master_weights(RULE), mpx.StaticLossScale(4.0))
    assert_same_bits(
        recipe.update(grads, recipe.init(params), params), by_hand.update(grads, by_hand.init(params), params)
    )


def test_the_storage_of_masters_can_be_chosen():
    state = mpx.mixed_precision(RULE, "bf16", storage="split").init({"w": jnp.ones(3, jnp.bfloat16)})
    assert state.master["w"].dtype == np.uint16


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (
            "f32",
            {"storage": "split"},
            "`storage` was given, but the policy 'p=full,c=full,o=full' stores no parameters",
        ),
        ("bf16", {"loss_scale": mpx.StaticLossScale(2.0)}, "`loss_scale` was given, .* has no float16 in it"),
        ("bf16", {"axis_name": "data"}, "`axis_name` was given, .* has no float16 in it"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(policy, options, message):
    with pytest.raises(ValueError, match=message):
        mpx.mixed_precision(RULE, policy, **options)


def test_a_policy_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="Unknown dtype 'bf61'"):
        mpx.mixed_precision(RULE, "params=bf61")


def test_what_is_no_policy_is_refused():
    with pytest.raises(TypeError, match="`policy` must be a Policy or the string of one, but got int"):
        mpx.mixed_precision(RULE, 16)
