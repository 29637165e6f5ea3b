"""Which leaves of a state are kept in few bits, what the rule sees of them, and what is
refused.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

import mpx
from benchmarks import in_the_mean
from mpx._jaxprs import closed_jaxpr, open_jaxpr
from mpx._stored.state_format import Cast, is_stored
from mpx.states import StoredLeaf
from tests.helpers import QUICKLY, assert_same_bits

pytestmark = pytest.mark.optax_promotion

SIGNED, UNSIGNED = mpx.Blockwise8bit(signed=True), mpx.Blockwise8bit(signed=False)
EIGHT_BITS = mpx.Blockwise8bit()
SHAPE = (64, 80)  # above `min_size`, and no multiple of the block size in a row


def params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(rng.normal(size=SHAPE), dtype),
        "bias": jnp.zeros(80, dtype),
    }


def grads(step=0):
    rng = np.random.default_rng(step + 1)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape) * 0.1, jnp.float32), params()
    )


def trained(tx, steps=3, start=None):
    now = params() if start is None else start
    state = tx.init(now)
    step = jax.jit(tx.update, compiler_options=QUICKLY)
    for i in range(steps):
        updates, state = step(grads(i), state, now)
        now = optax.apply_updates(now, updates)
    return now, state


def adam(formats, **options):
    return mpx.low_precision_state(optax.adam(1e-3), formats, **options)


def formats_of(state):
    return [
        leaf.format
        for leaf in jax.tree.leaves(state, is_leaf=is_stored)
        if is_stored(leaf)
    ]


# What is stored, and what the rule sees.


def test_chosen_leaves_are_stored_in_their_format_and_all_others_as_they_are():
    _, state = trained(adam({"mu": "bf16", "nu": EIGHT_BITS}))
    mu, nu = optax.tree.get(state, "mu"), optax.tree.get(state, "nu")
    assert mu["kernel"].dtype == jnp.bfloat16
    assert (nu["kernel"].codes.dtype, nu["kernel"].codes.shape) == (np.uint8, SHAPE)
    assert nu["kernel"].scales.shape == (20,)
    assert nu["kernel"].format == UNSIGNED
    assert mu["bias"].dtype == nu["bias"].dtype == np.float32  # 80 is less than 4,096
    assert optax.tree.get(state, "count").dtype == np.int32


# Whose state it is: the field decides, or the key of a dictionary that is a state, and
# never the name of a parameter.


class Layer(NamedTuple):
    mu: jax.Array
    nu: jax.Array


class OwnState(NamedTuple):
    m: Any
    exp_avg_sq: Any


class Labelled(NamedTuple):
    inner_states: Any


def with_state(state_of):
    return optax.GradientTransformation(
        state_of, lambda updates, state, params=None: (updates, state)
    )


LEAF = jnp.ones((1, 4096), jnp.float32)
TWO_RULES = {"mu": optax.adam(1e-3), "nu": optax.sgd(1e-3, momentum=0.9)}
ROLES = {
    "adam": (optax.adam(1e-3), LEAF, {"mu": SIGNED, "nu": UNSIGNED}),
    "amsgrad": (
        optax.amsgrad(1e-3),
        LEAF,
        {"mu": SIGNED, "nu": UNSIGNED, "nu_max": UNSIGNED},
    ),
    "sm3, whose nu is the momentum": (optax.sm3(1e-3), LEAF, {"nu": SIGNED}),
    "adan": (optax.adan(1e-3), LEAF, {"m": SIGNED, "v": SIGNED, "n": UNSIGNED}),
    "adadelta": (optax.adadelta(1e-3), LEAF, {"e_g": UNSIGNED, "e_x": UNSIGNED}),
    "sophia, whose nu may be negative": (
        optax.contrib.sophia(1e-3),
        LEAF,
        {"nu": SIGNED},
    ),
    "partition": (
        optax.partition(TWO_RULES, Layer("mu", "nu")),
        Layer(LEAF, LEAF),
        {"0/mu/mu": SIGNED, "0/nu/mu": UNSIGNED, "trace": SIGNED},
    ),
    "parameters called mu and nu": (
        optax.adam(1e-3),
        Layer(LEAF, LEAF),
        {"^0/mu": SIGNED, "^0/nu": UNSIGNED},
    ),
    "a dictionary": (
        with_state(lambda p: {"mu": p, "nu": p}),
        LEAF,
        {"mu": SIGNED, "nu": UNSIGNED},
    ),
    "own": (
        with_state(lambda p: OwnState(p, p)),
        LEAF,
        {"m": SIGNED, "exp_avg_sq": UNSIGNED},
    ),
    "own, masked": (
        with_state(lambda p: optax.MaskedState(OwnState(p, p))),
        LEAF,
        {"m": SIGNED},
    ),
}


@pytest.mark.parametrize(("rule", "params", "expected"), ROLES.values(), ids=ROLES)
def test_second_moments_are_found_by_the_field_of_the_state(rule, params, expected):
    for field, signed in expected.items():
        state = mpx.low_precision_state(rule, {field: EIGHT_BITS}, min_size=1).init(
            params
        )
        assert set(formats_of(state)) == {signed}, field


@pytest.mark.parametrize(
    "state_of",
    [lambda p: {"sums": {"nu": p}}, lambda p: Labelled({"nu": p}), lambda p: (p,)],
    ids=["in", "label", "tuple"],
)
def test_a_field_of_unknown_sign_has_to_be_told(state_of):
    rule, pattern = with_state(state_of), {".*": EIGHT_BITS}
    with pytest.raises(ValueError, match="in fields of unknown sign"):
        mpx.low_precision_state(rule, pattern).init(LEAF)
    assert formats_of(mpx.low_precision_state(rule, {".*": UNSIGNED}).init(LEAF)) == [
        UNSIGNED
    ]


# Paths.


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        # The leaf of a parameter called mu, too.
        (
            "mu",
            ["0/mu/a", "0/mu/u/mu", "0/nu/u/mu"],
        ),
        ("0/mu", ["0/mu/a", "0/mu/u/mu"]),
        ("mu/a", ["0/mu/a"]),
        ("m.", ["0/mu/a", "0/mu/u/mu", "0/nu/u/mu"]),
        (".*/a", ["0/mu/a", "0/nu/a"]),
        ("mu|nu", ["0/mu/a", "0/mu/u/mu", "0/nu/a", "0/nu/u/mu"]),
        (r"nu/(?!a).*", ["0/nu/u/mu"]),
        ("first moment", ["0/mu/a", "0/mu/u/mu"]),  # a role
        ("second moment", ["0/nu/a", "0/nu/u/mu"]),
    ],
)
def test_a_pattern_matches_whole_components_of_a_path(pattern, expected):
    start = {"a": jnp.ones(4096, jnp.float32), "u": {"mu": jnp.ones(4096, jnp.float32)}}
    state = adam({pattern: "bf16"}).init(start)
    stored = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree.leaves_with_path(state.inner_state)
        if leaf.dtype == jnp.bfloat16
    }
    assert sorted(stored) == expected


def test_a_role_stands_for_the_leaves_that_a_rule_keeps_under_another_name():
    """SM3 calls its second moment `mu`."""
    tx = mpx.low_precision_state(optax.sm3(1e-3), {"second moment": "bf16"})
    (sm3, *_) = tx.init({"w": jnp.ones(4096, jnp.float32)}).inner_state
    assert {x.dtype for x in jax.tree.leaves(sm3.mu)} == {np.dtype(jnp.bfloat16)}
    assert sm3.nu["w"].dtype == np.float32


@pytest.mark.parametrize("name", ["key", "weights", "signed", "count"])
def test_a_layer_that_is_called_as_a_role_of_one_word_is_found_by_its_path(name):
    state = adam({name: "bf16"}).init(
        {name: jnp.ones(4096, jnp.float32), "w": jnp.ones(4096, jnp.float32)}
    )
    mu = optax.tree.get(state, "mu")
    assert (mu[name].dtype, mu["w"].dtype) == (jnp.bfloat16, np.float32)


def test_the_first_pattern_wins_so_that_an_exception_stands_in_front():
    start = {"embedding": jnp.ones(4096, jnp.float32), "w": jnp.ones(4096, jnp.float32)}
    mu = optax.tree.get(adam({"embedding": "f32", "mu|nu": "bf16"}).init(start), "mu")
    assert (mu["embedding"].dtype, mu["w"].dtype) == (np.float32, jnp.bfloat16)
    with pytest.raises(
        ValueError,
        match=r"'mu/embedding' decides about no leaf, because others before it match",
    ):
        adam({"mu": "bf16", "mu/embedding": "f32"}).init(start)


# Stochastic rounding.


def test_each_step_and_each_leaf_draws_anew_and_equal_keys_give_equal_trainings():
    start = {"a": jnp.ones(4096, jnp.float32), "b": jnp.ones(4096, jnp.float32)}
    g = jax.tree.map(lambda p: p * 0.123456, start)

    def run(key):
        rule = optax.sgd(1.0, momentum=0.9)
        tx = mpx.low_precision_state(
            rule, {"trace": "bf16"}, rounding="stochastic", key=key
        )
        _, first = tx.update(g, tx.init(start), start)
        _, second = tx.update(
            g, first._replace(inner_state=tx.init(start).inner_state), start
        )
        return first, second

    first, second = run(jax.random.key(0))
    trace = lambda state: optax.tree.get(state, "trace")
    assert (trace(first)["a"] != trace(first)["b"]).any()
    assert (trace(first)["a"] != trace(second)["a"]).any()
    assert_same_bits(run(jax.random.PRNGKey(0)), (first, second))


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (mpx.master_weights(optax.sgd(1e-3)), "master"),
        (mpx.kahan_summation(jnp.float32), "compensation"),
        (optax.contrib.schedule_free_adamw(1e-3), "z"),
        (optax.contrib.prodigy(), ".*"),
        (optax.contrib.madgrad(1e-3), ".*"),
        (optax.contrib.cocob(), ".*"),
        (optax.contrib.mechanize(optax.sgd(1e-3)), ".*"),
    ],
)
def test_masters_compensations_and_copies_of_weights_are_never_stored_in_less(
    rule, field
):
    # Float32 parameters, of which they keep nothing, are all that wrappers would see:
    # take their states as they are.
    dtype = jnp.bfloat16 if field in ("master", "compensation") else jnp.float32
    as_it_is = optax.GradientTransformation(
        lambda _: rule.init(params(dtype)), rule.update
    )
    with pytest.raises(
        ValueError,
        match=r"are masters, compensations or copies of weights(.|\n)*/bias'",
    ):
        mpx.low_precision_state(as_it_is, {".*": EIGHT_BITS}).init(params())
    mpx.low_precision_state(as_it_is, {field: "f32"}).init(params())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_numbers_are_on_the_grid_before_they_are_cast(dtype):
    """Whatever becomes of the cast in a compiler, what is cast is rounded already."""
    x = jnp.linspace(0.1, 0.9, 64, dtype=jnp.float32)
    program = jax.make_jaxpr(lambda x: Cast(jnp.dtype(dtype).name).encode(x, None))(x)
    (cast,) = [eqn for eqn in program.eqns if eqn.outvars[0].aval.dtype == dtype]
    until_cast = closed_jaxpr(open_jaxpr(program).replace(outvars=cast.invars))
    (rounded,) = jaxpr_as_fun(until_cast)(x)
    assert_same_bits(rounded, x.astype(dtype).astype(jnp.float32))


KERNEL = jnp.ones((64, 64), jnp.float32)
COMPLEX = {"filter": jnp.full((64, 64), 1 + 2j, jnp.complex64), "kernel": KERNEL}
SLOPES = {"filter": jnp.full((64, 64), 0.3 - 0.1j, jnp.complex64), "kernel": KERNEL}


@pytest.mark.parametrize(
    "formats", [{"mu": "bf16"}, {"mu/filter": EIGHT_BITS}, {".*": "bf16"}]
)
def test_complex_leaves_are_refused_by_name(formats):
    with pytest.raises(
        ValueError,
        match=r"These leaves are complex(.|\n)*'0/mu/filter': complex64\[64, 64\]",
    ):
        mpx.low_precision_state(optax.adam(1e-3), formats).init(COMPLEX)


def test_complex_leaves_with_an_exception_stay_as_the_rule_has_them():
    tx = mpx.low_precision_state(
        optax.adam(1e-3), {"(mu|nu)/filter": "f32", "mu|nu": EIGHT_BITS}
    )
    updates, state = tx.update(SLOPES, tx.init(COMPLEX), COMPLEX)
    assert optax.tree.get(state, "mu")["filter"].dtype == jnp.complex64
    alone = {"filter": COMPLEX["filter"]}
    expected, _ = optax.adam(1e-3).update(
        {"filter": SLOPES["filter"]}, optax.adam(1e-3).init(alone), alone
    )
    assert_same_bits(updates["filter"], expected["filter"])


def test_both_parts_of_complex_moments_are_stored_by_a_rule_that_splits_them():
    rule = optax.contrib.split_real_and_imaginary(optax.adam(1e-3))
    tx = mpx.low_precision_state(rule, {"mu|nu": EIGHT_BITS})
    state, exact = tx.init(COMPLEX), rule.init(COMPLEX)
    for _ in range(3):
        updates, state = tx.update(SLOPES, state, COMPLEX)
        expected, exact = rule.update(SLOPES, exact, COMPLEX)
    np.testing.assert_allclose(updates["filter"], expected["filter"], rtol=0.02)
    assert {
        leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.size >= 4096
    } == {1}


@pytest.mark.parametrize(
    ("rule", "recipe", "warns"),
    [
        (optax.contrib.muon(1e-3), "bf16-split24-4bit", True),
        (optax.contrib.muon(1e-3), "bf16-split24-8bit", False),
        (optax.adam(1e-3), "bf16-split24-4bit", False),
    ],
)
def test_muon_with_momentum_in_4_bits_is_warned_of(recwarn, rule, recipe, warns):
    mpx.mixed_precision(rule, recipe, key=jax.random.key(0)).init(params(jnp.bfloat16))
    assert (
        any(
            "in 4 bits Muon trains worse" in str(warning.message) for warning in recwarn
        )
        == warns
    )


# Rounded without bias.


def test_a_weight_whose_gradients_stop_stands_still():
    def drift(way):
        rule = optax.adam(in_the_mean.RATE, 0.9, 0.95)
        return in_the_mean.drift(in_the_mean.kept(way, rule), 300)

    assert drift("8 bits").max() < 1e-5
    assert drift("4 and 8 bits").max() < 1e-5
    assert drift("8 bits, nearest").mean() > 1e-3


def test_a_row_with_rare_gradients_learns_as_in_float32():
    def rare_rows(way):
        rule = optax.adam(in_the_mean.RATE)
        return in_the_mean.rare_rows(in_the_mean.kept(way, rule), 1500)

    expected, second_moment = rare_rows("float32")
    for way in ("8 bits", "4 and 8 bits"):
        np.testing.assert_allclose(rare_rows(way), (expected, second_moment), rtol=0.1)
    nearest, stuck = rare_rows("8 bits, nearest")
    assert abs(nearest) < 0.8 * abs(expected)
    assert stuck > 3 * second_moment


@pytest.mark.parametrize("decay", [0.999, 0.9999])
def test_a_slow_second_moment_falls_as_in_float32(decay):
    """The other members of blocks of 16 whose largest number stays.

    Noise has 4,096 steps, and a decay of 0.9999 moves a number by 4 to 13 of them.
    """
    format = mpx.Blockwise8bit(16, signed=False)
    is_largest = jnp.arange(1024) % 16 == 15
    start = jax.random.uniform(jax.random.key(1), 1024, np.float32, 0.1)
    start = jnp.where(is_largest, np.float32(1), start)
    steps = round(0.5 / (1 - decay))

    def mean_after(key):
        def step(i, stored):
            x = format.decode(*stored)
            x = jnp.where(is_largest, 1.0, x * decay)
            of_step = None if key is None else jax.random.fold_in(key, i)
            return format.encode(x, of_step)

        stored = jax.lax.fori_loop(0, steps, step, format.encode(start))
        return np.asarray(format.decode(*stored)[~is_largest]).mean()

    expected = np.asarray(start[~is_largest]).mean() * decay**steps
    assert abs(mean_after(jax.random.key(0)) / expected - 1) < 0.05
    # To nearest it stays where it was.
    assert mean_after(None) > 1.5 * expected


def test_without_a_key_rounding_takes_that_of_seed_0_and_starts_no_device_before_init(
    monkeypatch,
):
    def transformations(**key):
        yield mpx.mixed_precision(optax.adam(1e-3), "bf16-split24-4bit", **key)
        yield mpx.mixed_precision(optax.adam(1e-3), "bf16-split-8bit", **key)
        yield mpx.mixed_precision(optax.adam(1e-3), "bf16-stochastic", **key)

    given = list(transformations(key=jax.random.key(0)))
    with monkeypatch.context() as patch:
        patch.setattr(jax.random, "key", None)
        made = list(transformations())
    for by_default, by_key in zip(made, given, strict=True):
        assert_same_bits(
            trained(by_default, start=params(jnp.bfloat16)),
            trained(by_key, start=params(jnp.bfloat16)),
        )


RECIPES = ["bf16-split-8bit", "bf16-split24-4bit", "bf16-kahan", "f16-scaled"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_monitor_inside_of_a_recipe_measures_as_in_optax(name):
    """Its state has no measurements before the first update, and has another structure
    after it.
    """
    monitor = optax.monitor({"norm": optax.tree.norm})
    start = {"w": jnp.full((64, 64), 0.5), "b": jnp.ones(4)}
    start = mpx.get_policy(name).cast_to_param(start)
    ends = []
    for rule in (optax.adamw(1e-2), optax.chain(monitor, optax.adamw(1e-2))):
        tx = mpx.mixed_precision(rule, name, key=jax.random.key(0))
        now, state = start, tx.init(start)
        update = jax.jit(tx.update)
        for _ in range(3):
            updates, state = update(jax.tree.map(jnp.ones_like, start), state, now)
            now = optax.apply_updates(now, updates)
        ends.append(now)
    assert_same_bits(*ends)
    scale = mpx.get_loss_scale(state).loss_scale
    np.testing.assert_allclose(optax.tree.get(state, "norm") * scale, 4100**0.5)


def edited(state, function):
    mu = optax.tree.get(state, "mu")
    return optax.tree.set(state, mu=jax.tree.map(function, mu, is_leaf=is_stored))


def test_moments_are_edited_decoded_and_codes_that_were_edited_are_refused():
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    tx = mpx.mixed_precision(optax.adam(1e-2), "bf16-split-8bit")
    _, state = tx.update(params, tx.init(params), params)
    right = edited(state, lambda m: m.encode(0.1 * m.decode()))
    assert jax.tree.structure(right) == jax.tree.structure(state)
    moment = optax.tree.get(right, "mu")["w"]
    np.testing.assert_allclose(moment.decode(), 0.01, rtol=1e-2)
    tx.update(params, right, params)
    wrong = edited(state, lambda m: jax.tree.map(lambda x: 0.1 * x, m))
    text = r"codes were changed .*`leaf.encode\(.*\n *'0/mu/w': codes of float"
    with pytest.raises(ValueError, match=text):
        tx.update(params, wrong, params)
    with pytest.raises(ValueError, match=r"`StoredLeaf.encode` needs .*\[64, 64\]"):
        moment.encode(jnp.ones(3))


def test_a_stored_leaf_says_in_its_repr_that_its_codes_are_to_be_decoded():
    state = mpx.low_precision_state(optax.trace(0.9), {"trace": EIGHT_BITS}).init(LEAF)
    assert repr(optax.tree.get(state, "trace")).endswith("int8[1, 4096] to decode)")


def test_shardings_are_mapped_over_a_state_of_codes_as_its_docstring_says():
    params = {"w": jnp.ones((64, 64), jnp.float32)}
    tx = mpx.low_precision_state(optax.adam(1e-2), {"mu|nu": EIGHT_BITS})
    state, names = tx.init(params), {"w": "a sharding"}
    mapped = optax.tree.map_params(
        tx, lambda leaf, name: name, state, names, is_leaf=is_stored
    )
    assert optax.tree.get(mapped, "mu") == names
    assert "optax.tree.map_params" in StoredLeaf.__doc__
    with pytest.raises(ValueError, match="StoredLeaf"):  # of JAX, which names the type
        optax.tree.map_params(tx, lambda leaf, name: name, state, names)


def test_a_role_that_a_rule_lacks_is_no_error_beside_one_that_it_has():
    by_role = {"first moment": "bf16", "second moment": "bf16"}
    state = mpx.low_precision_state(optax.trace(0.9), by_role).init(LEAF)
    assert optax.tree.get(state, "trace").dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="'first moment' matches no"):
        mpx.low_precision_state(optax.sgd(1.0), by_role).init(LEAF)
