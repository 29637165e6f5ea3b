"""Whether recipes end where float32 ends at the size of GPT-2 124M: curves of the
validation loss, and the last of it beside float32.

    PYTHONPATH=. python -m benchmarks.parity_at_size
    PYTHONPATH=. python -m benchmarks.parity_at_size --found found
    PYTHONPATH=. python -m benchmarks.parity_at_size --size smallest --steps 3

The runs are those of `examples.gpt.compare`, with GPT-2 in place of its tiny model: 16
sequences of 1,024 bytes a step, of the source code of Python's standard library. Bytes
are 256 of the 50,257 tokens; the rows of the others stay in the embedding, so that the
model has its 124 million parameters. Products of `f32` are TF32 on a GPU. Float32 runs
from three seeds, whose standard deviation is the spread, and the others from one.

`--found` shows what `benchmarks.on_gpu` measured in a folder, and trains nothing. On
one H200 a run should take about two minutes, and all ten twenty. This is an estimate:
bounds of the programs for it are 34 to 65 ms a step, and the one that was measured took
57 ms for a bound of 36. The programs take 37 GB at most.
"""

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.report import Row, Sheet
from benchmarks.workers import run_worker
from examples.gpt import compare, report
from examples.gpt.model import get_preset
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters

# The model, sequences of a step, and the peak of the learning rate.
SIZES = {"gpu": ("gpt2-124m", 16, 6e-4), "smallest": ("tiny", 8, 3e-4)}
OTHERS = (
    *("bf16-autocast", "bf16-split", "bf16-split-8bit", "bf16-split24-4bit", "fp8"),
    *("bf16-kahan", "bf16-naive"),  # naive: Optax alone, with bfloat16 parameters
)
F32 = report.REFERENCE
# Recipes and seeds. The seeds that only give the spread come last.
RUNS = ((F32, 0), *((recipe, 0) for recipe in OTHERS), (F32, 1), (F32, 2))
STEPS = 1_000
TEXT_BYTES = 16_000_000  # all of the standard library
TIMEOUT = 600.0  # seconds for one process
COLUMNS = {
    "recipe": "{recipe}",
    "seed": "{seed}",
    "bytes a parameter": "{held:.1f}",
    "training loss": "{training_loss:.4f}",
    "validation loss": "{loss:.4f}",
    "gap": "{gap:+.4f}",
    "in spreads": "{spreads:+.2f}",
}


def measure(recipe: str, size: str, steps: int, seed: int) -> list[Row]:
    """Train once and return the fields of the finished `examples.gpt.report.Run`."""
    preset, batch_size, learning_rate = SIZES[size]
    runs = compare.train_recipe(
        dataclasses.replace(get_recipe(recipe), matmul_precision=None),
        [seed],
        Hyperparameters(steps, learning_rate),
        *compare.split(compare.read_text(None, TEXT_BYTES)),
        config=get_preset(preset),
        batch_size=batch_size,
    )
    return [dataclasses.asdict(run) for run in runs]


def sheets(rows: list[Row]) -> list[Sheet]:
    """Return the table of runs: a gap is to float32 from the same seed, and a spread
    the standard deviation of float32 over its seeds.
    """
    losses = {
        (row["recipe"], row["seed"]): row["validation_losses"][-1] for row in rows
    }
    of_f32 = [loss for (recipe, _), loss in losses.items() if recipe == F32]
    spread = statistics.stdev(of_f32) if len(of_f32) > 1 else math.nan
    told = []
    for row in rows:
        loss = losses[row["recipe"], row["seed"]]
        gap = loss - losses.get((F32, row["seed"]), math.nan)
        held = sum(row["bytes_per_parameter"].values())
        told.append(
            row | {"held": held, "loss": loss, "gap": gap, "spreads": gap / spread}
        )
    return [Sheet(f"Parity of the recipes, spread {spread:.4f}", told, COLUMNS)]


def draw(rows: list[Row], path: Path) -> None:
    """Draw the curves, which need float32 from the first two seeds."""
    runs = sorted((report.Run(**row) for row in rows), key=lambda run: run.seed)
    seeds = [run.seed for run in runs if run.recipe == F32]
    if seeds[:2] != [0, 1]:
        raise ValueError(
            f"the picture needs {F32} from seeds 0 and 1, but there are {seeds}:"
            " measure the others first."
        )
    report.draw_curves(report.Comparison(runs)).savefig(path)


def train(size: str, steps: int) -> list[Row]:
    """Measure all runs, each in a process of its own, and return those that ended."""
    rows: list[Row] = []
    for recipe, seed in RUNS:
        job = {"recipe": recipe, "size": size, "steps": steps, "seed": seed}
        (row,) = run_worker("benchmarks.parity_at_size:measure", job, timeout=TIMEOUT)
        print(f"{recipe}, seed {seed}: {row.get('failed', 'done')}", flush=True)
        rows += [row] if "failed" not in row else []
    return rows


def main(
    size: Annotated[
        Literal["gpu", "smallest"], typer.Option(help="smallest: to try it.")
    ] = "gpu",
    steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = STEPS,
    found: Annotated[
        Path | None, typer.Option(help="The folder of `benchmarks.on_gpu` to draw.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("parity.png"),
) -> None:
    """Train, or take what was measured; print the table and draw the picture."""
    if found is None:
        rows = train(size, steps)
    else:
        entries = json.loads((found / "found.json").read_text("utf-8"))["units"]
        rows = [
            row
            for entry in entries.values()
            if (entry["table"], entry["status"]) == ("parity", "done")
            for row in entry["rows"]
        ]
    for sheet in sheets(rows):
        print(sheet.markdown())
    try:
        draw(rows, out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    print(f"Written: {out}.")


if __name__ == "__main__":
    typer.run(main)
