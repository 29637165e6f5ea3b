"""Llamas on GPUs that are not here, read off the programs of `examples.llama`: what
fits, and what devices send.

    PYTHONPATH=. python -m benchmarks.llama
    PYTHONPATH=. python -m benchmarks.llama --sizes
    PYTHONPATH=. python -m benchmarks.llama --largest
    PYTHONPATH=. python -m benchmarks.llama --rules

Nothing runs but in `measure`, for `benchmarks.on_gpu`: each figure is of a program that
XLA makes (10 to 60 seconds on two cores). A step is `mpx.train_step`, of sequences of
4,096 tokens: loss, gradient, clipping by a predicted norm, AdamW. Weights and state are
divided among all GPUs. A program fits if its peak takes at most `USABLE` of the memory:
CUDA and NCCL need the rest.

- Sizes: of each case three programs, of 1, 4 and 8 sequences a GPU. The largest batch
  is on a line through two of them.
- Largest: of each recipe two programs, of few layers and of more. The largest depth is
  on the line through both, or just below: the program of that depth is made, and its
  peak shown.
- Rules: AdamW beside Muon, of whose matrices each is whole on one GPU
  (`mpx.each_matrix`).
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import typer

import mpx
from benchmarks.gpt2_in_jax import peak_bytes, time_rounds
from benchmarks.reading import compiled_figures, flash_attention
from benchmarks.report import Row, Sheet
from examples import llama
from mpx.tools.program import StepReport, target_devices
from mpx.tools.program.targets import TARGETS

USABLE = 0.95  # with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95; by default JAX uses 0.75
LENGTH = 4096
GPUS = {"h100": "H100", "h200": "H200", "b200": "B200"}
CASES = (
    ("8B", 1),
    ("8B", 8),
    ("8B", 64),
    ("70B", 8),
    ("70B", 64),
    ("70B", 512),
    ("405B", 64),
    ("405B", 512),
)
SMALL: Row = {"attention": "cudnn", "kept": mpx.Blockwise8bit()}
RECIPES: dict[str, Row] = {
    "f32": {},  # cuDNN's attention is for 16 bits
    "bf16-masters": {"attention": "cudnn"},
    **dict.fromkeys(
        ("bf16-split", "bf16-split-8bit", "bf16-split24-8bit", "bf16-split24-4bit"),
        SMALL,
    ),
}
# One sort of GPU, how many, the widths of the model, and two depths.
MACHINES = (
    ("rtx4090", 1, "1B", (8, 24)),
    ("h100", 1, "8B", (8, 24)),
    ("h100", 8, "70B", (8, 24)),
    ("h200", 8, "70B", (8, 24)),
)
SIZE_COLUMNS = {
    "model": "{size}",
    "GPUs": "{count}",
    "held, GiB": "{held:.1f}",
    "peak, GiB": "{peak:.1f}",
    "sent, bytes a parameter": "{gathers:.1f} + {sums:.1f}",
    **{f"tokens a GPU at most, {name}": f"{{{gpu}}}" for gpu, name in GPUS.items()},
}
BY_RULE = (("8B", 8), ("70B", 8), ("405B", 64))
RULE_COLUMNS = {
    "model": "{size}",
    "H100": "{count}",
    "rule": "{rule}",
    "held, GiB": "{held:.1f}",
    "peak, GiB": "{peak:.1f}",
    "sent for the rule, bytes a parameter": "{sent:.2f}",
    "bound, s": "{bound:.2f}",
}
LARGEST_COLUMNS = {
    "recipe": "{recipe}",
    **{f"{n} x {TARGETS[gpu].name}": f"{{{gpu} {n}}}" for gpu, n, *_ in MACHINES},
}


def read(
    size: str,
    gpu: str,
    count: int,
    recipe: str,
    model: llama.Model = llama.LLAMA,
    **options: Any,
) -> tuple[StepReport, int]:
    """Return the report of a step, and how many parameters the model has."""
    jax.clear_caches()
    # XLA's figures of some GPUs are not known.
    target = gpu if TARGETS[gpu].gpu else "h100"
    gpus = target_devices(target, count) if count > 1 else ()
    with flash_attention():
        step, arguments, _ = llama.step_and_arguments(
            size, recipe, gpus, length=LENGTH, model=model, **options
        )
        report = mpx.step_report(step, *arguments, target=target)
    print(
        f"{size} {count} x {gpu} {recipe}: {report.peak_bytes / 2**30:.2f} GiB",
        flush=True,
    )
    return report, sum(leaf.size for leaf in jax.tree.leaves(arguments[0]))


def measure(size: str, kept: bool, length: int) -> Row:
    """Return what a step takes on this device: its time and its peak of memory beside
    those of its program.

    One sequence of `length` tokens. With `kept` layers keep their inputs in 8 bits.
    """
    is_gpu = jax.default_backend() == "gpu"
    config = dataclasses.replace(
        llama.CONFIGS[size],
        attention="cudnn" if is_gpu else "xla",
        kept=mpx.Blockwise8bit() if kept else None,
    )
    recipe = "bf16-split24-8bit"
    start, step = llama.make_step(config, recipe)
    state: Any = jax.jit(start)(jax.random.key(0))
    tokens = jax.random.randint(
        jax.random.key(1), (1, length + 1), 0, config.vocabulary
    )
    compiled = step.lower(*state, tokens).compile()
    before = peak_bytes()

    def run(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            *state, _ = compiled(*state, tokens)
        jax.block_until_ready(state)

    row: Row = {"size": size, "recipe": recipe, "inputs in 8 bits": kept}
    row |= time_rounds(run, steps=2, rounds=3)
    program = compiled_figures(compiled)
    if bound := program.get("bound ms"):
        row["bound, ms"] = bound
    peaks = {
        "program, GiB": 1e9 * program["peak GB"],
        "peak, GiB": peak_bytes(),
        "peak before, GiB": before,
    }
    return row | {name: x / 2**30 for name, x in peaks.items() if x is not None}


def most(budget: float, points: list[tuple[int, int]]) -> int:
    """Return how many of something fit into a budget, on the line through two pairs of
    a number and its bytes.
    """
    (a, bytes_of_a), (b, bytes_of_b) = points
    return int(a + (budget - bytes_of_a) * (b - a) / (bytes_of_b - bytes_of_a))


def usable(gpu: str) -> float:
    """Return the bytes of a GPU that a program may take."""
    return USABLE * TARGETS[gpu].memory_bytes


def sizes() -> Iterator[Row]:
    """Yield what Llamas need on several GPUs, by the recipe that holds 7 bytes a
    parameter.
    """
    for size, count in CASES:
        of = lambda rows, size=size, count=count: read(
            size, "h200", count, "bf16-split24-8bit", rows=rows, **SMALL
        )
        one, parameters = of(1)
        points = [
            (1, one.peak_bytes),
            *((rows, of(rows)[0].peak_bytes) for rows in (4, 8)),
        ]
        sent = lambda kind, report=one, n=parameters: (
            sum(
                count
                for name, count in report.sent_by_kind.items()
                if name.startswith(kind)
            )
            / n
        )
        row = {
            "size": size,
            "count": count,
            "gathers": sent("all-gather"),
            "sums": sent("reduce-scatter"),
        }
        row |= {"held": one.argument_bytes / 2**30, "peak": one.peak_bytes / 2**30}
        for gpu in GPUS:
            few, many = points[:2], points[1:]
            rows = most(usable(gpu), many if usable(gpu) > many[0][1] else few)
            row[gpu] = f"{rows * LENGTH:,}" if rows > 0 else "does not fit"
        yield row


def rules() -> Iterator[Row]:
    """Yield what Llamas need on H100s by AdamW and by Muon."""
    for size, count in BY_RULE:
        for rule in ("adamw", "muon"):
            report, parameters = read(
                size,
                "h100",
                count,
                "bf16-split24-8bit",
                rule=rule,
                loss_parts=8,
                **SMALL,
            )
            sent = report.sent_by_kind.get("all-to-all bf16", 0)
            row = {
                "size": size,
                "count": count,
                "rule": rule,
                "sent": sent / parameters,
                "bound": report.bound_seconds,
            }
            yield row | {
                "held": report.argument_bytes / 2**30,
                "peak": report.peak_bytes / 2**30,
            }


def deepest(
    gpu: str, count: int, size: str, depths: tuple[int, int], recipe: str
) -> str:
    """Return the parameters of the deepest model that a recipe trains, and its peak."""
    of = lambda depth: read(size, gpu, count, recipe, depth=depth, **RECIPES[recipe])
    points = [(depth, of(depth)[0].peak_bytes) for depth in depths]
    for depth in range(most(usable(gpu), points), 0, -1):
        report, parameters = of(depth)
        if report.peak_bytes <= usable(gpu):
            return f"{parameters / 1e9:.1f} ({report.peak_bytes / 2**30:.1f} GiB)"
    return "none"


def main(
    only_sizes: Annotated[
        bool, typer.Option("--sizes", help="Only the first table.")
    ] = False,
    only_largest: Annotated[
        bool, typer.Option("--largest", help="Only the second table.")
    ] = False,
    only_rules: Annotated[
        bool, typer.Option("--rules", help="Only the third table.")
    ] = False,
) -> None:
    """Make the programs, and print the tables."""
    if not (only_sizes or only_largest):
        print(
            Sheet(
                "Llamas by two rules, `bf16-split24-8bit`", list(rules()), RULE_COLUMNS
            ).markdown()
        )
    if not (only_largest or only_rules):
        print(
            Sheet(
                "Llamas by `bf16-split24-8bit`", list(sizes()), SIZE_COLUMNS
            ).markdown()
        )
    if not (only_sizes or only_rules):
        largest = [
            {"recipe": recipe}
            | {
                f"{machine[0]} {machine[1]}": deepest(*machine, recipe)
                for machine in MACHINES
            }
            for recipe in RECIPES
        ]
        print(
            Sheet(
                "Billions of parameters that AdamW trains", largest, LARGEST_COLUMNS
            ).markdown()
        )


if __name__ == "__main__":
    typer.run(main)
