"""Which rules keep their float32 result, and in what state: writes the table in
`benchmarks/STATE_FORMATS.md`.

    PYTHONPATH=. python -m benchmarks.state_formats
    PYTHONPATH=. python -m benchmarks.state_formats --rules adamw,lion --out some.md

Every optimizer of Optax and `optax.contrib`, with five ways to keep bfloat16 parameters
and five ways to keep the rule's averages, learns the problem of `benchmarks/sweep.py`:
1,085 trainings of 120 steps, nearly all of it compilation. A combination keeps the
float32 result if it ends at most one spread above it: the standard deviation of the
float32 loss over five initial weights.
"""

import importlib.metadata
import math
import platform
import statistics
import time
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import typer

from benchmarks.report import Row, table
from benchmarks.sweep import STATES, STEPS, train, transformation
from tests.rules import NO_MOMENTS, RULES, WRITE_BACKS, moment_fields

# By the ways to keep the state and the parameters.
Losses = dict[tuple[str, str], float]

SEEDS = 5
OUT = Path(__file__).with_name("STATE_FORMATS.md")
EXPLAINED = {
    "f32": "The rule's state as it is, in float32: only the parameters are bfloat16.",
    "bf16 nearest": "Averages in bfloat16, rounded to nearest.",
    "bf16 stochastic": "Averages in bfloat16, rounded stochastically.",
    "8-bit": "Averages in 8 bits, `Blockwise8bit()`, rounded at random.",
    "4-bit": (
        "Averages in 4 bits, `Blockwise4bit()`, rounded at random; second moments in 8"
        " bits."
    ),
}


def measure(name: str) -> tuple[list[float], Losses]:
    """Return the float32 losses of a rule over seeds, and the loss of each combination
    at seed 0.
    """
    # Optax's rules add arrays of two dtypes.
    with jax.numpy_dtype_promotion("standard"):
        reference = [
            train(name, RULES[name].make(), jnp.float32, seed)[1]
            for seed in range(SEEDS)
        ]
        losses = {}
        for state in STATES:
            for write_back in WRITE_BACKS:
                tx = transformation(name, write_back, state)
                if tx is not None:
                    losses[state, write_back] = train(name, tx, jnp.bfloat16)[1]
    return reference, losses


def keeps(loss: float, reference: list[float]) -> bool:
    """Return whether a training ends at most one spread above float32 with the same
    seed.
    """
    return math.isfinite(loss) and loss - reference[0] <= statistics.stdev(reference)


def cell(loss: float | None, reference: list[float]) -> str:
    """Return the gap to float32 in spreads; bold if the result is not kept."""
    if loss is None:
        return ""
    gap = (
        f"{(loss - reference[0]) / statistics.stdev(reference):+.2f}"
        if math.isfinite(loss)
        else str(loss)
    )
    return gap if keeps(loss, reference) else f"**{gap}**"


def write(out: Path, results: dict[str, tuple[list[float], Losses]]) -> None:
    """Write the page: an explanation, the number of combinations that keep the result,
    and the rules that lose it.
    """
    versions = ", ".join(
        f"{package} {importlib.metadata.version(package)}"
        for package in ("jax", "optax")
    )
    text = f"""# Which rules keep their float32 result with which state

Written by `PYTHONPATH=. python -m benchmarks.state_formats`; its docstring and `benchmarks/sweep.py` say what is run. \
Measured on {time.strftime("%Y-%m-%d")} on {platform.machine()}, {jax.devices()[0].device_kind}, with Python \
{platform.python_version()}, {versions}: {STEPS} steps on a small noisy regression, bfloat16 parameters, all with the \
learning rates of `tests/rules.py`, which are the same for all combinations and good for none in particular.

A figure is the loss of a combination minus the loss of the same rule in float32 from the same initial weights, \
divided by the spread of the float32 loss, its standard deviation over {SEEDS} initial weights. Up to +1 the float32 \
result is kept; beyond, the number is **bold**. Loss is taken at the best float32 values of the parameters \
(`mpx.master_params`). Stored in few bits is what a rule averages, not the weights that some rules keep \
({", ".join(f"`{name}`" for name in sorted(NO_MOMENTS))}).

Rules that keep their result, of those that have such a state:

{table([counts(state, results) for state in STATES], COUNTS)}
"""
    columns = {"rule": "{rule}", "stored so": "{fields}"} | {
        name: f"{{{name}}}" for name in WRITE_BACKS
    }
    for state in STATES:
        rows = [row(name, state, *result) for name, result in results.items()]
        lost = [found for found in rows if any("**" in cell for cell in found.values())]
        text += (
            "\n##"
            f" {state}\n\n{EXPLAINED[state]}\n\n{table(lost, columns) if lost else 'All keep it.'}\n"
        )
    out.write_text(text, encoding="utf-8")


COUNTS = {"state": "{state}"} | {name: f"{{{name}}}" for name in WRITE_BACKS}


def counts(state: str, results: dict[str, tuple[list[float], Losses]]) -> Row:
    """Return how many rules keep their result with a way to keep the state, for each
    way to keep parameters.
    """
    found: Row = {"state": state}
    for name in WRITE_BACKS:
        kept = [
            keeps(losses[state, name], reference)
            for reference, losses in results.values()
            if (state, name) in losses
        ]
        found[name] = f"{sum(kept)} of {len(kept)}"
    return found


def row(name: str, state: str, reference: list[float], losses: Losses) -> Row:
    """Return the row of a rule in the table of a way to keep the state."""
    fields = "" if state == "f32" else (moment_fields(name) or "").replace("|", ", ")
    cells = {
        write_back: cell(losses.get((state, write_back)), reference)
        for write_back in WRITE_BACKS
    }
    return {"rule": name, "fields": fields} | cells


def main(
    rules: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(RULES),
    out: Path = OUT,
) -> None:
    """Run the sweep and write the page after every rule, so that a stopped one has left
    something.
    """
    results = {}
    for name in rules.split(","):
        started = time.perf_counter()
        results[name] = measure(name)
        reference, losses = results[name]
        kept = sum(keeps(loss, reference) for loss in losses.values())
        print(
            f"{name}: {kept} of {len(losses)} keep the result,"
            f" {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        write(out, results)


if __name__ == "__main__":
    typer.run(main)
