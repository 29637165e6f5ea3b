"""What several tests of the examples need."""

import gc

import pytest


@pytest.fixture
def collected():
    """Warnings of what a test leaves unused come in that test, once nothing of it holds an exception any more."""
    yield
    gc.collect()
