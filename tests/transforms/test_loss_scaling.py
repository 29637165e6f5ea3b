import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import mpx
from tests.helpers import assert_same_bits, bits, eight_cpu_devices

pytestmark = [pytest.mark.optax_promotion, pytest.mark.eager]

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 10)
RULE = optax.chain(optax.clip_by_global_norm(1.0), optax.add_noise(1e-3, 0.5, key=0), optax.adamw(SCHEDULE))
WRAPPED = {
    "full masters": mpx.master_weights(RULE),
    "split masters": mpx.master_weights(RULE, storage="split"),
    "kahan": optax.chain(mpx.upcast(RULE), mpx.kahan_summation()),
    "stochastic": optax.chain(mpx.upcast(RULE), mpx.stochastic_rounding(jax.random.key(0))),
    "multi steps": optax.MultiSteps(mpx.master_weights(RULE), 2),
}


def params():
    rng = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(rng.normal(size=(4, 3)), jnp.bfloat16),
        "bias": jnp.asarray([0.0, -0.0, 1.0], jnp.bfloat16),
        "scale": jnp.asarray([-0.0, 2.0], jnp.float32),
    }


def good_grads(scale):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32) * scale, params())


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("leaf", ["kernel", "bias", "scale"])
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_skip_is_total(wrapped, leaf, poison):
    """One bad number: parameters, masters, moments, counts, keys and low bits keep their bits; -0.0 stays -0.0."""
    tx = mpx.loss_scaling(WRAPPED[wrapped])
    before, state = params(), tx.init(params())
    step = compiled_step(wrapped)
    for _ in range(2):
        before, state = step(before, state, good_grads(state.loss_scale))
    bad = good_grads(state.loss_scale)
    bad[leaf] = bad[leaf].at[0].set(poison)
    after, new_state = step(before, state, bad)
    assert_same_bits(after, before)
    assert_same_bits(new_state.inner_state, state.inner_state)
    assert int(new_state.skipped_steps) == int(state.skipped_steps) + 1 == 1
    assert float(new_state.loss_scale) == float(state.loss_scale) / 2
    assert int(new_state.scale_state.counter) == 0


@functools.cache
def compiled_step(wrapped):
    tx = mpx.loss_scaling(WRAPPED[wrapped])

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def test_without_it_one_bad_number_destroys_the_training():
    """The negative control."""
    tx = WRAPPED["full masters"]
    bad = good_grads(1.0)
    bad["kernel"] = bad["kernel"].at[0, 0].set(np.nan)
    updates, _ = tx.update(bad, tx.init(params()), params())
    assert jnp.isnan(updates["bias"]).all()


def test_a_good_step_counts_and_changes_no_scale():
    tx = mpx.loss_scaling(optax.sgd(1.0))
    state = tx.init(jnp.ones(2))
    _, new_state = tx.update(jnp.ones(2), state)
    assert (int(new_state.scale_state.counter), int(new_state.skipped_steps)) == (1, 0)
    assert_same_bits(new_state.loss_scale, state.loss_scale)


def test_a_skipped_update_is_minus_zero():
    """Adding +0.0 would turn a weight of -0.0 into +0.0."""
    tx = mpx.loss_scaling(optax.sgd(1.0))
    updates, _ = tx.update(jnp.asarray([1.0, jnp.nan], jnp.float32), tx.init(jnp.ones(2, jnp.float32)))
    assert (bits(updates) == 0x8000_0000).all()


def test_a_skipped_update_of_a_complex_leaf_is_minus_zero_in_both_parts():
    tx = mpx.loss_scaling(optax.sgd(1.0))
    params = jnp.asarray([complex(-0.0, -0.0)], jnp.complex64)
    updates, _ = tx.update(jnp.asarray([complex(1.0, jnp.nan)], jnp.complex64), tx.init(params))
    assert_same_bits(optax.apply_updates(params, updates), params)


def three_updates(tx, scale):
    """The last updates and the state."""
    step, state, start = jax.jit(tx.update), tx.init(params()), params()
    for _ in range(3):
        updates, state = step(good_grads(scale), state, start)
    return updates, state


def test_the_training_is_the_same_under_any_power_of_two_scale():
    expected, plain_state = three_updates(mpx.master_weights(RULE), 1.0)
    for exponent in (0, 1, 15, 24):
        scale = mpx.StaticLossScale(2.0**exponent)
        updates, state = three_updates(mpx.loss_scaling(mpx.master_weights(RULE), scale), scale.loss_scale)
        assert_same_bits(updates, expected)
        assert_same_bits(state.inner_state, plain_state)


def test_clipping_inside_sees_true_gradients():
    tx = mpx.loss_scaling(optax.clip_by_global_norm(1.0), mpx.StaticLossScale(2.0**10))
    updates, _ = tx.update(jnp.asarray([0.5 * 2**10, 0.0]), tx.init(jnp.ones(2)))
    assert updates.tolist() == [0.5, 0.0]


def test_float16_gradients_are_unscaled_in_float32():
    """2**-20 / 2**15 has no float16 value."""
    tx = mpx.loss_scaling(optax.identity())
    updates, _ = tx.update(jnp.full(2, 2.0**-20, jnp.float16), tx.init(jnp.ones(2)))
    assert_same_bits(updates, jnp.full(2, 2.0**-35, jnp.float32))


@pytest.mark.parametrize("loss_scale", [mpx.NoOpLossScale(), mpx.StaticLossScale(8.0)])
def test_a_scale_that_does_not_adapt_still_skips(loss_scale):
    tx = mpx.loss_scaling(optax.sgd(1.0), loss_scale)
    state = tx.init(jnp.ones(2))
    _, new_state = tx.update(jnp.asarray([1.0, jnp.inf]), state)
    assert int(new_state.skipped_steps) == 1
    assert float(new_state.loss_scale) == float(loss_scale.loss_scale)


def test_no_step_waits_for_the_host():
    tx = mpx.loss_scaling(mpx.master_weights(RULE))
    program = jax.jit(tx.update).lower(good_grads(1.0), tx.init(params()), params()).as_text()
    assert "callback" not in program
    assert "stablehlo.case" not in program
    assert "stablehlo.if" not in program


def test_skipped_steps_saturate():
    tx = mpx.loss_scaling(optax.sgd(1.0))
    most = np.int32(np.iinfo(np.int32).max)
    state = optax.tree.set(tx.init(jnp.ones(2)), skipped_steps=jnp.asarray(most), bad_steps=jnp.asarray(most))
    _, state = tx.update(jnp.full(2, jnp.nan), state)
    assert (state.skipped_steps, state.scale_state.bad_steps) == (most, most)


def test_hysteresis_survives_the_optimizer_state():
    tx = mpx.loss_scaling(optax.sgd(1.0), mpx.DynamicLossScale(2.0**10, period=2, hysteresis=2))
    state, scales = tx.init(jnp.ones(1)), []
    for finite in [False, True, False, True, True, False, False]:
        _, state = tx.update(jnp.asarray([1.0 if finite else jnp.nan]), state)
        scales.append(float(state.loss_scale))
    assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**9, 2.0**10, 2.0**10, 2.0**9]


def poisoned_on_one_device():
    """Gradients for eight devices, the last of which has a NaN."""
    return jnp.ones((8, 2), jnp.float32).at[7, 1].set(jnp.nan)


@pytest.mark.parametrize("axis_name", [None, "data"])
def test_inside_shard_map_all_devices_agree_that_a_step_is_bad(axis_name):
    tx = mpx.loss_scaling(optax.sgd(1.0), axis_name=axis_name)
    mesh = eight_cpu_devices()

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P("data")), check_vma=False
    )
    def step(grads, params):
        updates, state = tx.update(grads[0], tx.init(params), params)
        return updates[None], state.skipped_steps[None]

    updates, skipped = jax.jit(step)(poisoned_on_one_device(), jnp.ones(2))
    if axis_name is None:  # negative control: the others step on, and replicas drift apart
        assert skipped.tolist() == [0] * 7 + [1]
    else:
        assert skipped.tolist() == [1] * 8
        assert (bits(updates) == 0x8000_0000).all()


def test_inside_pmap_all_devices_agree_that_a_step_is_bad():
    tx = mpx.loss_scaling(optax.sgd(1.0), axis_name="data")

    def step(grads, params):
        updates, state = tx.update(grads, tx.init(params), params)
        return updates, state.skipped_steps

    updates, skipped = jax.pmap(step, axis_name="data", in_axes=(0, None), devices=jax.devices("cpu"))(
        poisoned_on_one_device(), jnp.ones(2)
    )
    assert skipped.tolist() == [1] * 8
    assert (bits(updates) == 0x8000_0000).all()


class TestErrors:
    def test_a_number_as_loss_scale_is_refused(self):
        with pytest.raises(TypeError, match=r"but got float; a number goes into `StaticLossScale\(number\)`"):
            mpx.loss_scaling(optax.sgd(1.0), 1024.0)

    @pytest.mark.parametrize(
        ("loss_scale", "wrong"),
        [
            (mpx.StaticLossScale(1000), "loss_scale=1000"),
            (mpx.StaticLossScale(0), "loss_scale=0"),
            (mpx.StaticLossScale(2.0**127), "loss_scale=1.7"),  # its reciprocal is subnormal
            (mpx.DynamicLossScale(jnp.float32(3)), "loss_scale=3.0"),
            (mpx.DynamicLossScale(factor=1.5), "factor=1.5"),
            (mpx.DynamicLossScale(min_loss_scale=0.3), "min_loss_scale=0.3"),
            (mpx.DynamicLossScale(max_loss_scale=65504.0), "max_loss_scale=65504.0"),
        ],
    )
    def test_a_scale_that_is_not_a_power_of_two_is_refused(self, loss_scale, wrong):
        with pytest.raises(ValueError, match=f"must be powers of two, but got {wrong}"):
            mpx.loss_scaling(optax.sgd(1.0), loss_scale)

    def test_a_scale_outside_its_bounds_is_refused(self):
        with pytest.raises(ValueError, match=r"between `min_loss_scale` and `max_loss_scale`, but got 33554432.0"):
            mpx.loss_scaling(optax.sgd(1.0), mpx.DynamicLossScale(2.0**25))

    def test_integer_gradients_are_refused(self):
        tx = mpx.loss_scaling(optax.sgd(1.0))
        with pytest.raises(TypeError, match="`loss_scaling` needs floating-point gradients"):
            tx.update(jnp.ones(2, jnp.int32), tx.init(jnp.ones(2)))
