"""Read off compiled programs what autocast costs beside the same models cast by hand; nothing runs.

A program is the loss and its gradient, by `mpx.value_and_grad`, of float32 parameters. All forms of a model have the
same attention (cuDNN's, in bfloat16), the same loss and the same checkpoints. Times are bounds at what good kernels
reach (see `benchmarks.reading`).
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import mpx
from benchmarks.models_by_hand import MODELS, Dtypes
from benchmarks.reading import absent_figures, start_compiler
from benchmarks.report import Sheet, judge, targets_table
from benchmarks.workers import Result

AUTOCAST, STREAM, NARROW, WIDE = "autocast", "by hand, f32 stream", "by hand, bf16", "f32"
FORMS = {
    AUTOCAST: Dtypes(),
    STREAM: Dtypes(jnp.bfloat16, jnp.float32),
    NARROW: Dtypes(jnp.bfloat16, jnp.bfloat16),
    WIDE: Dtypes(),
}
BOUND, OUTSIDE, PEAK = "reached ms", "outside bytes", "peak bytes"
# How many times as much as a form by hand autocast may take at most: of any model, and of GPT-2.
GOALS = {(BOUND, STREAM): 1.03, (PEAK, STREAM): 1.1}
GPT2_GOALS = {(BOUND, STREAM): 1.02, (BOUND, NARROW): 1.06, (OUTSIDE, STREAM): 1.05, (OUTSIDE, NARROW): 1.12}
WORDS = {BOUND: "bound", OUTSIDE: "bytes outside of products", PEAK: "peak"}


def read_models(
    names: list[str], target: str, keep: Callable[[list[Result]], None] = lambda rows: None
) -> list[Result]:
    """Return the rows of models in all their forms; `keep` gets what there is after each."""
    about, rows = start_compiler(target), []
    for name in names:
        for form in FORMS:
            rows.append({"model": name, "form": form} | about | read_form(name, form, target))
            keep(rows)
    return rows


def read_form(model: str, form: str, target: str) -> Result:
    """Return the figures of a form of a model, or why it does not compile."""
    made = MODELS[model](FORMS[form])
    loss = mpx.autocast(made.loss, "bf16") if form == AUTOCAST else made.loss
    step = mpx.value_and_grad(loss, has_aux=True)
    try:
        return absent_figures(step, *made.shapes(), target=target, donate=())
    except jax.errors.JaxRuntimeError as error:
        return {"failed": str(error).splitlines()[0]}


def sheets(rows: list[Result]) -> list[Sheet]:
    """Return the table of all programs, and that of the goals."""
    compiled = f"compiled for one {rows[0]['compiled for']}, jax {rows[0]['jax']}"
    table = Sheet(f"autocast beside models cast by hand, {compiled}", list(map(cells, with_ratios(rows))))
    return [table, targets_table(list(judged(rows)))]


def with_ratios(rows: list[Result]) -> list[Result]:
    """Return the rows with how many times as much autocast takes as each form."""
    ours = {row["model"]: row for row in rows if row["form"] == AUTOCAST and "failed" not in row}
    return [
        row | {"ratios": {figure: ours[row["model"]][figure] / row[figure] for figure in WORDS}}
        if row["form"] != AUTOCAST and row["model"] in ours and "failed" not in row
        else row
        for row in rows
    ]


def cells(row: Result) -> dict[str, str]:
    """Return the cells of a form of a model."""
    found = {"model": row["model"], "form": row["form"]}
    if "failed" in row:
        return found | {"note": row["failed"]}
    ratio = lambda figure: f"{row['ratios'][figure]:.3f}" if "ratios" in row else ""
    found |= {"bound, ms": f"{row[BOUND]:.2f}", "autocast / it": ratio(BOUND)}
    found |= {"not in products, GB": f"{row[OUTSIDE] / 1e9:.2f}", "autocast / that": ratio(OUTSIDE)}
    found |= {"temporaries, GB": f"{row['temporary bytes'] / 1e9:.2f}"}
    found |= {"peak, GB": f"{row[PEAK] / 1e9:.2f}", "autocast / its": ratio(PEAK)}
    return found | {"kernels": f"{row['kernels']:,}", "compiled in, s": f"{row['compile s']:.0f}"}


def judged(rows: list[Result]) -> Iterator[dict[str, Any]]:
    """Yield the goals of all models with their verdicts."""
    for row in with_ratios(rows):
        goals = GOALS | (GPT2_GOALS if row["model"] == "GPT-2" else {})
        for (figure, form), most in goals.items():
            if form == row["form"] and "ratios" in row:
                what = f"{row['model']}: {WORDS[figure]}, autocast / {form}"
                yield judge(what, row["ratios"][figure], most, least=False)
