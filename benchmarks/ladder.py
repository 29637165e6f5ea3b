"""GPT-2 trained ever faster, one change at a time: time, tokens/s, share of the GPU's rate, and memory of each rung.

    PYTHONPATH=. python -m benchmarks.ladder --json ladder.json
    PYTHONPATH=. python -m benchmarks.ladder --rungs f32,8bit,accumulate --part ladder --time-limit 550

A rung is one before it and one change: float32; TF32; bfloat16 by autocast; cuDNN's flash attention; an embedding with
rows up to a multiple of 128; bfloat16 parameters with split masters; 8-bit moments; weights of all layers in one stack.
Then those that pay with time for memory, and say how much: the loss in chunks; checkpoints that keep less and less. The
last one has several microbatches a step, with everything kept. More of them, to try out, are chosen by name
(`--rungs`). A step is loss, gradient, clipping and AdamW, with parameters and state donated. Tokens are real text,
eight batches in turn, on the device before the clock starts. Steps are enqueued one behind another and waited for once;
the time is the median of several rounds.

`--target h200` measures nothing: each rung is compiled for that device, which need not be there, and its program read
(see `benchmarks.reading`). Otherwise the bound of the program that ran stands beside the time, where the figures of the
device are known.

Each rung runs in a process of its own. One that fails, for want of memory or time or by a compiler's error, is a row
that says why, and the next one goes on. Memory is the peak that the device reports, after the program was compiled. A
CPU reports none; there it is the compiler's figure for the step: arguments, results and temporary arrays.

MFU is the share of the rate of a large product of random bfloat16 matrices, measured at the start, for every rung, also
those in float32. Counted are the operations that the model needs (`Config.flops_per_token`), not those of padding.
`--xla-flags` are given to all these processes; without them, XLA's own defaults hold. With `JAX_COMPILATION_CACHE_DIR`
set, XLA tries its kernels once for all rungs, and compiles a program that it has seen only once.

The other parts are at a fixed batch, with one program in several precisions: see `benchmarks.fixed_batch`.

On a GPU the model is GPT-2 124M, elsewhere a tiny one, so that the command can be tried: its times say nothing.
"""

import dataclasses
import enum
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import Sheet, bound_cells, make_console, spread_cell, write_json
from benchmarks.rungs import EXTRAS, LADDER, RUNGS, Rung, Setting, choose_rungs, choose_setting
from benchmarks.workers import Clock, Result, Run, run_worker
from examples.gpt.model import PRESETS

WORKER = "benchmarks.gpt2_in_jax"
NO_FLASH = "no GPU, no flash attention: as before"


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is needed to measure something.

    Attributes:
        setting: of all rungs.
        device: what the worker says of it.
        clock: of the whole command.
        run: runs a job in a process.
    """

    setting: Setting
    device: Result
    clock: Clock
    run: Run

    @property
    def on_gpu(self) -> bool:
        """Whether the numbers mean anything."""
        return self.device["backend"] == "gpu"

    def in_jax(self, rung: Rung, kind: str, **more: Any) -> Result:
        """Does a job with the settings of a rung."""
        setting = self.setting
        job = {"kind": kind, "preset": setting.preset, "batch_size": setting.batch_size, **rung.settings()}
        job |= {"steps": setting.steps, "rounds": setting.rounds, **more}
        notes = {}
        if job["attention"] == "cudnn" and not self.on_gpu:
            job["attention"], notes = "xla", {"note": NO_FLASH}
        flags = f"{os.environ.get('XLA_FLAGS', '')} {setting.xla_flags}".strip()
        environment = {"XLA_FLAGS": flags} if setting.xla_flags else {}
        answer = self.run(WORKER, job, timeout=self.clock.cut(setting.timeout), environment=environment)
        return {"job": job} | notes | answer


def start_bench(clock: Clock, run: Run, **given: Any) -> Bench:
    """Looks at the device, in a process that is gone afterwards.

    Raises:
        RuntimeError: if there is none that works.
    """
    device = run(WORKER, {"kind": "device"}, timeout=clock.cut(300.0))
    if "failed" in device:
        raise RuntimeError(f"the device cannot be used: {device['failed']}\n{device.get('log', '')}")
    return Bench(choose_setting(device["backend"], **given), device, clock, run)


def start_reading(clock: Clock, run: Run, **given: Any) -> Bench:
    """Looks at no device: programs are compiled for one that need not be here, at the sizes of a GPU."""
    return Bench(choose_setting("gpu", **given), {"backend": "gpu"}, clock, run)


# --- A rung. ---
def measure_rung(rung: Rung, bench: Bench) -> Result:
    """The row of a rung."""
    microbatches = bench.setting.microbatches(rung, PRESETS[bench.setting.preset].context)
    steps = bench.setting.steps_of(microbatches)
    answer = bench.in_jax(rung, "step", microbatches=microbatches, steps=steps)
    row = {"rung": rung.name, "label": rung.label, "after": rung.after} | answer
    return row if "failed" in row else row | rates(row, bench.device["matmul FLOP/s"])


def read_rung(rung: Rung, bench: Bench, target: str) -> Result:
    """The row of a rung that is compiled for a target, and not run."""
    microbatches = bench.setting.microbatches(rung, PRESETS[bench.setting.preset].context)
    answer = bench.in_jax(rung, "program", microbatches=microbatches, target=target)
    row = {"rung": rung.name, "label": rung.label, "after": rung.after} | answer
    return row if "failed" in row else row | reachable(row)


def reachable(row: Result) -> Result:
    """The tokens a second and the share of a GPU's rate above which its bound lets no step come."""
    speed = 1e3 * row["tokens"] / row["program"]["reached ms"]
    return {"tokens/s": speed, "MFU": speed * row["flops per token"] / row["program"]["reached FLOP/s"]}


def rates(row: Result, matmul: float) -> Result:
    """What follows from the time of a step.

    Args:
        row: with milliseconds, tokens a step, operations a token, memory and loss.
        matmul: operations a second of a large product, the yardstick.
    """
    speed = 1e3 * row["tokens"] / row["ms"]
    measured = row["peak bytes"] is not None
    found = {"tokens/s": speed, "FLOP/s": speed * row["flops per token"]}
    found |= {"MFU": found["FLOP/s"] / matmul}
    found["memory"] = row["peak bytes"] if measured else row["program"]["peak bytes"]
    found["memory is"] = "measured" if measured else "the compiler's figure"
    if measured and row["peak bytes"] == row["peak bytes before"]:
        found["memory is"] = "that of compiling, which was more than a step needs"
    return found if math.isfinite(row["loss"]) else found | {"failed": f"the loss is {row['loss']}"}


def add_gains(rows: list[Result]) -> None:
    """How many times as fast as the rung before, or as the nearest one before that which has run."""
    by_name = {row["rung"]: row for row in rows if "tokens/s" in row and "failed" not in row}
    speeds = {name: row["tokens/s"] for name, row in by_name.items()}
    for row in rows:
        before = row["after"]
        while before is not None and before not in speeds:
            before = RUNGS[before].after
        row.pop("gain", None)
        if before is not None and row["rung"] in speeds:
            row |= {"gain": speeds[row["rung"]] / speeds[before], "gain over": before}
            if "program" in row:
                row["saved bytes"] = held_bytes(by_name[before]) - held_bytes(row)


def held_bytes(row: Result) -> int:
    """The peak of memory of a rung: the measured one, or that of its program."""
    return row.get("memory", row["program"]["peak bytes"])


def each_rung(
    rungs: list[Rung], row_of: Callable[[Rung], Result], keep: Callable[[list[Result]], None]
) -> list[Result]:
    """The rows of all rungs; `keep` gets what there is after each."""
    rows = []
    for rung in rungs:
        rows.append(row_of(rung))
        add_gains(rows)
        keep(rows)
    return rows


def ladder_table(rows: list[Result], rate: float) -> Sheet:
    """The ladder as it was measured; `rate` is the measured rate of bfloat16 products."""
    job = rows[0]["job"]
    title = f"{job['preset']}, microbatches of {job['batch_size']} sequences; "
    title += f"MFU of {rate / 1e12:.4g} TFLOP/s, the measured rate of bfloat16 products"
    kinds = sorted({row["memory is"] for row in rows if "failed" not in row})
    return Sheet(title, list(map(measured_cells, rows)), f"memory: {', '.join(kinds)}" if kinds else "")


def measured_cells(row: Result) -> dict[str, str]:
    """The cells of a rung that was measured."""
    cells = {"rung": row["rung"], "adds": row["label"]}
    if "failed" in row:
        return cells | {"note": row["failed"]}
    cells |= {"ms a step": f"{row['ms']:.2f}", "spread": spread_cell(row["ms spread"], 2)}
    cells |= bound_cells(row["program"], row["ms"])
    cells |= {"tokens/s": f"{row['tokens/s']:,.0f}", "TFLOP/s": f"{row['FLOP/s'] / 1e12:.3g}"}
    cells |= {"MFU": f"{row['MFU']:.1%}", "peak GB": memory_cell(row), "gain": gain_cell(row), "pays": trade_cell(row)}
    return cells | {"loss": f"{row['loss']:.3f}", "note": row.get("note", "")}


def programs_table(rows: list[Result], setting: Setting) -> Sheet:
    """The ladder as it was read off programs."""
    compiled = next((f" for one {row['compiled for']}, jax {row['jax']}" for row in rows if "failed" not in row), "")
    title = f"{setting.preset}, microbatches of {setting.batch_size} sequences, compiled{compiled}"
    return Sheet(title, list(map(read_cells, rows)))


def read_cells(row: Result) -> dict[str, str]:
    """The cells of a rung that was read."""
    cells = {"rung": row["rung"], "adds": row["label"]}
    if "failed" in row:
        return cells | {"note": row["failed"]}
    program = row["program"]
    cells |= {"bound, ms": f"{program['bound ms']:.1f}", "at what is reached, ms": f"{program['reached ms']:.1f}"}
    cells |= {"peak, GB": f"{program['peak bytes'] / 1e9:.1f}", "moved, GB": f"{program['moved bytes'] / 1e9:.1f}"}
    cells |= {"not in products, GB": f"{program['outside bytes'] / 1e9:.1f}", "kernels": f"{program['kernels']:,}"}
    cells |= {"MFU at most": f"{row['MFU']:.0%}", "gain": gain_cell(row), "pays": trade_cell(row)}
    return cells | {"compiled in, s": f"{program['compile s']:.0f}"}


def memory_cell(row: Result) -> str:
    """Return a peak in GB, with a mark if it is only known not to be larger."""
    return ("at most " if "compiling" in row["memory is"] else "") + f"{row['memory'] / 1e9:.3g}"


def gain_cell(row: Result) -> str:
    """Return a gain, and over what if not over the rung before."""
    if "gain" not in row:
        return ""
    return f"{row['gain']:.2f}" + ("" if row["gain over"] == row["after"] else f" over {row['gain over']}")


def trade_cell(row: Result) -> str:
    """Return what a rung pays with time for memory; nothing where it is no slower than the one before."""
    if row.get("gain", 1) >= 1 or row.get("saved bytes", 0) <= 0:
        return ""
    return f"{1 / row['gain'] - 1:.1%} of time for {row['saved bytes'] / 1e9:.1f} GB"


# --- The command. ---
def chosen_rungs(names: list[str] | None) -> list[Rung]:
    """The rungs of `--rungs`."""
    try:
        return choose_rungs(names)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rungs") from error


Preset = enum.StrEnum("Preset", {name: name for name in PRESETS})
# Options that `benchmarks.programs` has too.
PresetOption = Annotated[Preset | None, typer.Option(help="The model; gpt2-124m on a GPU, tiny elsewhere.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Sequences of a microbatch; 16 on a GPU, else 4.")]
StepsOption = Annotated[int | None, typer.Option(min=1, help="Steps in a timed round; 10 on a GPU, else 3.")]
RoundsOption = Annotated[int | None, typer.Option(min=1, help="Timed rounds; 5 on a GPU, else 3.")]
BudgetOption = Annotated[int | None, typer.Option(min=1, help="Tokens of a step with accumulation; 524288 or 1024.")]
TimeoutOption = Annotated[float | None, typer.Option(help="Seconds that one process may take; 300.")]
LimitOption = Annotated[float | None, typer.Option(help="Seconds for all; what would begin later is left out.")]
FlagsOption = Annotated[str | None, typer.Option(help="XLA_FLAGS for all processes of JAX.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")]
RUNGS_HELP = f"Of {', '.join(r.name for r in LADDER)}; to try out: {', '.join(r.name for r in EXTRAS)}."


def main(
    preset: PresetOption = None,
    batch_size: BatchOption = None,
    steps: StepsOption = None,
    rounds: RoundsOption = None,
    token_budget: BudgetOption = None,
    timeout: TimeoutOption = None,
    time_limit: LimitOption = None,
    xla_flags: FlagsOption = None,
    rungs: Annotated[list[str] | None, typer.Option(help=RUNGS_HELP)] = None,
    target: Annotated[
        str | None, typer.Option(help="Only read the ladder's programs for this device: h200, ...")
    ] = None,
    json_path: JsonOption = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the ladder into this file.")] = None,
) -> None:
    """Measures, prints the tables and, if asked, writes the numbers and a picture."""
    console, chosen = make_console(), chosen_rungs(rungs)
    given = {"preset": preset and str(preset), "batch_size": batch_size, "steps": steps, "rounds": rounds}
    given |= {"token_budget": token_budget, "timeout": timeout, "xla_flags": xla_flags}
    clock = Clock(time_limit)
    bench = start_reading(clock, run_worker, **given) if target else start_bench(clock, run_worker, **given)
    found: dict[str, Any] = {"device": bench.device, "setting": dataclasses.asdict(bench.setting)}
    console.print(found)

    row_of = (lambda rung: read_rung(rung, bench, target)) if target else lambda rung: measure_rung(rung, bench)

    def keep(rows: list[Result]) -> None:
        found["ladder"] = rows
        console.print(progress(rows[-1]), markup=False)
        write_json(json_path, found)

    rows = each_rung(chosen, row_of, keep)
    console.print(programs_table(rows, bench.setting) if target else ladder_table(rows, bench.device["matmul FLOP/s"]))
    if picture is not None:
        from benchmarks.ladder_picture import write_picture  # Matplotlib need not be where programs are compiled

        write_picture(
            picture, rows, f"A step of {bench.setting.preset}: {'bound of the program' if target else 'measured'}"
        )


def progress(row: Result) -> str:
    """A line for a row that is there, so that one sees how far a long command is."""
    return f"{row['rung']}: {row.get('failed', 'done')}"


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
