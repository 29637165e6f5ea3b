"""Files of arrays: NumPy's, safetensors, Orbax checkpoints."""

import pathlib
from typing import Any

import jax
import ml_dtypes
import numpy as np

from mpx import _errors
from mpx.tools.cli.errors import CommandError, message_of
from mpx.tools.monitor.underflow import UnderflowReport, underflow_report


def read(path: pathlib.Path) -> tuple[Any, list[str]]:
    """Return the arrays of a file or folder as a tree, and notes on what was lost in the file.

    Raises:
        CommandError: if the file is of another kind, or damaged.
    """
    if not path.exists():
        raise CommandError(f"there is no file {path}.")
    readers = {".npz": _read_npz, ".npy": _read_npy, ".safetensors": _read_safetensors}
    if path.is_dir():
        return _read_orbax(path), []
    if path.suffix not in readers:
        raise CommandError(f"{path} is not a .npz, .npy or .safetensors file, nor the folder of an Orbax checkpoint.")
    try:
        found = readers[path.suffix](path)
        # NumPy saves bfloat16, which it does not know, as two bytes without a name.
        unnamed = [name for name, array in found.items() if array.dtype == np.dtype("V2")]
    except Exception as error:  # each reader has its own errors for a damaged file
        raise CommandError(f"{path} cannot be read as {path.suffix}: {message_of(error)}") from error
    tree = found | {name: found[name].view(ml_dtypes.bfloat16) for name in unnamed}
    return tree, [f"NumPy has lost the dtype of {_errors.listed(unnamed, 5)}: read as bfloat16."] if unnamed else []


def report(tree: Any, dtype: str, loss_scale: float) -> UnderflowReport:
    """Report on arrays."""
    return underflow_report(tree, dtype, loss_scale=loss_scale)


# `np.load` takes a file of any other kind for a pickle, and its error says how to run it.


def _read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    with path.open("rb") as stream, np.lib.npyio.NpzFile(stream, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _read_npy(path: pathlib.Path) -> dict[str, np.ndarray]:
    with path.open("rb") as stream:
        return {path.stem: np.lib.format.read_array(stream, allow_pickle=False)}


def _read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    import safetensors

    with safetensors.safe_open(path, framework="numpy") as file:
        # NumPy has no floats of 8 bits and fewer, and a report leaves them out.
        is_known = lambda name: not file.get_slice(name).get_dtype().startswith(("F4", "F6", "F8"))
        return {name: file.get_tensor(name) for name in file.keys() if is_known(name)}


def _read_orbax(path: pathlib.Path) -> Any:
    """Return the tree of a checkpoint: the folder itself, or the only one below it."""
    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError as error:
        raise CommandError(f"{path} is a folder; checkpoints of Orbax need `pip install orbax-checkpoint`.") from error
    # A manager makes a folder for each step, and in it one for each item; a name with `tmp` is not finished.
    below = sorted(file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/_METADATA"))
    whole = [folder for folder in below if ".orbax-checkpoint-tmp" not in str(folder)]
    found = [path] if (path / "_METADATA").is_file() else whole
    if len(found) != 1:
        listed = _errors.listed(list(map(str, found)), 5)
        problem = f"holds several checkpoints; give one: {listed}" if found else "holds no Orbax checkpoint"
        raise CommandError(f"the folder {path} {problem}.")
    folder = found[0].absolute()
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            shapes = checkpointer.metadata(folder).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
            tree = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    except Exception as error:  # Orbax, TensorStore and the system have their own errors for a damaged file
        raise CommandError(f"the checkpoint {found[0]} cannot be read: {message_of(error)}") from error
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, np.ndarray) else None, tree)
