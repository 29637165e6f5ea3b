"""Arguments of commands: numbers, memories, shapes, functions, rules."""

import importlib
import operator
import os
import re
import sys
from typing import Any

import jax
import optax
import optax.contrib

from mpx._dtypes import dtype_or_none

_PREFIXES = {"k": 1, "m": 2, "g": 3, "t": 4}
_COUNTS = {"": 1, "b": 10**9} | {name: 1000**power for name, power in _PREFIXES.items()}
_BYTES = {"b": 1} | {f"{name}b": 1000**power for name, power in _PREFIXES.items()}
_BYTES |= {f"{name}ib": 1024**power for name, power in _PREFIXES.items()}


def parameters(text: str) -> int:
    """Return a number of parameters: 124000000 for `124M`."""
    return _number(text, _COUNTS, "a number of parameters such as 124M, 7B or 70e9")


def memory_bytes(text: str) -> int:
    """Return a memory in bytes: 80000000000 for `80GB`, 1073741824 for `1 GiB`."""
    return _number(text, _BYTES, "a memory with its unit, such as 80GB (80e9 bytes) or 80GiB (80 * 2**30)")


def _number(text: str, units: dict[str, int], wanted: str) -> int:
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d\d?)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not {wanted}.")
    return round(float(match[1]) * units[match[2]])


def shape(text: str) -> jax.ShapeDtypeStruct:
    """Return the shape that a text such as `bf16[768,3072]` or `i32[]` describes."""
    match = re.fullmatch(r"(\w+)(?:\[([\d, ]*)\])?", text.strip())
    dtype = None if match is None else dtype_or_none(re.sub(r"^(?:[is]|(u))(\d+)$", r"\1int\2", match[1]))
    if match is None or dtype is None:
        raise ValueError(f"{text!r} is not a shape such as bf16[768,3072], i32[8], float8_e4m3fn[8] or f32[].")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"{text!r} has a type of 64 bits. Set JAX_ENABLE_X64=1.")
    return jax.ShapeDtypeStruct([int(dim) for dim in re.findall(r"\d+", match[2] or "")], dtype)


def attribute(reference: str) -> Any:
    """Return what `file.py:name` or `module:name` names; the file is run, as an import runs it."""
    place, _, name = reference.rpartition(":")
    folder, module = os.path.split(place)
    if not module or not name:
        raise ValueError(f"{reference!r} is neither file.py:function nor module:function.")
    sys.path.insert(0, os.path.abspath(folder))  # as `python file.py` does, for what lies beside it
    return operator.attrgetter(name)(importlib.import_module(module.removesuffix(".py")))


def rule(text: str) -> Any:
    """Return an Optax rule by its name, or the rule that `file.py:name` names or makes."""
    if ":" in text:
        found = attribute(text)
        return found() if callable(found) else found
    make = getattr(optax, text, None) or getattr(optax.contrib, text, None)
    if make is None:
        raise ValueError(f"Optax has no rule {text!r}. Write a function that makes it, and give file.py:function.")
    return make(learning_rate=1e-3)
