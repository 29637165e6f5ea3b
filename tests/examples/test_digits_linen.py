"""The digits example runs, and its recipes learn as float32 does."""

import numpy as np
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


def test_without_training_no_recipe_is_better_than_chance():
    """The negative control: what the example prints comes from its steps."""
    _, (images, labels) = digits_linen.load_data()
    for recipe in digits_linen.RECIPES:
        policy, state = digits_linen.make_state(recipe)
        predicted = digits_linen.predict(policy, state, images)
        assert 100 * np.mean(predicted == labels) < 3 * CHANCE
