"""Settings of the whole suite: eight CPU devices, no network of caches, names that doctests may use."""

import gc
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx

hypothesis.settings.register_profile("mpx", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("mpx")

gc.set_threshold(100_000, 50, 100)  # tracing makes many objects and little garbage; a search takes 7% of the time


@pytest.fixture(autouse=True)
def names_for_doctests(doctest_namespace):
    """Examples in docstrings begin where a user's file has its imports behind it."""
    public = {name: getattr(mpx, name) for name in dir(mpx) if not name.startswith("_")}
    formats = {name: getattr(mpx.formats, name) for name in dir(mpx.formats) if not name.startswith("_")}
    doctest_namespace.update(formats | public | {"mpx": mpx, "jax": jax, "jnp": jnp, "np": np, "optax": optax})
