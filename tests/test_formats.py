"""Roundings between float32 and 16 bits: every 16-bit pattern, every tie, the edges of
every exponent.

The oracles are the casts of NumPy and ml_dtypes, float64 (which holds every midpoint)
and exact fractions.
"""

import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpx import formats
from tests.helpers import (
    BF16,
    F16,
    assert_same_bits,
    assert_same_bits_everywhere,
    examples,
    float32_round_trips,
)

INFINITY = {BF16: 0x7F80, F16: 0x7C00}  # 16-bit patterns; all larger magnitudes are NaN

both_formats = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)

jit_round_to = jax.jit(formats.round_to, static_argnums=1)
jit_stochastic_round = jax.jit(formats.stochastic_round, static_argnums=2)


def from_bits(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def to_bits(x):
    return np.asarray(x).view(np.uint32)


def from_patterns(patterns, dtype):
    return np.asarray(patterns, np.uint16).view(dtype)


def every_value(dtype):
    """All 65,536 values of a 16-bit format, NaNs included."""
    return from_patterns(np.arange(2**16), dtype)


def widened(x):
    """Exactly the same numbers in float32."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return x.astype(np.float32)


def narrowed(x, dtype):
    """The oracle: NumPy's cast to float16, ml_dtypes' cast to bfloat16."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return x.astype(dtype)


def float32_patterns():
    """4.6 million bit patterns.

    With every sign, exponent and seven top bits of the mantissa: the numbers that
    bfloat16 and float16 hold, all ties of both, and the neighbours of both. Then the
    ends of the NaNs and of the subnormals, the largest finite numbers, and a million
    seeded ones.
    """
    high = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    low = (
        np.arange(16, dtype=np.uint32)[:, None] * 0x1000
        + np.array([-1, 0, 1], np.int64).astype(np.uint32)
    ).ravel()
    grid = (high | (low & 0xFFFF)).ravel()
    first = np.arange(2**16, dtype=np.uint32)
    ends = np.concatenate(
        # Subnormal, largest, NaN, NaN.
        [
            first,
            0x7F7F_0000 + first,
            0x7F80_0000 + first,
            0x7FFF_0000 + first,
        ]
    )
    seeded = np.random.default_rng(0).integers(0, 2**32, 2**20, np.uint32)
    return np.concatenate([grid, ends, ends | np.uint32(0x8000_0000), seeded])


@pytest.fixture(scope="module")
def patterns():
    return float32_patterns()


def stochastic_neighbours(x, dtype):
    """By the oracle: pattern of the neighbour toward zero, of the one away from it
    (saturated), and whether exact.
    """
    magnitude = np.abs(x)
    nearest = narrowed(magnitude, dtype)
    too_high = widened(nearest).astype(np.float64) > magnitude.astype(np.float64)
    lower = nearest.view(np.uint16) - too_high.astype(np.uint16)
    exact = widened(from_patterns(lower, dtype)) == magnitude
    upper = np.minimum(lower + 1, INFINITY[dtype] - 1).astype(np.uint16)
    sign = (to_bits(x) >> 16).astype(np.uint16) & np.uint16(0x8000)
    return lower | sign, np.where(exact, lower, upper).astype(np.uint16) | sign, exact


def upward_odds(x, dtype):
    """The probability with which a finite number rounds away from zero, as a
    `Fraction`.
    """
    lower, upper, _ = stochastic_neighbours(np.float32([x]), dtype)
    low, high = (
        abs(Fraction(float(widened(from_patterns(p, dtype))[0])))
        for p in (lower, upper)
    )
    return (
        (abs(Fraction(float(x))) - low) / (high - low) if high != low else Fraction(0)
    )


# --- round_to -------------------------------------------------------------------------------------------------------


@both_formats
def test_round_to_keeps_all_65536_values_of_the_format(dtype):
    """Signs of zeros too; a NaN stays one of the same sign, with its mantissa's top bit
    set.
    """
    values = widened(every_value(dtype))
    rounded = jit_round_to(values, dtype)
    numbers = ~np.isnan(values)
    assert_same_bits(rounded[numbers], values[numbers])
    assert_same_bits(
        rounded[~numbers], from_bits(to_bits(values[~numbers]) | np.uint32(0x0040_0000))
    )


@both_formats
def test_round_to_agrees_with_the_casts_of_numpy_on_millions_of_bit_patterns(
    patterns, dtype
):
    x = from_bits(patterns)
    expected = widened(narrowed(x, dtype))
    rounded = np.asarray(jit_round_to(x, dtype))
    assert rounded.dtype == np.float32
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(to_bits(rounded)[numbers], to_bits(expected)[numbers])
    assert np.isnan(rounded[~numbers]).all()
    np.testing.assert_array_equal(
        np.signbit(rounded[~numbers]), np.signbit(x[~numbers])
    )
    nan_patterns = to_bits(rounded[~numbers])
    assert not (
        nan_patterns & (0xFFFF if dtype == BF16 else 0x1FFF)
    ).any()  # a NaN that the format holds

    truncated = patterns[numbers] & np.uint32(
        0xFFFF_0000 if dtype == BF16 else 0xFFFF_E000
    )
    assert (
        truncated != to_bits(expected)[numbers]
    ).any()  # negative control: truncation differs


def test_round_to_keeps_float16_subnormals_which_reduce_precision_flushes():
    subnormals = widened(every_value(F16)[1:0x400])
    assert_same_bits(formats.round_to(subnormals, F16), subnormals)
    flushed = jax.lax.reduce_precision(subnormals, exponent_bits=5, mantissa_bits=10)
    assert not flushed.any()  # negative control


def test_rounding_to_float32_changes_nothing(patterns):
    x = jnp.asarray(from_bits(patterns[::997]))
    assert formats.round_to(x, jnp.float32) is x
    assert formats.stochastic_round(jax.random.key(0), x, np.float32) is x


# --- stochastic_round -----------------------------------------------------------------------------------------------


@both_formats
def test_stochastic_round_gives_only_the_two_neighbours_and_is_finite_for_finite_numbers(
    patterns, dtype
):
    """Over millions of patterns; a number beyond the range becomes the largest one,
    never infinite.
    """
    x = from_bits(patterns)
    rounded = np.asarray(jit_stochastic_round(jax.random.key(1), x, dtype)).view(
        np.uint16
    )
    finite = np.isfinite(x)
    lower, upper, _ = stochastic_neighbours(x[finite], dtype)
    down, up = rounded[finite] == lower, rounded[finite] == upper
    assert (down | up).all()
    assert (down & ~up).any()
    assert (up & ~down).any()
    assert ((rounded[finite] & 0x7FFF) < INFINITY[dtype]).all()
    np.testing.assert_array_equal(rounded[np.isinf(x)] & 0x7FFF, INFINITY[dtype])
    assert ((rounded[np.isnan(x)] & 0x7FFF) > INFINITY[dtype]).all()

    # Negative control: noise added to the bits turns large numbers into infinity.
    naive = (patterns + 0xFFFF) >> 16
    assert ((naive[finite] & 0x7FFF) == INFINITY[BF16]).any()


def fixed_noise(monkeypatch, noise):
    """Makes the next `stochastic_round` draw these bits, to count over all of them."""

    def bits(key, shape, dtype):
        assert shape == noise.shape
        return jnp.asarray(noise.astype(dtype))

    monkeypatch.setattr(jax.random, "bits", bits)


MAGNITUDES = [
    (BF16, x) for x in (1.0, 3.1415927, 2.0**-126, 2.0**-130, 2.0**-149, 3e38)
]
MAGNITUDES += [(F16, x) for x in (2.0**-14, 1.0, 3.1415927, 65000.0)]


@pytest.mark.parametrize(("dtype", "magnitude"), MAGNITUDES, ids=str)
def test_numbers_round_up_under_exactly_their_fraction_of_all_noises(
    monkeypatch, dtype, magnitude
):
    """Of the 65,536 (8,192) noises exactly `low` round up: in the subnormals of
    bfloat16 too.
    """
    bits = 16 if dtype == BF16 else 13  # that float32 has more
    fixed_noise(monkeypatch, np.arange(2**bits) << (0 if dtype == BF16 else 19))
    for low in (
        0,
        1,
        2 ** (bits - 2),
        2 ** (bits - 1) - 1,
        2 ** (bits - 1),
        2**bits - 1,
    ):
        x = from_bits((to_bits(np.float32(magnitude)) >> bits << bits) | np.uint32(low))
        lower, upper, _ = stochastic_neighbours(x[None], dtype)
        rounded = np.asarray(
            formats.stochastic_round(jax.random.key(0), jnp.full(2**bits, x), dtype)
        ).view(np.uint16)
        assert (
            Fraction(np.count_nonzero(rounded != lower), 2**bits)
            == upward_odds(x, dtype)
            == Fraction(low, 2**bits)
        )
        assert set(rounded.tolist()) <= {int(lower[0]), int(upper[0])}


@given(exponent=st.integers(-149, -15), mantissa=st.integers(0, 2**23 - 1))
@examples(150)
def test_float16_rounds_numbers_below_its_normal_ones_up_with_odds_exact_to_2_to_the_minus_32(
    exponent, mantissa
):
    """Up for the largest noises, `floor(2**32 * fraction)` of them, and down for all
    others.
    """
    x = np.float32(np.ldexp(1 + mantissa * 2.0**-23, exponent))
    odds = int(upward_odds(x, F16) * 2**32)
    noise = 2**32 - 1 - np.clip([0, odds - 1, odds, 2**32 - 1], 0, 2**32 - 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fixed_noise(monkeypatch, noise)
        rounded = np.asarray(
            formats.stochastic_round(jax.random.key(0), jnp.full(4, x), F16)
        ).view(np.uint16)
    lower, _, _ = stochastic_neighbours(x[None], F16)
    np.testing.assert_array_equal(rounded != lower, noise >= 2**32 - odds)


# --- split_f32 and join_f32 -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def round_trip():
    return jax.jit(lambda x: formats.join_f32(*formats.split_f32(x)))


@pytest.mark.parametrize("chosen", ["grid", "seeded"])
def test_split_and_join_give_back_every_pattern_that_is_not_nan(
    patterns, round_trip, chosen
):
    """Millions of patterns each; -0.0, subnormals and the numbers that round to
    infinity too.
    """
    bits = (
        patterns
        if chosen == "grid"
        else np.random.default_rng(5).integers(0, 2**32, 2**22, np.uint32)
    )
    x = from_bits(bits)
    joined = np.asarray(round_trip(x))
    assert joined.dtype == np.float32
    nan = np.isnan(x)
    np.testing.assert_array_equal(to_bits(joined)[~nan], bits[~nan])
    assert np.isnan(joined[nan]).all()


def test_the_weight_of_a_split_is_the_nearest_bfloat16_with_ties_away_from_zero(
    patterns,
):
    x = from_bits(patterns[np.isfinite(from_bits(patterns))])
    hi, lo = jax.jit(formats.split_f32)(x)
    assert hi.dtype == BF16
    assert lo.dtype == np.uint16
    expected = narrowed(x, BF16)
    tie = to_bits(x) & 0xFFFF == 0x8000
    np.testing.assert_array_equal(
        np.asarray(hi).view(np.uint16)[~tie], expected.view(np.uint16)[~tie]
    )
    away = (to_bits(x)[tie] >> 16) + 1
    np.testing.assert_array_equal(np.asarray(hi).view(np.uint16)[tie], away)


@pytest.mark.parametrize(
    "bits",
    [0x7FFF_FFFF, 0xFFFF_FFFF, 0x7F80_0001, 0xFF80_0001, 0x7FC0_0000, 0x7FFF_8000],
)
def test_the_split_of_nan_is_nan_with_zero_low_bits_and_joins_to_nan(bits):
    """0x7FFFFFFF + 0x8000 would carry into the sign and read as -0.0; 0x7F800001 would
    truncate to infinity.
    """
    assert (0x7FFF_FFFF + 0x8000) >> 16 == 0x8000  # negative control
    hi, lo = formats.split_f32(from_bits(bits))
    assert jnp.isnan(hi)
    assert lo == 0
    assert np.signbit(widened(np.asarray(hi))) == (bits >> 31)
    assert jnp.isnan(formats.join_f32(hi, lo))


def join_all_low_bits(pattern):
    """`join_f32` of one bfloat16 pattern with all 65,536 low halves."""
    lo = np.arange(2**16, dtype=np.uint16)
    return np.asarray(
        jax.jit(formats.join_f32)(from_patterns(np.full(2**16, pattern), BF16), lo)
    )


@pytest.mark.parametrize("pattern", [0x0000, 0x8000])
def test_joining_a_pruned_weight_never_borrows(pattern):
    """A zero from outside reads as that zero plus the low bits that it can have, those
    below 0x8000: at most 2**-133, same sign, never NaN.
    """
    joined, lo = join_all_low_bits(pattern), np.arange(2**16, dtype=np.uint32)
    np.testing.assert_array_equal(
        to_bits(joined), (np.uint32(pattern) << 16) | np.where(lo < 0x8000, lo, 0)
    )
    assert np.abs(joined).max() < 2.0**-133
    naive = from_bits(((np.uint32([pattern]) - np.uint32(1)) << 16) | np.uint32(0x8001))
    assert np.isnan(naive).all()  # negative control: a borrow


@pytest.mark.parametrize("sign", [0x0000, 0x8000])
def test_joining_infinity_with_small_low_bits_reads_infinite_and_with_large_ones_the_largest_numbers(
    sign,
):
    joined = join_all_low_bits(sign | 0x7F80)
    assert np.isinf(joined[:0x8000]).all()
    largest = (np.uint32(sign | 0x7F7F) << 16) | np.arange(
        0x8000, 0x1_0000, dtype=np.uint32
    )
    np.testing.assert_array_equal(to_bits(joined[0x8000:]), largest)
    assert (np.signbit(joined) == bool(sign)).all()


@pytest.mark.parametrize("pattern", [0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFC0, 0xFFFF])
def test_joining_nan_reads_nan_for_all_low_bits(pattern):
    assert np.isnan(join_all_low_bits(pattern)).all()


# --- the same everywhere, and not removable -------------------------------------------------------------------------


def sample():
    return from_bits(
        np.concatenate(
            [float32_patterns()[::997], [0x7FFF_FFFF, 0x0000_0001, 0x7F7F_FFFF]]
        )
    )


def roundings():
    """The functions of this module as functions of one float32 array."""
    key = jax.random.key(11)
    cases = {
        f"round_to {dtype}": lambda x, dtype=dtype: formats.round_to(x, dtype)
        for dtype in (BF16, F16)
    }
    cases |= {
        f"stochastic_round {dtype}": lambda x, dtype=dtype: formats.stochastic_round(
            key, x, dtype
        )
        for dtype in (BF16, F16)
    }
    return cases | {
        "split_f32": formats.split_f32,
        "join_f32": lambda x: formats.join_f32(*formats.split_f32(x)),
    }


def as_integers(tree):
    """The bits of a tree of arrays: CPU replaces the payload of a bfloat16 NaN when it
    copies one inside a program.
    """
    return jax.tree.map(
        lambda leaf: jax.lax.bitcast_convert_type(leaf, f"u{leaf.dtype.itemsize}"), tree
    )


def test_the_bits_are_the_same_everywhere():
    """But random bits are other ones under `vmap` of one key."""
    x = jnp.stack([sample(), sample()[::-1]])
    together = lambda names: (
        lambda x: {name: as_integers(function(x)) for name, function in names.items()}
    )
    certain = {
        name: function
        for name, function in roundings().items()
        if "stochastic" not in name
    }
    assert_same_bits_everywhere(
        together(roundings()), x, ways=("jit", "scan", "64 bits in jit")
    )
    assert_same_bits_everywhere(together(certain), x, ways=["vmap"])
    assert_same_bits_everywhere(together(roundings()), x[:, :100], ways=["no jit"])


def conversions_of_16_bits(function, x):
    """The conversions to and from a 16-bit float in the lowered program."""
    return re.findall(
        r"stablehlo\.(?:convert|reduce_precision) .*f16.*",
        jax.jit(function).lower(x).as_text(),
    )


@pytest.mark.parametrize("name", roundings())
def test_no_conversion_that_a_compiler_may_drop_stands_in_the_program(name):
    assert conversions_of_16_bits(roundings()[name], jnp.ones(8, jnp.float32)) == []


@both_formats
def test_the_naive_round_trip_is_found_in_its_program(dtype):
    """Negative control of the test above: a GPU compiler may turn this into nothing."""
    naive = lambda x: x.astype(dtype).astype(jnp.float32)
    x = jnp.ones(8, jnp.float32)
    assert len(float32_round_trips(naive, x)) == 1
    assert len(conversions_of_16_bits(naive, x)) == 2
    in_a_loop = lambda x: jax.lax.scan(
        lambda c, _: (naive(c), None), x, None, length=2
    )[0]
    assert len(float32_round_trips(in_a_loop, x)) == 1


# --- overflow -------------------------------------------------------------------------------------------------------


@both_formats
def test_an_overflow_can_become_the_largest_number_and_nothing_else_changes(dtype):
    """Over every upper half of a float32, with the low halves around ties: only finite
    results that overflow differ.
    """
    low = np.array(
        [0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32
    )
    patterns = (np.arange(2**16, dtype=np.uint32)[:, None] << 16 | low).ravel()
    x = jnp.asarray(patterns.view(np.float32))
    plain = np.asarray(formats.round_to(x, dtype))
    limited = np.asarray(formats.round_to(x, dtype, overflow="largest"))
    finite = np.isfinite(patterns.view(np.float32))
    overflows = finite & np.isinf(plain)
    assert overflows.any()
    np.testing.assert_array_equal(
        limited[~overflows].view(np.uint32), plain[~overflows].view(np.uint32)
    )
    np.testing.assert_array_equal(
        limited[overflows], np.copysign(float(jnp.finfo(dtype).max), plain[overflows])
    )


def test_a_split_can_cut_off_what_has_no_finite_upper_half():
    patterns = np.arange(0x7F7F_7000, 0x7F80_0010, dtype=np.uint32)
    patterns = np.concatenate([patterns, patterns | 0x8000_0000])
    hi, lo = formats.split_f32(
        jnp.asarray(patterns.view(np.float32)), overflow="largest"
    )
    magnitude = patterns & 0x7FFF_FFFF
    finite = magnitude < 0x7F80_0000
    assert np.isfinite(np.asarray(hi).astype(np.float32)[finite]).all()
    joined = np.asarray(formats.join_f32(hi, lo)).view(np.uint32)
    expected = np.where(finite, np.minimum(magnitude, 0x7F7F_7FFF), magnitude) | (
        patterns & 0x8000_0000
    )
    exact = magnitude <= 0x7F80_0000  # what is not NaN
    np.testing.assert_array_equal(joined[exact], expected[exact])
