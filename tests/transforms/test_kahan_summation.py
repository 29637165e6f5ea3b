"""Check `kahan_summation` against exact fractions."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx

pytestmark = pytest.mark.optax_promotion

NARROW = [jnp.bfloat16, jnp.float16]


def add_all(tx, start, updates):

    def step(carry, update):
        params, state = carry
        update, state = tx.update(update, state, params)
        return (optax.apply_updates(params, update), state), None

    return jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), updates)[0])(start)


def add_repeatedly(tx, start, update, steps):
    return add_all(tx, start, jnp.broadcast_to(update, (steps, *jnp.shape(update))))


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
    """Compare with exact fractions: off by less than half an ulp of the compensation a
    step, never by one of `p`.
    """
    rng = np.random.default_rng(0)
    updates = (rng.normal(size=1000) * 1e-3).astype(np.float32)
    exact = Fraction(1) + sum((Fraction(float(u)) for u in updates), Fraction(0))
    params, state = add_all(mpx.kahan_summation(), jnp.ones((), dtype), updates)
    total = Fraction(float(params)) + Fraction(float(state.compensation))
    eps = float(jnp.finfo(dtype).eps)
    assert abs(total - exact) < 1000 * eps * 2.0**-9
    assert abs(Fraction(float(params)) - exact) <= Fraction(eps)


def test_a_compensation_of_float16_loses_what_bfloat16_keeps():
    """Show why the default is bfloat16 for float16 parameters too: 2**-26 has no
    float16 value.
    """
    start, update = jnp.full((), 2.0**-10, jnp.float16), jnp.float32(2.0**-26)
    default, _ = add_repeatedly(mpx.kahan_summation(), start, update, 256)
    narrow, _ = add_repeatedly(mpx.kahan_summation(jnp.float16), start, update, 256)
    assert float(default) == 2.0**-10 + 2.0**-18
    assert float(narrow) == 2.0**-10


def test_a_compensation_beyond_the_range_of_its_dtype_does_not_become_infinite():
    """A bfloat16 weight of 1e8 lacks more than float16 can hold."""
    start, update = (
        jnp.array([1e8, -1e8], jnp.bfloat16),
        jnp.array([3e5, -3e5], jnp.float32),
    )
    assert mpx.all_finite(
        add_repeatedly(mpx.kahan_summation(jnp.float16), start, update, 20)
    )


@pytest.mark.parametrize("dtype", NARROW)
def test_an_infinite_parameter_stays_infinite(dtype):
    """A mask of attention, say, of which no gradient arrives: in float32 it stays."""
    params, _ = add_repeatedly(
        mpx.kahan_summation(), jnp.array([-jnp.inf, jnp.inf], dtype), jnp.zeros(2), 3
    )
    assert params.tolist() == [-np.inf, np.inf]
