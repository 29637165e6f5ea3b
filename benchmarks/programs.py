"""Read off compiled programs what steps cost on a GPU that need not be here: the tables of `benchmarks/RESULTS.md`.

    PYTHONPATH=. python -m benchmarks.programs --target h200 --json programs.json

It needs the compiler (`pip install -e ".[cuda12]"` or `".[cuda13]"`) and no GPU; nothing runs. First each recipe of
`benchmarks.optimizer_step`, by hand and with mpx, on the tensors of GPT-2 124M; then each rung of `benchmarks.ladder`.
Bounds are sums over kernels of the larger of bytes over bandwidth and FLOPs over rate, and 2 microseconds a launch: by
the published figures of the target, and by what good kernels reach of them, 5/6 of the bandwidth and 81% of the rate
(4.0 TB/s and 800 TFLOP/s on an H200). They are no times. Each program is compiled in a process of its own, without
autotuning, since no kernel can be tried.
"""

from typing import Annotated, Any

import typer

from benchmarks import ladder
from benchmarks.optimizer_step import RECIPES
from benchmarks.report import SIDES, Sheet, make_console, write_json
from benchmarks.workers import CALL, Clock, Result, job_of, run_worker


def read_recipe(recipe: str, bench: ladder.Bench, target: str, scale: int) -> Result:
    """The row of a recipe."""
    job = job_of("benchmarks.optimizer_step:read", recipe=recipe, tensors="gpt2", scale=scale, target=target)
    return {"recipe": recipe} | bench.run(CALL, job, timeout=bench.clock.cut(bench.setting.timeout))


def recipes_table(rows: list[Result]) -> Sheet:
    """What a step of each recipe moves and needs, a parameter."""
    count = next((f"{row['parameters']:,} parameters" for row in rows if "failed" not in row), "")
    return Sheet(f"one AdamW step of GPT-2's tensors, {count}", list(map(recipe_cells, rows)))


def recipe_cells(row: Result) -> dict[str, str]:
    """The cells of a recipe."""
    if "failed" in row:
        return {"recipe": row["recipe"], "note": row["failed"]}
    programs, count = [row[f"program {side}"] for side in SIDES], row["parameters"]
    cell = lambda name, unit, digits: ", ".join(f"{program[name] / unit:,.{digits}f}" for program in programs)
    return {
        "recipe": row["recipe"],
        "bytes a parameter moved, by hand and with mpx": cell("moved bytes", count, 2),
        "held": cell("peak bytes", count, 2),
        "temporary": cell("temporary bytes", count, 2),
        "kernels": cell("kernels", 1, 0),
        "bound, ms": cell("bound ms", 1, 3),
        "at what is reached, ms": cell("reached ms", 1, 3),
        "compiled in, s": cell("compile s", 1, 1),
    }


def main(
    target: Annotated[str, typer.Option(help="The device: a100, h100, h200, b200.")] = "h200",
    recipes: Annotated[str, typer.Option(help="Separated by commas; empty for the ladder alone.")] = ",".join(RECIPES),
    rungs: Annotated[list[str] | None, typer.Option(help=ladder.RUNGS_HELP)] = None,
    preset: ladder.PresetOption = None,
    batch_size: ladder.BatchOption = None,
    timeout: ladder.TimeoutOption = None,
    scale: Annotated[int, typer.Option(min=1, help="What the rows of the optimizer's tensors are divided by.")] = 1,
    json_path: ladder.JsonOption = None,
) -> None:
    """Reads all programs, prints the tables as Markdown and, if asked, writes the numbers."""
    console, chosen = make_console(), ladder.chosen_rungs(rungs)
    given = {"preset": preset and str(preset), "batch_size": batch_size, "timeout": timeout}
    bench = ladder.start_reading(Clock(None), run_worker, **given)
    found: dict[str, Any] = {"target": target, "recipes": []}

    def keep(rows: list[Result]) -> None:
        found["ladder"] = rows
        write_json(json_path, found)

    with console.status("Compiling ..."):
        for recipe in filter(None, recipes.split(",")):
            found["recipes"].append(read_recipe(recipe, bench, target, scale))
            write_json(json_path, found)
        ladder.each_rung(chosen, lambda rung: ladder.read_rung(rung, bench, target), keep)
    sheets = recipes_table(found["recipes"]), ladder.programs_table(found["ladder"], bench.setting)
    print("\n\n".join(sheet.markdown() for sheet in sheets if sheet.rows))


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
