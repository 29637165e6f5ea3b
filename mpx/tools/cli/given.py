"""What the user gives on the command line: numbers, memories, shapes, meshes, functions, rules."""

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType

from mpx._dtypes import dtype_or_none
from mpx.tools.cli.errors import CommandError, users_code

_NUMBER = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([A-Za-z]*)")
_LARGEST = 10**18
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_SHAPE = re.compile(r"([A-Za-z]\w*)(?:\[([\d,\s]*)\])?")
_INTEGER = re.compile(r"([isu])(8|16|32|64)")


def parameters(text: str) -> int:
    """A number of parameters.

    Example:
        >>> parameters("124M"), parameters("70e9"), parameters("1.5b")
        (124000000, 70000000000, 1500000000)
    """
    return _number(text, _COUNTS, "a number of parameters such as 124M, 7B or 70e9")


def memory_bytes(text: str) -> int:
    """A memory.

    Example:
        >>> memory_bytes("80GB"), memory_bytes("1 GiB")
        (80000000000, 1073741824)
    """
    return _number(text, _BYTES, "a memory such as 80GB (80e9 bytes) or 80GiB (80 * 2**30)")


def _number(text: str, units: dict[str, int], wanted: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise CommandError(f"{text!r} is not {wanted}.")
    number = Decimal(re.sub("[_,]", "", match[1])) * units[match[2].lower()]
    if number != int(number) or not 0 < number <= _LARGEST:
        raise CommandError(f"{text!r} is not {wanted}: it must be whole, above 0 and at most {_LARGEST:.0e}.")
    return int(number)


def shape(text: str) -> jax.ShapeDtypeStruct:
    """A shape as mpx prints it.

    Example:
        >>> shape("bf16[768,3072]"), shape("i32[]")
        (ShapeDtypeStruct(shape=(768, 3072), dtype=bfloat16), ShapeDtypeStruct(shape=(), dtype=int32))
    """
    match = _SHAPE.fullmatch(text.strip())
    dtype = None if match is None else _dtype(match[1])
    try:
        dims = [] if match is None else [int(dim) for dim in (match[2] or "").split(",") if dim.strip()]
    except ValueError:  # "8 8"
        dtype = None
    if dtype is None:
        raise CommandError(f"{text!r} is not a shape such as bf16[768,3072], i32[8], float8_e4m3fn[8] or f32[].")
    return jax.ShapeDtypeStruct(dims, dtype)


def _dtype(name: str) -> np.dtype | None:
    integer = _INTEGER.fullmatch(name)
    if integer is not None:
        name = f"{'uint' if integer[1] == 'u' else 'int'}{integer[2]}"
    dtype = dtype_or_none(name)
    is_number = dtype is not None and (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_)
    return dtype if is_number else None


def mesh(text: str) -> AbstractMesh:
    """A mesh without devices.

    Example:
        >>> dict(mesh("data=8,model=2").shape), dict(mesh("8").shape)
        ({'data': 8, 'model': 2}, {'data': 8})
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.rpartition("="))
        name = name or "data"
        if not size.isdecimal() or int(size) < 1 or name in axes or (not equals and "," in text):
            raise CommandError(f"{text!r} is not a mesh such as data=8,model=2 or a number of devices.")
        axes[name] = int(size)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


# Functions.


def is_reference(text: str) -> bool:
    """Whether this names something in a file or a module."""
    return ":" in text


def function(reference: str) -> Callable[..., Any]:
    """What `file.py:function` or `module:function` names."""
    found = attribute(reference)
    if not callable(found):
        raise CommandError(f"{reference!r} is no function, but {type(found).__name__}.")
    return found


def attribute(reference: str) -> Any:
    """What `file.py:name` or `module:name` names; its file is run, as an import runs it."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise CommandError(f"{reference!r} is neither file.py:function nor module:function.")
    found = _module_of(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise CommandError(f"{place} has no {name!r}.{_others(part, found)}")
        found = getattr(found, part)
    return found


def _others(name: str, place: Any) -> str:
    own = [n for n, value in vars(place).items() if not n.startswith("_") and callable(value)]
    close = difflib.get_close_matches(name, own, n=3) or own[:10]
    return f" It has {', '.join(close)}." if close else ""


def _module_of(place: str) -> Any:
    if place.endswith(".py") or os.sep in place:
        path = pathlib.Path(place)
        if not path.is_file():
            raise CommandError(f"there is no file {place}.")
        return _module_of_file(path.resolve())
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        with users_code():
            return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise CommandError(f"{error}, for {place!r}. A file is given as path/to/file.py:function.") from error
    except TypeError as error:  # a relative name
        raise CommandError(f"{place!r} is neither a file nor a module: {error}.") from error


@functools.cache
def _module_of_file(path: pathlib.Path) -> Any:
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python file.py` does, for what lies beside it
    name = f"_given_{path.stem}"  # a plain `train` may be another module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CommandError(f"{path} is no Python file.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with users_code():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# Rules.


def rule(text: str) -> Any:
    """An Optax rule by its name, or what `module:attribute` names: a rule, or a function that makes one."""
    if is_reference(text):
        found = attribute(text)
        if not hasattr(found, "init") and callable(found):
            with users_code():
                found = found()
        return found
    made_by = getattr(optax, text, None) or getattr(optax.contrib, text, None)
    if not inspect.isfunction(made_by) or text.startswith("_"):
        close = ", ".join(difflib.get_close_matches(text, {*dir(optax), *dir(optax.contrib)}, n=3))
        raise CommandError(
            f"Optax has no rule {text!r}.{f' Did you mean {close}?' if close else ''} A rule of your own is given as "
            "file.py:function."
        )
    settings = inspect.signature(made_by).parameters
    open_ones = [name for name, setting in settings.items() if setting.default is setting.empty]
    if set(open_ones) - {"learning_rate"}:
        raise CommandError(
            f"`optax.{text}` needs {', '.join(open_ones)}: write a function that makes the rule, and give it as "
            "file.py:function."
        )
    made = made_by(**{name: 1e-3 for name in open_ones})
    if not hasattr(made, "init"):
        raise CommandError(f"`optax.{text}` makes no rule, but {type(made).__name__}.")
    return made
