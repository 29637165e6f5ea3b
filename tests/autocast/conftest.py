"""Tests of autocast differentiate float16 functions of numbers that float16 has,
without a loss scale.
"""

import warnings

import pytest


@pytest.fixture(autouse=True)
def float16_without_a_scale():
    warnings.filterwarnings(
        "ignore", ".* is differentiated without a loss scale", UserWarning
    )
