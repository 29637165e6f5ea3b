"""The parts of `benchmarks.ladder` at a fixed batch: one program of GPT-2 in several precisions, nothing else changed.

1. steps: the full training step in float32, TF32, bfloat16 autocast, and float16 with dynamic loss scaling.
2. passes: the forward pass up to the mean loss, and the loss with its gradient, in the same precisions and with
   bfloat16 parameters.
3. updates: the optimizer alone, clipping included, on random gradients; and the cast of all float32 weights to bfloat16
   by `policy.cast_to_param`, called and waited for like any other function.

Attention is XLA's own in all of them, since cuDNN's cannot run in float32. A user of GPT-2 in Julia saw, on a GPU and
at a batch of their own, the numbers in `JULIA`: they are printed as a reference and are no target. Targets are that the
cast takes less than 2 ms for GPT-2 124M, and that an update takes less time than the fastest of the gradients.
"""

import dataclasses
from typing import Any, NamedTuple

from benchmarks.report import Sheet, judge, spread_cell
from benchmarks.rungs import FIXED
from benchmarks.workers import Result

CAST = "cast to bf16"
YARDSTICKS = ("f32", "tf32")
JULIA = {
    "step": "1.16 times as fast as in f32",
    "forward": "1.9 times as fast as in f32",
    "gradient": "1.8 times as fast as in f32",
    "update": "37 ms",
    "cast": "152 ms",
}
CAST_TARGET = 2.0  # ms


class Part(NamedTuple):
    """A part of the command.

    Attributes:
        title: the title of its table.
        kind: the job of the worker.
        recipes: the precisions in which the program is measured.
        times: the names of what is timed in a job.
    """

    title: str
    kind: str
    recipes: tuple[str, ...]
    times: tuple[str, ...]


PASSES = ("f32", "tf32", "bf16-autocast", "bf16-split", "f16-scaled")
UPDATES = ("f32", "bf16-masters", "bf16-split", "bf16-split-8bit", CAST)
PARTS = {
    "steps": Part("full steps", "step", ("f32", "tf32", "bf16-autocast", "f16-scaled"), ("step",)),
    "passes": Part("passes", "passes", PASSES, ("forward", "gradient")),
    "updates": Part("updates and cast", "update", UPDATES, ("update", "cast")),
}


def measure_recipe(part: Part, recipe: str, bench: Any) -> Result:
    """Return the row of one recipe."""
    kind, rung = ("cast", FIXED) if recipe == CAST else (part.kind, dataclasses.replace(FIXED, recipe=recipe))
    answer = bench.in_jax(rung, kind, microbatches=1)
    whole = {"step": answer} if kind == "step" and "failed" not in answer else {}
    return {"recipe": recipe} | answer | whole


def milliseconds(rows: list[Result], what: str) -> dict[str, float]:
    """Return times by recipe, of the rows that have them."""
    return {row["recipe"]: row[what]["ms"] for row in rows if what in row}


def table(part: Part, rows: list[Result]) -> Sheet:
    """Return times of a part, and how many times as fast each is as in float32 and in TF32."""
    seen = ", ".join(f"{what} {JULIA[what]}" for what in part.times)
    cells = lambda row: {"note": row["failed"]} if "failed" in row else _time_cells(part, rows, row)
    found = [{"recipe": row["recipe"]} | cells(row) for row in rows]
    return Sheet(f"{part.title}, fixed batch; a Julia user saw: {seen}", found)


def _time_cells(part: Part, rows: list[Result], row: Result) -> dict[str, str]:
    cells = {}
    for what in (what for what in part.times if what in row):
        times = milliseconds(rows, what)
        cells |= {f"{what}, ms": f"{row[what]['ms']:.3f}", f"{what}, spread": spread_cell(row[what]["ms spread"])}
        cells |= {
            f"{what}: {base} / this": f"{times[base] / row[what]['ms']:.2f}" for base in YARDSTICKS if base in times
        }
    return cells


def targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets that can be judged with what was measured."""
    updates = milliseconds(found.get("updates", []), "update")
    gradients = milliseconds(found.get("passes", []), "gradient")
    judged = []
    if updates and gradients:
        what = "ms of the slowest update, against those of the fastest gradient"
        judged.append(judge(what, max(updates.values()), min(gradients.values()), least=False))
    for cast in milliseconds(found.get("updates", []), "cast").values():
        judged.append(judge("ms of casting all weights, asked of gpt2-124m", cast, CAST_TARGET, least=False))
    return judged
