"""Check `Blockwise8bit`: all codes, the turns between them, scales, blocks, what cannot
be held.

The oracle is the definition of the map, in fractions; nearest members and neighbours
are looked up in it in float64.
"""

import functools
import re
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mpx._stored.blockwise import Blockwise4bit, Blockwise8bit
from tests.helpers import assert_same_bits, assert_same_bits_everywhere

SMALLEST_NORMAL = np.float32(2.0**-126)
LARGEST = np.finfo(np.float32).max
BELOW_2_64 = np.nextafter(np.float32(2.0**64), np.float32(0))
INF = np.inf
SIGMAS = 6

both_maps = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


class BlockwiseArray(NamedTuple):
    codes: jax.Array
    scale: jax.Array


def key_of(seed):
    """Return a key whose data are random, as a step gives it."""
    return jax.random.split(jax.random.key(seed))[0]


def encode(x, block_size, signed, key=None):
    return BlockwiseArray(*Blockwise8bit(block_size, signed).encode(x, key))


def decode(coded, block_size, signed):
    return Blockwise8bit(block_size, signed).decode(*coded)


jit_encode = jax.jit(encode, static_argnums=(1, 2))
jit_decode = jax.jit(decode, static_argnums=(1, 2))
# Of blocks that stand alone: `[blocks, block_size, 1]` and codes of it.
encode_each = jax.jit(jax.vmap(lambda block: encode(block, block.size, True)))
decode_each = jax.jit(
    jax.vmap(lambda codes, scale: decode((codes, scale), codes.size, True))
)


@functools.cache
def members(signed):
    """Return the map by definition, ascending: of the codes -127 to 127, or 0 to 255."""
    top = 127 if signed else 255
    return np.array(
        [Fraction(c * abs(c), top**2) for c in range(-top if signed else 0, top + 1)],
        np.float64,
    )


def indices(codes, signed):
    """Return the places of codes in the map."""
    return np.asarray(codes, np.int32) + (127 if signed else 0)


def of_codes(codes, signed):
    return members(signed)[indices(codes, signed)]


def all_codes(signed):
    return (
        jnp.arange(-127, 128, dtype=jnp.int8)
        if signed
        else jnp.arange(256, dtype=jnp.uint8)
    )


def turns(signed):
    """Return where the nearest code changes: half-way between the roots, not between
    the numbers themselves.
    """
    top = 127 if signed else 255
    halves = [2 * c + 1 for c in range(-top if signed else 0, top)]
    return np.array(
        [Fraction(half * abs(half), (2 * top) ** 2) for half in halves], np.float64
    )


def nearest(v, signed):
    """Return the index of the member nearest to `v` (float64); unsigned, that of a
    positive number is not 0.
    """
    index = np.searchsorted(turns(signed), v)
    return index if signed else np.where(v > 0, np.maximum(index, 1), index)


def assert_nearest(codes, v, signed):
    """Accept either neighbour within two millionths of the turn between them, and only
    the nearest one elsewhere.
    """
    chosen, best = indices(codes, signed), nearest(v, signed)
    off = chosen != best
    assert (np.abs(chosen - best)[off] == 1).all()
    turn = turns(signed)[np.minimum(chosen, best)[off]]
    assert (np.abs(v[off] - turn) <= 2e-6 * np.abs(turn)).all(), (v[off], turn)


def quotients(x, scale, block_size):
    """Return `x / scale` in float64, flat; 0 in a block of scale 0."""
    per_number = np.repeat(np.asarray(scale, np.float64), block_size)[: x.size]
    return np.divide(
        x.reshape(-1).astype(np.float64),
        per_number,
        out=np.zeros(x.size),
        where=per_number != 0,
    )


def numbers(seed, blocks, block_size, signed):
    """Return float32 numbers, flat: nine decades within a block, forty between blocks."""
    rng = np.random.default_rng(seed)
    x = 10 ** rng.uniform(-9, 0, (blocks, block_size)) * 10 ** rng.uniform(
        -20, 20, (blocks, 1)
    )
    x = x * rng.choice([-1, 1], x.shape) if signed else x
    return x.reshape(-1).astype(np.float32)


def decoded_map(signed, scale=1):
    """Return what all codes decode to."""
    return jit_decode(
        BlockwiseArray(all_codes(signed), jnp.float32([scale])), 256, signed
    )


def round_trip(x, block_size, signed, seed=None):
    key = None if seed is None else key_of(seed)
    return np.asarray(
        jit_decode(
            jit_encode(jnp.asarray(x, jnp.float32), block_size, signed, key),
            block_size,
            signed,
        )
    )


def with_one_in_front(v, block_size=16):
    """Return numbers from -1 to 1 as blocks whose scale is exactly 1."""
    per_block = block_size - 1
    padded = np.pad(np.asarray(v, np.float32), (0, -len(v) % per_block)).reshape(
        -1, per_block
    )
    return np.pad(padded, ((0, 0), (1, 0)), constant_values=1).reshape(-1)


# --- the map --------------------------------------------------------------------------------------------------------


@both_maps
def test_all_codes_decode_to_the_members_of_the_map_within_an_ulp(signed):
    values, expected = np.asarray(decoded_map(signed)), members(signed)
    assert values.dtype == np.float32
    assert len(set(values.tolist())) == len(expected)
    ulp = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    assert (np.abs(values.astype(np.float64) - expected) <= ulp).all()


# --- the nearest code -----------------------------------------------------------------------------------------------


@both_maps
@pytest.mark.parametrize("block_size", [16, 256, 65536])
def test_encode_gives_the_nearest_member_over_nine_decades(signed, block_size):
    x = numbers(block_size, 2**17 // block_size, block_size, signed)
    codes, scale = jax.tree.map(np.asarray, jit_encode(x, block_size, signed))
    v = quotients(x, scale, block_size)
    assert_nearest(codes, v, signed)
    assert (
        of_codes(codes, signed) > v
    ).mean() > 0.3  # negative control: rounding down would miss these


@both_maps
def test_encode_turns_to_the_next_code_half_way_between_every_two(signed):
    """Look a few millionths beside each turn; the unsigned turn between 0 and the first
    code is at 0.
    """
    turn = turns(signed)
    toward = np.sign(turn) * 5e-6
    for v in (turn * (1 - toward), turn * (1 + toward)):
        codes = np.asarray(jit_encode(with_one_in_front(v), 16, signed).codes)
        inner = codes.reshape(-1, 16)[:, 1:].reshape(-1)[: len(v)]
        np.testing.assert_array_equal(indices(inner, signed), nearest(v, signed))


@both_maps
def test_the_bits_are_the_same_everywhere(signed):
    def both_ways(x):
        coded = encode(x, 256, signed)
        return coded, decode(jax.lax.optimization_barrier(coded), 256, signed)

    rows = jnp.asarray(numbers(1, 16, 256, signed)).reshape(4, 1024)[:, :1000]
    assert_same_bits_everywhere(both_ways, rows, ways=("jit", "scan", "vmap"))


# --- storage --------------------------------------------------------------------------------------------------------


def test_an_array_takes_a_byte_a_number_and_four_a_block():
    for shape in [(1,), (256,), (257,), (7, 50), (0,)]:
        x = jnp.ones(shape, jnp.float32)
        coded = jit_encode(x, 256, True)
        assert coded.codes.shape == shape
        assert (coded.codes.dtype, coded.scale.dtype) == (np.int8, np.float32)
        assert coded.codes.nbytes + coded.scale.nbytes == x.size + 4 * -(-x.size // 256)
        assert_same_bits(jit_decode(coded, 256, True), x)


# --- scales ---------------------------------------------------------------------------------------------------------


@both_maps
@given(bits=hnp.arrays(np.uint32, (4, 16)), small=st.booleans())
def test_the_scale_of_any_32_bits_is_what_comparisons_of_numbers_say(
    signed, bits, small
):
    """Draw NaN, infinities, zeros of both signs and subnormal numbers, which count as
    zero.
    """
    x = (bits & np.uint32(0x80FF_FFFF) if small else bits).view(np.float32)
    for block, scale in zip(
        x, np.asarray(jit_encode(x, 16, signed).scale).reshape(-1), strict=True
    ):
        normal = np.where(np.abs(block) < SMALLEST_NORMAL, np.float32(0), block)
        if not np.isfinite(block).all() or (not signed and (normal < 0).any()):
            assert np.isnan(scale)
        else:
            assert_same_bits(scale, np.abs(normal).max())


def test_the_derivative_of_what_is_decoded_is_zero():
    """As of every rounding, although the scale is a member of its block."""
    slope = jax.jit(jax.grad(lambda x: decode(encode(x, 16, True), 16, True).sum()))
    assert not slope(jnp.arange(16, dtype=jnp.float32)).any()


@both_maps
@pytest.mark.parametrize(
    "scale",
    [LARGEST, 2.0**127, 2.0**126, 2.0**64, BELOW_2_64, 2.0**-110, 2.0**-125, 2.0**-126],
)
def test_scales_at_both_ends_of_float32_give_the_nearest_codes(signed, scale):
    """The reciprocal of the largest scales is subnormal, which is flushed to zero on
    many machines.
    """
    v = np.geomspace(1e-9, 1, 4095) * (
        np.where(np.arange(4095) % 2, 1, -1) if signed else 1
    )
    x = np.append(v * 0.999, 1).astype(np.float32) * np.float32(scale)
    x[(np.abs(x) < 2 * SMALLEST_NORMAL) & (x != np.float32(scale))] = (
        0  # subnormal numbers may count as zero
    )
    coded = jit_encode(x, 4096, signed)
    assert_same_bits(coded.scale, jnp.float32([scale]))
    assert_nearest(np.asarray(coded.codes), quotients(x, coded.scale, 4096), signed)
    decoded = np.asarray(jit_decode(coded, 4096, signed))
    assert decoded[-1] == np.float32(scale)
    assert np.isfinite(decoded).all()


# --- what cannot be held --------------------------------------------------------------------------------------------


keys = pytest.mark.parametrize("seed", [None, 0], ids=["nearest", "stochastic"])


def decoded_middle(x, signed, seed):
    """Return what the second of three blocks becomes; check that the others become what
    they do beside ones.
    """
    beside_ones = np.concatenate([x[:16], np.ones(16, np.float32), x[32:]])
    decoded, expected = (
        round_trip(y, 16, signed, seed).reshape(3, 16) for y in (x, beside_ones)
    )
    assert np.isfinite(decoded[::2]).all()
    assert_same_bits(decoded[::2], expected[::2])
    return decoded[1]


@both_maps
@keys
def test_a_nan_makes_its_block_nan_and_no_other(signed, seed):
    for beside in (1.0, np.inf):
        x = numbers(5, 3, 16, signed)
        x[20], x[25], x[30] = np.nan, beside, 0
        assert np.isnan(decoded_middle(x, signed, seed)).all()


@keys
def test_an_infinity_makes_its_block_nan(seed):
    for signed, infinity in [(True, INF), (True, -INF), (False, INF)]:
        x = numbers(6, 3, 16, signed)
        x[17], x[18], x[19] = LARGEST, 0, infinity
        assert np.isnan(decoded_middle(x, signed, seed)).all()


@keys
def test_a_negative_number_makes_its_block_nan_under_the_unsigned_map(seed):
    for negative in [-1.0, -1e-30, -(2.0**-126), -np.inf]:
        x = numbers(7, 3, 16, False)
        x[20] = negative
        assert np.isnan(decoded_middle(x, False, seed)).all()


# --- at random ------------------------------------------------------------------------------------------------------


@both_maps
def test_at_random_the_mean_over_many_keys_is_the_number(signed):
    """A number with the odds p goes up in `n` codings `n p ± sqrt(n p (1 - p))` times."""
    n, v = 3000, np.random.default_rng(8).uniform(-4 if signed else -4.6, -0.01, 240)
    x = with_one_in_front(
        10**v * np.where(np.arange(240) % 2, -1, 1) if signed else 10**v
    ).astype(np.float32)
    keys = jax.random.split(jax.random.key(9), n)
    decoded = jax.jit(jax.vmap(lambda k: decode(encode(x, 16, signed, k), 16, signed)))(
        keys
    )
    mean, m = np.asarray(decoded, np.float64).mean(0), members(signed)

    inner = np.abs(x) < m[-2]
    x, mean = x[inner].astype(np.float64), mean[inner]
    high = np.searchsorted(m, x)
    odds = (x - m[high - 1]) / (m[high] - m[high - 1])
    x, mean, high, odds = (
        a[(odds > 0.02) & (odds < 0.98)] for a in (x, mean, high, odds)
    )
    assert len(x) > 200
    deviation = np.sqrt(odds * (1 - odds) / n) * (m[high] - m[high - 1])
    z = (mean - x) / deviation
    assert np.abs(z).max() < SIGMAS
    assert 0.5 < np.mean(z**2) < 1.5
    control = (
        m[nearest(x, signed)] - x
    ) / deviation  # negative control: the nearest member
    assert np.mean(control**2) > 100


@both_maps
@pytest.mark.parametrize("seed", range(3))
def test_at_random_every_number_becomes_one_of_its_two_neighbours(signed, seed):
    """A number close to a code counts as that code. Unsigned, a positive number does
    not become zero.
    """
    x = numbers(10 + seed, 256, 256, signed)
    codes, scale = jit_encode(x, 256, signed, key_of(seed))
    v, m, chosen = quotients(x, scale, 256), members(signed), indices(codes, signed)
    low = np.searchsorted(m, v - 1e-6 * np.abs(v), side="right") - 1
    high = np.searchsorted(m, v + 1e-6 * np.abs(v), side="left")
    low = np.maximum(low, 0 if signed else (v > 0).astype(int))
    assert ((low <= chosen) & (chosen <= np.maximum(high, low))).all()
    assert 0.02 < (chosen != nearest(v, signed)).mean() < 0.5


@both_maps
def test_at_random_equal_keys_give_equal_codes_eagerly_and_under_jit_and_other_keys_others(
    signed,
):
    """Look at members, whose odds are 0 or 1 but for a rounding, and at numbers of all
    magnitudes.
    """
    x = jnp.concatenate(
        [decoded_map(signed), jnp.asarray(numbers(13, 4, 256, signed)[:1000])]
    )
    first, other = (jit_encode(x, 256, signed, key_of(k)) for k in (0, 1))
    assert_same_bits(encode(x, 256, signed, key_of(0)), first)
    assert_same_bits(other.scale, first.scale)
    assert (np.asarray(other.codes) != np.asarray(first.codes)).mean() > 0.03


# --- the format -----------------------------------------------------------------------------------------------------


def test_other_block_sizes_than_powers_of_two_from_16_to_65536_and_other_signs_than_booleans_are_refused():
    assert [Blockwise8bit(2**i).block_size for i in range(4, 17)] == [
        2**i for i in range(4, 17)
    ]
    for size in [0, 8, 100, 2**17, -256, True, 256.0, "256", None]:
        message = (
            "`Blockwise8bit`: `block_size` must be a power of two from 16 to 65,536,"
            f" but got {size!r}."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            Blockwise8bit(block_size=size)
    for signed in (0, 1, "yes"):
        with pytest.raises(TypeError, match="`signed` must be True, False or None"):
            Blockwise8bit(signed=signed)


SHAPES = [(3, 256), (3, 100), (16, 1024), (2, 8, 1024), (4096,), (1024, 8), ()]
SHAPES_AND_SIZES = [(shape, 128) for shape in SHAPES] + [
    (shape, size) for shape in SHAPES[1:3] for size in (16, 1024)
]


@pytest.mark.parametrize(("shape", "block_size"), SHAPES_AND_SIZES, ids=str)
def test_blocks_follow_the_order_of_the_elements_whatever_the_shape(shape, block_size):
    """Some of these arrays are seen in the tiles of a TPU."""
    x = numbers(4, 2**15 // block_size, block_size, True)[: int(np.prod(shape))]
    # As many blocks for all shapes.
    alone = encode_each(np.pad(x, (0, 2**15 - x.size)).reshape(-1, block_size, 1))
    coded = jit_encode(x.reshape(shape), block_size, True)
    assert_same_bits(
        coded.scale.reshape(-1), alone.scale.reshape(-1)[: -(-x.size // block_size)]
    )
    assert_same_bits(coded.codes.reshape(-1), alone.codes.reshape(-1)[: x.size])
    assert_same_bits(
        jit_decode(coded, block_size, True).reshape(-1),
        decode_each(*alone).reshape(-1)[: x.size],
    )


# Many devices.


@pytest.mark.parametrize(
    "shape", [(64, 2304), (16, 1600), (2, 8, 192), (320,)], ids=str
)
@pytest.mark.parametrize("format", [Blockwise8bit(), Blockwise4bit(64)], ids=str)
def test_blocks_that_reach_over_devices_have_the_bits_of_one_device(format, shape):
    """Of 2,304 columns a device has 288, whose blocks of 256 consist of units of 32:
    the largest of each is sent.
    """
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def coded(devices):
        mesh = jax.make_mesh(
            (devices,),
            ("data",),
            (AxisType.Auto,),
            devices=jax.devices("cpu")[:devices],
        )
        with jax.set_mesh(mesh):
            columns = jax.device_put(x, P(*[None] * (len(shape) - 1), "data"))
            codes, scales = jax.jit(lambda x: format.encode(x))(columns)
            return jax.tree.map(
                np.asarray, (codes, scales, jax.jit(format.decode)(codes, scales))
            )

    divided, whole = coded(8), coded(1)
    assert_same_bits(divided, whole)
    of_blocks = np.pad(np.abs(x).reshape(-1), (0, -x.size % format.block_size)).reshape(
        -1, format.block_size
    )
    assert (divided[1].reshape(-1) == of_blocks.max(1)).all()


def test_columns_of_an_exported_program_may_be_symbols():
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(Blockwise8bit().encode))(
        jax.ShapeDtypeStruct((4, 64 * n), jnp.float32)
    )
    x = np.random.default_rng(0).normal(size=(4, 192)).astype(np.float32)
    assert_same_bits(exported.call(x), Blockwise8bit().encode(x))
