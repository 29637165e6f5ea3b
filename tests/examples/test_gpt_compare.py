"""The comparison of recipes on a small GPT: its command line, its files, and what it promises about data."""

import io
import itertools
import json
import re

import jax
import pytest
from matplotlib.text import Text
from rich.console import Console
from typer.testing import CliRunner

from examples.gpt import compare, pictures, report
from examples.gpt.recipes import RECIPES, get_recipe

# Optax adds arrays of two dtypes, and Flax's norms arrays of two ranks.
pytestmark = pytest.mark.optax_promotion

TINY = ["--steps", "4", "--width", "32", "--depth", "1"]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text that is long enough\n" % number for number in range(400)))
    return path


def run(*arguments):
    return CliRunner().invoke(compare.app, [str(argument) for argument in arguments])


def written(folder):
    return json.loads((folder / "precision.json").read_text())


@pytest.mark.slow
def test_a_comparison_prints_its_table_writes_json_and_plot_and_compiles_each_step_once(
    text_file, tmp_path, monkeypatch
):
    """The only test that trains: a training step takes seconds to compile."""
    names = "f32,bf16-naive,f16-scaled"
    programs = []
    monkeypatch.setitem(compare.COMPILER_OPTIONS, "xla_backend_optimization_level", 0)  # it compiles in half the time
    make_compiled = compare.make_compiled
    monkeypatch.setattr(compare, "make_compiled", lambda *given: programs.append(make_compiled(*given)) or programs[-1])
    result = run("--text", text_file, "--out", tmp_path / "new", "--recipes", names, "--seeds", 2, *TINY)

    assert result.exit_code == 0, result.output
    finished = re.findall(r"^(.*, seed \d): validation loss \d\.\d{4}$", result.output, re.M)
    assert finished == ["f32, seed 0", "f32, seed 1", "bf16-naive, seed 0", "f16-scaled, seed 0"]
    assert "the standard deviation of the final validation loss over 2 f32 runs" in " ".join(result.output.split())
    assert (tmp_path / "new" / "precision.png").read_bytes().startswith(b"\x89PNG")
    content = written(tmp_path / "new")
    assert content["settings"]["steps"] == 4
    assert content["settings"]["recipes"] == names.split(",")
    assert content["settings"]["text"]["name"] == str(text_file)
    assert not content["interrupted"]
    runs = {(run["recipe"], run["seed"]): run for run in content["runs"]}
    assert list(runs) == [("f32", 0), ("f32", 1), ("bf16-naive", 0), ("f16-scaled", 0)]
    naive, first, second = runs["bf16-naive", 0], runs["f32", 0], runs["f32", 1]
    assert len(naive["training_losses"]) == 4
    assert naive["validation_steps"] == [1, 2, 3, 4]
    assert naive["gap"] == naive["validation_losses"][-1] - first["validation_losses"][-1]
    # The standard deviation of two numbers is their distance divided by the square root of 2.
    distance = abs(first["validation_loss"] - second["validation_loss"])
    assert content["deviation"] == pytest.approx(distance / 2**0.5)
    assert naive["gap_in_deviations"] == pytest.approx(naive["gap"] / content["deviation"])
    # f32 ran twice, and no update of any recipe changed the types of what goes into the next step.
    assert [program.train_step._cache_size() for program in programs] == [1, 1, 1]
    assert [program.evaluate._cache_size() for program in programs] == [1, 1, 1]


def finished_run(recipe, seed=0, loss=2.4, size=(2.0, 2.0, 12.0)):
    """Return a run as `train` does."""
    size = dict(zip(("parameters", "gradients", "optimizer state"), size, strict=True))
    return report.Run(recipe, seed, 862_464, size, 5.0, 0.0471, [loss] * 4, [2, 4], [loss, loss], 3, 1.0)


def test_one_seed_gives_gaps_but_no_spread():
    comparison = report.Comparison([finished_run("f32", loss=2.5), finished_run("bf16-naive", loss=2.75)])

    assert comparison.deviation() is None
    assert comparison.gap(comparison.runs[1]) == 0.25
    assert comparison.gap_in_deviations(comparison.runs[1]) is None
    assert "it takes f32 runs of two seeds or more" in report.caption(comparison)
    equal = report.Comparison([*comparison.runs, finished_run("f32", seed=1, loss=2.5)])
    assert equal.deviation() == 0
    assert equal.gap_in_deviations(equal.runs[1]) is None  # and no division by zero


def test_without_f32_there_is_no_gap(tmp_path):
    comparison = report.Comparison([finished_run("bf16-naive")])
    pictures.write_pictures(tmp_path, comparison)

    assert comparison.gap(comparison.runs[0]) is None
    assert "no f32 run has finished" in report.caption(comparison)


def test_ctrl_c_keeps_the_runs_that_have_finished(text_file, tmp_path, monkeypatch):
    def train_until(recipe):
        def train(program, seed, *arguments):
            if program.recipe.name == recipe:
                raise KeyboardInterrupt
            return finished_run(program.recipe.name, seed)

        monkeypatch.setattr(compare, "train", train)

    train_until("bf16-split")
    names = ["--recipes", "bf16-kahan", "--recipes", "f32", "--recipes", "bf16-split,bf16-naive"]
    result = run("--text", text_file, "--out", tmp_path, *names, "--seeds", 1, *TINY)

    assert result.exit_code == 130
    assert "Finished and kept: f32 (seed 0), bf16-naive (seed 0)." in result.output
    assert [run["recipe"] for run in written(tmp_path)["runs"]] == ["f32", "bf16-naive"]
    assert written(tmp_path)["interrupted"]
    assert (tmp_path / "precision.png").exists()

    train_until("f32")
    result = run("--text", text_file, "--out", tmp_path / "new", *TINY)
    assert result.exit_code == 130
    assert "nothing is written" in result.output
    assert list((tmp_path / "new").iterdir()) == []


@pytest.fixture
def no_training(monkeypatch):
    """Make a test fail that gets as far as building a program."""
    monkeypatch.setattr(compare, "make_compiled", lambda *arguments: pytest.fail("an error came too late"))


@pytest.mark.usefixtures("no_training")
def test_a_text_that_cannot_be_used_is_refused_at_once(tmp_path):
    (tmp_path / "text").write_bytes(b"too little")
    result = run("--text", tmp_path / "text", "--out", tmp_path)
    assert result.exit_code == 2
    assert "--text: the text is too short: it has 10 bytes, and at least 6,500 are needed" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes", "f32,bf17"], f"no recipe is called 'bf17'; there are {', '.join(compare.ALL_NAMES)}"),
        (["--recipes", ","], "no recipe is named"),
        (["--width", "33"], "must be a multiple of 32, but is 33"),
        (["--learning-rate", "nan"], "must be positive, but is nan"),
        (["--steps", "0"], "Invalid value"),
        (["--seeds", "0"], "Invalid value"),
        (["--depth", "0"], "Invalid value"),
        (["--recipe-seeds", "4"], "must be at most `--seeds`, 3, but is 4"),
        (["--out", "/dev/null"], "cannot write into the folder /dev/null"),
    ],
)
@pytest.mark.usefixtures("no_training")
def test_a_bad_option_is_refused_at_once(arguments, message, text_file):
    result = run("--text", text_file, *arguments)

    assert result.exit_code == 2
    assert message in result.output
    assert arguments[0] in result.output


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
    "fp8": (2, 2, 10),
    "fp8-row": (2, 2, 10),
    "bf16-stochastic": (2, 2, 8),
    "bf16-kahan": (2, 2, 6),
    "f16-scaled": (4, 2, 8),
}


@pytest.mark.parametrize("name", compare.ALL_NAMES)
def test_bytes_are_those_of_the_arrays_with_gradients_as_inside_a_jitted_step(name):
    """Counts are a few bytes. Leaves of less than 4,096 elements stay float32 instead of 8 bits."""
    program = compare.make_compiled(get_recipe(name), compare.Settings())
    shapes = jax.eval_shape(program.init, 0)

    found = tuple(compare.bytes_per_parameter(program.recipe, *shapes).values())
    assert found == pytest.approx(SIZES[name], abs=0.06 if name == "bf16-split-8bit" else 3e-3)


def test_a_loss_that_is_not_a_number_is_null_in_the_json(tmp_path):
    comparison = report.Comparison([finished_run("f32", loss=float("nan")), finished_run("f32", seed=1)])
    report.write_json(tmp_path / "out.json", comparison, {}, interrupted=False)
    pictures.write_pictures(tmp_path, comparison)

    assert json.loads((tmp_path / "out.json").read_text())["runs"][0]["validation_loss"] is None
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


@pytest.mark.parametrize("names", [compare.DEFAULT_NAMES, compare.ALL_NAMES, ["f32", "bf16-naive"]], ids=len)
def test_the_labels_of_the_picture_overlap_nothing_and_can_be_read_at_390_pixels(names):
    sizes = [recipe.name for recipe in RECIPES]
    gaps = {name: 0.08 if name == "bf16-naive" else 0.0002 * sizes.index(name) for name in names}
    runs = [finished_run(name, loss=2.4 + gaps[name], size=SIZES[name]) for name in names]
    comparison = report.Comparison([*runs, finished_run("f32", seed=1, loss=2.405)])
    figure = pictures.draw_precision(comparison)
    figure.canvas.draw()
    (axes,) = figure.axes

    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    whole = " ".join(text.get_text() for text in texts)
    threads = [text.arrow_patch.get_window_extent() for text in axes.texts if getattr(text, "arrow_patch", None)]
    dots = [line.get_window_extent() for line in axes.lines]
    assert all(name in whole for name in names)
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
    assert not [(box, other) for box in boxes for other in threads + dots if box.overlaps(other)]
    assert all(figure.bbox.contains(x, y) for box in boxes for x, y in box.corners())
    pixels = 390 / figure.get_figwidth()
    assert min(text.get_fontsize() for text in texts) / 72 * pixels >= 9.5
