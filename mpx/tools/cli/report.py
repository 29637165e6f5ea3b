"""`mpx report`: what would underflow in a file of arrays, or how a run went."""

import contextlib
import pathlib
from typing import Annotated

import jax
import numpy as np
import typer

import mpx
from mpx.tools.cli import arrays, output, run_log
from mpx.tools.cli.errors import CommandError

EXAMPLE = "mpx report gradients.npz --dtype f16"


def report(
    file: Annotated[
        pathlib.Path,
        typer.Argument(
            help="Arrays (.npz, .npy, .safetensors, the folder of an Orbax checkpoint), or a run log (.jsonl)."
        ),
    ],
    dtype: Annotated[str | None, typer.Option(help="The format asked about, for arrays: f16 if left out.")] = None,
    loss_scale: Annotated[
        float | None, typer.Option(help="By which the loss of these gradients was multiplied: 1 if left out.")
    ] = None,
    as_json: output.AsJson = False,
) -> None:
    """Read arrays, and say what would underflow and which loss scale they need; or a run log, and say how it went.

    A run log is a file of JSON lines, each with step, loss, loss_scale and skipped_steps; other keys are ignored.
    """
    if not file.exists():
        raise CommandError(f"there is no file {file}.")
    if file.suffix == ".jsonl" and not file.is_dir():
        if dtype is not None or loss_scale is not None:
            raise CommandError("--dtype and --loss-scale would do nothing for a run log.")
        summary, notes = run_log.read(file)
        kind, found, content = "run log", summary, summary.as_dict()
    else:
        tree, notes = arrays.read(file)
        # Without 64 bits, jax would round such numbers to float32 and make the smallest of them zero.
        is_wide = any(array.dtype == np.float64 for array in jax.tree.leaves(tree))
        with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
            found = mpx.underflow_report(tree, dtype or "f16", loss_scale=1.0 if loss_scale is None else loss_scale)
        kind, content = "arrays", found.as_dict()
    for text in notes:
        output.note(text)
    if as_json:
        output.show_json({"file": str(file), "kind": kind, "notes": notes, "report": content})
    else:
        output.show(found)
