"""Check `Blockwise4bit`: its map, two codes a byte, what is rounded at random.

Scales and blocks are those of `Blockwise8bit`, which has tests of its own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx._stored.blocks import packed, unpacked
from tests.helpers import assert_same_bits, assert_same_bits_everywhere

FORMAT = mpx.Blockwise4bit(16)
MEMBERS = np.sign(np.arange(-7, 8)) * (np.arange(-7, 8) / 7.0) ** 2
KEY = jax.random.split(jax.random.key(0))[0]  # its data are random
round_trip = jax.jit(lambda x, key=None: FORMAT.decode(*FORMAT.encode(x, key)))


def numbers(seed, shape=(64, 32)):
    """Return normal numbers; blocks have other sizes."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 10 ** rng.uniform(-6, 2, (*shape[:-1], 1))).astype(
        np.float32
    )


def over_the_largest(x):
    """Return numbers over the largest magnitude of their block, `[blocks, 16]`."""
    blocks = np.asarray(x, np.float64).reshape(-1, 16)
    return blocks / np.abs(blocks).max(axis=1, keepdims=True)


def test_each_byte_holds_two_neighbours_the_first_in_its_low_bits():
    pairs = (
        np.stack(np.meshgrid(np.arange(-8, 8), np.arange(-8, 8), indexing="ij"), -1)
        .reshape(2, -1)
        .astype(np.int32)
    )
    bytes_ = packed(jnp.asarray(pairs))
    assert (bytes_.dtype, bytes_.shape) == (np.uint8, (2, 128))
    np.testing.assert_array_equal(
        bytes_, (pairs[:, ::2] & 15) | (pairs[:, 1::2] & 15) << 4
    )
    np.testing.assert_array_equal(unpacked(bytes_), pairs)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (4, 0)])
def test_an_array_without_elements_has_no_codes_and_comes_back(shape):
    codes, scales = jax.eval_shape(FORMAT.encode, jnp.zeros(shape, jnp.float32))
    assert (codes.size, scales.size) == (0, 0)
    assert jax.eval_shape(FORMAT.decode, codes, scales).shape == shape


def test_numbers_become_members_of_the_map_and_the_largest_of_a_block_stays_exact():
    x = numbers(0)
    for key in (None, KEY):
        found = over_the_largest(round_trip(x, key))
        assert np.abs(found[..., None] - MEMBERS).min(axis=-1).max() < 1e-6
        largest = np.abs(over_the_largest(x)) == 1
        np.testing.assert_array_equal(
            np.asarray(round_trip(x, key)).reshape(-1, 16)[largest],
            x.reshape(-1, 16)[largest],
        )


def test_at_random_a_number_becomes_one_of_its_two_neighbours_and_is_right_in_the_mean():
    x, count = numbers(1, (4, 16)), 4000
    keys = jax.random.split(jax.random.key(0), count)
    many = np.asarray(jax.vmap(lambda key: round_trip(x, key))(keys), np.float64)
    mean, v = many.mean(0), over_the_largest(x)
    low = MEMBERS[np.searchsorted(MEMBERS, v, side="right").clip(1, 14) - 1]
    high = MEMBERS[np.searchsorted(MEMBERS, v, side="right").clip(1, 14)]
    scale = np.abs(x).max(axis=1, keepdims=True)
    assert (many >= (low - 1e-6) * scale).all()
    assert (many <= (high + 1e-6) * scale).all()
    deviation = np.sqrt(np.maximum((v - low) * (high - v), 1e-4) / count) * scale
    assert np.abs((mean - x) / deviation).max() < 6
    # To nearest: negative control.
    assert np.abs((np.asarray(round_trip(x)) - x) / deviation).max() > 20


def test_coding_again_changes_nothing():
    for shape in ((64, 32), (3, 5), (7,), ()):
        once = round_trip(
            np.asarray(
                numbers(2, (64, 32)).reshape(-1)[: int(np.prod(shape))].reshape(shape)
            )
        )
        assert_same_bits(round_trip(once), once)
        assert_same_bits(round_trip(once, KEY), once)


@pytest.mark.parametrize(
    ("shape", "dtype", "codes"),
    [
        ((64, 128), "uint8", (64, 64)),
        ((3, 5), "int8", (3, 5)),
        ((10,), "uint8", (5,)),
        ((), "int8", ()),
    ],
)
def test_two_codes_share_a_byte_if_rows_are_even(shape, dtype, codes):
    stored, _ = jax.eval_shape(mpx.Blockwise4bit().encode, jnp.ones(shape, jnp.float32))
    assert (stored.dtype, stored.shape) == (dtype, codes)


def test_what_is_not_finite_makes_its_block_nan():
    x = numbers(3)
    x[0, 3], x[1, 20], x[2, 5] = np.nan, np.inf, -np.inf
    found = np.asarray(round_trip(x, KEY))
    assert np.isnan(found[0, :16]).all()
    assert np.isnan(found[1, 16:]).all()
    assert np.isnan(found[2, :16]).all()
    assert np.isfinite(found[3:]).all()


def test_the_bits_are_the_same_everywhere():
    encode = lambda x: FORMAT.encode(x, KEY)
    assert_same_bits_everywhere(
        encode,
        jnp.asarray(numbers(4, (2, 48))),
        ways=("jit", "scan", "vmap", "64 bits"),
    )


@pytest.mark.optax_promotion
def test_other_leaves_in_16_bits_stay_rounded_to_nearest_beside_it():
    params = {"w": jnp.asarray(numbers(5, (64, 128)))}
    trained = {}
    for name, key in (("a", jax.random.key(0)), ("b", jax.random.key(1))):
        formats = {"mu": mpx.Blockwise4bit(), "nu": "bf16"}
        tx = mpx.low_precision_state(optax.adam(1e-3), formats, key=key)
        _, trained[name] = jax.jit(tx.update)(params, tx.init(params), params)
    first, second = (
        {name: optax.tree.get(trained[name], field)["w"] for name in "ab"}
        for field in ("mu", "nu")
    )
    assert_same_bits(second["a"], second["b"])
    assert (np.asarray(first["a"].codes) != np.asarray(first["b"].codes)).mean() > 0.3
