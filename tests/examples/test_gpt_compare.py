"""The comparison of recipes on a small GPT: what the command prints and writes. No
model is trained.
"""

import pytest
from typer.testing import CliRunner

from examples.gpt import compare, report

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = pytest.mark.optax_promotion


def test_the_comparison_says_which_run_it_is_at_and_writes_its_table_and_pictures(
    tmp_path, monkeypatch
):
    def finished(recipe, seeds, *_, **sizes):
        size = {"parameters": 2.0, "gradients": 2.0, "optimizer state": 12.0}
        return (
            report.Run(recipe.name, seed, size, 2.4, [2, 4], [2.4 + seed / 10] * 2, 3)
            for seed in seeds
        )

    monkeypatch.setattr(compare, "train_recipe", finished)
    (tmp_path / "a.txt").write_text("text\n" * 5000)
    options = [
        "--text",
        str(tmp_path / "a.txt"),
        "--recipes",
        "bf16-split",
        "--out",
        str(tmp_path),
    ]
    lines = CliRunner().invoke(compare.app, options).output.splitlines()
    assert (
        lines[1] == "run 1 of 4: f32, seed 0: validation loss 2.4000; about 1 min to go"
    )
    assert lines[4] == "run 4 of 4: bf16-split, seed 0: validation loss 2.4000"
    assert {"curves.png", "precision.json", "precision.png"} < {
        path.name for path in tmp_path.iterdir()
    }
