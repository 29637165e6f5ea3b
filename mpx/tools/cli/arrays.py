"""Files of arrays: NumPy's, safetensors, Orbax checkpoints."""

import json
import math
import pathlib
import zipfile
import zlib
from typing import Any

import jax
import ml_dtypes
import numpy as np

from mpx import _errors
from mpx.tools.cli.errors import CommandError, message_of

_SAFETENSORS: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
_LONGEST_HEADER = 100_000_000  # the format's own limit
_FIRST_BYTES = {".npz": b"PK", ".npy": b"\x93NUMPY"}
_DAMAGED = (
    OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError, NotImplementedError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def read(path: pathlib.Path) -> tuple[Any, list[str]]:
    """The arrays of a file or folder, as a tree, and what a reader of numbers drawn from them must know.

    Raises:
        CommandError: if this is none of the kinds, or damaged.
    """
    readers = {".npz": _read_npz, ".npy": _read_npy, ".safetensors": _read_safetensors}
    if path.is_dir():
        return _read_orbax(path), []
    if path.suffix not in readers:
        raise CommandError(
            f"{path} is of no kind that is known here: .npz, .npy, .safetensors, .jsonl (a run log), or the folder of "
            "an Orbax checkpoint."
        )
    try:
        _require_first_bytes(path)
        found = readers[path.suffix](path)
    except _DAMAGED as error:
        raise CommandError(f"{path} cannot be read as {path.suffix}: {message_of(error)}") from error
    tree = {name: _named_bfloat16(array) for name, array in found.items()}
    renamed = [name for name, array in found.items() if array.dtype != tree[name].dtype]
    notes = [f"NumPy has lost the type of {_errors.listed(renamed, 5)}: taken for bfloat16."] if renamed else []
    return tree, notes


def _require_first_bytes(path: pathlib.Path) -> None:
    """NumPy would take any other file for a pickle, and say how to run it."""
    expected = _FIRST_BYTES.get(path.suffix, b"")
    with path.open("rb") as file:
        if file.read(len(expected)) != expected:
            raise ValueError("it does not begin as such a file does.")


def _read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    others = [name for name, content in found.items() if not isinstance(content, np.ndarray)]
    if others:
        raise ValueError(f"it holds files that are no arrays: {_errors.listed(others, 5)}.")
    return found


def _read_npy(path: pathlib.Path) -> dict[str, np.ndarray]:
    return {path.stem: np.load(path, allow_pickle=False)}


def _named_bfloat16(array: np.ndarray) -> np.ndarray:
    """NumPy saves bfloat16, which it does not know, as two nameless bytes."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def _read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Eight bytes that say how long the header is, the header in JSON, the arrays one after another."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(_LONGEST_HEADER, len(content) - 8):
        raise ValueError("its header is cut off.")
    header = json.loads(content[8 : 8 + length])
    body = memoryview(content)[8 + length :]
    return {name: _tensor(name, entry, body) for name, entry in header.items() if name != "__metadata__"}


def _tensor(name: str, entry: dict[str, Any], body: memoryview) -> np.ndarray:
    if entry["dtype"] not in _SAFETENSORS:
        raise ValueError(f"{name!r} is of the unknown type {entry['dtype']}.")
    dtype, (start, end) = np.dtype(_SAFETENSORS[entry["dtype"]]), entry["data_offsets"]
    if not 0 <= start <= end <= len(body) or end - start != dtype.itemsize * math.prod(entry["shape"]):
        raise ValueError(f"the bytes of {name!r} are cut off, or not as many as its shape says.")
    return np.frombuffer(body[start:end], dtype).reshape(entry["shape"])


def _read_orbax(path: pathlib.Path) -> Any:
    """The tree of a checkpoint: of the folder itself, or of the only one below it."""
    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError as error:
        raise CommandError(f"{path} is a folder; checkpoints of Orbax need `pip install orbax-checkpoint`.") from error
    # A manager makes a folder for each step, and in it one for each item; what it has not finished is called otherwise.
    below = sorted(file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/_METADATA"))
    whole = [folder for folder in below if ".orbax-checkpoint-tmp" not in str(folder)]
    found = [path] if (path / "_METADATA").is_file() else whole
    if not found:
        raise CommandError(f"the folder {path} holds no Orbax checkpoint.")
    if len(found) > 1:
        raise CommandError(
            f"the folder {path} holds several checkpoints; give one: {_errors.listed(list(map(str, found)), 5)}."
        )
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            shapes = checkpointer.metadata(found[0].absolute()).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
            tree = checkpointer.restore(found[0].absolute(), args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    except Exception as error:  # of Orbax, of TensorStore, or of the system, for the same damaged file
        raise CommandError(f"the checkpoint {found[0]} cannot be read: {message_of(error)}") from error
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, np.ndarray) else None, tree)
