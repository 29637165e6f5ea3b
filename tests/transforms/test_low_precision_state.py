"""Which leaves of a state are kept in few bits, what the rule sees of them, and what is refused."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx._jaxprs import closed_jaxpr, open_jaxpr
from mpx._stored.state_format import as_format, is_stored
from tests.helpers import QUICKLY, assert_same_bits, eight_cpu_devices, types_of, unfused

pytestmark = pytest.mark.optax_promotion

SIGNED, UNSIGNED = mpx.Blockwise8bit(signed=True), mpx.Blockwise8bit(signed=False)
EIGHT_BITS = mpx.Blockwise8bit()
SHAPE = (64, 80)  # above `min_size`, and no multiple of the block size in a row


def params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {"kernel": jnp.asarray(rng.normal(size=SHAPE), dtype), "bias": jnp.zeros(80, dtype)}


def grads(step=0):
    rng = np.random.default_rng(step + 1)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) * 0.1, jnp.float32), params())


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


def momentum_in_8_bits():
    """Return a rule with one moment, whose programs compile in half the time of Adam's."""
    return mpx.low_precision_state(optax.sgd(1e-3, momentum=0.9), {"trace": EIGHT_BITS})


def formats_of(state):
    return [leaf.format for leaf in jax.tree.leaves(state, is_leaf=is_stored) if is_stored(leaf)]


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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_the_first_moment_is_that_of_float32_rounded_once(dtype):
    """Take one step from zero: the moment is 0.1 * g, computed in float32."""
    _, exact = trained(optax.adam(1e-3), steps=1)
    _, state = trained(adam({"mu": dtype}), steps=1)
    moment = lambda state: optax.tree.get(state, "mu")["kernel"]
    assert_same_bits(moment(state), np.asarray(moment(exact)).astype(dtype))


def test_a_rule_follows_the_algorithm_with_moments_rounded_where_they_are_stored():
    """Follow Adam in float64 NumPy, whose moments pass through bfloat16 between steps."""
    tx = adam({"mu": "bf16", "nu": "bf16"})
    state, step = tx.init(params()), jax.jit(tx.update, compiler_options=QUICKLY)
    moment = lambda name: np.asarray(optax.tree.get(state, name)["kernel"])
    for i in range(1, 6):
        g = np.asarray(grads(i)["kernel"], np.float64)
        mu = 0.9 * moment("mu").astype(np.float64) + 0.1 * g
        nu = 0.999 * moment("nu").astype(np.float64) + 0.001 * g**2
        expected = -1e-3 * mu / (1 - 0.9**i) / (np.sqrt(nu / (1 - 0.999**i)) + 1e-8)
        updates, state = step(grads(i), state, params())
        np.testing.assert_allclose(updates["kernel"], expected, rtol=1e-4, atol=1e-10)
        # float32 and float64 may round a sum to two sides of a tie, now and then.
        assert (moment("mu") != mu.astype(jnp.bfloat16)).mean() < 1e-3
        assert (moment("nu") != nu.astype(jnp.bfloat16)).mean() < 1e-3


def test_the_rule_sees_float32_whatever_parameters_gradients_and_stored_state_are():
    seen = []

    def update(updates, state, params=None):
        seen.extend(leaf.dtype for leaf in jax.tree.leaves((updates, state, params)))
        return updates, state

    rule = optax.GradientTransformation(lambda p: optax.TraceState(jax.tree.map(jnp.zeros_like, p)), update)
    tx = mpx.low_precision_state(rule, {"trace": EIGHT_BITS})
    start = params(jnp.bfloat16)
    updates, _ = tx.update(jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads()), tx.init(start), start)
    assert set(seen) == {np.dtype(np.float32)}
    assert updates["kernel"].dtype == np.float32


def test_float32_formats_change_nothing_to_the_bit():
    now, state = trained(mpx.low_precision_state(optax.adamw(1e-3), {"mu": "f32", "nu": jnp.float32}))
    exact, exact_state = trained(mpx.upcast(optax.adamw(1e-3)))
    assert_same_bits(now, exact)
    assert_same_bits(state.inner_state, exact_state)


def test_a_rule_that_stores_bfloat16_itself_is_taken():
    tx = mpx.low_precision_state(optax.adam(1e-3, mu_dtype=jnp.bfloat16), {"mu": "bf16", "nu": EIGHT_BITS})
    start = params()
    state = tx.init(start)
    _, new = tx.update(grads(), state, start)
    assert types_of(new) == types_of(state)


@pytest.mark.parametrize(
    ("rule", "unsigned", "signed"),
    [
        (optax.adam(1e-3), ["nu"], ["mu"]),
        (optax.amsgrad(1e-3), ["nu", "nu_max"], ["mu"]),
        (optax.sm3(1e-3), [], ["nu"]),  # here `nu` is the momentum
        (optax.adan(1e-3), ["n"], ["m", "v"]),
        (optax.adadelta(1e-3), ["e_g", "e_x"], []),
        (optax.contrib.sophia(1e-3), [], ["nu"]),  # an estimate of the Hessian, which may be negative
        (optax.partition({"a": optax.adam(1e-3)}, "a"), ["nu"], ["mu"]),
    ],
)
def test_second_moments_are_found_by_the_field_of_the_state(rule, unsigned, signed):
    start = {"kernel": jnp.ones((1, 64), jnp.float32)}
    state = jax.tree.map(lambda x: jnp.ones_like(x) if jnp.ndim(x) else x, rule.init(start))
    ones = optax.GradientTransformation(lambda params: state, lambda updates, state, params=None: (updates, state))
    formats = {field: EIGHT_BITS for field in unsigned + signed}
    stored = mpx.low_precision_state(ones, formats, min_size=1).init(start)
    for field in unsigned + signed:
        (found,) = [value for _, value in optax.tree.get_all_with_path(stored, field)]
        assert found["kernel"].format == (UNSIGNED if field in unsigned else SIGNED), field


def test_second_moments_of_8_bits_are_never_zero_where_there_was_a_gradient():
    """A block with gradients of 1 and of 1e-5: squares of 1e-10 are far below the map's smallest member, 1.5e-5."""
    g = {"w": jnp.full(4096, 1e-5, jnp.float32).at[0].set(1.0)}
    tx = adam({"mu": "bf16", "nu": EIGHT_BITS})
    state = tx.init(g)
    _, state = tx.update(g, state, g)
    assert (optax.tree.get(state, "nu")["w"].codes > 0).all()
    updates, state = tx.update(jax.tree.map(jnp.zeros_like, g), state, g)
    assert jnp.abs(updates["w"]).max() < 1e-3  # the other way, mu / eps is 900 times the learning rate
    signed = adam({"mu": "bf16", "nu": SIGNED})
    _, state = signed.update(g, signed.init(g), g)
    updates, _ = signed.update(jax.tree.map(jnp.zeros_like, g), state, g)  # negative control
    assert jnp.abs(updates["w"]).max() > 0.1


def test_a_number_that_is_not_finite_stays_visible():
    """Look at the first three blocks of 256, each with another number that is not finite."""
    bad = np.array([5, 300, 600])
    g = {"w": jnp.ones(4096, jnp.float32).at[bad].set(jnp.array([np.nan, np.inf, -np.inf], jnp.float32))}
    for chosen in ("bf16", EIGHT_BITS):
        tx = mpx.low_precision_state(optax.sgd(1.0, momentum=0.9), {"trace": chosen})
        _, state = tx.update(g, tx.init(g), g)
        updates, _ = tx.update(g, state, g)
        assert not np.isfinite(updates["w"][bad]).any()
        assert np.isfinite(updates["w"][768:]).all()


# Paths.


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("mu", ["0/mu/a", "0/mu/u/mu", "0/nu/u/mu"]),  # the leaf of a parameter called mu, too
        ("0/mu", ["0/mu/a", "0/mu/u/mu"]),
        ("mu/a", ["0/mu/a"]),
        ("m.", ["0/mu/a", "0/mu/u/mu", "0/nu/u/mu"]),
        (".*/a", ["0/mu/a", "0/nu/a"]),
        ("mu|nu", ["0/mu/a", "0/mu/u/mu", "0/nu/a", "0/nu/u/mu"]),
        (r"nu/(?!a).*", ["0/nu/u/mu"]),
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


def test_the_first_pattern_wins_so_that_an_exception_stands_in_front():
    start = {"embedding": jnp.ones(4096, jnp.float32), "w": jnp.ones(4096, jnp.float32)}
    mu = optax.tree.get(adam({"embedding": "f32", "mu|nu": "bf16"}).init(start), "mu")
    assert (mu["embedding"].dtype, mu["w"].dtype) == (np.float32, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"'mu/embedding' decides about no leaf, because others before it match"):
        adam({"mu": "bf16", "mu/embedding": "f32"}).init(start)


def test_a_pattern_without_a_leaf_is_an_error_that_lists_the_paths_there_are():
    accumulates = optax.GradientTransformation(lambda p: {"accumulator": p}, lambda u, s, p=None: (u, s))
    for rule, pattern, listed in [
        (optax.adam(1e-3), "momentum", "0/mu/bias, 0/mu/kernel, 0/nu/bias, 0/nu/kernel"),
        (optax.adam(1e-3), "0/count", "0/mu/bias"),  # integers and scalars are never touched
        (optax.sgd(1e-3), "mu", r"\(none\)"),
        (accumulates, "mu", "accumulator/bias"),
    ]:
        with pytest.raises(ValueError, match=f"'{pattern}' matches no floating-point array .*: {listed}"):
            mpx.low_precision_state(rule, {pattern: "bf16"}).init(params())
    with pytest.raises(ValueError, match="and 40 more"):
        adam({"momentum": "bf16"}).init({f"w{i}": jnp.ones(2) for i in range(30)})


def test_a_rule_without_arrays_needs_no_matching_leaf():
    """Leave empty trees to the contract."""
    scalar = {"scalar": jnp.ones(())}
    tx = adam({"mu": "bf16"})
    tx.update(scalar, tx.init(scalar), scalar)


# Stochastic rounding.


STEPS = 700


def left(chosen, keeps, rounding="nearest"):
    """Return the mean second moment, relative to the first, of elements whose gradient is 0 from then on."""
    key = jax.random.key(0) if rounding == "stochastic" else None
    make = lambda b2: mpx.low_precision_state(optax.adam(1e-3, b2=b2), {"nu": chosen}, rounding=rounding, key=key)
    ones = jnp.ones(4096, jnp.float32)
    _, state = make(0.0).update(ones, make(0.0).init(ones), ones)  # the moment is 1
    step = lambda _, state: make(0.999).update(keeps, state, ones)[1]
    state = jax.jit(lambda s: jax.lax.fori_loop(0, STEPS, step, s))(state)
    moment = optax.tree.get(state, "nu")
    moment = moment.decode() if is_stored(moment) else moment
    return float(moment.astype(jnp.float32)[keeps == 0].mean())


def test_a_second_moment_that_falls_stands_still_under_nearest_rounding_and_not_under_stochastic_rounding():
    """0.999**700 = 0.496. To nearest, a thousandth less than a bfloat16 number is that number again.

    In 8 bits a block of equal members falls with its float32 scale. Beside a member that stays the others do not.
    """
    none = jnp.zeros(4096, jnp.float32)
    first_of_block = none.at[::256].set(1.0)
    np.testing.assert_allclose(left("f32", none), 0.999**STEPS, rtol=1e-3)
    np.testing.assert_allclose(left(EIGHT_BITS, none), 0.999**STEPS, rtol=1e-3)
    for chosen, keeps in (("bf16", none), (EIGHT_BITS, first_of_block)):
        assert left(chosen, keeps) == 1
        np.testing.assert_allclose(left(chosen, keeps, "stochastic"), 0.999**STEPS, rtol=0.03)


@pytest.mark.parametrize("chosen", ["bf16", "f16", EIGHT_BITS], ids=str)
def test_stochastic_rounding_of_a_momentum_has_the_mean_of_float32(chosen):
    """8,192 momenta of 0.1 * g, each stored once: the mean's error is a hundredth of one's."""
    g = jnp.linspace(0.5, 0.51, 8192, dtype=jnp.float32).at[::256].set(1.0)
    rule, key = optax.sgd(1.0, momentum=0.9), jax.random.key(1)
    tx = mpx.low_precision_state(rule, {"trace": chosen}, rounding="stochastic", key=key)
    _, state = tx.update(g, tx.init(g), g)
    updates, _ = tx.update(jnp.zeros(8192, jnp.float32), state, g)
    np.testing.assert_allclose(-updates.mean() / 0.9, g.mean(), rtol=1e-3)


def test_each_step_and_each_leaf_draws_anew_and_equal_keys_give_equal_trainings():
    start = {"a": jnp.ones(4096, jnp.float32), "b": jnp.ones(4096, jnp.float32)}
    g = jax.tree.map(lambda p: p * 0.123456, start)

    def run(key):
        rule = optax.sgd(1.0, momentum=0.9)
        tx = mpx.low_precision_state(rule, {"trace": "bf16"}, rounding="stochastic", key=key)
        _, first = tx.update(g, tx.init(start), start)
        _, second = tx.update(g, first._replace(inner_state=tx.init(start).inner_state), start)
        return first, second

    first, second = run(jax.random.key(0))
    trace = lambda state: optax.tree.get(state, "trace")
    assert (trace(first)["a"] != trace(first)["b"]).any()
    assert (trace(first)["a"] != trace(second)["a"]).any()
    assert_same_bits(run(jax.random.PRNGKey(0)), (first, second))


# With other transformations.


def test_8_bytes_a_parameter_with_split_masters():
    """2 of weights, 2 of low bits, 2 of moments and their scales, 2 of gradients."""
    tx = mpx.master_weights(adam({"mu|nu": EIGHT_BITS}), storage="split")
    weights = {"w": jnp.ones((256, 256), jnp.bfloat16)}
    state = tx.init(weights)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((weights, weights, state)))
    assert held == 8 * 256 * 256 + 2 * 4 * 256 + 4  # two float32 scales a block, and the step count


def test_split_masters_around_it_are_those_of_full_ones_to_the_bit():
    masters = []
    for storage in ("full", "split"):
        tx = mpx.master_weights(momentum_in_8_bits(), storage=storage)
        now = params(jnp.bfloat16)
        state, step = tx.init(now), jax.jit(tx.update, compiler_options=unfused())
        for i in range(20):
            updates, state = step(grads(i), state, now)
            now = optax.apply_updates(now, updates)
        masters.append(mpx.master_params(now, state))
    assert_same_bits(*masters)


# Errors.


def test_a_second_moment_in_float16_is_refused_with_the_reason_whatever_its_size():
    """Squares of 1e-4 are 1e-8, which float16 does not have."""
    with pytest.raises(ValueError, match=r"second moments, which float16 cannot hold(.|\n)*'0/nu/bias': float32\[80\]"):
        adam({"mu": "f16", "nu": "f16"}).init(params())
    assert np.float16(1e-4**2) == 0  # why


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (mpx.master_weights(optax.sgd(1e-3)), "master"),
        (mpx.kahan_summation(jnp.float32), "compensation"),
        (mpx.params_ema(0.9), "ema"),
        (optax.contrib.schedule_free_adamw(1e-3), "z"),
        (optax.contrib.prodigy(), ".*"),
        (optax.contrib.madgrad(1e-3), ".*"),
        (optax.contrib.cocob(), ".*"),
        (optax.contrib.mechanize(optax.sgd(1e-3)), ".*"),
    ],
)
def test_masters_compensations_averages_and_copies_of_weights_are_never_stored_in_less(rule, field):
    # Float32 parameters, of which they keep nothing, are all that wrappers would see: take their states as they are.
    dtype = jnp.bfloat16 if field in ("master", "compensation") else jnp.float32
    as_it_is = optax.GradientTransformation(lambda _: rule.init(params(dtype)), rule.update)
    with pytest.raises(ValueError, match=r"are masters, compensations, averages or copies of weights(.|\n)*/bias'"):
        mpx.low_precision_state(as_it_is, {".*": EIGHT_BITS}).init(params())
    mpx.low_precision_state(as_it_is, {field: "f32"}).init(params())


def test_float64_leaves_are_not_stored_in_less():
    with jax.enable_x64(True):
        start = {"w": jnp.full(4096, 1 + 2.0**-40)}
        with pytest.raises(ValueError, match=r"are float64(.|\n)*'0/mu/w': float64\[4096\]"):
            adam({"mu": "bf16"}).init(start)
        tx, plain = adam({"mu": "f32"}), optax.adam(1e-3)  # an exception: as they are
        _, state = tx.update(start, tx.init(start), start)
        _, expected = plain.update(start, plain.init(start), start)
        (updates, state), (wanted, expected) = tx.update(start, state, start), plain.update(start, expected, start)
        assert_same_bits((updates, state.inner_state), (wanted, expected))


UNKNOWN = (
    "must be bfloat16, float16, float32, 'e4m3', 'e5m2' or a `StateFormat` such as `Blockwise8bit\\(\\)`, but got "
)


@pytest.mark.parametrize(
    ("formats", "error", "message"),
    [
        ({}, ValueError, "`formats` is empty"),
        (None, TypeError, "`formats` must map patterns to formats"),
        ({"(": "bf16"}, ValueError, r"'\(' is not a regular expression"),
        ({0: "bf16"}, ValueError, "0 is not a regular expression"),
        *[({"mu": unknown}, ValueError, UNKNOWN) for unknown in ("int8", np.int8, "f64", None, 8)],
        ({"mu": mpx.Blockwise8bit}, ValueError, r"Make one: `Blockwise8bit\(\)`"),
    ],
)
def test_formats_that_mean_nothing_are_refused(formats, error, message):
    with pytest.raises(error, match=message):
        adam(formats)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rounding": "up"}, ValueError, r"`rounding` must be one of \('nearest', 'stochastic'\), but got 'up'"),
        ({"rounding": "stochastic"}, ValueError, "needs a PRNG key"),
        ({"key": 0}, ValueError, "rounding to nearest has no use for it"),
        ({"rounding": "stochastic", "key": 3}, TypeError, "needs a PRNG key such as"),
        ({"min_size": -1}, ValueError, "`min_size` must be a number of elements, but got -1"),
        ({"min_size": 1.5}, ValueError, "`min_size` must be a number of elements"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        adam({"mu": "bf16"}, **options)


def test_settings_that_would_do_nothing_are_refused():
    with pytest.raises(ValueError, match="every format is float32"):
        adam({"mu": "f32"}, rounding="stochastic", key=jax.random.key(0))
    state = adam({"mu": "bf16"}).init(params())
    with pytest.raises(ValueError, match="another `min_size`"):
        adam({"mu": "bf16"}, min_size=10**6).update(grads(), state, params())
    with pytest.raises(ValueError, match=r"stored in 16 bits by the rule itself.*`mu_dtype`"):
        mpx.low_precision_state(optax.adam(1e-3, mu_dtype=jnp.bfloat16), {"mu": "f32", "nu": "bf16"}).init(params())


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"mu": "bf16"}, {"mu": EIGHT_BITS}, "mu/kernel': stored as bfloat16, but the format is Blockwise8bit"),
        ({"mu": EIGHT_BITS}, {"mu": "bf16"}, "mu/kernel': stored as .*signed=True.*, but the format is bfloat16"),
        ({"mu": EIGHT_BITS}, {"nu": EIGHT_BITS}, "mu/kernel': stored as .*signed=True.*, but the format is the"),
        ({"mu": EIGHT_BITS}, {"mu": mpx.Blockwise8bit(128)}, "mu/kernel': stored as Blockwise8bit"),
        ({"nu": EIGHT_BITS}, {"nu": SIGNED}, "nu/kernel': stored as Blockwise8bit.*signed=False"),
        ({"mu|nu": "bf16"}, {"mu": "bf16"}, "nu/kernel': stored as bfloat16, but the format is the rule's own"),
        ({"mu": "bf16"}, {"mu": "f32"}, "mu/kernel': stored as bfloat16, but the format is float32"),
    ],
)
def test_a_state_of_other_formats_is_refused(before, after, message):
    """Change the recipe between two training runs: decoded in the wrong format it would be noise."""
    with pytest.raises(ValueError, match=f"'0/{message}") as raised:
        adam(after).update(grads(), adam(before).init(params()), params())
    assert re.search("Use those, or call `init`", str(raised.value))


# Whose state it is.


class Layer(NamedTuple):
    """Parameters whose names are those of moments."""

    mu: jax.Array
    nu: jax.Array


class OwnState(NamedTuple):
    m: Any
    v: Any
    exp_avg_sq: Any


class LabelledStates(NamedTuple):
    inner_states: Any


def test_names_of_parameters_do_not_decide_what_a_moment_is():
    """Negative gradients: a first moment under the unsigned map would be NaN."""
    start = Layer(jnp.ones(4096, jnp.float32), jnp.ones(4096, jnp.float32))
    g = jax.tree.map(jnp.negative, start)
    tx = adam({"mu|nu": EIGHT_BITS})
    state = tx.init(start)
    for _ in range(2):
        updates, state = tx.update(g, state, start)
    assert formats_of(state) == [SIGNED, SIGNED, UNSIGNED, UNSIGNED]
    assert all(bool(jnp.isfinite(u).all()) for u in updates)
    adam({"^0/mu": "f16"}).init(start)


def test_a_state_that_is_a_dictionary_is_known_by_its_keys():
    rule = optax.GradientTransformation(lambda p: {"mu": p, "nu": p}, lambda u, s, p=None: (u, s))
    state = mpx.low_precision_state(rule, {"mu|nu": EIGHT_BITS}).init(jnp.ones(4096, jnp.float32))
    assert formats_of(state) == [SIGNED, UNSIGNED]
    sums = optax.GradientTransformation(lambda p: {"sums": {"nu": p}}, lambda u, s, p=None: (u, s))
    with pytest.raises(ValueError, match="in fields of unknown sign"):  # `nu` is a parameter here
        mpx.low_precision_state(sums, {"nu": EIGHT_BITS}).init(jnp.ones(4096, jnp.float32))


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: (s, optax.EmptyState()), lambda s: optax.MaskedState(s)])
def test_fields_of_a_state_that_is_not_of_optax_are_known_by_the_usual_names_or_have_to_be_told(wrap):
    start = {"w": jnp.ones(4096, jnp.float32)}
    rule = optax.GradientTransformation(lambda p: wrap(OwnState(p, p, p)), lambda u, s, p=None: (u, s))
    with pytest.raises(ValueError, match=r"in fields of unknown sign(.|\n)*v/w"):
        mpx.low_precision_state(rule, {"v": EIGHT_BITS}).init(start)
    formats = {"m": EIGHT_BITS, "exp_avg_sq": EIGHT_BITS, "v": UNSIGNED}
    state = mpx.low_precision_state(rule, formats).init(start)
    assert formats_of(state) == [SIGNED, UNSIGNED, UNSIGNED]
    with pytest.raises(ValueError, match="second moments, which float16"):
        mpx.low_precision_state(rule, {"exp_avg_sq": "f16"}).init(start)


def test_second_moments_of_partitions_are_found_whatever_the_labels():
    tx = optax.partition({"mu": optax.adam(1e-3), "nu": optax.sgd(1e-3, momentum=0.9)}, {"a": "mu", "b": "nu"})
    start = {"a": jnp.ones(4096, jnp.float32), "b": jnp.ones(4096, jnp.float32)}
    state = mpx.low_precision_state(tx, {".*": EIGHT_BITS}).init(start)
    assert formats_of(state) == [SIGNED, UNSIGNED, SIGNED]
    labelled = optax.GradientTransformation(lambda p: LabelledStates({"nu": p["a"]}), lambda u, s, p=None: (u, s))
    with pytest.raises(ValueError, match="in fields of unknown sign"):
        mpx.low_precision_state(labelled, {"nu": EIGHT_BITS}).init(start)


def test_another_state_and_one_inside_another_are_refused():
    with pytest.raises(TypeError, match="`low_precision_state` needs the `LowPrecisionState`"):
        adam({"mu": "bf16"}).update(grads(), optax.adam(1e-3).init(params()), params())
    with pytest.raises(TypeError, match=r"needs an Optax gradient transformation.*Call it with its settings"):
        mpx.low_precision_state(optax.adam, {"mu": "bf16"})
    with pytest.raises(ValueError, match="stores its state in few bits already"):
        mpx.low_precision_state(optax.chain(adam({"nu": EIGHT_BITS})), {"mu": "bf16"}).init(params())


@pytest.mark.parametrize(("spec", "columns"), [(P("data"), 512), (P(None, "data"), 8192)])
def test_arrays_split_over_devices_into_whole_blocks_are_coded_where_they_are(spec, columns):
    """Parameters, codes and scales are split alike, no array is gathered, and the bits are those of one device."""
    mesh = eight_cpu_devices()
    p = jnp.asarray(np.random.default_rng(0).normal(size=(64, columns)), jnp.float32)
    tx = momentum_in_8_bits()
    place = lambda x: jax.device_put(x, NamedSharding(mesh, spec if x.ndim == 2 else P()))
    whole = jax.tree.map(lambda x: jax.device_put(x, jax.devices("cpu")[0]), tx.init(p))
    step = jax.jit(lambda s, p: tx.update(p, s, p), compiler_options=unfused())
    split = jax.tree.map(place, whole)
    compiled = step.lower(split, place(p)).compile()
    assert "all-gather" not in compiled.as_text()
    (updates, new), (expected_updates, expected) = compiled(split, place(p)), step(whole, p)
    assert_same_bits(jax.device_get((updates, new)), jax.device_get((expected_updates, expected)))
    for leaf in jax.tree.leaves(new):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec if leaf.ndim == 2 else P()), leaf.ndim)


def test_donating_the_state_of_low_precision_does_not_delete_the_callers_key():
    key, ones = jax.random.PRNGKey(0), jnp.ones(4, jnp.float32)
    tx = adam({"mu": "bf16"}, min_size=1, rounding="stochastic", key=key)
    state = tx.init(ones)
    jax.jit(tx.update, donate_argnums=1)(ones, state, ones)
    assert state.key.is_deleted()
    assert not key.is_deleted()
    tx.init(ones)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_numbers_are_on_the_grid_before_they_are_cast(dtype):
    """Whatever becomes of the cast in a compiler, what is cast is rounded already."""
    x = jnp.linspace(0.1, 0.9, 64, dtype=jnp.float32)
    program = jax.make_jaxpr(lambda x: as_format(dtype).encode(x, None))(x)
    (cast,) = [eqn for eqn in program.eqns if eqn.outvars[0].aval.dtype == dtype]
    until_cast = closed_jaxpr(open_jaxpr(program).replace(outvars=cast.invars))
    (rounded,) = jaxpr_as_fun(until_cast)(x)
    assert_same_bits(rounded, x.astype(dtype).astype(jnp.float32))
