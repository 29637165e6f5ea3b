"""Which rules `fused_update` runs in one kernel a matrix: writes the table in `benchmarks/FUSED_RULES.md`.

    PYTHONPATH=. python -m benchmarks.fused_rules

Every optimizer of Optax and `optax.contrib`, with split masters and its averages in 8-bit blocks, is planned for one
bfloat16 matrix of 512 by 512. Nothing is run, and no GPU is needed: it takes seconds.
"""

import importlib.metadata
from pathlib import Path

import jax
import jax.numpy as jnp

import mpx
from benchmarks.report import Row, table
from tests.rules import RULES
from tests.sweep import moment_fields

OUT = Path(__file__).with_name("FUSED_RULES.md")
COLUMNS = {
    "rule": "`{rule}`",
    "in 8 bits": "{fields}",
    "runs in": "{runs}",
    "bytes an element, or why not": "{figure}",
}


def row(name: str) -> Row:
    """Return what a rule keeps in 8 bits, what runs it, and the bytes of an element or the reason."""
    rule, fields = RULES[name], moment_fields(name)
    tx = rule.make() if fields is None else mpx.low_precision_state(rule.make(), {fields: mpx.Blockwise8bit()})
    params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)}
    grads = {"w": jax.ShapeDtypeStruct((2, 512, 512), jnp.bfloat16)} if rule.per_example else params
    zeros = {"w": jnp.zeros((512, 512))}
    with jax.numpy_dtype_promotion("standard"):  # Optax's rules add arrays of two dtypes
        fused = mpx.fused_update(mpx.master_weights(tx, storage="split"))
        (leaf,) = fused.plan(params, grads, **rule.extra_args(zeros, zeros)).rows
    figure = leaf.reason if leaf.moved_bytes is None else f"{leaf.moved_bytes / leaf.size:.2f}"
    return {"rule": name, "fields": (fields or "").replace("|", ", "), "runs": leaf.runs, "figure": figure}


def main() -> None:
    """Plan all rules and write the page."""
    rows = [row(name) for name in RULES]
    kernels = sum(row["runs"] == "a kernel" for row in rows)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("jax", "optax"))
    text = (
        "# Which rules `fused_update` runs in one kernel a matrix\n\n"
        "Written by `PYTHONPATH=. python -m benchmarks.fused_rules`, whose docstring says what is planned; with "
        f"{versions}. {kernels} of {len(rows)} rules run in a kernel; XLA runs the others, for the reason in the last "
        "column. A rule whose elements do not mix moves as many bytes as the last column says, for each element of "
        "a matrix: gradient, parameter, low bits and state.\n\n"
    )
    OUT.write_text(f"{text}{table(rows, COLUMNS)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
