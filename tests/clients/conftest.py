"""Other people's libraries promote dtypes as JAX does by default, and use what their dependencies deprecate."""

import pytest


def pytest_configure(config):
    """Make errors of all warnings but these."""
    for kind in ("DeprecationWarning", "FutureWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")


@pytest.fixture(autouse=True)
def strict_promotion():
    """Stand in place of the strict modes of mpx's own tests."""
