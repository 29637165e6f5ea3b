"""`mpx report`: which gradients in a file of arrays underflow."""

import contextlib
import pathlib

import jax
import numpy as np
import typer

import mpx
from mpx.tools.cli import arrays, output
from mpx.tools.cli.errors import CommandError


def run(file: pathlib.Path, dtype: str, loss_scale: float, as_json: bool) -> None:
    """Read arrays and write a report on them."""
    if not file.exists():
        raise CommandError(f"there is no file {file}.")
    tree, notes = arrays.read(file)
    # Without 64-bit types jax rounds float64 to float32, and the smallest numbers to zero.
    is_wide = any(array.dtype == np.float64 for array in jax.tree.leaves(tree))
    with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
        found = mpx.underflow_report(tree, dtype, loss_scale=loss_scale)
    for note in notes:
        typer.echo(f"Note: {note}", err=True)
    output.write({"file": str(file), "notes": notes, "report": found.as_dict()}, [found], as_json)
