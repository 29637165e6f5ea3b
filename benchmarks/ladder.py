"""GPT-2 trained ever faster, one change at a time: time, tokens/s, share of the GPU's
rate, and memory of each rung.

    PYTHONPATH=. python -m benchmarks.ladder
    PYTHONPATH=. python -m benchmarks.ladder --target h200 --rungs f32,8bit,accumulate

`benchmarks.rungs` says what a rung changes. A step is loss, gradient, clipping and
AdamW, with parameters and state donated. Tokens are random, eight batches in turn.
Steps are enqueued one behind another and waited for once: the median of several rounds
is the time. Each rung runs in a process of its own, and one that fails says why.

`--target h200` measures nothing: each rung is compiled for that device, which need not
be there, and its program read (see `benchmarks.reading`). Otherwise the bound of the
program that ran stands beside the time. Without a GPU the model is a tiny one, so that
the command can be tried.

Memory is the peak that the device reports, after the program was compiled; on a CPU,
which reports none, the compiler's figure. MFU is the share of the measured rate of a
large bfloat16 product; counted are the operations that the model needs
(`flops_per_token`), not the ones for padding.
"""

import dataclasses
import math
from typing import Annotated, Any

import typer

from benchmarks.report import Row, Sheet
from benchmarks.rungs import (
    EXTRAS,
    LADDER,
    ON_CPU,
    ON_GPU,
    RUNGS,
    Rung,
    Setting,
    choose_rungs,
)
from benchmarks.workers import run_worker

TIMEOUT = 900.0  # seconds for one process

# Rungs that were only read have no times, and their MFU is a bound.
COLUMNS = {
    "rung": "{rung}",
    "adds": "{label}",
    "ms a step": "{ms:.2f}",
    "spread": "{low:.2f} to {high:.2f}",
    "bound, ms": "{program[bound ms]:.1f}",
    "at what is reached, ms": "{program[reached ms]:.1f}",
    "tokens/s": "{tokens/s:,.0f}",
    "MFU": "{MFU:.1%}",
    "peak, GB": "{peak GB:.3g}{peak is}",
    "moved, GB": "{program[moved GB]:.3g}",
    "not in products, GB": "{program[outside GB]:.3g}",
    "kernels": "{program[kernels]:,}",
    "MFU at most": "{MFU at most:.0%}",
    "gain": "{gain}",
    "pays": "{pays}",
    "compiled in, s": "{program[compile s]:.0f}",
    "loss": "{loss:.3f}",
    "why not": "{failed}",
    "note": "{note}",
}


# --- What follows from what was measured. ---
def derived(rows: list[Row], rate: float | None = None) -> list[Row]:
    """Return rows with speed, MFU, memory, and the gain over the rung before, if it
    ran.

    A row has the time of a step, or the bound of its program if that was read. `rate`
    is in operations a second, for the MFU of measured rows; programs bring their own.
    """
    ran: dict[str, Row] = {}
    return [
        one_derived(row, rate, ran)
        for row in sorted(rows, key=lambda row: list(RUNGS).index(row["rung"]))
    ]


def one_derived(row: Row, rate: float | None, ran: dict[str, Row]) -> Row:
    """Return one such row; `ran` has the rungs before it, and gets it if it ran."""
    rung = RUNGS[row["rung"]]
    row = row | {"label": rung.label}
    if not math.isfinite(row.get("loss", 0)):
        row["failed"] = f"the loss is {row['loss']}"
    if "failed" in row:
        return row
    program = row["program"]
    row["speed"] = 1e3 * row["tokens"] / row.get("ms", program.get("reached ms"))
    needed = row["speed"] * row["flops per token"]
    if "ms" in row:
        row |= {"tokens/s": row["speed"], "MFU": needed / (rate or math.nan)}
    else:
        row["MFU at most"] = needed / program["reached FLOP/s"]
    row |= peak(row)
    if rung.after in ran:
        row |= gain(row, ran[rung.after])
    ran[row["rung"]] = row
    return row


def peak(row: Row) -> Row:
    """Return the peak of memory in GB: what the device counted, or the compiler's
    figure where it counts nothing.
    """
    if row.get("peak bytes") is None:
        return {
            "peak GB": row["program"]["peak GB"],
            "peak is": " (compiled)" if "ms" in row else "",
        }
    # Where compiling took more than the step, the step's own peak is not known.
    return {
        "peak GB": row["peak bytes"] / 1e9,
        "peak is": " at most" * (row["peak bytes"] == row["peak bytes before"]),
    }


def gain(row: Row, before: Row) -> Row:
    """Return how many times as fast a row is, and if it is slower, what it pays for how
    much memory.
    """
    times, saved = row["speed"] / before["speed"], before["peak GB"] - row["peak GB"]
    pays = (
        {"pays": f"{1 / times - 1:.1%} of time for {saved:.1f} GB"}
        if times < 1 and saved > 0
        else {}
    )
    return {"gain": f"{times:.2f}"} | pays


def measured_sheet(rows: list[Row], preset: str, rate: float) -> Sheet:
    """Return the table of what was measured of a model; `rate` is the measured rate of
    bfloat16 products.
    """
    title = (
        f"{preset}; MFU of {rate / 1e12:.4g} TFLOP/s, the measured rate of bfloat16"
        " products"
    )
    return Sheet(title, derived(rows, rate), COLUMNS)


def programs_sheet(rows: list[Row], setting: Setting) -> Sheet:
    """Return the table of rungs whose programs were read."""
    compiled = next(
        (
            f" for one {row['compiled for']}, jax {row['jax']}"
            for row in rows
            if "failed" not in row
        ),
        "",
    )
    title = (
        f"{setting.preset}, microbatches of {setting.batch_size} sequences,"
        f" compiled{compiled}"
    )
    return Sheet(title, derived(rows), COLUMNS)


# --- The command. ---
def job_of(rung: Rung, setting: Setting, **more: Any) -> Row:
    """Return the arguments of a function of `benchmarks.gpt2_in_jax`."""
    return {
        "rung": dataclasses.asdict(rung),
        "setting": dataclasses.asdict(setting),
    } | more


def run_rungs(rungs: list[Rung], setting: Setting, target: str | None) -> list[Row]:
    """Measure rungs, or read their programs that are compiled for a target."""
    rows: list[Row] = []
    for rung in rungs:
        name, more = (
            ("read_step", {"target": target}) if target else ("measure_step", {})
        )
        (row,) = run_worker(
            f"benchmarks.gpt2_in_jax:{name}",
            job_of(rung, setting, **more),
            timeout=TIMEOUT,
        )
        rows.append({"rung": rung.name} | row)
        print(f"{rung.name}: {row.get('failed', 'done')}", flush=True)
    return rows


NAMES = (
    f"Of {', '.join(rung.name for rung in LADDER)}; to try out:"
    f" {', '.join(rung.name for rung in EXTRAS)}."
)


def main(
    rungs: Annotated[str, typer.Option(help=NAMES)] = "",
    preset: Annotated[
        str, typer.Option(help="The model; gpt2-124m on a GPU, tiny elsewhere.")
    ] = "",
    target: Annotated[
        str | None,
        typer.Option(help="Only read the programs for this device: h200, ..."),
    ] = None,
) -> None:
    """Measure the ladder or read its programs, and print the table."""
    steps, rate, setting = choose_rungs(rungs), None, ON_GPU
    if target is None:
        (device,) = run_worker("benchmarks.gpt2_in_jax:device", {}, timeout=TIMEOUT)
        if "failed" in device:
            raise typer.BadParameter(f"the device cannot be used: {device['failed']}")
        rate, setting = (
            device["FLOP/s"],
            (ON_GPU if device["backend"] == "gpu" else ON_CPU),
        )
    setting = dataclasses.replace(setting, preset=preset or setting.preset)
    rows = run_rungs(steps, setting, target)
    sheet = (
        programs_sheet(rows, setting)
        if rate is None
        else measured_sheet(rows, setting.preset, rate)
    )
    print(sheet.markdown())


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command()(main)

if __name__ == "__main__":
    app()
