"""Which rules keep their float32 result with which state: writes the table in `benchmarks/STATE_FORMATS.md`.

    PYTHONPATH=. python -m benchmarks.state_formats
    PYTHONPATH=. python -m benchmarks.state_formats --rules adamw,lion --out some.md

Every optimizer of Optax and `optax.contrib`, with four ways to keep bfloat16 parameters and six ways to keep the
rule's averages, learns the problem of `tests/sweep.py`: 1,036 trainings of 120 steps, about 40 minutes on a core,
nearly all of it compilation. A combination keeps the float32 result if it ends at most one spread above it: the
standard deviation of the float32 loss over five initial weights.
"""

import argparse
import importlib.metadata
import math
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from tests.rules import RULES
from tests.sweep import NO_MOMENTS, STATES, STEPS, WRITE_BACKS, moment_fields, train, transformation

SEEDS = 5
OUT = Path(__file__).with_name("STATE_FORMATS.md")
EXPLAINED = {
    "f32": "The rule's state as it is, in float32: only the parameters are bfloat16.",
    "bf16 nearest": "Averages in bfloat16, rounded to nearest.",
    "bf16 stochastic": "Averages in bfloat16, rounded stochastically.",
    "8-bit": "Averages in 8 bits, `Blockwise8bit()`.",
    "e4m3": "Averages in 8-bit floats, e4m3, rounded to nearest. What changes by less than a thirty-second in a "
    "step stands still. A second moment or a sum that stays too large makes steps small, one that stays too small "
    "makes them large. A loss below that of float32 says here that a rule trains otherwise, not that it trains better.",
    "e4m3 stochastic": "Averages in 8-bit floats, e4m3, rounded stochastically: right in the mean, and noisy.",
}


def measure(name: str) -> tuple[list[float], dict[tuple[str, str], float]]:
    """The float32 losses of a rule over seeds, and the loss of each combination at seed 0."""
    with jax.numpy_dtype_promotion("standard"):  # Optax's rules add arrays of two dtypes
        reference = [train(name, RULES[name].make(), jnp.float32, seed)[1] for seed in range(SEEDS)]
        losses = {}
        for state in STATES:
            for write_back in WRITE_BACKS:
                tx = transformation(name, write_back, state)
                if tx is not None:
                    losses[state, write_back] = train(name, tx, jnp.bfloat16)[1]
    return reference, losses


def keeps(loss: float, reference: list[float]) -> bool:
    """Whether a training ends at most one spread above float32 with the same seed."""
    return math.isfinite(loss) and loss - reference[0] <= statistics.stdev(reference)


def cell(loss: float | None, reference: list[float]) -> str:
    """The gap to float32 in spreads; bold if the result is not kept."""
    if loss is None:
        return ""
    gap = f"{(loss - reference[0]) / statistics.stdev(reference):+.2f}" if math.isfinite(loss) else str(loss)
    return gap if keeps(loss, reference) else f"**{gap}**"


def write(out: Path, results: dict[str, tuple[list[float], dict[tuple[str, str], float]]]) -> None:
    """The page: an explanation, and a table for each way to keep the state."""
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("jax", "optax"))
    everything = [(loss, reference) for reference, losses in results.values() for loss in losses.values()]
    kept = sum(keeps(*item) for item in everything)
    lines = [
        "# Which rules keep their float32 result with which state",
        "",
        "Written by `PYTHONPATH=. python -m benchmarks.state_formats`; its docstring and `tests/sweep.py` say what is "
        f"run. Measured on {time.strftime('%Y-%m-%d')} on {platform.machine()}, {jax.devices()[0].device_kind}, with "
        f"Python {platform.python_version()}, {versions}: {STEPS} steps on a small noisy regression, bfloat16 "
        "parameters, all with the learning rates of `tests/rules.py`, which are the same for all combinations and good "
        "for none in particular.",
        "",
        "A cell is the loss of a combination minus that of the same rule in float32 from the same initial weights, "
        f"divided by the spread of the float32 loss, its standard deviation over {SEEDS} initial weights. Up to +1 the "
        "float32 result is kept; beyond, the number is **bold**. Loss is taken at the best float32 values of the "
        f"parameters (`mpx.master_params`). {kept} of {len(everything)} combinations keep it.",
        "",
        "Stored in few bits is what a rule averages, by the fields of its state; not the weights that some rules keep "
        f"({', '.join(f'`{name}`' for name in sorted(NO_MOMENTS))}). A rule that averages nothing is in the first "
        "table only.",
    ]
    for state in STATES:
        rows = {name: result for name, result in results.items() if any(key[0] == state for key in result[1])}
        lines += ["", f"## {state}", "", EXPLAINED[state], ""]
        lines += ["| rule | stored so | f32 loss | spread | " + " | ".join(WRITE_BACKS) + " |", "|" + "---|" * 8]
        for name, (reference, losses) in rows.items():
            fields = "" if state == "f32" else ", ".join((moment_fields(name) or "").split("|"))
            cells = [cell(losses.get((state, write_back)), reference) for write_back in WRITE_BACKS]
            figures = [f"{reference[0]:.4f}", f"{statistics.stdev(reference):.4f}"]
            lines.append(f"| {' | '.join([name, fields, *figures, *cells])} |")
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Runs the sweep and writes the page after every rule, so that a stopped one has left something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default=",".join(RULES), help="separated by commas")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    console, results = Console(), {}
    for name in arguments.rules.split(","):
        started = time.perf_counter()
        results[name] = measure(name)
        reference, losses = results[name]
        kept = sum(keeps(loss, reference) for loss in losses.values())
        console.print(f"{name}: {kept} of {len(losses)} keep the result, {time.perf_counter() - started:.0f} s")
        write(arguments.out, results)


if __name__ == "__main__":
    main()
