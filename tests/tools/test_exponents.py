"""Counts of numbers by fate and by exponent, against casts and `frexp` on the host."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpx.monitor import fates

FORMATS = [
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
]


def floats_around_every_number(dtype):
    """Return all numbers of a format in float32, the midpoints between them, and the
    float32 neighbors of both.
    """
    width = np.dtype(dtype).itemsize * 8
    numbers = (
        np.arange(2**width, dtype=np.uint64)
        .astype(f"u{width // 8}")
        .view(dtype)
        .astype(np.float32)
    )
    ordered = np.unique(np.abs(numbers[np.isfinite(numbers)]))
    # Where the next number would be.
    beyond = 2 * ordered[-1].astype(np.float64) - ordered[-2]
    middles = (np.append(ordered, beyond).astype(np.float64)[1:] + ordered) / 2
    points = np.concatenate(
        [numbers, ordered, middles.astype(np.float32), np.float32([2.0**-149, 3e38])]
    )
    bits = points.view(np.uint32)
    return np.concatenate([bits, bits + np.uint32(1), bits - np.uint32(1)]).view(
        np.float32
    )


histogram = jax.jit(lambda x: fates.count(fates.exponents_of(x), 279))
fates_of = jax.jit(fates.fates_of)


def masks(x, dtype):
    """Return masks of the numbers that become zero, subnormal, normal, infinite, or are
    not finite themselves.
    """
    kinds = np.asarray(fates_of(x, fates.edges_of(np.dtype(dtype))))
    return [kinds == kind for kind in range(1, 6)]


def test_the_fate_of_a_number_is_what_a_cast_on_the_host_makes_of_it():
    for dtype in FORMATS:
        x = floats_around_every_number(dtype)
        with np.errstate(all="ignore"):
            cast = np.abs(x.astype(dtype).astype(np.float64))
        counted = np.isfinite(x) & (x != 0)
        smallest_normal = float(ml_dtypes.finfo(dtype).smallest_normal)
        normal = (cast >= smallest_normal) & np.isfinite(cast)
        expected = [
            cast == 0,
            (cast > 0) & (cast < smallest_normal),
            normal,
            ~np.isfinite(cast),
        ]
        np.testing.assert_array_equal(
            masks(x, dtype), [*(expected & counted), ~np.isfinite(x)]
        )


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"]
)
def test_the_histogram_of_every_16_bit_number_is_that_of_frexp(dtype):
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):  # of NaN
        wide = x.astype(np.float64)
    used = np.isfinite(wide) & (wide != 0)
    zeros, *counts, nonfinite = np.asarray(histogram(jnp.asarray(x))[0])
    np.testing.assert_array_equal(
        counts, np.bincount(np.frexp(wide[used])[1] - 1 + 149, minlength=277)
    )
    assert (zeros, nonfinite) == ((wide == 0).sum(), (~np.isfinite(wide)).sum())


def test_every_power_of_two_of_float32_and_the_number_below_it_are_counted_at_their_exponents():
    powers = np.ldexp(1.0, np.arange(-149, 128)).astype(np.float32)
    below = (powers.view(np.uint32) - np.uint32(1)).view(np.float32)
    np.testing.assert_array_equal(histogram(-powers)[0], [0] + [1] * 277 + [0])
    np.testing.assert_array_equal(histogram(below)[0], [1] * 277 + [0, 0])


@pytest.mark.parametrize("limit", [10, 50, 400])
def test_more_numbers_than_can_be_counted_are_counted_by_rows(monkeypatch, limit):
    """The limit is lowered: an array of 2**32 numbers is too large for a test."""
    monkeypatch.setattr(fates, "_COUNTED", limit)
    x = np.random.default_rng(0).integers(0, 6, (6, 3, 20))
    expected = [(x == kind).sum() for kind in range(6)]
    for kinds in (6, 279):  # by a pass for each kind, and by a scatter
        parts = fates.count(jnp.asarray(x, jnp.int32), kinds)
        assert parts.shape == ({10: 6 * 3 * 20, 50: 6 * 3, 400: 1}[limit], kinds)
        total = np.asarray(parts).sum(axis=0)
        assert total[:6].tolist() == expected
        assert not total[6:].any()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_array_is_counted_where_it_lies(kind):
    x = np.exp2(np.arange(64.0) - 32).astype(np.float32).reshape(16, 4)
    mesh = jax.make_mesh(
        (8,), ("data",), axis_types=(kind,), devices=jax.devices("cpu")
    )
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    counted = histogram.lower(sharded).compile()
    np.testing.assert_array_equal(
        counted(sharded)[0, 1:-1], [-32 <= e < 32 for e in fates.EXPONENTS]
    )
    assert "all-gather" not in counted.as_text()
