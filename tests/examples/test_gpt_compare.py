"""The comparison of recipes on a small GPT: its command line, its files, and what it promises about data."""

import io
import json
import re

import jax
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from examples.gpt import compare, pictures, report
from examples.gpt.model import Config
from examples.gpt.recipes import RECIPES, get_recipe

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = pytest.mark.optax_promotion

NANO = Config(width=32, depth=1, heads=2, context=64, vocabulary=256)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text that is long enough\n" % number for number in range(400)))
    return path


def run(*arguments):
    return CliRunner().invoke(compare.app, [str(argument) for argument in arguments])


def written(folder):
    return json.loads((folder / "precision.json").read_text())


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


@pytest.mark.slow
def test_a_comparison_prints_its_table_writes_json_and_plots_and_compiles_each_step_once(
    text_file, tmp_path, monkeypatch
):
    """The only test that trains: a training step takes seconds to compile."""
    names, made = "f32,bf16-naive,f16-scaled", []
    monkeypatch.setattr(compare, "CONFIG", NANO)
    monkeypatch.setitem(compare.COMPILER_OPTIONS, "xla_backend_optimization_level", 0)  # it compiles in half the time
    make_steps = compare.make_steps
    monkeypatch.setattr(compare, "make_steps", lambda *given: made.append(make_steps(*given)) or made[-1])
    result = run("--text", text_file, "--out", tmp_path / "new", "--recipes", names, "--seeds", 2, "--steps", 4)

    assert result.exit_code == 0, result.output
    finished = re.findall(r"^(.*, seed \d): validation loss \d\.\d{4}$", result.output, re.M)
    assert finished == ["f32, seed 0", "f32, seed 1", "bf16-naive, seed 0", "f16-scaled, seed 0"]
    assert "the standard deviation of that loss over 2 f32 runs" in " ".join(result.output.split())
    assert (tmp_path / "new" / "precision.png").read_bytes().startswith(b"\x89PNG")
    content = written(tmp_path / "new")
    assert content["settings"]["steps"] == 4
    assert content["settings"]["recipes"] == names.split(",")
    assert content["settings"]["text"]["name"] == str(text_file)
    assert not content["interrupted"]
    runs = {(run["recipe"], run["seed"]): run for run in content["runs"]}
    assert list(runs) == [("f32", 0), ("f32", 1), ("bf16-naive", 0), ("f16-scaled", 0)]
    naive, first, second = (runs[key]["validation_losses"] for key in (("bf16-naive", 0), ("f32", 0), ("f32", 1)))
    assert runs["bf16-naive", 0]["validation_steps"] == [1, 2, 3, 4]
    assert runs["bf16-naive", 0]["gap"] == naive[-1] - first[-1]
    # The standard deviation of two numbers is their distance divided by the square root of 2.
    assert content["deviation"] == pytest.approx(abs(first[-1] - second[-1]) / 2**0.5)
    # The first loss is the one of the initial weights, which the seed decides.
    assert runs["f32", 0]["training_losses"][0] != runs["f32", 1]["training_losses"][0]
    # f32 ran twice, and no update of any recipe changed the types of what goes into the next step.
    assert [steps.train_step._cache_size() for steps in made] == [1, 1, 1]
    assert [steps.evaluate._cache_size() for steps in made] == [1, 1, 1]


def finished_run(recipe, seed=0, loss=2.4, size=(2.0, 2.0, 12.0)):
    """Return a run as `train` does."""
    size = dict(zip(("parameters", "gradients", "optimizer state"), size, strict=True))
    return report.Run(recipe, seed, 862_464, size, [loss] * 4, [2, 4], [loss, loss], 3, 1.0)


def test_gaps_are_to_f32_of_the_same_seed_and_one_seed_has_no_deviation(tmp_path):
    naive = [finished_run("bf16-naive", seed=seed, loss=2.75) for seed in range(2)]
    alone, one_seed, two_seeds = (
        report.Comparison([*[finished_run("f32", seed=seed, loss=2.5 - seed) for seed in range(seeds)], *naive])
        for seeds in range(3)
    )
    assert [[comparison.gap(run) for run in naive] for comparison in (alone, one_seed, two_seeds)] == [
        [None, None], [0.25, None], [0.25, 1.25]
    ]  # fmt: skip
    assert two_seeds.mean_over_seeds("bf16-naive", two_seeds.gap) == 0.75
    assert one_seed.mean_over_seeds("bf16-naive", one_seed.gap) == 0.25  # of the seed that both have
    assert [comparison.deviation() for comparison in (alone, one_seed, two_seeds)] == [None, None, 0.5**0.5]
    assert "it takes f32 runs of two seeds or more" in report.caption(one_seed)
    pictures.write_pictures(tmp_path, alone)


def test_ctrl_c_keeps_the_runs_that_have_finished(text_file, tmp_path, monkeypatch):
    def train(steps, seed, *arguments):
        if steps.program.recipe.name == "bf16-split":
            raise KeyboardInterrupt
        return finished_run(steps.program.recipe.name, seed)

    monkeypatch.setattr(compare, "train", train)
    names = ["--recipes", "bf16-kahan", "--recipes", "f32", "--recipes", "bf16-split,bf16-naive"]
    result = run("--text", text_file, "--out", tmp_path, *names, "--seeds", 1)

    assert result.exit_code == 130
    assert "Stopped before the end; 2 runs had finished." in result.output
    assert [run["recipe"] for run in written(tmp_path)["runs"]] == ["f32", "bf16-naive"]
    assert written(tmp_path)["interrupted"]
    assert (tmp_path / "precision.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "short"], "it has 10 bytes, and at least 10,000 are needed"),
        (["--recipes", "f32,bf17"], f"no recipe is called 'bf17'; there are {', '.join(compare.ALL_NAMES)}"),
        (["--learning-rate", "nan"], "must be positive, but is nan"),
        (["--steps", "0"], "Invalid value"),
        (["--out", "/dev/null"], "/dev/null"),
    ],
)
def test_a_bad_option_is_refused_at_once(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_bytes(b"too little")
    result = run(*arguments)

    assert result.exit_code == 2
    assert message in result.output


# AdamW has two moments; masters add 4 bytes to the state, low bits 2, a compensation 2.
SIZES = {
    "f32": (4, 4, 8),
    "tf32": (4, 4, 8),
    "bf16-autocast": (4, 2, 8),
    "bf16-naive": (2, 2, 4),
    "bf16-cast": (2, 2, 12),
    "bf16-masters": (2, 2, 12),
    "bf16-split": (2, 2, 10),
    "bf16-split-8bit": (2, 2, 4 + 2 / 64),
    "bf16-split24-8bit": (2, 2, 3 + 2 / 64),
    "bf16-split24-4bit": (2, 2, 2.5 + 1 / 32 + 1 / 64),
    "fp8": (2, 2, 10),
    "fp8-row": (2, 2, 10),
    "bf16-stochastic": (2, 2, 8),
    "bf16-kahan": (2, 2, 6),
    "f16-scaled": (4, 2, 8),
}


@pytest.mark.parametrize("name", compare.ALL_NAMES)
def test_bytes_are_those_of_the_arrays_with_gradients_as_inside_a_jitted_step(name):
    """Counts are a few bytes. Leaves of less than 4,096 elements stay float32 instead of 8 bits."""
    program = compare.make_steps(get_recipe(name), compare.Settings()).program
    shapes = jax.eval_shape(program.init, 0)

    found = tuple(compare.bytes_per_parameter(program.recipe, *shapes).values())
    assert found == pytest.approx(SIZES[name], abs=0.06 if "bit" in name else 3e-3)


def test_a_loss_that_is_not_a_number_is_null_in_the_json(tmp_path):
    comparison = report.Comparison([finished_run("f32", loss=float("nan")), finished_run("f32", seed=1)])
    report.write_json(tmp_path / "out.json", comparison, {}, interrupted=False)
    pictures.write_pictures(tmp_path, comparison)

    assert json.loads((tmp_path / "out.json").read_text())["runs"][0]["validation_losses"] == [None, None]
    assert comparison.deviation() is None


def all_recipes():
    """Return a run of every recipe with different losses, and a second seed of f32."""
    runs = [finished_run(recipe.name, loss=2.4 + index / 10) for index, recipe in enumerate(RECIPES)]
    return report.Comparison([*runs, finished_run("f32", seed=1, loss=2.5)])


def test_the_table_fits_a_terminal_of_80_columns():
    console = Console(width=80, file=io.StringIO())
    console.print(report.table(all_recipes()))

    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    # The standard deviation of 2.4 and 2.5 is 0.1 / sqrt(2).
    # Nothing has a second seed but f32, so the means are of the first.
    assert "f32 16.0 2.0 2.0 12.0 2.4000 2.4000 - - 3" in lines
    assert "tf32 16.0 2.0 2.0 12.0 2.5000 2.5000 +0.1000 +1.41 3" in lines
    assert not any("…" in line for line in lines)
