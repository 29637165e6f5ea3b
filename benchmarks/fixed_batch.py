"""The parts of `benchmarks.ladder` at a fixed batch: one program of GPT-2 in several precisions, nothing else changed.

1. steps: the full training step in float32, TF32, bfloat16 autocast, and float16 with dynamic loss scaling.
2. passes: the forward pass up to the mean loss, and the loss with its gradient, in the same precisions and with
   bfloat16 parameters.
3. updates: the optimizer alone, clipping included, on random gradients; and the cast of all float32 weights to bfloat16
   by `policy.cast_to_param`, called and waited for like any other function.

Attention is XLA's own in all of them, since cuDNN's cannot run in float32. A user of GPT-2 in Julia saw, on a GPU and
at a batch of their own, the factors in `JULIA`: they are printed as a reference and are no target. Targets are that the
cast takes less than 2 ms for GPT-2 124M, and that an update takes less time than the fastest of the gradients.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from benchmarks.rungs import FIXED
from benchmarks.targets import judge
from benchmarks.workers import Result

STEPS = ("f32", "tf32", "bf16-autocast", "f16-scaled")
PASSES = ("f32", "tf32", "bf16-autocast", "bf16-split", "f16-scaled")
UPDATES = ("f32", "bf16-masters", "bf16-split", "bf16-split-8bit")
CAST = "cast to bf16"
YARDSTICKS = ("f32", "tf32")
JULIA = {"forward": 1.9, "gradient": 1.8, "step": 1.16, "update ms": 37, "cast ms": 152}
CAST_TARGET = 2.0  # ms

Keep = Callable[[list[Result]], None]


def with_recipe(recipe: str) -> Any:
    """The one program, in some precision."""
    return dataclasses.replace(FIXED, recipe=recipe)


def measure_steps(bench: Any, keep: Keep) -> None:
    """Full training steps."""
    rows = []
    for recipe in STEPS:
        answer = bench.in_jax(with_recipe(recipe), "step", microbatches=1)
        rows.append({"recipe": recipe} | answer | ({"step": answer} if "failed" not in answer else {}))
        keep(rows)


def measure_passes(bench: Any, keep: Keep) -> None:
    """Forward passes and gradients."""
    rows = []
    for recipe in PASSES:
        rows.append({"recipe": recipe} | bench.in_jax(with_recipe(recipe), "passes"))
        keep(rows)


def measure_updates(bench: Any, keep: Keep) -> None:
    """Updates, and the cast."""
    rows = []
    for recipe in UPDATES:
        rows.append({"recipe": recipe} | bench.in_jax(with_recipe(recipe), "update"))
        keep(rows)
    rows.append({"recipe": CAST} | bench.in_jax(FIXED, "cast"))
    keep(rows)


def milliseconds(rows: list[Result], what: str) -> dict[str, float]:
    """By recipe, those of the rows that have them."""
    return {row["recipe"]: row[what]["ms"] for row in rows if what in row}


def ratio_cells(rows: list[Result], what: str, recipe: str) -> list[str]:
    """A time, and how many times as fast as in float32 and in TF32."""
    times = milliseconds(rows, what)
    ratios = [f"{times[base] / times[recipe]:.2f}" if base in times else "" for base in YARDSTICKS]
    return [f"{times[recipe]:.3f}", *ratios]


def ratios_table(title: str, rows: list[Result], *parts: str) -> Table:
    """Times of some parts and their ratios."""
    julia = ", ".join(f"{part} {JULIA[part]}" for part in parts)
    table = Table("recipe", title=f"{title}; a Julia user saw, f32 / 16 bits: {julia}")
    for part in parts:
        for column in (f"{part}, ms", "f32 / this", "TF32 / this"):
            table.add_column(column)
    for row in rows:
        if "failed" in row:
            table.add_row(row["recipe"], f"[red]{escape(row['failed'])}[/]")
        else:
            cells = [cell for part in parts for cell in ratio_cells(rows, part, row["recipe"])]
            table.add_row(row["recipe"], *cells)
    return table


def steps_table(rows: list[Result], on_gpu: bool) -> Table:
    """Full steps."""
    del on_gpu
    return ratios_table("full steps, fixed batch", rows, "step")


def passes_table(rows: list[Result], on_gpu: bool) -> Table:
    """Forward passes and gradients."""
    del on_gpu
    return ratios_table("passes, fixed batch", rows, "forward", "gradient")


def updates_table(rows: list[Result], on_gpu: bool) -> Table:
    """Updates and the cast."""
    table = Table("", "ms", "spread", "a Julia user's ms", "target on a GPU", title="updates and cast")
    for row in rows:
        what = "cast" if row["recipe"] == CAST else "update"
        if what not in row:
            table.add_row(row["recipe"], "", "", "", f"[red]{escape(row['failed'])}[/]")
            continue
        target = f"under {CAST_TARGET} for gpt2-124m" if what == "cast" else "less than the fastest gradient"
        spread = "{:.3f} to {:.3f}".format(*row[what]["ms spread"])
        table.add_row(row["recipe"], f"{row[what]['ms']:.3f}", spread, str(JULIA[f"{what} ms"]), target)
    if not on_gpu:
        table.caption = "not on a GPU: no verdict"
    return table


def targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets that can be judged with what was measured."""
    updates = milliseconds(found.get("updates", []), "update")
    gradients = milliseconds(found.get("passes", []), "gradient")
    judged = []
    if updates and gradients:
        what = "ms of the slowest update, against those of the fastest gradient"
        judged.append(judge(what, max(updates.values()), min(gradients.values()), least=False))
    for cast in milliseconds(found.get("updates", []), "cast").values():
        judged.append(judge("ms of casting all weights, asked of gpt2-124m", cast, CAST_TARGET, least=False))
    return judged


class Part(NamedTuple):
    """A part of the command: what measures it, and its table."""

    measure: Callable[[Any, Keep], None]
    table: Callable[[list[Result], bool], Table]


PARTS = {
    "steps": Part(measure_steps, steps_table),
    "passes": Part(measure_passes, passes_table),
    "updates": Part(measure_updates, updates_table),
}
