"""Check `kahan_summation` against exact fractions, and that no compiler can remove what it keeps."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.helpers import assert_same_bits, float32_round_trips

pytestmark = pytest.mark.optax_promotion

NARROW = [jnp.bfloat16, jnp.float16]


def add_repeatedly(tx, start, update, steps):
    def step(_, carry):
        params, state = carry
        updates, state = tx.update(update, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(lambda p: jax.lax.fori_loop(0, steps, step, (p, tx.init(p))))(start)


@pytest.mark.parametrize("dtype", NARROW)
def test_updates_too_small_to_round_up_are_kept(dtype):
    """256 updates of an eighth of an ulp: each one alone rounds to nothing."""
    eps = float(jnp.finfo(dtype).eps)
    one, update = jnp.ones((), dtype), jnp.float32(eps / 8)
    plain, _ = add_repeatedly(optax.identity(), one, update, 256)
    summed, _ = add_repeatedly(mpx.kahan_summation(), one, update, 256)
    assert plain == one  # negative control
    assert summed.dtype == dtype
    assert float(summed) == 1 + 256 * eps / 8


@pytest.mark.parametrize("dtype", NARROW)
def test_parameter_plus_compensation_is_the_exact_sum_to_the_precision_of_both(dtype):
    """Compare with exact fractions: off by less than half an ulp of the compensation a step, never by one of `p`."""
    rng = np.random.default_rng(0)
    updates = (rng.normal(size=1000) * 1e-3).astype(np.float32)
    exact = Fraction(1) + sum((Fraction(float(u)) for u in updates), Fraction(0))
    tx = mpx.kahan_summation()

    def step(carry, update):
        params, state = carry
        emitted, state = tx.update(update, state, params)
        return (optax.apply_updates(params, emitted), state), None

    start = jnp.ones((), dtype)
    (params, state), _ = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), updates))(start)
    total = Fraction(float(params)) + Fraction(float(state.compensation))
    eps = float(jnp.finfo(dtype).eps)
    assert abs(total - exact) < 1000 * eps * 2.0**-9
    assert abs(Fraction(float(params)) - exact) <= Fraction(eps)


def test_a_compensation_of_float16_loses_what_bfloat16_keeps():
    """Show why the default is bfloat16 for float16 parameters too: 2**-26 has no float16 value."""
    start, update = jnp.full((), 2.0**-10, jnp.float16), jnp.float32(2.0**-26)
    default, _ = add_repeatedly(mpx.kahan_summation(), start, update, 256)
    narrow, _ = add_repeatedly(mpx.kahan_summation(jnp.float16), start, update, 256)
    assert float(default) == 2.0**-10 + 2.0**-18
    assert float(narrow) == 2.0**-10


def test_a_compensation_beyond_the_range_of_its_dtype_does_not_become_infinite():
    """A bfloat16 weight of 1e8 lacks more than float16 can hold."""
    start, update = jnp.array([1e8, -1e8], jnp.bfloat16), jnp.array([3e5, -3e5], jnp.float32)
    params, state = add_repeatedly(mpx.kahan_summation(jnp.float16), start, update, 20)
    assert jnp.isfinite(params).all()
    assert jnp.isfinite(state.compensation).all()


def test_numbers_below_the_smallest_normal_one_keep_their_roundings():
    """Integer roundings see the subnormals of float16; 2**-20 is one."""
    params = jnp.full((), 2.0**-20, jnp.float16)
    params, state = add_repeatedly(mpx.kahan_summation(), params, jnp.float32(2.0**-26), 16)
    assert float(params) == 2.0**-20 + 2.0**-22
    assert float(state.compensation) == 0


def test_float32_leaves_pass_through_and_store_nothing():
    tx = mpx.kahan_summation()
    params = {"wide": jnp.ones(3), "narrow": jnp.ones(3, jnp.bfloat16)}
    state = tx.init(params)
    updates, new_state = tx.update({"wide": jnp.full(3, 0.1), "narrow": jnp.full(3, 0.1)}, state, params)
    assert state.compensation["wide"] == optax.MaskedNode()
    assert_same_bits(updates["wide"], jnp.full(3, 0.1))
    assert new_state.compensation["narrow"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", NARROW)
def test_no_compiler_can_remove_its_roundings(dtype):
    """Look for `f32 -> 16 bits -> f32` in the program: a GPU may drop it, and the compensation with it."""
    tx = mpx.kahan_summation()
    params = jnp.ones(8, dtype)
    state = tx.init(params)

    def naive(update, compensation, params):
        y = update + compensation.astype(jnp.float32)
        new = (params.astype(jnp.float32) + y).astype(dtype)
        return y - (new.astype(jnp.float32) - params.astype(jnp.float32))

    assert float32_round_trips(naive, jnp.ones(8, jnp.float32), state.compensation, params)  # negative control
    assert not float32_round_trips(tx.update, jnp.ones(8, jnp.float32), state, params)


def test_narrow_updates_are_widened_before_they_are_added():
    tx = mpx.kahan_summation()
    params = jnp.ones(2, jnp.bfloat16)
    state = tx.init(params)
    narrow = tx.update(jnp.full(2, 2.0**-10, jnp.bfloat16), state, params)
    assert_same_bits(narrow, tx.update(jnp.full(2, 2.0**-10), state, params))


def test_a_dtype_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="`dtype` must be bfloat16, float16 or float32, but got int8"):
        mpx.kahan_summation(jnp.int8)


def test_the_new_parameter_is_the_sum_rounded_once():
    """Just above a tie: rounded to bfloat16 before it is added, the update would tie to even."""
    tx = mpx.kahan_summation()
    params = jnp.ones(1, jnp.bfloat16)
    updates, _ = tx.update(jnp.asarray([2.0**-8 * (1 + 2.0**-12)]), tx.init(params), params)
    assert optax.apply_updates(params, updates).tolist() == [1 + 2.0**-7]
