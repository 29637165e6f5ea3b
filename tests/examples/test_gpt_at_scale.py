"""The plan on paper: its table is what the code counts."""

from pathlib import Path

import pytest

from examples.gpt import at_scale

PLAN = Path(at_scale.__file__).with_name("AT_SCALE.md")

pytestmark = pytest.mark.optax_promotion


def test_the_plan_shows_what_is_counted():
    lines = PLAN.read_text().splitlines()
    for row in [at_scale.HEADER, *at_scale.rows()]:
        assert f"| {' | '.join(row)} |" in lines


def test_a_parameter_takes_the_bytes_of_the_design():
    """2 for a bfloat16 parameter and 12, 10, 4 + 4/256 x 2 for its optimizer state, but for small leaves."""
    elements = at_scale.costs("bf16-split").gradients / 4
    for recipe, expected in (
        ("bf16-masters", 12),
        ("bf16-split", 10),
        ("bf16-split-8bit", 4.03125),
        ("bf16-kahan", 10),
    ):
        assert at_scale.costs(recipe).undivided / elements == pytest.approx(expected, rel=1e-3)
        assert at_scale.costs(recipe).parameters / elements == 2


def test_the_state_is_divided_among_all_gpus_but_for_a_thousandth():
    for recipe in at_scale.RECIPES:
        cost = at_scale.costs(recipe)
        assert cost.optimizer == pytest.approx(cost.undivided / at_scale.DATA, rel=1e-3)
