"""Dtypes as users write them: a dtype, its name, or a short name such as `bf16`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

_NAMES = (
    "bf16 bfloat16",
    "f16 fp16 float16",
    "full f32 fp32 float32",
    "f64 fp64 float64",
)
DTYPE_NAMES = {
    name: jnp.dtype(names.split()[-1]) for names in _NAMES for name in names.split()
}
UP_TO_FLOAT32 = (jnp.bfloat16, np.float16, np.float32)


def half_dtype() -> DTypeLike:
    """Return the 16-bit dtype that jmp chooses for this machine: bfloat16 on TPU,
    float16 elsewhere.

    Example:
        >>> np.dtype(half_dtype()).itemsize
        2
    """
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def bytes_of(dtype: Any, count: int) -> int:
    """Return the bytes of an array of `count` elements; two 4-bit numbers share a byte,
    as they do on a device.
    """
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    bits = 8 * dtype.itemsize if is_key else jax.dtypes.itemsize_bits(dtype)
    return -(-count * bits // 8)


def dtype_or_none(given: Any) -> np.dtype | None:
    """Return the dtype that the user means, or None if `given` is no dtype.

    A string is a short name (`bf16`), `half`, or the full name of a dtype
    (`float8_e4m3fn`). NumPy's codes are refused because they count bytes: its `f8` is
    float64, and its `f16` is not float16. None, which NumPy reads as float64, is
    refused too.
    """
    if isinstance(given, str) and (given == "half" or given in DTYPE_NAMES):
        return np.dtype(half_dtype()) if given == "half" else DTYPE_NAMES[given]
    try:
        dtype = None if given is None else np.dtype(given)
    except Exception:  # TypeError, ValueError, and SyntaxError for ","
        return None
    return (
        None
        if isinstance(given, str) and dtype is not None and dtype.name != given
        else dtype
    )
