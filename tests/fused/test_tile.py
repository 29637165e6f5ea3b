"""Check what a kernel computes otherwise than XLA does, against XLA."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from mpx._fused.tile import _rounded
from tests.helpers import assert_same_bits

EDGES = np.array(
    [0, 0.5, 1, 1.5, 2, 2.5, 3, 2**23 - 0.5, 2**23, 2**24, 2**31, 3e38, np.inf],
    np.float32,
)
NEAR_EDGES = np.concatenate(
    [EDGES, np.nextafter(EDGES, np.float32(0)), np.nextafter(EDGES, np.float32(np.inf))]
)
NUMBERS = {
    "float16": np.arange(2**16, dtype=np.uint16).view(np.float16),
    "bfloat16": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16),
    "float32": np.concatenate([NEAR_EDGES, -NEAR_EDGES, np.float32([np.nan, 1e-30])]),
}


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("method", lax.RoundingMethod)
def test_rounding_to_integers_is_that_of_xla(method, dtype):
    """Of every number of 16 bits, with signs of zero; which NaN comes out is not
    compared.
    """
    x = NUMBERS[dtype]
    actual, expected = (
        np.asarray(rounded(jnp.asarray(x), method)) for rounded in (_rounded, lax.round)
    )
    is_number = ~np.asarray(jnp.isnan(jnp.asarray(x)))
    assert_same_bits(actual[is_number], expected[is_number])
    assert jnp.isnan(jnp.asarray(actual[~is_number])).all()


def test_rounding_half_to_even_is_not_rounding_half_up():
    """Compare with `floor(x + 0.5)`, the negative control."""
    x = jnp.asarray(EDGES)
    assert (
        jnp.floor(x + 0.5) != lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    ).any()
