"""Files of arrays: NumPy's and safetensors."""

import pathlib

import ml_dtypes
import numpy as np


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name."""
    if path.suffix not in (".npz", ".npy", ".safetensors"):
        raise ValueError(f"{path} is not a .npz, .npy or .safetensors file.")
    with path.open("rb") as stream:
        # `np.load` takes a file of any other kind for a pickle, and its error says how to run it.
        if path.suffix == ".npz":
            found = dict(np.lib.npyio.NpzFile(stream, allow_pickle=False))
        elif path.suffix == ".npy":
            found = {path.stem: np.lib.format.read_array(stream, allow_pickle=False)}
        else:
            found = _read_safetensors(path)
    # NumPy saves bfloat16, which it does not know, as two bytes without a name.
    return {name: x.view(ml_dtypes.bfloat16) if x.dtype == np.dtype("V2") else x for name, x in found.items()}


def _read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    import safetensors

    with safetensors.safe_open(path, framework="numpy") as file:
        # NumPy has no floats of 8 bits and fewer, and a report leaves them out.
        is_known = lambda name: not file.get_slice(name).get_dtype().startswith(("F4", "F6", "F8"))
        return {name: file.get_tensor(name) for name in file.keys() if is_known(name)}
