"""The same GPT-2 in JAX with mpx and in PyTorch at its best, on the same GPU in one go: speed, memory and loss curves.

    PYTHONPATH=. python -m benchmarks.on_gpu --parts ladder --out found

Model, batch, sequence length, tokens, optimizer and schedule are the same. PyTorch has `torch.compile`, bfloat16
autocast, `scaled_dot_product_attention`, fused AdamW and a padded vocabulary. JAX and PyTorch take turns, rung by rung,
each measurement in a process of its own, timed by the same function.

JAX is always compiled, so every rung is compared with PyTorch compiled; where `torch.compile` fails (on a CPU it is
off), with PyTorch as it is, and the row says so. What has no counterpart (the loss in chunks, split masters, 8-bit
moments) is compared with PyTorch at its best with the same number of microbatches.

Memory is the peak of what the library's allocator has handed out: `peak_bytes_in_use`, `max_memory_allocated`. Neither
counts the CUDA context and loaded kernels. On a CPU the two libraries can tell no figure of one kind, so there is no
ratio. Targets, for an H200, are judged on a GPU only.

Loss curves: from the same float32 weights (rounded to bfloat16 where a recipe stores them so), on the same tokens, with
the same hyperparameters, in float32 and at the top rung (without accumulation). In float32 they differ by the order of
sums.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ladder
from benchmarks.report import Sheet, judge, spread_cell
from benchmarks.rungs import (
    COUNTERPARTS,
    EIGHT_BIT,
    FIXED,
    PADDED,
    TORCH_F32,
    TORCH_FUSED,
    Setting,
    TorchRung,
)
from benchmarks.workers import Result
from examples.gpt.model import PRESETS

WORKER = "benchmarks.gpt2_in_torch"
TOP, BOTTOM = "accumulate", "f32"
SPEED_TARGET, MEMORY_TARGET, GAIN_TARGET, MFU_TARGET = 1.1, 0.8, 10.0, 0.45

# The vocabulary is padded on both sides: a table of another shape would begin with other random weights.
CURVES = {
    "f32": (FIXED, dataclasses.replace(TORCH_F32, vocabulary_multiple=PADDED.vocabulary_multiple)),
    "top": (EIGHT_BIT, TORCH_FUSED),
}
LEARNING_RATES = {"tiny": 1e-3}  # all others 6e-4
LAST = 10  # steps, whose mean loss is compared


def torch_job(rung: TorchRung, setting: Setting, compiled: bool, kind: str, **more: Any) -> dict[str, Any]:
    """What the worker needs to know."""
    sizes = ("width", "depth", "heads", "context", "vocabulary")
    config = {name: getattr(PRESETS[setting.preset], name) for name in sizes}
    job = {"kind": kind, "config": config, "batch_size": setting.batch_size, **rung.settings()}
    job |= {"steps": setting.steps, "rounds": setting.rounds}
    return job | {"compile": compiled} | more


def measure_torch(rung: TorchRung, bench: ladder.Bench, compiled: bool) -> Result:
    """The row of a rung in PyTorch."""
    setting = bench.setting
    microbatches = setting.microbatches(rung, PRESETS[setting.preset].context)
    more = {"microbatches": microbatches, "steps": setting.steps_of(microbatches)}
    job = torch_job(rung, setting, compiled, "step", **more)
    answer = bench.run(WORKER, job, timeout=bench.clock.cut(setting.timeout))
    row = {"rung": rung.name, "label": rung.label, "compiled": compiled, "job": job} | answer
    return row if "failed" in row else row | {"tokens/s": 1e3 * row["tokens"] / row["ms"]}


def measure_either(rung: TorchRung, bench: ladder.Bench, compiled: bool) -> list[Result]:
    """The rows of a rung: where it cannot be compiled, also one of PyTorch as it is."""
    rows = [measure_torch(rung, bench, compiled)]
    return [*rows, measure_torch(rung, bench, False)] if compiled and "failed" in rows[0] else rows


# --- Speed and memory. ---
class Pair(NamedTuple):
    """A rung of JAX and its counterpart."""

    jax: Result
    torch: Result

    @property
    def speed(self) -> float:
        """How many times as many tokens a second JAX has."""
        return self.jax["tokens/s"] / self.torch["tokens/s"]

    @property
    def memory(self) -> float | None:
        """How many times as much memory JAX needs; None where the device counts none."""
        ours, theirs = (row.get("peak bytes") for row in self)
        return ours / theirs if ours and theirs else None


def pairs(jax: list[Result], torch: list[Result]) -> list[Pair]:
    """Each rung of JAX beside its counterpart, the compiled one of two; those of which both ran."""
    ran = sorted((row for row in torch if "failed" not in row), key=lambda row: row["compiled"])
    by_name = {row["rung"]: row for row in ran}
    rows = [row for row in jax if "failed" not in row and COUNTERPARTS[row["rung"]] in by_name]
    return [Pair(row, by_name[COUNTERPARTS[row["rung"]]]) for row in rows]


def targets(jax: list[Result], torch: list[Result]) -> list[dict[str, Any]]:
    """The targets that can be judged with what was measured."""
    ran = {row["rung"]: row for row in jax if "failed" not in row}
    judged = []
    for pair in (pair for pair in pairs(jax, torch) if pair.jax["rung"] == TOP):
        what = "tokens/s at the top rung, JAX / PyTorch" + ("" if pair.torch["compiled"] else " (not compiled)")
        judged.append(judge(what, pair.speed, SPEED_TARGET, least=True))
        if pair.memory is not None:
            judged.append(judge("peak memory there, JAX / PyTorch", pair.memory, MEMORY_TARGET, least=False))
    if TOP in ran:
        judged.append(judge("MFU of JAX there", ran[TOP]["MFU"], MFU_TARGET, least=True))
    if TOP in ran and BOTTOM in ran:
        gain = ran[TOP]["tokens/s"] / ran[BOTTOM]["tokens/s"]
        judged.append(judge("tokens/s of JAX, top / f32", gain, GAIN_TARGET, least=True))
    return judged


# --- Loss curves. ---
def measure_curves(bench: ladder.Bench, compiled: bool, steps: int) -> list[Result]:
    """Both libraries' losses in float32 and at the top rung, from the same weights."""
    rows: list[Result] = []
    training = {"steps": steps, "learning_rate": LEARNING_RATES.get(bench.setting.preset, 6e-4)}
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder) / "weights.npz")
        for name, (rung, torch_rung) in CURVES.items():
            write = weights if name == "f32" else None  # what PyTorch starts from is float32
            ours = bench.in_jax(rung, "curve", hyperparameters=training, weights=write)
            job = torch_job(torch_rung, bench.setting, compiled, "curve", hyperparameters=training, weights=weights)
            theirs = bench.run(WORKER, job, timeout=bench.clock.cut(bench.setting.timeout))
            rows.append({"curve": name, "rung": rung.name, "jax": ours, "torch": theirs} | compare(ours, theirs))
    return rows


def compare(ours: Result, theirs: Result) -> Result:
    """How far two curves are apart: at their widest, and in the mean of their last steps."""
    failures = [f"{side}: {row['failed']}" for side, row in (("JAX", ours), ("PyTorch", theirs)) if "failed" in row]
    if failures:
        return {"failed": "; ".join(failures)}
    a, b = ours["losses"], theirs["losses"]
    means = {"last JAX": sum(a[-LAST:]) / len(a[-LAST:]), "last PyTorch": sum(b[-LAST:]) / len(b[-LAST:])}
    return {"largest difference": max(abs(x - y) for x, y in zip(a, b, strict=True)), "first": [a[0], b[0]]} | means


# --- Tables. ---
def pairs_table(found: list[Pair]) -> Sheet:
    """Rung by rung."""
    return Sheet("JAX with mpx / PyTorch", list(map(pair_cells, found)))


def pair_cells(pair: Pair) -> dict[str, str]:
    """Speed and memory of a rung beside its counterpart."""
    name = pair.torch["rung"] + ("" if pair.torch["compiled"] else " (not compiled)")
    cells = {"rung": pair.jax["rung"], "in PyTorch": name}
    sides = {"JAX": pair.jax, "PyTorch": pair.torch}
    cells |= {f"tokens/s, {side}": f"{row['tokens/s']:,.0f}" for side, row in sides.items()}
    cells["ratio"] = f"{pair.speed:.3f}"
    if pair.memory is not None:
        cells |= {f"peak GB, {side}": f"{row['peak bytes'] / 1e9:.3g}" for side, row in sides.items()}
        cells["of memory"] = f"{pair.memory:.3f}"
    return cells


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
