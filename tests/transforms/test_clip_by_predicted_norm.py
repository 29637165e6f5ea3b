"""Check `clip_by_predicted_norm`: what it predicts, what it remembers, and where it
stands.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import BF16, F16, F32, assert_same_bits, types_of

pytestmark = pytest.mark.optax_promotion

GRADS = {"head": jnp.float32([3.0]), "layers": jnp.float32([4.0, 0.0])}  # norm 5
CLIP = mpx.clip_by_predicted_norm(1.0, "head")


def times(factor, tree=GRADS):
    return jax.tree.map(lambda g: g * jnp.asarray(factor, g.dtype), tree)


def after(*steps, tx=CLIP):
    """Return the norm of the last updates, and the state after some steps."""
    state = tx.init(steps[0])
    for grads in steps:
        updates, state = tx.update(grads, state, grads)
    return float(optax.tree.norm(mpx.cast(updates, "f32"))), state


# What is predicted.


@pytest.mark.parametrize("growth", [0.5, 1.0, 1024.0])
def test_where_all_gradients_grow_alike_the_second_step_has_the_global_norm(growth):
    last = times(growth)
    updates, _ = CLIP.update(last, CLIP.update(GRADS, CLIP.init(GRADS))[1])
    expected, _ = optax.clip_by_global_norm(1.0).update(last, optax.EmptyState())
    for path, update in updates.items():
        np.testing.assert_allclose(update, expected[path], rtol=1e-6)


FIRST = 5 / (3 * 3**0.5)  # one of three elements predicts


def test_in_the_first_step_all_elements_are_taken_to_have_gradients_of_one_size():
    assert after(GRADS)[0] == pytest.approx(FIRST)
    ones = {"head": jnp.ones((4, 2)), "layers": jnp.ones((5, 8))}
    assert after(ones)[0] == pytest.approx(1)


def test_leaves_that_predict_show_that_all_gradients_grow():
    """The others stay as they are, so the last norm times 2 is too large."""
    grown = GRADS | {"head": 2 * GRADS["head"]}
    assert after(GRADS, grown)[0] == pytest.approx(np.hypot(6, 4) / 10)


def test_gradients_that_grow_alone_pass_and_the_next_ones_are_clipped_too_much():
    """Each of the next steps halves the exponent of what is too much."""
    alone = GRADS | {"layers": 100 * GRADS["layers"]}
    norm, growth = np.hypot(3, 400), np.hypot(3, 400) / 5
    assert after(GRADS, alone)[0] == pytest.approx(norm / 5)
    assert after(GRADS, alone, GRADS)[0] == pytest.approx(growth**-0.5)
    assert after(GRADS, alone, GRADS, GRADS)[0] == pytest.approx(growth**-0.25)


def test_gradients_below_the_bound_keep_their_bits():
    small = times(0.125)  # a norm of 0.625
    updates, _ = CLIP.update(small, CLIP.init(small))
    assert_same_bits(updates, small)


# What is remembered.


def test_where_leaves_that_predict_are_zero_the_last_norm_is_predicted():
    zero = GRADS | {"head": jnp.zeros(1)}
    assert after(GRADS, zero)[0] == pytest.approx(4 / 5)
    norm, state = after(GRADS, zero, GRADS)
    assert norm == pytest.approx(1)
    assert state.norm == 5
    assert state.ratio == pytest.approx(5 / 3)


def test_gradients_of_zero_are_forgotten_by_the_next_step():
    zero = times(0.0)
    assert after(zero)[0] == 0
    assert after(GRADS, zero)[0] == 0
    assert after(GRADS, zero, GRADS)[0] == pytest.approx(1)
    assert after(zero, GRADS)[0] == pytest.approx(FIRST)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["head", "layers"])
def test_gradients_that_are_not_finite_spoil_no_later_step(bad, where):
    """In their own step they spoil the update, as with the global norm."""
    spoiled = GRADS | {where: jnp.full_like(GRADS[where], bad)}
    norm, state = after(GRADS, spoiled)
    assert np.isnan(norm) or np.isinf(norm)
    assert_same_bits(state, after(GRADS)[1])
    assert after(GRADS, spoiled, times(2.0))[0] == pytest.approx(1)
    assert after(spoiled, GRADS)[0] == pytest.approx(FIRST)


def test_a_norm_that_overflows_clips_to_zero_and_spoils_no_later_step():
    huge = times(1e25)
    assert after(huge)[0] == 0
    assert after(GRADS, huge, GRADS)[0] == pytest.approx(1)


def test_a_mean_of_ratios_that_overflows_is_forgotten():
    far = {"head": jnp.float32([1e-13]), "layers": jnp.float32([1e13, 0])}
    _, once = after(GRADS, far)
    _, twice = after(GRADS, far, far)
    assert np.isinf(once.ratio * jnp.float32(1e26))
    assert_same_bits(twice, once)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_norms_of_16_bit_gradients_are_those_of_float32(dtype):
    """In float16 300**2 is infinite, as the negative control shows."""
    grads = {
        "head": jnp.full(64, 300, dtype),
        "layers": jnp.full((4, 64), 0.0078125, dtype),
    }
    norm, state = after(grads, grads)
    assert norm == pytest.approx(1, rel=1e-2)
    assert state.norm == pytest.approx(2400)
    assert types_of(CLIP.update(grads, state)[0]) == types_of(grads)
    if dtype == F16:
        assert np.isinf(optax.tree.norm(grads))


def test_scalars_and_leaves_of_no_elements_are_clipped():
    grads = {"head": jnp.float32(3), "b": jnp.float32(4), "none": jnp.zeros((0, 2))}
    assert after(grads, grads)[0] == pytest.approx(1)


def test_the_state_is_a_carry_of_scan_with_the_bits_of_single_steps():
    def step(state, factor):
        updates, state = CLIP.update(times(factor), state)
        return state, updates

    factors = jnp.float32([1, 3, 0.25])
    scanned, _ = jax.jit(lambda s: jax.lax.scan(step, s, factors))(CLIP.init(GRADS))
    state = CLIP.init(GRADS)
    for factor in factors:
        state, _ = jax.jit(step)(state, factor)
    assert_same_bits(scanned, state)


def test_nothing_is_divided_by_zero():
    with jax.debug_nans(True), jax.debug_infs(True):
        after(times(0.0), GRADS, times(0.0))


# Where it stands.


def test_extra_arguments_are_accepted():
    CLIP.update(GRADS, CLIP.init(GRADS), value=jnp.float32(1))


def test_inside_of_multi_steps_a_mean_over_steps_is_clipped_once():
    tx = optax.MultiSteps(CLIP, 2).gradient_transformation()
    norm, state = after(GRADS, times(3.0), GRADS, times(3.0), tx=tx)
    assert norm == pytest.approx(1)
    assert state.inner_opt_state.norm == 10


def test_a_step_that_is_skipped_keeps_the_state():
    tx = mpx.loss_scaling(CLIP, mpx.StaticLossScale(8.0))
    _, before = after(times(8.0), tx=tx)
    _, state = after(times(8.0), times(np.inf), tx=tx)
    assert state.skipped_steps == 1
    assert before.inner_state.norm == 5
    assert_same_bits(state.inner_state, before.inner_state)


def test_in_every_recipe_the_chain_is_accepted():
    tx = optax.chain(mpx.clip_by_predicted_norm(1.0, "kernel"), optax.adamw(1e-3))
    for recipe in ("f16-scaled", "bf16-split-8bit", "bf16-kahan"):
        mpx.check_chain(mpx.mixed_precision(tx, recipe))
    mpx.check_chain(
        optax.chain(mpx.clip_by_predicted_norm(1.0, "kernel"), mpx.master_weights(tx))
    )


@pytest.mark.parametrize(
    ("tx", "text"),
    [
        (
            optax.chain(
                mpx.clip_by_predicted_norm(1.0, "kernel"),
                mpx.loss_scaling(optax.sgd(0.1)),
            ),
            "gradients reach `loss_scaling` scaled",
        ),
        (
            optax.chain(
                mpx.kahan_summation(), mpx.clip_by_predicted_norm(1.0, "kernel")
            ),
            "was final when `kahan_summation` had rounded it",
        ),
    ],
)
def test_check_chain_refuses_it_where_nothing_may_clip(tx, text):
    with pytest.raises(ValueError, match=text):
        mpx.check_chain(tx)


def test_convert_state_carries_its_state_to_another_recipe():
    rule = optax.chain(CLIP, optax.adam(1e-3))
    old, new = (mpx.mixed_precision(rule, x) for x in ("bf16-split", "bf16-masters"))
    params = mpx.cast(GRADS, "bf16")
    _, state = old.update(GRADS, old.init(params), params)
    _, converted = mpx.convert_state(params, state, old, new)
    assert optax.tree.get(converted, "norm") == 5


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: mpx.clip_by_predicted_norm(0.0, "head"), "positive and finite, but got 0"),
        (lambda: mpx.clip_by_predicted_norm(np.nan, "head"), "but got nan"),
        (lambda: mpx.clip_by_predicted_norm(np.inf, "head"), "but got inf"),
        (
            lambda: mpx.clip_by_predicted_norm(1.0, "head("),
            r"`by` 'head\(' is not a regular expression: ",
        ),
        (
            lambda: mpx.clip_by_predicted_norm(1.0, "hea").init(GRADS),
            r"'hea' matches no parameter. It must match whole components of a path,"
            r" such as \['head', 'layers'\]",
        ),
    ],
)  # fmt: skip
def test_what_cannot_predict_is_refused_in_words(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_the_state_of_another_transformation_is_refused():
    with pytest.raises(TypeError, match="needs the `ClipByPredictedNormState`"):
        CLIP.update(GRADS, optax.EmptyState())


# In `train_step`.


def stacked():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "head": jax.random.normal(keys[0], (4, 8), F32),
        "layers": {"w": 2 * jax.random.normal(keys[1], (3, 4, 4), F32)},
    }


def loss_of_stacked(params, x):
    layer = lambda x, w: (jnp.tanh(x @ w["w"]), None)
    return jnp.mean((jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]) ** 2)


@pytest.mark.parametrize("recipe", ["f32", "bf16-split"])
@pytest.mark.parametrize(
    ("clip", "kept"),
    [
        (mpx.clip_by_predicted_norm(0.1, "head"), {"head"}),
        (mpx.clip_by_predicted_norm(0.1, "layers"), {"head", "layers/w"}),
        (optax.clip_by_global_norm(0.1), {"head", "layers/w"}),
    ],
)
def test_train_step_releases_layers_unless_they_predict(clip, kept, recipe):
    tx = mpx.mixed_precision(optax.chain(clip, optax.adam(1e-2)), recipe)
    params = mpx.get_policy(recipe).cast_to_param(stacked())
    step = mpx.train_step(mpx.autocast(loss_of_stacked, recipe), tx)
    plan = step.plan(params, tx.init(params), jnp.ones((2, 4), F32))
    assert {row.path for row in plan.rows if row.reason} == kept


def test_train_step_clips_as_the_plain_step_does():
    params, x = stacked(), jnp.ones((2, 4), F32)
    tx = optax.chain(mpx.clip_by_predicted_norm(0.1, "head"), optax.sgd(0.1))

    def plain(params, state, x):
        loss, grads = jax.value_and_grad(loss_of_stacked)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    found = [
        train_three_times(jax.jit(step), params, tx.init(params), x)
        for step in (mpx.train_step(loss_of_stacked, tx), plain)
    ]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    state = optax.tree.get(found[0], "ClipByPredictedNormState")
    assert state.norm > 0.1  # so that it clips


def train_three_times(step, params, state, x):
    for _ in range(3):
        params, state, loss = step(params, state, x)
    return params, state, loss
