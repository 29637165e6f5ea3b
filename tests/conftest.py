"""Strict modes for the tests: what mpx does must not lean on implicit promotion."""

import jax
import pytest

# Their libraries are the extra `clients`, in an environment of their own: `.ci/run`
# names the folder, which runs it.
collect_ignore = ["clients"]


@pytest.fixture(autouse=True)
def strict_promotion(request):
    """Dtypes and ranks are never promoted in silence, except in tests marked
    `optax_promotion`.

    `optax.apply_updates` and many of Optax's rules add arrays of two dtypes; what runs
    them needs the mark.
    """
    dtype_promotion = (
        "standard" if request.node.get_closest_marker("optax_promotion") else "strict"
    )
    with jax.numpy_dtype_promotion(dtype_promotion), jax.numpy_rank_promotion("raise"):
        yield
