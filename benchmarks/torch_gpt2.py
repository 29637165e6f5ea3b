"""GPT-2 124M trained by PyTorch and by mpx, in turn: time of a step, tokens/s and
memory.

    PYTHONPATH=. python -m benchmarks.torch_gpt2
    PYTHONPATH=. python -m benchmarks.torch_gpt2 --size smallest

Both train one model on the same random tokens, 16 sequences of 1,024 a step, with
float32 parameters, bfloat16 autocast, an embedding padded to 50,304 rows, clipping and
AdamW. `benchmarks.gpt2_in_torch` is the one, the rung `padded` of `benchmarks.rungs`
the other; `--turns` takes other rungs.

Each turn has a process of its own, A B C C B A: the libraries share neither the GPU's
memory nor a build of cuDNN, and each has its own default pool. In each a round of steps
goes before those that are timed, so that the GPU keeps its clocks. PyTorch chooses its
kernel of attention, or is told to take cuDNN's, which mpx uses. The time is the median
of the turns' medians. Memory is the most in use at once, by the count of PyTorch's
allocator and of JAX; pools may be larger. For PyTorch the seconds of compiling are
those of the first step.
"""

import dataclasses
import importlib.metadata
import statistics
from typing import Annotated, Literal

import typer

from benchmarks import gpt2_in_jax, ladder
from benchmarks.report import Row, Sheet
from benchmarks.rungs import ON_CPU, ON_GPU, RUNGS, choose_rungs
from benchmarks.workers import run_worker

SETTINGS = {
    "gpu": ON_GPU,
    "smallest": dataclasses.replace(ON_CPU, steps=1, rounds=1),
}
# Forms of PyTorch, by the kernel of attention; other sides are rungs.
TORCH: dict[str, Literal["default", "cudnn"]] = {
    "torch": "default",
    "torch-cudnn": "cudnn",
}
TURNS = ("torch", "torch-cudnn", "padded", "padded", "torch-cudnn", "torch")
TIMEOUT = 300.0  # seconds for one process
COLUMNS = {
    "side": "{name}",
    "ms a step": "{ms:.2f}",
    "spread": "{low:.2f} to {high:.2f}",
    "tokens/s": "{tokens/s:,.0f}",
    "times PyTorch": "{gain:.2f}",
    "peak, GB": "{peak GB:.3g}{peak is}",
    "compiled in, s": "{compile s:.0f}",
    "loss": "{loss:.3f}",
    "note": "{note}",
}


def measure(size: str, side: str) -> list[Row]:
    """Return what one turn of a side measures."""
    setting = SETTINGS[size]
    if side in TORCH:
        # Only where it runs: it need not be installed.
        from benchmarks import gpt2_in_torch

        name = f"PyTorch {importlib.metadata.version('torch')}, {TORCH[side]} attention"
        row = gpt2_in_torch.measure_step(dataclasses.asdict(setting), TORCH[side])
    else:
        name = f"mpx, jax {importlib.metadata.version('jax')}, rung {side}"
        (rung,) = choose_rungs(side)
        row = gpt2_in_jax.measure_step(**ladder.job_of(rung, setting))
        row["compile s"] = row["program"]["compile s"]
    return [{"side": side, "name": name} | row]


def sheets(rows: list[Row]) -> list[Sheet]:
    """Return the table of what was measured, a row a side."""
    sides = dict.fromkeys(row["side"] for row in rows)
    folded = {
        side: fold([row for row in rows if row["side"] == side]) for side in sides
    }
    if "torch" in folded:
        for row in folded.values():
            row["gain"] = folded["torch"]["ms"] / row["ms"]
    return [Sheet("GPT-2 beside PyTorch", list(folded.values()), COLUMNS)]


def fold(turns: list[Row]) -> Row:
    """Return the row of a side from its turns."""
    row = max(turns, key=lambda row: row["peak bytes"] or 0)
    row = row | {
        "ms": statistics.median(turn["ms"] for turn in turns),
        "low": min(turn["low"] for turn in turns),
        "high": max(turn["high"] for turn in turns),
        # A later turn finds compiled programs of an earlier one.
        "compile s": max(turn["compile s"] for turn in turns),
    }
    row["tokens/s"] = 1e3 * row["tokens"] / row["ms"]
    return row | (ladder.peak(row) if row["peak bytes"] else {})


def main(
    size: Annotated[
        Literal["gpu", "smallest"], typer.Option(help="smallest: to try it.")
    ] = "gpu",
    turns: Annotated[
        str, typer.Option(help=f"Sides in turn, of {', '.join((*TORCH, *RUNGS))}.")
    ] = ",".join(TURNS),
) -> None:
    """Measure the sides in turn and print the table."""
    rows: list[Row] = []
    for side in turns.split(","):
        job = {"size": size, "side": side}
        (row,) = run_worker("benchmarks.torch_gpt2:measure", job, timeout=TIMEOUT)
        print(f"{side}: {row.get('failed', 'done')}", flush=True)
        rows.append(row)
    for sheet in sheets([row for row in rows if "failed" not in row]):
        print(sheet.markdown())


if __name__ == "__main__":
    typer.run(main)
