"""The digits example runs, and its recipes learn as float32 does."""

import pytest

from examples import digits_linen

pytestmark = [pytest.mark.optax_promotion, pytest.mark.slow]  # real models are trained

CHANCE = 10.0  # per cent: ten digits


def test_every_recipe_learns_the_digits_about_as_well_as_float32():
    accuracies = digits_linen.main(epochs=3)

    assert list(accuracies) == list(digits_linen.RECIPES)
    assert accuracies["f32"] > 8 * CHANCE
    for accuracy in accuracies.values():
        assert abs(accuracy - accuracies["f32"]) < 3
