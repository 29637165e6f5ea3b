"""Turn what `benchmarks.on_gpu` has measured into the tables of `benchmarks/RESULTS.md`."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import (
    all_tests,
    autocast,
    autocast_accuracy,
    fixed_batch,
    ladder,
    main_job,
    optimizer_step,
    overhead,
    torch_gpt2,
)
from benchmarks.report import Sheet, targets_table
from benchmarks.rungs import RUNGS
from benchmarks.workers import Result

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


def grouped(rows: Rows, *names: str) -> Iterator[tuple[Any, Rows]]:
    """Yield the rows that agree in some values; those of a group need not have been measured one after another."""
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    yield from groups.items()


def optimizer_sheets(rows: Rows) -> Iterator[Sheet]:
    """Yield the tables of each set of tensors."""
    for (title,), group in grouped(rows, "title"):
        yield from optimizer_step.sheets(title, group)


def torch_sheets(rows: Rows) -> Iterator[Sheet]:
    """Yield the table of each set of tensors."""
    for (title,), group in grouped(rows, "title"):
        yield optimizer_step.torch_sheet(title, group)


def autocast_sheets(rows: Rows) -> Iterator[Sheet]:
    """Yield the table of each dtype of parameters."""
    for (size, params), group in grouped(rows, "size", "params"):
        yield autocast.steps_table(f"autocast, loss and gradient: {size}, parameters {params}", group)


def of_gpt2(rows: dict[str, Rows], device: Result) -> Iterator[Sheet]:
    """Yield the ladder, PyTorch's, the pairs of both, and the parts at a fixed batch."""
    jax = sorted(rows.get("ladder", []), key=lambda row: list(RUNGS).index(row["rung"]))
    torch = rows.get("PyTorch", [])
    if jax:
        ladder.add_gains(jax)
        yield ladder.ladder_table(jax, device["matmul FLOP/s"])
    if torch:
        yield torch_gpt2.torch_table(torch)
    if found := torch_gpt2.pairs(jax, torch):
        yield torch_gpt2.pairs_table(found)
    for name, part in fixed_batch.PARTS.items():
        if rows.get(name):
            yield fixed_batch.table(part, rows[name])
    if judged := torch_gpt2.targets(jax, torch) + fixed_batch.targets(rows):
        yield targets_table(judged)


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
    "accuracy": lambda rows: [autocast_accuracy.accuracy_table("autocast, relative errors", rows)],
    "overhead": overhead.steps_sheets,
    "casts": lambda rows: [overhead.casts_sheet(rows)],
    "training": lambda rows: [main_job.sheet(rows)],
    "curves": lambda rows: [torch_gpt2.curves_table(rows)],
    "residuals": lambda rows: [autocast.residuals_table("kept for the backward pass", rows)],
    "tracing": lambda rows: [autocast.tracing_table("tracing and lowering", rows)],
    "tests": lambda rows: [all_tests.sheet(rows)],
    "doctor": lambda rows: [f"```text\n{row['text']}\n```" for row in rows],
}
