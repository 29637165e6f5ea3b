"""Check the benchmark of parity at size: a run is that of the comparison, and its table
and picture are made of rows.
"""

import json

import pytest
import typer

from benchmarks import parity_at_size
from examples.gpt import compare
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters

pytestmark = pytest.mark.optax_promotion


def row(recipe, seed, *losses):
    held = {"parameters": 2.0, "gradients": 2.0, "optimizer state": 12.0}
    steps = list(range(1, 1 + len(losses)))
    row = {"recipe": recipe, "seed": seed, "bytes_per_parameter": held}
    row |= {"training_loss": 2.4, "validation_steps": steps, "skipped_steps": 0}
    return row | {"validation_losses": list(losses)}


ROWS = [
    row("f32", 0, 3.0, 2.0),
    row("bf16-naive", 0, 3.2, 2.5),
    row("f32", 1, 3.0, 2.2),
]


def trained(function, arguments, *, timeout):
    """Answer as a worker would; one recipe fails."""
    assert function == "benchmarks.parity_at_size:measure"
    if arguments["recipe"] == "fp8":
        return [{"failed": "no FP8"}]
    return [row(arguments["recipe"], arguments["seed"], 3.0, 2.0 + arguments["seed"])]


def test_gaps_are_to_float32_of_the_same_seed_in_spreads():
    """The deviation of 2.0 and 2.2 is 0.1414, and 0.5 is 3.54 times as much."""
    (sheet,) = parity_at_size.sheets(ROWS)
    printed = sheet.markdown()
    assert "Parity of the recipes, spread 0.1414" in printed
    assert "| bf16-naive | 0 | 16.0 | 2.4000 | 2.5000 | +0.5000 | +3.54 |" in printed
    assert "| f32 | 1 | 16.0 | 2.4000 | 2.2000 | +0.0000 | +0.00 |" in printed
    (alone,) = parity_at_size.sheets(ROWS[1:2])  # nothing to compare it with
    assert "| 2.5000 | +nan | +nan |" in alone.markdown()


def test_what_was_found_is_drawn(tmp_path, capsys):
    units = {
        str(i): {"table": "parity", "status": "done", "rows": [row]}
        for i, row in enumerate(ROWS)
    }
    units["failed"] = {"table": "parity", "status": "failed", "rows": [{"failed": ""}]}
    units["other"] = {"table": "ladder", "status": "done", "rows": [{"ms": 1.0}]}
    (tmp_path / "found.json").write_text(json.dumps({"units": units}))
    picture = tmp_path / "parity.png"
    parity_at_size.main(found=tmp_path, out=picture)
    assert "| bf16-naive |" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_all_are_trained_but_a_picture_needs_two_seeds(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(parity_at_size, "run_worker", trained)
    parity_at_size.main(steps=2, out=tmp_path / "parity.png")
    printed = capsys.readouterr().out
    assert "fp8, seed 0: no FP8" in printed
    assert "| f32 | 2 |" in printed
    monkeypatch.setattr(parity_at_size, "RUNS", parity_at_size.RUNS[:-2])
    with pytest.raises(
        typer.BadParameter, match=r"f32 from seeds 0 and 1, but .* \[0\]"
    ):
        parity_at_size.main(steps=2, out=tmp_path / "parity.png")


@pytest.mark.slow
def test_a_run_is_that_of_the_comparison():
    """Negative control: another seed."""
    (found,) = parity_at_size.measure("bf16-split", "smallest", steps=3, seed=1)
    parts = compare.split(compare.read_text(None, parity_at_size.TEXT_BYTES))
    recipe, hyperparameters = get_recipe("bf16-split"), Hyperparameters(3, 3e-4)
    other, expected = compare.train_recipe(recipe, range(2), hyperparameters, *parts)
    assert json.loads(json.dumps(found)) == found
    assert found["validation_steps"] == [1, 2, 3]
    assert found["validation_losses"] == expected.validation_losses
    assert found["validation_losses"] != other.validation_losses
