"""Check `master_weights`: parameters are the cast masters, split masters the full ones,
and what is refused.
"""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx import formats
from mpx._stored.weights import LowBits
from tests.helpers import assert_same_bits, bits, unfused

pytestmark = pytest.mark.optax_promotion

NARROW = [jnp.bfloat16, jnp.float16]


def follow(tx, params, grads, **jit_options):
    """Return parameters and state after one update for each row of `grads`, in one
    program.
    """

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    run = lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g)[0]
    return jax.jit(run, **jit_options)(params, grads)


@pytest.mark.parametrize("dtype", NARROW)
def test_parameters_are_the_cast_masters_after_apply_updates(dtype):
    """Take small, middle and large steps, 100,000 weights of each."""
    rng = np.random.default_rng(0)
    start = jnp.asarray(rng.normal(size=(3, 100_000)), jnp.float32).astype(dtype)
    steps = rng.normal(size=(4, 3, 100_000)) * np.array([1e-4, 1e-2, 1.0])[:, None]
    params, state = follow(
        mpx.master_weights(optax.sgd(1.0)), start, jnp.asarray(steps, jnp.float32)
    )
    np.testing.assert_array_equal(
        np.asarray(params), np.asarray(state.master).astype(np.dtype(dtype))
    )


@pytest.mark.parametrize("dtype", NARROW)
def test_updates_chosen_naively_miss_the_cast_masters(dtype):
    """Just above the tie behind 1, master - 2**-24 is rounded to the tie. Differences
    of 16-bit numbers miss often.
    """
    rng, eps = np.random.default_rng(0), float(jnp.finfo(dtype).eps)
    masters = jnp.asarray(
        [1 + eps / 2 + 2.0**-23, *rng.normal(size=10_000)], jnp.float32
    )
    params = jnp.asarray([2.0**-24, *rng.normal(size=10_000)], dtype)
    cast = np.asarray(masters).astype(np.dtype(dtype))
    landed = lambda updates: np.asarray(optax.apply_updates(params, updates))
    assert landed(masters - params.astype(jnp.float32))[0] == 1 != cast[0]
    assert (landed(masters.astype(dtype) - params) != cast).mean() > 1e-3
    tx = mpx.master_weights(optax.sgd(1.0))
    updates, _ = tx.update(
        jnp.zeros(10_001), tx.init(params)._replace(master=masters), params
    )
    np.testing.assert_array_equal(landed(updates), cast)


@pytest.mark.parametrize("storage", ["full", "split", "split24"])
def test_a_weight_that_falls_almost_to_zero_is_off_by_little_and_mended_by_the_next_step(
    storage,
):
    """Go from 1 to 2**-20 (1 + 2**-7): the sum has no bits for it; the error is at most
    2**-24 of the old weight.
    """
    target = np.float32(2.0**-20 * (1 + 2.0**-7))
    start = jnp.ones(1, jnp.bfloat16)
    tx = mpx.master_weights(optax.sgd(1.0), storage=storage)
    step = jnp.asarray([[1 - target]], jnp.float32)
    params, state = follow(tx, start, step)
    assert abs(float(params[0]) - float(target)) <= 2.0**-24
    updates, state = tx.update(jnp.zeros(1), state, params)
    params = optax.apply_updates(params, updates)
    assert params[0] == mpx.master_params(params, state)[0].astype(jnp.bfloat16)


def test_split_masters_are_the_full_ones_after_a_thousand_steps_of_adamw():
    """Compile both without fusion: in programs of other operations the compiler
    contracts other products and sums.
    """
    rng = np.random.default_rng(0)
    start = jnp.asarray(rng.normal(size=1024), jnp.bfloat16)
    grads = jnp.asarray(rng.normal(size=(1000, 1024)), jnp.float32)
    rule = optax.adamw(1e-3, weight_decay=0.1)
    split_params, split = follow(
        mpx.master_weights(rule, storage="split"),
        start,
        grads,
        compiler_options=unfused(),
    )
    full_params, full = follow(
        mpx.master_weights(rule), start, grads, compiler_options=unfused()
    )
    assert split.master.dtype == np.uint16
    assert_same_bits(mpx.master_params(split_params, split), full.master)
    assert_same_bits(formats.join_f32(split_params, split.master), full.master)
    assert (
        full.master != full_params.astype(jnp.float32)
    ).mean() > 0.9  # the low bits did matter


def test_at_random_no_update_is_lost_in_the_mean():
    """200 steps, each a 40th of the distance between two masters of 24 bits; to nearest
    no master moves.
    """
    start = jnp.asarray(np.random.default_rng(0).uniform(1, 2, 20_000), jnp.bfloat16)
    step = 2.0**-15 / 40
    moved = {}
    to_nearest = LowBits(np.dtype(np.uint8))  # it gets no key
    for storage in (to_nearest, "split24"):
        tx = mpx.master_weights(optax.sgd(1.0), storage)
        params, state = follow(
            tx, start, jnp.full((200, start.size), -step, jnp.float32)
        )
        moved[storage is to_nearest] = np.asarray(
            mpx.master_params(params, state) - start.astype(jnp.float32), np.float64
        )
    assert not moved[True].any()
    # There are 128 numbers; equal ones are rounded alike.
    deviation = moved[False].std() / np.sqrt(128)
    assert abs(moved[False].mean() - 200 * step) < 5 * deviation
    assert moved[False].std() > 2.0**-16


def half_a_step_of_24_bits(start, count):
    """Return whether each of `count` float32 numbers survives, from the bits `start`
    on: rounded, saturated, or NaN.
    """
    storage = LowBits(np.dtype(np.uint8))
    given = start + jnp.arange(count, dtype=np.uint32)
    weights = jax.lax.bitcast_convert_type(given, np.float32)
    back = bits_of(storage.restore(*storage.store(weights, np.dtype(jnp.bfloat16))))
    magnitude, largest, infinity = (
        given & 0x7FFF_FFFF,
        np.uint32(0x7F7F_7F00),
        np.uint32(0x7F80_0000),
    )
    error = jnp.maximum(back, given) - jnp.minimum(back, given)
    finite = jnp.where(
        magnitude > largest,
        back == (given & np.uint32(0x8000_0000)) | largest,
        error <= 0x80,
    )
    is_nan = (back & 0x7FFF_FFFF) > infinity
    return jnp.where(
        magnitude > infinity,
        is_nan,
        jnp.where(magnitude == infinity, back == given, finite),
    )


def bits_of(x):
    return jax.lax.bitcast_convert_type(x, np.uint32)


survives = jax.jit(lambda start: half_a_step_of_24_bits(start, 2**22).all())


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param(
            [0x3F80_0000, 0x7F00_0000, 0x7F40_0000, 0xFF40_0000, 0], id="some"
        ),
        pytest.param(range(0, 2**32, 2**22), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_master_of_24_bits_is_off_by_half_of_their_last_unit_at_most(starts):
    """Infinities, NaN and subnormals too; what is beyond the largest parameter becomes
    the largest.
    """
    assert all(survives(np.uint32(start)) for start in starts)


def test_a_split_parameter_changed_from_outside_is_taken_as_it_is():
    """Pruned to zero with low bits that were rounded up: a borrow would make it NaN."""
    tx = mpx.master_weights(optax.sgd(1.0), storage="split")
    params, state = follow(tx, jnp.ones(4, jnp.bfloat16), jnp.full((1, 4), 1e-3))
    assert (state.master >= 0x8000).all()
    pruned = jnp.zeros_like(params)
    assert (abs(mpx.master_params(pruned, state)) < 1e-37).all()
    updates, state = tx.update(jnp.full(4, -0.5), state, pruned)
    assert optax.apply_updates(pruned, updates).tolist() == [0.5] * 4


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [(jnp.bfloat16, storage) for storage in ("full", "split", "split24")]
    + [(jnp.float16, "full")],
)
def test_a_finite_master_out_of_range_is_stored_as_the_largest_finite_number(
    dtype, storage
):
    largest = float(jnp.finfo(dtype).max)
    above = np.float32(np.finfo(np.float32).max if dtype == jnp.bfloat16 else 70_000)
    tx = mpx.master_weights(optax.sgd(1.0), storage=storage)
    params = jnp.asarray([1.0, -1.0], dtype)
    params, state = follow(tx, params, jnp.asarray([[-above, above]]))
    assert params.astype(jnp.float32).tolist() == [largest, -largest]
    half = mpx.master_params(params, state) / 2
    updates, state = tx.update(half, state, params)  # and can come back
    assert_same_bits(optax.apply_updates(params, updates), half.astype(dtype))


def test_float32_leaves_store_nothing_and_pass_through_and_float16_ones_keep_full_masters_under_split():
    params = {
        "wide": jnp.ones(3),
        "half": jnp.ones(3, jnp.float16),
        "brain": jnp.ones(3, jnp.bfloat16),
    }
    tx = mpx.master_weights(optax.sgd(0.1), storage="split")
    state = tx.init(params)
    assert state.master["wide"] == optax.MaskedNode()
    assert (state.master["half"].dtype, state.master["brain"].dtype) == (
        np.float32,
        np.uint16,
    )
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    plain, _ = optax.sgd(0.1).update(jnp.ones(3), optax.sgd(0.1).init(jnp.ones(3)))
    assert_same_bits(updates["wide"], plain)


def test_float32_parameters_can_have_float64_masters_and_are_those_rounded_to_nearest():
    with jax.enable_x64(True):
        tx = mpx.master_weights(optax.sgd(1.0), dtype=jnp.float64)
        grads = np.random.default_rng(0).normal(size=(10, 1000))
        params, state = follow(tx, jnp.ones(1000, jnp.float32), jnp.asarray(grads))
        assert state.master.dtype == np.float64
        np.testing.assert_allclose(
            state.master, 1 - grads.sum(0), rtol=1e-10, atol=1e-10
        )
        assert_same_bits(params, np.asarray(state.master).astype(np.float32))
        # Beyond the range of float32.
        params, _ = follow(tx, params, jnp.full((1, 1000), 1e39))
        assert_same_bits(params, np.full(1000, -np.finfo(np.float32).max))


@pytest.mark.parametrize(
    "tx",
    [mpx.master_weights(optax.sgd(0.1)), mpx.kahan_summation()],
    ids=["full", "kahan"],
)
def test_parameters_that_are_not_those_of_the_state_are_all_named(tx):
    old = {
        "a": jnp.ones(2, jnp.bfloat16),
        "b": jnp.ones(2, jnp.bfloat16),
        "c": jnp.ones(2, jnp.bfloat16),
    }
    new = {
        "a": jnp.ones(3, jnp.bfloat16),
        "b": jnp.ones(2, jnp.float32),
        "d": jnp.ones(2),
    }
    with pytest.raises(
        ValueError, match="the state was made for other parameters"
    ) as error:
        tx.update(jax.tree.map(jnp.ones_like, new), tx.init(old), new)
    lines = str(error.value).splitlines()
    assert [re.match(r"  '(.)'", line)[1] for line in lines[1:]] == ["c", "d", "a", "b"]
    assert "'a': bfloat16[3], but the state keeps" in str(error.value)
    assert "'b': float32[2], but the state keeps " in str(error.value)
    assert "`equinox.apply_updates`" in str(error.value)  # it adds without casting back


def test_low_bits_are_kept_exactly_where_the_addition_lands_on_the_new_parameter():
    """Try weights and masters up to 40 binades apart and of both signs: where `p + u`
    misses, the master is forgotten.

    Updates are float64: where a float32 one misses, the new master has no low bits. The
    oracle adds in float32 and rounds to bfloat16, as `optax.apply_updates` does.
    """
    rng = np.random.default_rng(0)
    old = rng.normal(size=1_000_000).astype(jnp.bfloat16)
    wide = old.astype(np.float64)
    factors = (
        2.0 ** rng.integers(-40, 40, old.size)
        * rng.uniform(0.5, 2, old.size)
        * rng.choice([-1, 1], old.size)
    )
    masters = (wide * factors).astype(np.float32)
    # Below a power of two numbers lie twice as dense.
    masters[::10] = 2.0 ** rng.integers(-40, 40, masters[::10].size)
    change = masters.astype(np.float64) - wide
    with jax.enable_x64(True):
        given = jnp.asarray(old), jnp.zeros(old.shape, np.uint16), jnp.asarray(change)
        updates, stored = LowBits(np.dtype(np.uint16)).land(*given, "a test", None)
    high, low = map(
        np.asarray, formats.split_f32(jnp.asarray((wide + change).astype(np.float32)))
    )
    landed = (old.astype(np.float32) + np.asarray(updates)).astype(jnp.bfloat16)
    hit = bits(landed) == bits(high)
    assert 0.2 < hit.mean() < 0.9
    assert_same_bits(stored, np.where(hit, low, np.uint16(0)))


# Parameters, gradients, and parameters after the step. Where nothing changes nothing is
# subtracted: inf - inf is NaN.
CORNERS = {
    "zeros keep their signs": ([0.0, -0.0], [0.0, 0.0], [0.0, -0.0]),
    "infinities stay": (
        [np.inf, -np.inf, 1.0],
        [0.0, 0.0, 0.0],
        [np.inf, -np.inf, 1.0],
    ),
    "minus zero becomes the plus zero of its master": ([-0.0], [-0.0], [0.0]),
}


@pytest.mark.parametrize("storage", ["full", "split", "split24"])
@pytest.mark.parametrize("name", CORNERS)
def test_zeros_and_infinities_are_those_of_float32(name, storage):
    start, grads, expected = CORNERS[name]
    tx, params = (
        mpx.master_weights(optax.sgd(1.0), storage=storage),
        jnp.asarray(start, jnp.bfloat16),
    )
    updates, state = tx.update(jnp.asarray(grads, jnp.float32), tx.init(params), params)
    after = optax.apply_updates(params, updates)
    assert_same_bits(after, jnp.asarray(expected, jnp.bfloat16))
    assert_same_bits(
        mpx.master_params(after, state), jnp.asarray(expected, jnp.float32)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_updates_in_param_dtype_suit_a_library_that_adds_without_a_cast_and_leave_masters_exact(
    dtype,
):
    """SGD with a power of two as its rate: equal bits in every program."""
    rng = np.random.default_rng(0)
    start = jnp.asarray(rng.normal(size=4000), dtype)
    grads = [jnp.asarray(rng.normal(size=4000), jnp.float32) for _ in range(5)]
    narrow, wide = (
        mpx.master_weights(optax.sgd(0.25), updates_in_param_dtype=on)
        for on in (True, False)
    )
    mpx.check_chain(narrow)
    p, q, s, t = start, start, narrow.init(start), wide.init(start)
    missed = 0
    for g in grads:
        u, s = narrow.update(g, s, p)
        assert u.dtype == dtype
        p = eqx.apply_updates(p, u)
        u, t = wide.update(g, t, q)
        q = optax.apply_updates(q, u)
        assert_same_bits(s.master, t.master)
        off = np.abs(np.asarray(p, np.float64) - np.asarray(q, np.float64))
        last_place = 2.0 ** -(7 if dtype == jnp.bfloat16 else 10)
        assert (
            off
            <= last_place
            * np.maximum(abs(np.asarray(q, np.float64)), abs(np.asarray(u, np.float64)))
        ).all()
        missed += (off > 0).sum()
    # These weights change by a quarter of themselves.
    assert 0 < missed < 0.2 * 5 * 4000
    assert (
        eqx.apply_updates(
            start, wide.update(grads[0], wide.init(start), start)[0]
        ).dtype
        == jnp.float32
    )
