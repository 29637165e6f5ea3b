"""Other people's libraries promote dtypes as JAX does by default, and use what their
dependencies deprecate.
"""

import importlib.util

import pytest

if importlib.util.find_spec("maxtext"):
    from tests.clients import (
        stand_ins as stand_ins,
    )  # for what they import and do not use
else:
    collect_ignore = [
        "test_language_models.py"
    ]  # they have an environment of their own: see the README here


def pytest_configure(config):
    """Make errors of all warnings but these."""
    for kind in ("DeprecationWarning", "FutureWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")
    config.addinivalue_line(
        "filterwarnings", "ignore:. is not of type float64"
    )  # of GPJax


@pytest.fixture(autouse=True)
def strict_promotion():
    """Stand in place of the strict modes of mpx's own tests."""
