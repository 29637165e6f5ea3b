"""Read off compiled programs what steps cost on a GPU that need not be here: the tables of `benchmarks/RESULTS.md`.

    PYTHONPATH=. python -m benchmarks.programs --target h200

It needs the compiler (`pip install -e ".[cuda12]"` or `".[cuda13]"`) and no GPU; nothing runs. First each recipe of
`benchmarks.optimizer_step`, by hand and with mpx, on the tensors of GPT-2 124M; then each rung of `benchmarks.ladder`.
Bounds are sums over kernels of the larger of bytes over bandwidth and FLOPs over rate, and 2 microseconds a launch: by
the published figures of the target, and by what good kernels reach of them, 5/6 of the bandwidth and 81% of the rate
(4.0 TB/s and 800 TFLOP/s on an H200). They are no times. Each program is compiled in a process of its own, without
autotuning, since no kernel can be tried.
"""

import dataclasses
from typing import Annotated

import typer

from benchmarks import ladder
from benchmarks.optimizer_step import RECIPES
from benchmarks.report import Row, Sheet
from benchmarks.rungs import ON_GPU, choose_rungs
from benchmarks.workers import run_worker

COLUMNS = {
    "recipe": "{recipe}",
    "bytes a parameter moved, by hand and with mpx": "{by hand[moved]:.2f}, {mpx[moved]:.2f}",
    "held": "{by hand[peak]:.2f}, {mpx[peak]:.2f}",
    "temporary": "{by hand[temporary]:.2f}, {mpx[temporary]:.2f}",
    "kernels": "{by hand[kernels]:,}, {mpx[kernels]:,}",
    "bound, ms": "{by hand[bound ms]:.3f}, {mpx[bound ms]:.3f}",
    "at what is reached, ms": "{by hand[reached ms]:.3f}, {mpx[reached ms]:.3f}",
    "compiled in, s": "{by hand[compile s]:.1f}, {mpx[compile s]:.1f}",
    "why not": "{failed}",
}


def read_recipe(recipe: str, target: str) -> Row:
    """Return the row of a recipe."""
    job = {"recipe": recipe, "tensors": "gpt2", "scale": 1, "target": target}
    (row,) = run_worker("benchmarks.optimizer_step:read", job, timeout=ladder.TIMEOUT)
    print(f"{recipe}: {row.get('failed', 'done')}", flush=True)
    return {"recipe": recipe} | row


def recipes_sheet(rows: list[Row]) -> Sheet:
    """Return the table of what a step of each recipe moves and needs."""
    count = next((f", {row['parameters']:,} parameters" for row in rows if "failed" not in row), "")
    return Sheet(f"one AdamW step of GPT-2's tensors{count}", rows, COLUMNS)


def main(
    target: Annotated[str, typer.Option(help="The device: a100, h100, h200, b200.")] = "h200",
    recipes: Annotated[str, typer.Option(help="Separated by commas; empty for the ladder alone.")] = ",".join(RECIPES),
    rungs: ladder.RungsOption = "",
    preset: ladder.PresetOption = ON_GPU.preset,
) -> None:
    """Read all programs and print the tables."""
    steps, setting = choose_rungs(rungs), dataclasses.replace(ON_GPU, preset=preset)
    found = [read_recipe(recipe, target) for recipe in filter(None, recipes.split(","))]
    rows = ladder.run_rungs(steps, setting, target)
    print("\n\n".join([recipes_sheet(found).markdown(), ladder.programs_sheet(rows, setting).markdown()]))


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
