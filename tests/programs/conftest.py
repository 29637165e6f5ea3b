"""Programs that others write promote dtypes and ranks as JAX does by default."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion():
    """Replace the strict modes of all other tests by JAX's own."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
