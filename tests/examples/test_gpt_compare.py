"""The comparison of recipes on a small GPT: its command line, its files, and what it promises about data."""

import io
import itertools

import numpy as np
import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from rich.console import Console
from typer.testing import CliRunner

from examples.gpt import compare, report
from examples.gpt.recipes import RECIPES

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = pytest.mark.optax_promotion


def test_random_batches_depend_on_the_seed_and_fixed_ones_on_nothing():
    text = np.arange(100_000)
    batches = lambda seed: np.stack([*compare.random_batches(text, seed=seed, count=5)])
    np.testing.assert_array_equal(batches(1), batches(1))
    assert not np.array_equal(batches(1), batches(2))
    fixed = compare.fixed_batches(text)
    assert (batches(1).shape, fixed.shape) == ((5, 8, 65), (16, 8, 65))
    for made in (batches(1), fixed):
        np.testing.assert_array_equal(made - made[..., :1], np.broadcast_to(np.arange(65), made.shape))
    assert (fixed[0, 0, 0], fixed[-1, -1, -1]) == (0, 99_999)


def test_the_held_out_part_is_never_trained_on_and_comes_from_all_over_the_text():
    training, held_out = compare.split(np.arange(1000))
    assert sorted([*training, *held_out]) == list(range(1000))
    assert np.histogram(held_out, 10, (0, 1000))[0].tolist() == [10] * 10


def finished_run(recipe, seed=0, loss=2.4, size=(2.0, 2.0, 12.0)):
    """Return a run as `train_recipe` does."""
    size = dict(zip(("parameters", "gradients", "optimizer state"), size, strict=True))
    return report.Run(recipe, seed, size, loss, [2, 4], [loss, loss], 3)


def test_gaps_are_to_f32_of_the_same_seed_and_means_of_the_seeds_that_all_have():
    naive = [finished_run("bf16-naive", seed=seed, loss=2.75) for seed in range(2)]
    references = [finished_run("f32", seed=seed, loss=2.5 - seed) for seed in range(3)]
    found = report.Comparison([*references, *naive])
    assert [found.gaps(run)[-1] for run in naive] == [0.25, 1.25]
    assert (found.gap("bf16-naive"), found.gap("f32"), found.deviation) == (0.75, 0, 1)
    assert found.mean("f32", lambda run: run.validation_losses[-1]) == 2.0
    alone = report.Comparison([*references, naive[0], finished_run("fp8", loss=float("nan"))])
    assert alone.gap("bf16-naive") == 0.25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "short"], "it has 10 bytes, and at least 10,000 are needed"),
        (["--recipes", "f32,bf17"], f"no recipe is called 'bf17'; there are {', '.join(compare.ALL_NAMES)}"),
        (["--recipes", "f32"], "choose at least one recipe to compare with f32"),
        (["--learning-rate", "nan"], "must be positive, but is nan"),
        (["--seeds", "1"], "Invalid value"),
        (["--out", "/dev/null"], "/dev/null"),
    ],
)
def test_a_bad_option_is_refused_at_once(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_bytes(b"too little")
    result = CliRunner().invoke(compare.app, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_the_comparison_says_which_run_of_how_many_it_is_at_and_how_long_it_may_take(tmp_path, monkeypatch):
    finished = lambda recipe, count, *_: (finished_run(recipe.name, seed, 2.4 + seed / 10) for seed in range(count))
    monkeypatch.setattr(compare, "train_recipe", finished)
    (tmp_path / "a.txt").write_text("text\n" * 5000)
    options = ["--text", str(tmp_path / "a.txt"), "--recipes", "bf16-split", "--out", str(tmp_path)]
    lines = CliRunner().invoke(compare.app, options).output.splitlines()
    assert lines[1] == "run 1 of 4: f32, seed 0: validation loss 2.4000; about 1 min to go"
    assert lines[4] == "run 4 of 4: bf16-split, seed 0: validation loss 2.4000"


def test_the_table_fits_a_terminal_of_80_columns_and_there_are_pictures_of_all_recipes(tmp_path):
    """The standard deviation of 2.4 and 2.5 is 0.1 / sqrt(2). A loss that is not a number has no dot.

    No label lies over another.
    """
    losses = {recipe.name: 2.4 + index / 10 for index, recipe in enumerate(RECIPES)} | {"fp8": float("nan")}
    runs = [finished_run(name, loss=loss) for name, loss in losses.items()]
    comparison = report.Comparison([*runs, finished_run("f32", seed=1, loss=2.5)])
    console = Console(width=80, file=io.StringIO())
    console.print(report.table(comparison))
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "f32 16.0 2.0 2.0 12.0 2.4000 2.4000 - - 3" in lines
    assert "tf32 16.0 2.0 2.0 12.0 2.5000 2.5000 +0.1000 +1.41 3" in lines
    assert not any("…" in line for line in lines)
    figure = report.draw_precision(comparison)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert len(boxes) > 2 * len(RECIPES) - 2
    assert not [pair for pair in itertools.combinations(boxes, 2) if Bbox.intersection(*pair)]
    report.write(tmp_path, comparison)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "precision.json", "precision.png"]
