"""Let arrays of a few tiles be large, so that kernels are interpreted quickly."""

import pytest

from mpx._fused import partition
from tests.fused.helpers import LARGE


@pytest.fixture(autouse=True)
def small_is_smaller(monkeypatch):
    monkeypatch.setattr(partition, "SMALL", LARGE)
