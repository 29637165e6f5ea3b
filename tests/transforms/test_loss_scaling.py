"""Check `loss_scaling`: what a skip keeps, the scale of each step, several devices."""

import dataclasses
import functools
import itertools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import mpx
from tests.helpers import (
    assert_same_bits,
    bits,
    cases,
    eight_cpu_devices,
    types_of,
    unfused,
)

pytestmark = [pytest.mark.optax_promotion, pytest.mark.eager]

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 10)
RULE = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.add_noise(1e-3, 0.5, key=0),
    optax.adamw(SCHEDULE),
)
WRAPPED = {
    "full masters": mpx.master_weights(RULE),
    "split masters": mpx.master_weights(RULE, storage="split"),
    "kahan": optax.chain(mpx.upcast(RULE), mpx.kahan_summation()),
    "stochastic": optax.chain(
        mpx.upcast(RULE), mpx.stochastic_rounding(jax.random.key(0))
    ),
    "multi steps": optax.MultiSteps(mpx.master_weights(RULE), 2),
    "few bits": mpx.master_weights(
        mpx.low_precision_state(
            optax.adamw(SCHEDULE), {"mu|nu": mpx.Blockwise8bit(16)}, min_size=1
        )
    ),
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
    return jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32) * scale, params()
    )


@pytest.mark.parametrize("wrapped", cases(WRAPPED, {"split masters", "few bits"}))
def test_a_skip_is_total(wrapped):
    """One bad number: parameters, masters, moments, counts, keys and low bits keep
    their bits; -0.0 stays -0.0.

    The next good step is that of a training without the bad one. It keeps the note of
    which gradient was bad.
    """
    tx = mpx.loss_scaling(WRAPPED[wrapped])

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    before, state = params(), tx.init(params())
    for _ in range(2):
        before, state = step(before, state, good_grads(state.loss_scale))
    assert int(state.first_nonfinite) == -1
    for leaf, poison in itertools.product(before, [np.inf, -np.inf, np.nan]):
        bad = good_grads(state.loss_scale)
        bad[leaf] = bad[leaf].at[0].set(poison)
        after, new_state = step(before, state, bad)
        assert_same_bits(after, before)
        assert_same_bits(new_state.inner_state, state.inner_state)
        assert types_of(new_state) == types_of(state)
        assert int(new_state.skipped_steps) == int(state.skipped_steps) + 1 == 1
        assert float(new_state.loss_scale) == float(state.loss_scale) / 2
        assert int(new_state.scale_state.counter) == int(new_state.stuck_steps) == 0
        assert int(new_state.first_nonfinite) == sorted(before).index(leaf)
        good, good_state = step(after, new_state, good_grads(new_state.loss_scale))
        assert int(good_state.first_nonfinite) == sorted(before).index(leaf)
        expected, expected_state = step(before, state, good_grads(state.loss_scale))
        assert_same_bits(
            (good, good_state.inner_state), (expected, expected_state.inner_state)
        )


def test_without_it_one_bad_number_destroys_the_training():
    """The negative control."""
    tx = WRAPPED["full masters"]
    bad = good_grads(1.0)
    bad["kernel"] = bad["kernel"].at[0, 0].set(np.nan)
    updates, _ = jax.jit(tx.update)(bad, tx.init(params()), params())
    assert jnp.isnan(updates["bias"]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
def test_a_skipped_update_is_minus_zero(dtype):
    """Adding +0.0 would turn a weight of -0.0 into +0.0."""
    tx = mpx.loss_scaling(optax.sgd(1.0))
    zero = np.asarray(-0.0 if dtype == jnp.float32 else complex(-0.0, -0.0), dtype)
    params = jnp.asarray([zero, zero])
    updates, _ = tx.update(jnp.asarray([1.0, jnp.nan], dtype), tx.init(params))
    assert_same_bits(updates, params)
    assert_same_bits(optax.apply_updates(params, updates), params)


def test_the_training_is_the_same_under_any_power_of_two_scale():
    """Compile without fusion: in programs of other operations the compiler contracts
    other products and sums.
    """

    def three_updates(tx, exponent=0):
        step, state = jax.jit(tx.update, compiler_options=unfused()), tx.init(params())
        if exponent:
            state = state._replace(loss_scale=jnp.float32(2.0**exponent))
        for _ in range(3):
            updates, state = step(good_grads(2.0**exponent), state, params())
        return updates, state

    rule = mpx.master_weights(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE))
    )
    expected, plain_state = three_updates(rule)
    tx = mpx.loss_scaling(rule, mpx.StaticLossScale(1.0))
    for exponent in (1, 15, 24):
        updates, state = three_updates(tx, exponent)
        assert_same_bits(updates, expected)
        assert_same_bits(state.inner_state, plain_state)


def test_a_run_goes_on_with_the_settings_of_its_program_and_the_counters_of_its_checkpoint():
    """A minimum of 4 in the checkpoint, of 1/4 in the program."""
    make = lambda low: mpx.loss_scaling(
        optax.sgd(1.0), mpx.DynamicLossScale(4.0, 0, 10, 2, low, hysteresis=2)
    )
    old, new = make(4.0), make(0.25)
    bad, state = jnp.full(1, jnp.nan), old.init(jnp.ones(1))
    for tx, expected in [
        (old, 4.0),
        (old, 4.0),
        (new, 2.0),
        (new, 1.0),
        (new, 0.5),
        (new, 0.25),
        (new, 0.25),
    ]:
        _, state = tx.update(bad, state)
        assert float(state.loss_scale) == expected
    assert float(mpx.get_loss_scale(state).min_loss_scale) == 0.25


# --- several devices --------------------------------------------------------------------------------------------------


def poisoned_on_one_device():
    """Return gradients for eight devices, the last of which has a NaN."""
    return jnp.ones((8, 2), jnp.float32).at[7, 1].set(jnp.nan)


@pytest.mark.parametrize(
    ("axis_name", "check_vma"), [(None, False), ("data", False), ("data", True)]
)
def test_inside_shard_map_all_devices_agree_that_a_step_is_bad(axis_name, check_vma):
    tx = mpx.loss_scaling(optax.sgd(1.0), axis_name=axis_name)
    mesh = eight_cpu_devices()

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=(P("data"), P("data")),
        check_vma=check_vma,
    )
    def step(grads, params):
        updates, state = tx.update(grads[0], tx.init(params), params)
        return updates[None], state.skipped_steps[None]

    updates, skipped = jax.jit(step)(poisoned_on_one_device(), jnp.ones(2))
    # Negative control: the others step on, and replicas drift apart.
    if axis_name is None:
        assert skipped.tolist() == [0] * 7 + [1]
    else:
        assert skipped.tolist() == [1] * 8
        assert (bits(updates) == 0x8000_0000).all()


@dataclasses.dataclass(frozen=True)
class Counting(mpx.LossScale):
    """A scale of one's own: it halves at every third bad step."""

    loss_scale: float
    bad: object
    every: int = 3
    can_shrink = True

    def adjust(self, grads_finite):
        bad = jnp.where(grads_finite, self.bad, self.bad + 1)
        halves = ~grads_finite & (bad % self.every == 0)
        loss_scale = jnp.where(halves, self.loss_scale / 2, self.loss_scale)
        return dataclasses.replace(self, loss_scale=loss_scale, bad=bad)


def test_a_scale_of_ones_own_is_one_class_whose_settings_survive_jit_and_scan():
    tx = mpx.loss_scaling(optax.sgd(1.0), Counting(8.0, np.int32(0)))
    start = tx.init(jnp.ones(1))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(start))
    step = lambda state, grads: (tx.update(grads, state)[1], None)
    bad = jnp.full((6, 1), jnp.nan)
    state, _ = jax.jit(lambda state: jax.lax.scan(step, state, bad))(start)
    assert optax.tree.get(state, "loss_scale") == state.loss_scale == 2
    state = optax.tree.set(state, loss_scale=jnp.float32(64))
    state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(state))
    found = mpx.get_loss_scale(state)
    assert (type(found), found.loss_scale, found.bad, found.every) == (
        Counting,
        64,
        6,
        3,
    )
    restored = flax.serialization.from_bytes(start, flax.serialization.to_bytes(state))
    assert_same_bits(restored, state)


def test_a_scale_that_makes_an_array_of_a_number_is_told_to_begin_with_an_array():
    with pytest.raises(TypeError, match=r"`Counting.adjust` .*must be arrays from the"):
        mpx.loss_scaling(optax.sgd(1.0), Counting(8.0, 0))


def test_a_line_search_inside_sees_true_gradients():
    """With a slope 2**15 times too large it would take tiny steps, and say nothing."""
    loss = lambda w: jnp.sum(jnp.arange(1.0, 5) * (w - 3) ** 2)

    def three_steps(tx):
        w, state = jnp.zeros(4), tx.init(jnp.zeros(4))
        for _ in range(3):
            value, grad = mpx.value_and_grad(loss, mpx.get_loss_scale(state))(w)
            updates, state = tx.update(
                grad, state, w, value=value, grad=grad, value_fn=loss
            )
            w = optax.apply_updates(w, updates)
        return w

    search = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15))
    assert_same_bits(three_steps(mpx.loss_scaling(search)), three_steps(search))


def test_the_state_of_a_bare_rule_has_strong_types_that_stay_and_buffers_of_its_own():
    init = lambda params: {
        "start": params,
        "weak": 0.5,
        "drifts": jnp.zeros((), jnp.bfloat16),
    }
    rule = optax.GradientTransformation(
        init, lambda u, s, params=None: (u, s | {"drifts": jnp.float32(1.0)})
    )
    tx, params = mpx.loss_scaling(rule), jnp.ones(3, jnp.float32)
    state = tx.init(params)
    assert state.inner_state["start"] is not params
    assert not state.inner_state["weak"].weak_type
    assert tx.update(params, state)[1].inner_state["drifts"].dtype == jnp.bfloat16


def test_counters_saturate():
    tx = mpx.loss_scaling(optax.sgd(1.0), mpx.StaticLossScale(1.0))
    most = np.int32(np.iinfo(np.int32).max)
    state = tx.init(jnp.ones(2))._replace(
        skipped_steps=jnp.asarray(most), stuck_steps=jnp.asarray(most)
    )
    _, state = tx.update(jnp.full(2, jnp.nan), state)
    assert (state.skipped_steps, state.stuck_steps) == (most, most)


def test_a_rule_whose_state_is_a_bare_dictionary_has_no_loss_scale_once_it_stands_in_a_chain():
    """The remedy of the error for it: nothing tells such a state from parameters that
    were passed by mistake.
    """
    rule = optax.GradientTransformation(
        lambda params: {"momentum": params},
        lambda updates, state, params=None: (updates, {"momentum": updates}),
    )
    with pytest.raises(
        TypeError,
        match=r"element of a chain, as in `optax.chain\(rule, optax.identity\(\)\)`",
    ):
        mpx.get_loss_scale(rule.init({"w": jnp.ones(2)}))
    state = mpx.mixed_precision(optax.chain(rule, optax.identity()), "f32").init(
        {"w": jnp.ones(2)}
    )
    assert mpx.get_loss_scale(state) == mpx.NoOpLossScale()
    assert mpx.skipped_steps(state) == 0
