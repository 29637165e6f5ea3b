"""The Equinox example runs, and its table says what its title claims."""

import pytest

from examples import equinox_regression

pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained


def test_plain_bfloat16_stalls_where_kahan_summation_and_split_masters_follow_float32():
    losses = equinox_regression.main(steps=600)

    float32 = losses["f32"]
    assert losses["bf16-naive"] > 1.5 * float32
    assert losses["bf16-kahan"] < 1.15 * float32
    assert losses["bf16-split"] < 1.05 * float32
