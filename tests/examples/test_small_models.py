"""The examples of Flax Linen and Equinox run, and their tables say what their titles
claim.
"""

import pytest

from examples import digits_linen, equinox_regression

pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained


def test_every_recipe_learns_the_digits_about_as_well_as_float32():
    """Of ten digits one in ten is right by chance."""
    accuracies = digits_linen.main(epochs=3)
    assert list(accuracies) == list(digits_linen.RECIPES)
    assert accuracies["f32"] > 80
    for accuracy in accuracies.values():
        assert abs(accuracy - accuracies["f32"]) < 3


def test_plain_bfloat16_stalls_where_kahan_summation_and_split_masters_follow_float32():
    losses = equinox_regression.main(steps=600)
    float32 = losses["f32"]
    assert losses["bf16-naive"] > 1.5 * float32
    assert losses["bf16-kahan"] < 1.15 * float32
    assert losses["bf16-split"] < 1.05 * float32
