"""The same GPT-2 in JAX with mpx and in PyTorch at its best, on the same GPU in one go: speed, memory and loss curves.

    PYTHONPATH=. python -m benchmarks.torch_gpt2 --json torch.json --plot curves.png
    PYTHONPATH=. python -m benchmarks.torch_gpt2 --rungs f32,accumulate --part speed --time-limit 550

Model, batch, sequence length, tokens, optimizer and schedule are the same. PyTorch has `torch.compile`, bfloat16
autocast, `scaled_dot_product_attention`, fused AdamW and a padded vocabulary; `--compile-mode` has PyTorch's
own names. JAX and PyTorch take turns, rung by rung, each measurement in a process of its own, timed by the same
function.

JAX is always compiled, so every rung is compared with PyTorch compiled; where `torch.compile` fails or is not wanted
(on a CPU it is off), with PyTorch as it is, and the row says so. What has no counterpart (the loss in chunks, split
masters, 8-bit moments) is compared with PyTorch at its best with the same number of microbatches. Some rungs of PyTorch
without compilation stand below, for information.

Memory is the peak of what the library's allocator has handed out: `peak_bytes_in_use`, `max_memory_allocated`. Neither
counts the CUDA context and loaded kernels. On a CPU the two libraries can tell no figure of one kind, so there is no
ratio. Targets, for an H200, are judged on a GPU only.

Loss curves: from the same float32 weights (rounded to bfloat16 where a recipe stores them so), on the same tokens, with
the same hyperparameters, in float32 and at the top rung (without accumulation). In float32 they differ by the order of
sums.
"""

import dataclasses
import enum
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import ladder
from benchmarks.report import Sheet, judge, make_console, spread_cell, targets_table, write_json
from benchmarks.rungs import (
    COUNTERPARTS,
    EIGHT_BIT,
    FIXED,
    PADDED,
    TORCH_F32,
    TORCH_FUSED,
    TORCH_RUNGS,
    Rung,
    Setting,
    TorchRung,
)
from benchmarks.workers import Clock, Result, run_worker
from examples.gpt.model import PRESETS

WORKER = "benchmarks.gpt2_in_torch"
EAGER = ("bf16", "fused")  # PyTorch without compilation, for information
TOP, BOTTOM = "accumulate", "f32"
SPEED_TARGET, MEMORY_TARGET, GAIN_TARGET, MFU_TARGET = 1.1, 0.8, 10.0, 0.45

# The vocabulary is padded on both sides: a table of another shape would begin with other random weights.
CURVES = {
    "f32": (FIXED, dataclasses.replace(TORCH_F32, vocabulary_multiple=PADDED.vocabulary_multiple)),
    "top": (EIGHT_BIT, TORCH_FUSED),
}
LEARNING_RATES = {"tiny": 1e-3}  # all others 6e-4
CURVE_STEPS = {"gpu": 200, "cpu": 60}
LAST = 10  # steps, whose mean loss is compared

Part = enum.StrEnum("Part", {name: name for name in ("speed", "curves", "all")})
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CompileMode = enum.StrEnum("CompileMode", {name: name for name in COMPILE_MODES})


@dataclasses.dataclass(frozen=True)
class TorchOptions:
    """How PyTorch runs.

    Attributes:
        compile: whether it does so by `torch.compile`.
        mode: of that.
    """

    compile: bool
    mode: str = "default"


def torch_job(rung: TorchRung, setting: Setting, options: TorchOptions, kind: str, **more: Any) -> dict[str, Any]:
    """What the worker needs to know."""
    sizes = ("width", "depth", "heads", "context", "vocabulary")
    config = {name: getattr(PRESETS[setting.preset], name) for name in sizes}
    job = {"kind": kind, "config": config, "batch_size": setting.batch_size, **rung.settings()}
    job |= {"steps": setting.steps, "rounds": setting.rounds}
    return job | {"compile": options.compile, "compile_mode": options.mode} | more


def measure_torch(rung: TorchRung, bench: ladder.Bench, options: TorchOptions) -> Result:
    """The row of a rung in PyTorch."""
    setting = bench.setting
    microbatches = setting.microbatches(rung, PRESETS[setting.preset].context)
    more = {"microbatches": microbatches, "steps": setting.steps_of(microbatches)}
    job = torch_job(rung, setting, options, "step", **more)
    answer = bench.run(WORKER, job, timeout=bench.clock.cut(setting.timeout))
    row = {"rung": rung.name, "label": rung.label, "compiled": options.compile, "job": job} | answer
    return row if "failed" in row else row | {"tokens/s": 1e3 * row["tokens"] / row["ms"]}


# --- Speed and memory. ---
def measure_speed(
    rungs: list[Rung], bench: ladder.Bench, options: TorchOptions, keep: Callable[[Result], None]
) -> Result:
    """Rows of both libraries, which take turns; `keep` gets what there is after each rung."""
    found: Result = {"jax": [], "torch": []}
    for rung in rungs:
        found["jax"].append(ladder.measure_rung(rung, bench))
        ladder.add_gains(found["jax"])
        name = COUNTERPARTS[rung.name]
        if name not in [row["rung"] for row in found["torch"]]:
            found["torch"].append(measure_torch(TORCH_RUNGS[name], bench, options))
            if options.compile and "failed" in found["torch"][-1]:
                found["torch"].append(measure_torch(TORCH_RUNGS[name], bench, TorchOptions(compile=False)))
        keep(found | {"pairs": pairs(found)})
    if options.compile:
        have = [row["rung"] for row in found["torch"] if row["compiled"] and "failed" not in row]
        for name in (name for name in EAGER if name in have):
            found["torch"].append(measure_torch(TORCH_RUNGS[name], bench, TorchOptions(compile=False)))
            keep(found | {"pairs": pairs(found)})
    return found | {"pairs": pairs(found)}


def pairs(found: Result) -> list[Result]:
    """Each rung of JAX beside its counterpart: the ratios of tokens/s and of peak memory."""
    ran = sorted((row for row in found["torch"] if "failed" not in row), key=lambda row: row["compiled"])
    torch = {row["rung"]: row for row in ran}  # of two, the compiled one
    rows = []
    for row in found["jax"]:
        pair = {"rung": row["rung"], "torch rung": COUNTERPARTS[row["rung"]]}
        other = torch.get(pair["torch rung"])
        if "failed" not in row and other is not None:
            pair |= {"compiled": other["compiled"], "tokens/s ratio": row["tokens/s"] / other["tokens/s"]}
            if row["peak bytes"] and other.get("peak bytes"):
                pair["memory ratio"] = row["peak bytes"] / other["peak bytes"]
        rows.append(pair)
    return rows


def targets(found: Result) -> list[dict[str, Any]]:
    """The targets that can be judged with what was measured."""
    jax = {row["rung"]: row for row in found["jax"] if "failed" not in row}
    top = next((pair for pair in found["pairs"] if pair["rung"] == TOP), {})
    judged = []
    if "tokens/s ratio" in top:
        what = "tokens/s at the top rung, JAX / PyTorch"
        what += "" if top["compiled"] else " (not compiled)"
        judged.append(judge(what, top["tokens/s ratio"], SPEED_TARGET, least=True))
    if "memory ratio" in top:
        judged.append(judge("peak memory there, JAX / PyTorch", top["memory ratio"], MEMORY_TARGET, least=False))
    if TOP in jax:
        judged.append(judge("MFU of JAX there", jax[TOP]["MFU"], MFU_TARGET, least=True))
    if TOP in jax and BOTTOM in jax:
        gain = jax[TOP]["tokens/s"] / jax[BOTTOM]["tokens/s"]
        judged.append(judge("tokens/s of JAX, top / f32", gain, GAIN_TARGET, least=True))
    return judged


# --- Loss curves. ---
def measure_curves(
    bench: ladder.Bench, options: TorchOptions, steps: int, keep: Callable[[list[Result]], None]
) -> list[Result]:
    """Both libraries' losses in float32 and at the top rung, from the same weights."""
    rows: list[Result] = []
    training = {"steps": steps, "learning_rate": LEARNING_RATES.get(bench.setting.preset, 6e-4)}
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder) / "weights.npz")
        for name, (rung, torch_rung) in CURVES.items():
            write = weights if name == "f32" else None  # what PyTorch starts from is float32
            ours = bench.in_jax(rung, "curve", hyperparameters=training, weights=write)
            job = torch_job(torch_rung, bench.setting, options, "curve", hyperparameters=training, weights=weights)
            theirs = bench.run(WORKER, job, timeout=bench.clock.cut(bench.setting.timeout))
            rows.append({"curve": name, "rung": rung.name, "jax": ours, "torch": theirs} | compare(ours, theirs))
            keep(rows)
    return rows


def compare(ours: Result, theirs: Result) -> Result:
    """How far two curves are apart: at their widest, and in the mean of their last steps."""
    failures = [f"{side}: {row['failed']}" for side, row in (("JAX", ours), ("PyTorch", theirs)) if "failed" in row]
    if failures:
        return {"failed": "; ".join(failures)}
    a, b = ours["losses"], theirs["losses"]
    means = {"last JAX": sum(a[-LAST:]) / len(a[-LAST:]), "last PyTorch": sum(b[-LAST:]) / len(b[-LAST:])}
    return {"largest difference": max(abs(x - y) for x, y in zip(a, b, strict=True)), "first": [a[0], b[0]]} | means


def plot_curves(rows: list[Result], path: Path) -> None:
    """Draws what curves there are."""
    import matplotlib

    matplotlib.use("Agg")  # only a file is written: no display is needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    colors = {"f32": ("#000000", "#E69F00"), "top": ("#0072B2", "#D55E00")}
    for row in rows:
        for (side, style), color in zip((("jax", "-"), ("torch", "--")), colors[row["curve"]], strict=True):
            if "losses" in row[side]:
                label = f"{'JAX' if side == 'jax' else 'PyTorch'}, {row['curve']}"
                axes.plot(row[side]["losses"], style, color=color, label=label)
    axes.set(xlabel="step", ylabel="training loss, nats a token", title="Same weights, same tokens")
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


# --- Tables. ---
def pairs_table(found: Result) -> Sheet:
    """Rung by rung."""
    jax = {row["rung"]: row for row in found["jax"]}
    cells = [pair_cells(pair, jax[pair["rung"]], counterpart(pair, found["torch"])) for pair in found["pairs"]]
    return Sheet("JAX with mpx / PyTorch", cells)


def pair_cells(pair: Result, ours: Result, theirs: Result) -> dict[str, str]:
    """Speed and memory of a rung beside its counterpart."""
    sides = {"JAX": ours, "PyTorch": theirs}
    speed = lambda row: f"{row['tokens/s']:,.0f}" if "failed" not in row else ""
    memory = lambda row: f"{row['peak bytes'] / 1e9:.3g}" if row.get("peak bytes") else "-"
    ratio = lambda name: f"{pair[name]:.3f}" if name in pair else "-"
    cells = {"rung": pair["rung"], "in PyTorch": pair["torch rung"] + ("" if theirs["compiled"] else " (not compiled)")}
    cells |= {f"tokens/s, {side}": speed(row) for side, row in sides.items()} | {"ratio": ratio("tokens/s ratio")}
    cells |= {f"peak GB, {side}": memory(row) for side, row in sides.items()} | {"of memory": ratio("memory ratio")}
    notes = [f"{side}: {row['failed']}" for side, row in sides.items() if "failed" in row]
    return cells | {"note": "; ".join([*notes, *([ours["note"]] if "note" in ours else [])])}


def counterpart(pair: Result, rows: list[Result]) -> Result:
    """The row that a pair is about: the compiled one, unless that failed and another did not."""
    about = [row for row in rows if row["rung"] == pair["torch rung"]]
    ran = [row for row in about if "failed" not in row]
    return next((row for row in ran if row["compiled"]), (ran or about)[0])


def torch_table(rows: list[Result]) -> Sheet:
    """All of PyTorch's rungs by themselves."""
    return Sheet("PyTorch", list(map(torch_cells, rows)))


def torch_cells(row: Result) -> dict[str, str]:
    """Time and memory of a rung in PyTorch."""
    cells = {"rung": row["rung"], "adds": row["label"], "compiled": "yes" if row["compiled"] else "no"}
    if "failed" in row:
        return cells | {"note": row["failed"]}
    on_gpu = "peak bytes" in row
    cells |= {"ms a step": f"{row['ms']:.2f}", "spread": spread_cell(row["ms spread"], 2)}
    cells |= {"tokens/s": f"{row['tokens/s']:,.0f}"}
    cells |= {"peak GB": f"{row['peak bytes' if on_gpu else 'process bytes'] / 1e9:.3g}", "loss": f"{row['loss']:.3f}"}
    return cells | {"note": "" if on_gpu else "memory: the whole process"}


def curves_table(rows: list[Result]) -> Sheet:
    """How far curves are apart."""
    return Sheet("loss curves: same weights, same tokens", list(map(curve_cells, rows)))


def curve_cells(row: Result) -> dict[str, str]:
    """Where two curves begin and end, and how far they are apart at their widest."""
    if "failed" in row:
        return {"curve": row["curve"], "note": row["failed"]}
    names = "first loss, JAX", "PyTorch", f"mean of the last {LAST}, JAX", f"of the last {LAST}, PyTorch"
    losses = *row["first"], row["last JAX"], row["last PyTorch"]
    cells = {name: f"{loss:.4f}" for name, loss in zip(names, losses, strict=True)}
    return {"curve": row["curve"]} | cells | {"largest difference": f"{row['largest difference']:.1e}"}


# --- The command. ---
def main(
    preset: ladder.PresetOption = None,
    batch_size: ladder.BatchOption = None,
    steps: ladder.StepsOption = None,
    rounds: ladder.RoundsOption = None,
    token_budget: ladder.BudgetOption = None,
    timeout: ladder.TimeoutOption = None,
    time_limit: ladder.LimitOption = None,
    xla_flags: ladder.FlagsOption = None,
    rungs: Annotated[list[str] | None, typer.Option(help=ladder.RUNGS_HELP)] = None,
    part: Annotated[Part, typer.Option(help="What to measure.")] = Part.all,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Whether PyTorch is compiled; on a GPU it is.")
    ] = None,
    compile_mode: Annotated[CompileMode, typer.Option(help="Of torch.compile.")] = CompileMode.default,
    curve_steps: Annotated[int | None, typer.Option(min=1, help="Of the loss curves; 200 on a GPU, else 60.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the loss curves into this file.")] = None,
    json_path: ladder.JsonOption = None,
) -> None:
    """Measures both, prints the tables and, if asked, writes the numbers."""
    console, chosen = make_console(), ladder.chosen_rungs(rungs)
    if importlib.util.find_spec("torch") is None:
        console.print('PyTorch is not installed, so its rows stay empty: `pip install -e ".[bench]"`.', markup=False)
    given = {"preset": preset and str(preset), "batch_size": batch_size, "steps": steps, "rounds": rounds}
    given |= {"token_budget": token_budget, "timeout": timeout, "xla_flags": xla_flags}
    bench = ladder.start_bench(Clock(time_limit), run_worker, **given)
    options = TorchOptions(bench.on_gpu if compiled is None else compiled, str(compile_mode))
    found: dict[str, Any] = {"device": bench.device, "setting": dataclasses.asdict(bench.setting)}
    found["torch options"] = dataclasses.asdict(options)
    console.print(found)

    def keep(name: str, value: Any) -> None:
        found[name] = value
        console.print(f"{name}: {len(value['jax'] if name == 'speed' else value)} done")
        write_json(json_path, found)

    if part in ("speed", "all"):
        show_speed(console, measure_speed(chosen, bench, options, lambda value: keep("speed", value)), bench)
        found["targets"] = targets(found["speed"]) if bench.on_gpu else []
        write_json(json_path, found)
    if part in ("curves", "all"):
        count = curve_steps or CURVE_STEPS["gpu" if bench.on_gpu else "cpu"]
        rows = measure_curves(bench, options, count, lambda value: keep("curves", value))
        console.print(curves_table(rows))
        if plot is not None:
            plot_curves(rows, plot)


def show_speed(console: Console, found: Result, bench: ladder.Bench) -> None:
    """All tables of speed and memory; verdicts only where they mean something."""
    console.print(ladder.ladder_table(found["jax"], bench))
    console.print(torch_table(found["torch"]))
    console.print(pairs_table(found))
    if bench.on_gpu:
        console.print(targets_table(targets(found)))


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
