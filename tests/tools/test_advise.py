"""`advise` measures what narrowing does to a training run, and what it advises brings the error under the bound."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import mpx
from mpx.tools.advise.advise import advise, grouped
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


def rows_by_name(advice):
    return {row.name: row for row in advice.rows}


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


def centred_errors(policy):
    return errors_of_training(centred_loss, centred_params(), normal(3, 6, 4), policy)


def test_the_layer_that_cannot_stand_rounding_is_ranked_first_and_kept():
    advice = centred_advice()
    assert advice.overrides == (("^second$", np.dtype(np.float32)),)
    assert advice.rows[0].name == "second"
    assert [row.is_kept for row in advice.rows] == [True, False, False, False]
    assert [row.error for row in advice.rows] == sorted((row.error for row in advice.rows), reverse=True)
    assert advice.rest.worst == 0  # every contraction has a leaf


def test_the_errors_are_those_of_training_and_the_override_brings_them_under_the_bound_but_another_does_not():
    advice = centred_advice()
    for policy, errors in ((BF16, advice.before), (advice.policy, advice.after)):
        np.testing.assert_allclose((errors.loss, errors.gradient), centred_errors(policy), rtol=1e-3)
    assert advice.before.worst > advice.bound >= advice.after.worst
    assert advice.met
    other = mpx.get_policy(str(BF16), overrides=(("^first$", jnp.float32), ("^third$", jnp.float32)))
    assert max(centred_errors(other)) > 10 * advice.bound


@pytest.mark.parametrize("name", ["third", "bias"])
def test_the_error_of_a_row_is_that_of_its_leaf_rounded_and_its_product_narrowed(name):
    """Write the one product in bfloat16 by hand, and the others in float32."""
    params, x = centred_params(), normal(3, 6, 4)

    def by_hand(params, x):
        dots = {key: narrow_dot(jnp.bfloat16) if key == name else jnp.matmul for key in params}
        hidden = jnp.tanh(dots["first"](x, params["first"]))
        hidden = hidden - hidden.mean(axis=1, keepdims=True)
        hidden = jnp.tanh(dots["second"](hidden, params["second"]))
        return jnp.mean((dots["third"](hidden, params["third"]) + params["bias"]) ** 2)

    alone = params | {name: jnp.asarray(rounded(params[name], jnp.bfloat16))}
    value, grads = jax.jit(jax.value_and_grad(by_hand))(alone, x)
    reference = jax.jit(jax.value_and_grad(centred_loss))(params, x)
    row = rows_by_name(centred_advice())[name]
    assert row.gradient_error == pytest.approx(relative(grads, reference[1]), rel=1e-2, abs=1e-7)
    assert row.loss_error == pytest.approx(relative(value, reference[0]), rel=1e-2, abs=1e-7)


def test_a_row_says_what_keeping_it_costs():
    """Count two bytes more for each number, two FLOPs for each of 6 x 4 x 8 products, and none for a bias."""
    rows = rows_by_name(centred_advice())
    assert (rows["first"].bytes, rows["first"].flops) == (2 * 32, 2 * 6 * 4 * 8)
    assert (rows["bias"].bytes, rows["bias"].flops) == (2 * 3, 0)


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
    assert (advice.overrides, advice.policy, advice.met) == ((), STORED_ONLY, True)
    assert advice.after == advice.before
    assert advice.before.worst > 0


def attention_loss(params, x):
    queries, keys = jnp.tanh(x @ params["query"]), jnp.tanh(x @ params["key"])
    scores = jnp.einsum("qd,kd->qk", 8.0 * queries, 8.0 * keys)
    weights = jax.nn.softmax(scores)
    return jnp.mean((weights @ x) ** 2)


def test_what_no_override_reaches_is_measured_and_full_precision_around_it_meets_the_bound():
    params, x = {"query": normal(0, 8, 16), "key": normal(1, 8, 16)}, 2 * normal(2, 6, 8)
    advice = advise(attention_loss, params, x, COMPUTE_ONLY, bound=5e-3)
    assert {row.name for row in advice.rows if row.is_kept} == {"query", "key"}
    assert not advice.met
    assert advice.after == advice.rest
    assert "is not met, even with all of these leaves in float32. `mpx.explain` lists" in str(advice)
    expected = errors_of_training(attention_loss, params, x, advice.policy)
    np.testing.assert_allclose((advice.rest.loss, advice.rest.gradient), expected, rtol=1e-3)

    def wrapped_loss(params, x):
        queries, keys = jnp.tanh(x @ params["query"]), jnp.tanh(x @ params["key"])
        scores = mpx.full_precision(jnp.einsum)("qd,kd->qk", 8.0 * queries, 8.0 * keys)
        return jnp.mean((jax.nn.softmax(scores) @ x) ** 2)

    assert advise(wrapped_loss, params, x, COMPUTE_ONLY, bound=5e-3).met


@pytest.mark.parametrize("head", [jnp.log, jax.nn.log_softmax], ids=["infinite", "nan"])
def test_an_overflow_is_an_infinite_error_ranked_first(head):
    """Compute 300 x 300 x 2, which is beyond the range of float16; the difference of two infinities is NaN."""
    loss_fn = lambda params, x: jnp.mean(head(x @ params["large"])) + jnp.mean(x @ params["small"])
    params = {"large": full((2, 2), 300.0), "small": normal(0, 2, 2)}
    policy = mpx.get_policy("params=f16,compute=f16,output=f32")
    advice = advise(loss_fn, params, full((3, 2), 300.0), policy, bound=1e-2)
    assert [(row.name, row.error == np.inf) for row in advice.rows] == [("large", True), ("small", False)]
    assert (advice.before.worst, advice.met) == (np.inf, True)
    assert advice.overrides == (("^large$", np.dtype(np.float32)),)


def test_a_loss_scale_keeps_float16_gradients_from_underflow():
    """Scale cotangents of 2^-30, which are 0 in float16, by 2^20."""
    loss_fn = lambda params, x: jnp.sum(x @ params) * 2.0**-30
    policy = mpx.get_policy("params=f32,compute=f16,output=f32")
    run = functools.partial(advise, loss_fn, normal(0, 4, 2), normal(1, 3, 4), policy, bound=1e-2)
    assert run().before.gradient == pytest.approx(1)
    scaled = run(loss_scale=mpx.StaticLossScale(2.0**20))
    assert scaled.before.gradient < 1e-3
    assert scaled.rows[0].gradient_error < 1e-3


PATHS = st.text(st.sampled_from("ab01.*+[](|)$^\\/- é"), max_size=5)


@settings(max_examples=60)
@given(st.lists(PATHS, min_size=1, max_size=8, unique=True))
@pytest.mark.parametrize("groups", ["leaves", "patterns", lambda path: path[:1]])
def test_a_groups_pattern_finds_its_own_paths_and_no_others(groups, paths):
    for pattern, own in grouped(paths, groups).values():
        assert [path for path in paths if re.search(pattern, path)] == own


def test_many_leaves_are_grouped_by_patterns_and_a_function_names_its_own_groups():
    many = [f"layer_{i}" for i in range(25)]
    assert (list(grouped(many, None)), list(grouped(many[:3], None))) == (["layer_*"], many[:3])
    group = lambda path: "some" if path in ("a", "b") else "others"
    found = grouped(["a", "a.b", "b", "ab"], group)
    assert found == {"some": ("^(?:a|b)$", ["a", "b"]), "others": (r"^(?:a\.b|ab)$", ["a.b", "ab"])}


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](nnx.tanh(self.layers[0](x)))


def test_a_model_of_flax_is_advised_by_its_paths():
    graph, params = nnx.split(NnxModel(nnx.Rngs(0)))
    loss_fn, x = lambda params, x: jnp.mean(nnx.merge(graph, params)(x) ** 2), normal(0, 2, 4)
    advice = advise(loss_fn, params, x, STORED_ONLY, bound=1e-6)
    assert sorted(name for name, _ in advice.overrides) == ["^layers/0/kernel$", "^layers/1/kernel$"]  # biases are 0
    policy = mpx.get_policy(str(BF16), overrides=advice.overrides)
    assert {row.runs_in for row in mpx.explain(loss_fn, policy)(params, x).contractions} == {"f32"}


def test_errors_are_means_over_a_list_of_batches():
    loss_fn = lambda params, batch: jnp.sum(params * batch)
    params = numbers([1.001, 1.003, 1.0])
    batches = [numbers([1.0, 0.0, 1.0]), numbers([0.0, 2.0, 1.0])]
    run = functools.partial(advise, loss_fn, params, policy=STORED_ONLY, bound=1.0)
    single = [run(batch=batch).before.loss for batch in batches]
    assert single[0] != single[1]
    assert run(batch=batches).before.loss == pytest.approx(np.mean(single))
    exact = [abs(rounded(p, jnp.bfloat16) - np.float32(p)) for p in (1.001, 1.003)]
    np.testing.assert_allclose(single, [exact[0] / 2.001, 2 * exact[1] / 3.006], rtol=1e-3)


def test_a_tuple_is_one_batch_and_integers_pass():
    def loss_fn(params, batch):
        ids, scale = batch
        return scale * jnp.sum((params["embedding"][ids] @ params["head"]) ** 2)

    params = {"embedding": normal(0, 5, 4), "head": normal(1, 4, 2), "step": 3, "name": "model", "ids": jnp.arange(2)}
    batches = [(jnp.array([0, 3]), 2), (jnp.array([1, 1]), 5)]
    advice = advise(loss_fn, params, batches, STORED_ONLY, bound=1.0)
    assert {row.name for row in advice.rows} == {"embedding", "head"}


def test_overrides_of_the_policy_stay_behind_the_advised_ones():
    params = {"kept": full(2, 1.001), "stored": full(2, 1.001)}
    policy = mpx.get_policy("params=bf16,compute=f32", overrides=(("kept", jnp.float32),))
    advice = advise(lambda p, x: jnp.sum((x * (p["kept"] + p["stored"])) ** 2), params, ones(2), policy, bound=1e-7)
    assert [row.name for row in advice.rows] == ["stored"]
    assert advice.policy.overrides == (*advice.overrides, *policy.overrides)


def test_advice_is_a_table_of_text_and_a_dictionary_for_json():
    advice = centred_advice()
    text = str(advice)
    assert re.search(r"^what +loss +gradient +bytes +FLOPs +keep by$", text, re.M)
    assert re.search(r"^second +\S+ +\S+ +128 +768  override$", text, re.M)
    assert text.endswith("override ('^second$', 'f32')\nThe bound 0.02 is met.")
    read = json.loads(json.dumps(advice.as_dict()))
    assert read["overrides"] == [["^second$", "float32"]]
    assert (read["met"], read["bound"], read["policy"]) == (advice.met, advice.bound, str(advice.policy))
    assert (read["before"]["loss"], read["rest"]["loss"]) == (advice.before.loss, advice.rest.loss)


def test_a_bound_that_nothing_meets_keeps_all_there_is():
    """Narrow sums by a table of rules: they are no contractions, so no override reaches them."""
    rules = mpx.DEFAULT_RULES | {"add": "narrow"}
    loss_fn = mpx.autocast(lambda params, x: jnp.sum((jnp.sin(x) + jnp.cos(x)) * params), "bf16", rules=rules)
    advice = advise(loss_fn, full((3,), 1.001), numbers([0.3, 0.4, 0.7]), BF16, bound=1e-6)
    assert not advice.met
    assert advice.rest.worst > 1e-6
    assert [(row.name, row.is_kept) for row in advice.rows] == [("(the array)", True)]
