"""Other people's libraries promote dtypes as JAX does by default, and use what their
dependencies deprecate.
"""

import importlib.util

import pytest

if importlib.util.find_spec("maxtext"):
    # For what they import and do not use.
    from tests.clients import (
        stand_ins as stand_ins,
    )
else:
    # They have an environment of their own: see the README here.
    collect_ignore = ["test_language_models.py"]


def pytest_configure(config):
    """Make errors of all warnings but these."""
    for kind in ("DeprecationWarning", "FutureWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")
    # Of GPJax.
    config.addinivalue_line("filterwarnings", "ignore:. is not of type float64")


@pytest.fixture(autouse=True)
def strict_promotion():
    """Stand in place of the strict modes of mpx's own tests."""
