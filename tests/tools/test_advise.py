"""`advise` measures what narrowing does to a training run, and what it advises brings the error under the bound."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpx
from mpx.tools.advise import advise, grouped
from tests.autocast.helpers import narrow_dot, normal, rounded

BF16 = mpx.get_policy("params=bf16,compute=bf16,output=f32")
COMPUTE_ONLY = mpx.get_policy("params=f32,compute=bf16,output=f32")
STORED_ONLY = mpx.get_policy("params=bf16,compute=f32,output=f32")
full = functools.partial(jnp.full, dtype=np.float32)
ones = functools.partial(jnp.ones, dtype=np.float32)
numbers = functools.partial(jnp.asarray, dtype=np.float32)


def relative(x, reference):
    """Return the relative error of a tree of arrays, with the Euclidean norm, in float64."""
    flat = lambda tree: np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])
    return np.linalg.norm(flat(x) - flat(reference)) / np.linalg.norm(flat(reference))


def errors_of_training(loss_fn, params, batch, policy):
    """Return the errors of the loss and the gradient of a training run, by the public functions that it uses."""
    reference = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    lowered = jax.jit(mpx.value_and_grad(mpx.autocast(loss_fn, policy)))(policy.cast_to_param(params), batch)
    return tuple(relative(x, true) for x, true in zip(lowered, reference, strict=True))


def centred_loss(params, x):
    """Give the second layer weights of 100 and a little; the 100 cancels against inputs that add up to 0."""
    hidden = jnp.tanh(x @ params["first"])
    hidden = hidden - hidden.mean(axis=1, keepdims=True)
    return jnp.mean((jnp.tanh(hidden @ params["second"]) @ params["third"] + params["bias"]) ** 2)


def centred_params():
    first, second, third = normal(0, 4, 8), 100 + 0.3 * normal(1, 8, 8), normal(2, 8, 3)
    return {"first": 0.5 * first, "second": second, "third": 0.5 * third, "bias": ones((1, 3))}


@functools.cache
def centred_advice():
    return advise(centred_loss, centred_params(), normal(3, 6, 4), BF16, bound=2e-2)


def test_the_layer_that_cannot_stand_rounding_is_ranked_first_and_kept_and_then_training_meets_the_bound():
    advice = centred_advice()
    assert [row.name for row in advice.rows if row.is_kept] == [advice.rows[0].name] == ["second"]
    assert [row.errors.worst for row in advice.rows] == sorted((row.errors.worst for row in advice.rows), reverse=True)
    assert advice.rest.worst == 0  # every contraction has a leaf
    errors_of = functools.partial(errors_of_training, centred_loss, centred_params(), normal(3, 6, 4))
    for policy, errors in ((BF16, advice.before), (advice.policy, advice.after)):
        np.testing.assert_allclose((errors.loss, errors.gradient), errors_of(policy), rtol=1e-3)
    assert advice.before.worst > advice.bound >= advice.after.worst
    assert advice.met
    other = mpx.get_policy(str(BF16), overrides=(("^first$", jnp.float32), ("^third$", jnp.float32)))
    assert max(errors_of(other)) > 10 * advice.bound  # the negative control


def test_the_error_of_a_row_is_that_of_its_leaf_rounded_and_its_product_narrowed():
    """Write the one product in bfloat16 by hand, and the others in float32."""
    params, x = centred_params(), normal(3, 6, 4)

    def by_hand(params, x):
        hidden = jnp.tanh(x @ params["first"])
        hidden = jnp.tanh((hidden - hidden.mean(axis=1, keepdims=True)) @ params["second"])
        return jnp.mean((narrow_dot(jnp.bfloat16)(hidden, params["third"]) + params["bias"]) ** 2)

    alone = params | {"third": jnp.asarray(rounded(params["third"], jnp.bfloat16))}
    value, grads = jax.jit(jax.value_and_grad(by_hand))(alone, x)
    reference = jax.jit(jax.value_and_grad(centred_loss))(params, x)
    (errors,) = [row.errors for row in centred_advice().rows if row.name == "third"]
    assert errors.gradient == pytest.approx(relative(grads, reference[1]), rel=1e-2, abs=1e-7)
    assert errors.loss == pytest.approx(relative(value, reference[0]), rel=1e-2, abs=1e-7)


def test_no_more_is_kept_than_the_bound_takes():
    """Sum up leaves with errors that fall by 4: the first three of five are needed, and two do not suffice."""
    params = {name: full(2, 1 + 2.0**-k) for name, k in zip("abcde", range(9, 19, 2), strict=True)}
    loss_fn = lambda params, x: sum(jnp.sum(x * leaf) for leaf in jax.tree.leaves(params))
    error = lambda *ks: sum(2.0**-k for k in ks) / sum(1 + 2.0**-k for k in range(9, 19, 2))
    bound = error(15, 17) * 1.1
    assert bound < error(13, 15, 17)
    advice = advise(loss_fn, params, ones(2), STORED_ONLY, bound=bound)
    assert [(row.name, row.is_kept) for row in advice.rows] == [(name, name in "abc") for name in "abcde"]
    assert advice.met
    assert advice.before.loss == pytest.approx(error(9, 11, 13, 15, 17), rel=1e-2)
    assert advice.after.loss == pytest.approx(error(15, 17), rel=1e-2)


def test_nothing_is_kept_where_the_policy_meets_the_bound():
    advice = advise(lambda params, x: jnp.sum(params * x), full(2, 1.001), ones(2), STORED_ONLY, bound=0.1)
    assert (advice.policy, advice.met) == (STORED_ONLY, True)
    assert advice.after == advice.before
    assert advice.before.worst > 0


def test_what_no_override_reaches_is_measured_and_a_leaf_that_is_not_narrowed_has_no_row():
    def attention_loss(params, x):
        queries, keys = jnp.tanh(x @ params["query"]), jnp.tanh(x @ params["key"] + params["bias"])
        scores = jnp.einsum("qd,kd->qk", 8.0 * queries, 8.0 * keys)
        return jnp.mean((jax.nn.softmax(scores) @ x) ** 2)

    params, x = {"query": normal(0, 8, 16), "key": normal(1, 8, 16), "bias": ones((1, 16))}, 2 * normal(2, 6, 8)
    advice = advise(attention_loss, params, x, COMPUTE_ONLY, bound=5e-3)
    assert {row.name: row.is_kept for row in advice.rows} == {"query": True, "key": True}
    assert (advice.met, advice.after) == (False, advice.rest)
    assert "is not met, even with all of these leaves in float32. `mpx.explain` lists" in str(advice)
    expected = errors_of_training(attention_loss, params, x, advice.policy)
    np.testing.assert_allclose((advice.rest.loss, advice.rest.gradient), expected, rtol=1e-3)


def test_an_overflow_is_an_infinite_error_ranked_first():
    """Compute 300 x 300 x 2, which is beyond the range of float16; the difference of two infinities is NaN."""
    loss_fn = lambda params, x: jnp.mean(jax.nn.log_softmax(x @ params["large"])) + jnp.mean(x @ params["small"])
    params = {"large": full((2, 2), 300.0), "small": normal(0, 2, 2)}
    policy = mpx.get_policy("params=f16,compute=f16,output=f32")
    advice = advise(loss_fn, params, full((3, 2), 300.0), policy, bound=1e-2)
    assert [(row.name, row.errors.worst == np.inf) for row in advice.rows] == [("large", True), ("small", False)]
    assert (advice.before.worst, advice.met) == (np.inf, True)


def test_an_error_is_infinite_where_only_the_reference_is_zero():
    """1 + 2^-9 is 1 in bfloat16, so that the sum is not 0."""
    loss_fn = lambda params, x: jnp.sum(params * x)
    advice = advise(loss_fn, numbers([1 + 2.0**-9, -1.0, -(2.0**-9)]), ones(3), STORED_ONLY)
    assert (advice.before.loss, advice.before.gradient, advice.after.loss) == (np.inf, 0, 0)


def test_a_loss_scale_keeps_float16_gradients_from_underflow():
    """Scale cotangents of 2^-30, which are 0 in float16, by 2^20."""
    loss_fn = lambda params, x: jnp.sum(x @ params) * 2.0**-30
    policy = mpx.get_policy("params=f32,compute=f16,output=f32")
    run = functools.partial(advise, loss_fn, normal(0, 4, 2), normal(1, 3, 4), policy, bound=1e-2)
    assert run().before.gradient == pytest.approx(1)
    scaled = run(loss_scale=mpx.StaticLossScale(2.0**20))
    assert scaled.before.gradient < 1e-3
    assert scaled.rows[0].errors.gradient < 1e-3


PATHS = st.text(st.sampled_from("ab01.*+[](|)$^\\/- é"), max_size=5)


@settings(max_examples=60)
@given(st.lists(PATHS, min_size=1, max_size=30, unique=True))
def test_a_groups_pattern_finds_its_own_paths_and_no_others(paths):
    for pattern, own in grouped(paths).items():
        assert [path for path in paths if re.search(pattern, path)] == own


def test_many_leaves_are_kept_together_if_they_differ_in_numbers_only():
    params = {f"layer_{i}": full(2, 1.001) for i in range(25)} | {"last": full(2, 1.0)}
    loss_fn = lambda params, x: sum(jnp.sum(x * leaf) for leaf in jax.tree.leaves(params))
    advice = advise(loss_fn, params, ones(2), STORED_ONLY, bound=1e-6)
    found = [(row.name, row.pattern, row.bytes, row.is_kept) for row in advice.rows]
    assert found == [("layer_*", "^layer_[0-9]+$", 2 * 50, True), ("last", "^last$", 2 * 2, False)]
    assert advice.met


def test_overrides_of_the_policy_stay_behind_the_advised_ones():
    params = {"kept": full(2, 1.001), "stored": full(2, 1.001)}
    policy = mpx.get_policy("params=bf16,compute=f32", overrides=(("kept", jnp.float32),))
    advice = advise(lambda p, x: jnp.sum((x * (p["kept"] + p["stored"])) ** 2), params, ones(2), policy, bound=1e-7)
    assert [row.name for row in advice.rows] == ["stored"]
    assert advice.policy.overrides == (("^stored$", jnp.float32), *policy.overrides)


def test_advice_is_a_table_of_text_and_a_dictionary_for_json():
    advice = centred_advice()
    text = str(advice)
    assert re.search(r"^what +loss +gradient +bytes  keep by$", text, re.M)
    assert re.search(r"^second +\S+ +\S+ +128  override$", text, re.M)
    assert text.endswith("override ('^second$', 'f32')\nThe bound 0.02 is met.")
    read = json.loads(json.dumps(advice.as_dict()))
    assert (read["met"], read["bound"], read["policy"]) == (advice.met, advice.bound, str(advice.policy))
    assert (read["before"]["loss"], read["rest"]["loss"]) == (advice.before.loss, advice.rest.loss)
