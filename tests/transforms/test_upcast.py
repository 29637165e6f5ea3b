"""Check `upcast`: what the rule sees, and what every wrapper refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.eager


@pytest.fixture
def params():
    return {
        "kernel": jnp.ones((2, 3), jnp.bfloat16),
        "bias": jnp.zeros(3, jnp.float16),
        "scale": jnp.ones((), jnp.float32),
    }


def test_the_rule_sees_float32_parameters_gradients_and_extra_arguments(params):
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(updates=updates, params=params, **extra_args)
        return updates, state

    tx = mpx.upcast(optax.GradientTransformationExtraArgs(lambda params: params, update))
    state = tx.init(params)
    tx.update(params, state, params, value=jnp.float16(2), ratio=0.5, hessian=params, count=jnp.int32(3))
    assert {x.dtype for x in jax.tree.leaves(state)} == {np.dtype(np.float32)}
    for name in ("updates", "params", "hessian", "value", "ratio"):
        assert {x.dtype for x in jax.tree.leaves(seen[name])} == {np.dtype(np.float32)}, name
    assert seen["count"].dtype == np.int32


def test_a_rule_works_without_parameters_where_it_does_in_optax(params):
    tx = mpx.upcast(optax.sgd(0.5))
    updates, _ = tx.update(params, tx.init(params))
    assert_same_bits(updates["kernel"], jnp.full((2, 3), -0.5, jnp.float32))


def test_a_rule_may_still_choose_a_narrow_dtype_for_its_own_state(params):
    state = mpx.upcast(optax.adam(1e-3, mu_dtype=jnp.bfloat16)).init(params)
    assert optax.tree.get(state, "mu")["kernel"].dtype == jnp.bfloat16
    assert optax.tree.get(state, "nu")["kernel"].dtype == np.float32


@pytest.mark.optax_promotion
def test_adam_in_float16_is_nan_without_it_and_finite_with_it():
    """eps=1e-8 is 0 in float16, so that a zero gradient gives 0 / 0."""
    params = jnp.ones(3, jnp.float16)
    grads = jnp.zeros(3, jnp.float16)
    naive, wide = optax.adam(1e-3), mpx.upcast(optax.adam(1e-3))
    assert jnp.isnan(naive.update(grads, naive.init(params), params)[0]).all()  # negative control
    assert jnp.isfinite(wide.update(grads, wide.init(params), params)[0]).all()


@pytest.mark.optax_promotion
def test_injected_hyperparameters_are_not_rounded_to_the_parameters_dtype():
    params = jnp.ones(3, jnp.bfloat16)
    tx = optax.inject_hyperparams(optax.adam)(1e-3, b2=0.999)
    assert tx.init(params).hyperparams["b2"] == 1  # negative control
    assert mpx.upcast(tx).init(params).hyperparams["b2"] == np.float32(0.999)


def test_what_is_not_a_transformation_is_refused():
    hint = r"got function\. Call it with its settings first, as in `optax.adamw\(1e-3\)`"
    for wrapper in (mpx.upcast, mpx.master_weights, mpx.loss_scaling):
        with pytest.raises(TypeError, match=r"needs an Optax gradient transformation, but got float\.$"):
            wrapper(1e-3)
        with pytest.raises(TypeError, match=hint):
            wrapper(optax.adamw)


def test_a_dtype_that_is_not_wide_is_refused():
    for dtype in (np.int32, jnp.bfloat16):
        with pytest.raises(ValueError, match="`dtype` must be float32 or float64, but got"):
            mpx.upcast(optax.sgd(1.0), dtype)


def test_gradients_that_are_not_floating_are_all_named():
    """Integers, booleans, and the float0 that JAX gives as the gradient of an integer."""
    tx = mpx.upcast(optax.sgd(1.0))
    params = {"embed": {"ids": np.zeros(512, np.int32)}, "flag": np.zeros(2, np.int32), "w": np.ones(2, np.float32)}
    grads = jax.grad(lambda p: p["w"].sum(), allow_int=True)(params) | {"embed": params["embed"]}
    expected = (
        r"`upcast` needs floating-point gradients, but 2 of 3 leaves are not\. Differentiate the floating .*\n"
        r"  grads\['embed/ids'\]: int32\[512\]\n"
        r"  grads\['flag'\]: .*float0"
    )
    with pytest.raises(TypeError, match=expected):
        tx.update(grads, tx.init(params), params)
    with pytest.raises(TypeError, match=re.escape("grads['flag']: bool[2]")):
        tx.update(grads | {"flag": np.zeros(2, bool)}, tx.init(params), params)


def test_a_rule_that_turns_a_count_into_a_float_is_refused():
    count = lambda dtype: {"count": jnp.zeros((), dtype)}
    broken = optax.GradientTransformation(lambda p: count(jnp.int32), lambda g, s, p=None: (g, count(jnp.float32)))
    tx = mpx.upcast(broken)
    with pytest.raises(TypeError, match=r"state at 'count' from int32\[\] to float32\[\]\."):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


def test_float64_parameters_stay_float64():
    with jax.enable_x64(True):
        tx = mpx.upcast(optax.sgd(1.0))
        params = {"wide": jnp.ones(2, jnp.float64), "narrow": jnp.ones(2, jnp.bfloat16)}
        updates, _ = tx.update(params, tx.init(params), params)
        assert updates["wide"].dtype == np.float64
        assert updates["narrow"].dtype == np.float32


def test_updates_that_a_rule_narrows_come_out_as_float32():
    tx = mpx.upcast(optax.stateless(lambda u, params: jax.tree.map(lambda x: x.astype(jnp.bfloat16), u)))
    params = jnp.ones(2, jnp.bfloat16)
    assert tx.update(jnp.ones(2), tx.init(params), params)[0].dtype == jnp.float32


def strong(tree):
    return not any(jax.typeof(x).weak_type for x in jax.tree.leaves(tree))


def test_states_are_strongly_typed_from_the_start_and_after_an_update():
    assert strong(mpx.upcast(optax.adam(1e-3)).init({"w": 1.0}))  # a Python number among the parameters
    weak = optax.GradientTransformation(lambda p: jnp.asarray(0.5), lambda u, s, p=None: (u, jnp.asarray(1.0)))
    tx, params = mpx.upcast(weak), jnp.ones(2, jnp.bfloat16)
    state = tx.init(params)
    assert strong(state)
    assert strong(jax.eval_shape(tx.update, params, state, params)[1])


def test_the_state_of_a_rule_that_keeps_its_parameters_or_an_array_twice_can_be_donated_with_them():
    count = jnp.zeros((), jnp.int32)
    keep = lambda p: {"a": p, "b": p, "c": 0.5, "counts": (count, count)}
    params = jnp.ones(3, jnp.float32)
    state = mpx.upcast(optax.GradientTransformation(keep, lambda u, s, p=None: (u, s))).init(params)
    jax.jit(lambda p, s: (p + 1, jax.tree.map(lambda x: x + 1, s)), donate_argnums=(0, 1))(params, state)
    assert strong(state)


def test_a_rule_that_changes_the_shape_of_its_state_is_refused():
    grows = optax.GradientTransformation(
        lambda p: {"m": p}, lambda u, s, p=None: (u, {"m": jnp.ones((4, 2), np.float32)})
    )
    tx, params = mpx.upcast(grows), jnp.ones(2, jnp.float32)
    with pytest.raises(TypeError, match=r"state at 'm' from float32\[2\] to float32\[4, 2\]\. Is a mean of gradients"):
        tx.update(params, tx.init(params), params)
