"""Compile for devices that are not here."""

import importlib.util

import jax
import pytest

from mpx.tools.program.targets import target_devices


@pytest.fixture(scope="session")
def h200():
    """Return eight GPUs to compile for."""
    if not any(
        importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)
    ):
        pytest.skip('the compiler for GPUs is missing: pip install ".[compiler]"')
    return target_devices("h200", 8)


@pytest.fixture(scope="session")
def v5e():
    """Return a TPU to compile for."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip('the compiler for TPUs is missing: pip install "jax[tpu]"')
    return target_devices("v5e", 1)


@pytest.fixture(autouse=True)
def computed_on_the_cpu():
    """Compute on the CPU on a machine with a GPU too."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield
