"""Compile for a GPU that is not here. JAX reads the leave to do so when it starts."""

import importlib.util

import pytest

from mpx.tools.program.targets import allow_targets, target_devices

allow_targets()


def pytest_collection_modifyitems(items):
    """Skip what compiles for a GPU where the compiler for one is missing."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        for item in items:
            if "gpu_program" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason='the compiler for GPUs is missing: pip install ".[cuda12]"'))


@pytest.fixture(scope="session")
def h200():
    """Return eight GPUs to compile for."""
    return target_devices("h200", 8)
