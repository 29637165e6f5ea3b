"""Turn what `benchmarks.on_gpu` has measured into the tables of `benchmarks/RESULTS.md`."""

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import autocast, fixed_batch, ladder, optimizer_step, overhead, torch_gpt2
from benchmarks.on_gpu_units import FULL, SMALL
from benchmarks.report import Sheet, targets_table
from benchmarks.rungs import RUNGS
from benchmarks.workers import Clock, Result, run_worker
from examples.gpt.report import Comparison, Run

Rows = list[Result]


def markdown(parts: dict[str, Any]) -> str:
    """Return all tables of the parts of a folder."""
    if not parts:
        return "Nothing has been measured."
    device = next(iter(parts.values()))["device"]
    blocks = [conditions_line(device)]
    rows: dict[str, Rows] = {}
    for part in parts.values():
        for entry in part["units"].values():
            rows.setdefault(entry["table"], []).extend(row for row in entry["rows"] if "failed" not in row)
    for table, make in TABLES.items():
        if rows.get(table):
            blocks += [sheet if isinstance(sheet, str) else sheet.markdown() for sheet in make(rows[table])]
    blocks += [sheet.markdown() for sheet in of_gpt2(rows, device)]
    return "\n\n".join([*blocks, *(sheet.markdown() for sheet in not_measured(parts))])


def conditions_line(device: Result) -> str:
    """Return where, when and with what was measured."""
    found = device["conditions"]
    versions = ", ".join(f"{name} {found[name]}" for name in ("jax", "jaxlib", "flax", "optax", "numpy", "mpx"))
    rate = f"products of bfloat16 matrices at {device['matmul FLOP/s'] / 1e12:.4g} TFLOP/s"
    driver = f", driver {found['driver']}" if found["driver"] else ""
    return f"Measured on {found['date']} on {found['device']}{driver}, Python {found['python']}, {versions}; {rate}."


def optimizer_sheets(rows: Rows) -> Iterator[Sheet]:
    """Yield the tables of each set of tensors."""
    for title, group in itertools.groupby(rows, lambda row: row["title"]):
        yield from optimizer_step.sheets(title, list(group))


def torch_sheets(rows: Rows) -> Iterator[Sheet]:
    """Yield the table of each set of tensors."""
    for title, group in itertools.groupby(rows, lambda row: row["title"]):
        yield optimizer_step.torch_sheet(title, list(group))


def autocast_sheets(rows: Rows) -> Iterator[Sheet]:
    """Yield the table of each dtype of parameters."""
    for (size, params), group in itertools.groupby(rows, lambda row: (row["size"], row["params"])):
        yield autocast.steps_table(f"autocast, loss and gradient: {size}, parameters {params}", list(group))


def training_sheet(rows: Rows) -> Sheet:
    """Return the last losses of each recipe, and its gap to float32 in spreads."""
    found = Comparison([Run(**row) for row in rows])
    spread = found.deviation()
    cells = []
    for recipe, group in itertools.groupby(found.runs, lambda run: run.recipe):
        runs = list(group)
        gaps = [gap for gap in map(found.gap, runs) if gap is not None]
        mean = statistics.fmean(gaps) if gaps else None
        row = {"recipe": recipe} | {f"seed {run.seed}": f"{run.validation_loss:.4f}" for run in runs}
        row["mean gap to f32"] = "" if mean is None else f"{mean:+.4f}"
        row["in spreads"] = "" if mean is None or not spread else f"{mean / spread:+.2f}"
        seconds = [run.seconds_per_step for run in runs if run.seconds_per_step is not None]
        cells.append(row | {"ms a step": f"{1e3 * statistics.median(seconds):.2f}" if seconds else ""})
    return Sheet("the main job: validation loss", cells)


def tests_sheet(rows: Rows) -> Sheet:
    """Return how many tests passed, and the names of those that did not."""
    names = "passed", "failed", "error", "skipped"
    cells = [
        {"tests": row["tests"].rpartition("/")[2]} | {name: str(row["counts"].get(name, 0)) for name in names}
        for row in rows
    ]
    return Sheet("tests", cells, "\n".join(line for row in rows for line in row["failures"]))


def of_gpt2(rows: dict[str, Rows], device: Result) -> Iterator[Sheet]:
    """Yield the ladder, PyTorch's, the pairs of both, and the parts at a fixed batch."""
    size = FULL if device["backend"] == "gpu" else SMALL
    jax = sorted(rows.get("ladder", []), key=lambda row: list(RUNGS).index(row["rung"]))
    speed = {"jax": jax, "torch": rows.get("PyTorch", [])}
    targets = []
    if jax:
        ladder.add_gains(jax)
        yield ladder.ladder_table(jax, ladder.Bench(size.setting, device, Clock(None), run_worker))
    if speed["torch"]:
        yield torch_gpt2.torch_table(speed["torch"])
    if jax and speed["torch"]:
        known = {row["rung"] for row in speed["torch"]}
        speed["pairs"] = [pair for pair in torch_gpt2.pairs(speed) if pair["torch rung"] in known]
        yield torch_gpt2.pairs_table(speed)
        targets = torch_gpt2.targets(speed)
    for name, part in fixed_batch.PARTS.items():
        if rows.get(name):
            yield fixed_batch.table(part, rows[name])
    if targets := targets + fixed_batch.targets(rows):
        yield targets_table(targets)


def not_measured(parts: dict[str, Any]) -> Iterator[Sheet]:
    """Yield what failed, was stopped or was left out, and why."""
    cells = [
        {"part": name, "unit": unit, "what became of it": entry["status"], "note": entry.get("note", "")}
        for name, part in parts.items()
        for unit, entry in part["units"].items()
        if entry["status"] != "done"
    ]
    if cells:
        yield Sheet("not measured", cells)


TABLES: dict[str, Callable[[Rows], Any]] = {
    "optimizer steps": optimizer_sheets,
    "Torch's optimizers": torch_sheets,
    "autocast": autocast_sheets,
    "accuracy": lambda rows: [autocast.accuracy_table("autocast, relative errors", rows)],
    "overhead": lambda rows: [overhead.steps_sheet(rows)],
    "casts": lambda rows: [overhead.casts_sheet(rows)],
    "training": lambda rows: [training_sheet(rows)],
    "curves": lambda rows: [torch_gpt2.curves_table(rows)],
    "tests": lambda rows: [tests_sheet(rows)],
    "doctor": lambda rows: [f"```text\n{row['text']}\n```" for row in rows],
}
