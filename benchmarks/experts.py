"""Mixtures of experts on GPUs that are not here, read off the programs of
`examples.experts`: what fits, what devices send, and how many GPUs other recipes need.

    PYTHONPATH=. python -m benchmarks.experts
    PYTHONPATH=. python -m benchmarks.experts --size 1T

Nothing runs: each figure is of a program that XLA makes. A step is `mpx.train_step`, of
a sequence of 4,096 tokens on each GPU: loss, gradients, clipping by a predicted norm,
and AdamW or Muon. Experts and all else are divided among all GPUs. A program fits if
its peak takes at most `USABLE` of the memory.

What float32 and bfloat16 with float32 masters need is the smallest number of GPUs,
among those that divide the experts and the width, on which AdamW's program fits.
"""

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import typer

from benchmarks.llama import GPUS, RECIPES, SMALL, read, usable
from benchmarks.report import Row, Sheet
from examples import experts


class Case(NamedTuple):
    """A model, on so many GPUs, and how it is trained there."""

    size: str
    gpu: str
    count: int
    recipe: str
    rule: str


CASES = (
    Case("30B", "h200", 1, "bf16-split24-8bit", "muon"),
    Case("30B", "h100", 2, "bf16-split24-4bit", "adamw"),
    Case("120B", "h100", 8, "bf16-split24-4bit", "adamw"),
    Case("235B", "h200", 16, "bf16-split24-4bit", "adamw"),
    Case("1T", "h200", 64, "bf16-split24-4bit", "adamw"),
    Case("1T", "h100", 64, "bf16-split24-8bit", "muon"),
    Case("1T", "h100", 64, "bf16-split24-4bit", "adamw"),
)
OTHERS = ("f32", "bf16-masters")
KINDS = {
    "tokens": "all-to-all",
    "weights": "all-gather",
    "sums": "reduce-scatter",
}
COLUMNS = {
    "model": "{size}",
    "billions": "{billions:.1f}",
    "GPUs": "{count} {gpu}",
    "recipe, rule": "{recipe}, {rule}",
    "held, GiB": "{held:.1f}",
    "peak, GiB": "{peak:.1f}",
    "fits": "{fits}",
    "bound, s": "{bound:.2f}",
    "sent a GPU, GB: tokens": "{tokens:.1f}",
    "gathered": "{weights:.1f}",
    "added up": "{sums:.1f}",
    **{f"GPUs by `{recipe}`": f"{{{recipe}}}" for recipe in OTHERS},
}


def needed(case: Case, recipe: str, parameters: int) -> int | None:
    """Return on how many such GPUs AdamW fits by a recipe; None: on none of them."""
    config, memory = experts.CONFIGS[case.size], usable(case.gpu)
    for count in range(1, config.experts + 1):
        if config.experts % count or config.width % count:
            continue
        if 12 * parameters > count * memory:  # parameters and moments alone
            continue
        report, _ = read(
            case.size, case.gpu, count, recipe, experts.MODEL, **RECIPES[recipe]
        )
        if report.peak_bytes <= memory:
            return count
    return None


def rows(size: str | None, with_others: bool) -> Iterator[Row]:
    """Yield what the steps of a size need, or of all."""
    for case in CASES:
        if size not in (None, case.size):
            continue
        report, parameters = read(*case[:4], experts.MODEL, rule=case.rule, **SMALL)
        row: Row = case._asdict() | {"gpu": GPUS[case.gpu]}
        row |= {
            "billions": parameters / 1e9,
            "held": report.argument_bytes / 2**30,
            "peak": report.peak_bytes / 2**30,
            "bound": report.bound_seconds,
            "fits": "yes" if report.peak_bytes <= usable(case.gpu) else "no",
        }
        for name, kind in KINDS.items():
            by_kind = report.sent_by_kind.items()
            row[name] = sum(x for key, x in by_kind if key.startswith(kind)) / 1e9
        if with_others and case.rule == "adamw":
            row |= {recipe: needed(case, recipe, parameters) for recipe in OTHERS}
        yield row


def main(
    size: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    others: Annotated[
        bool, typer.Option(help="Whether to look for other recipes' GPUs.")
    ] = True,
) -> None:
    """Make the programs, and print the table."""
    title = "Mixtures of experts, 4,096 tokens a GPU"
    print(Sheet(title, list(rows(size, others)), COLUMNS).markdown())


if __name__ == "__main__":
    typer.run(main)
