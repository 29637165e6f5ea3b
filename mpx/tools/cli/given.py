"""Arguments of commands: numbers, memories, shapes, meshes, functions, rules."""

import functools
import importlib.util
import inspect
import math
import os
import pathlib
import pkgutil
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

from mpx import _errors
from mpx._dtypes import dtype_or_none
from mpx.tools.cli.errors import CommandError, users_code

_NUMBER = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([A-Za-z]*)")
_LARGEST = 10**18
_MOST_DEVICES = 2**20
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_PREFIXES = {"k": 1, "m": 2, "g": 3, "t": 4}
_BYTES = {"b": 1} | {f"{name}b": 1000**power for name, power in _PREFIXES.items()}
_BYTES |= {f"{name}ib": 1024**power for name, power in _PREFIXES.items()}
_SHAPE = re.compile(r"(\w+?)(?:\[\s*((?:\d+\s*,\s*)*\d+)?\s*\])?")


def parameters(text: str) -> int:
    """Return a number of parameters: 124000000 for `124M`; raise for `7`, which was meant to be `7B`."""
    number = text.strip()
    if re.fullmatch(r"\d{1,3}(\.\d+)?", number) and float(number):
        raise CommandError(f"{text!r} would be {number} parameters. Did you mean {number}B (10^9) or {number}M (10^6)?")
    return _number(text, _COUNTS, "a number of parameters such as 124M, 7B or 70e9")


def memory_bytes(text: str) -> int:
    """Return a memory in bytes: 80000000000 for `80GB`, 1073741824 for `1 GiB`."""
    return _number(text, _BYTES, "a memory with its unit, such as 80GB (80e9 bytes) or 80GiB (80 * 2**30)")


def _number(text: str, units: dict[str, int], wanted: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise CommandError(f"{text!r} is not {wanted}.")
    number = Decimal(re.sub("[_,]", "", match[1])) * units[match[2].lower()]
    if number != int(number) or not 0 < number <= _LARGEST:
        raise CommandError(f"{text!r} is not {wanted}: it must be whole, above 0 and at most {_LARGEST:.0e}.")
    return int(number)


def shape(text: str) -> jax.ShapeDtypeStruct:
    """Return the shape that a text such as `bf16[768,3072]` or `i32[]` describes."""
    match = _SHAPE.fullmatch(text.strip())
    dtype = None if match is None else dtype_or_none(re.sub(r"^(?:[is]|(u))(\d+)$", r"\1int\2", match[1]))
    if match is None or dtype is None or not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
        raise CommandError(f"{text!r} is not a shape such as bf16[768,3072], i32[8], float8_e4m3fn[8] or f32[].")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise CommandError(f"{text!r} needs 64-bit types; set the environment variable JAX_ENABLE_X64=1.")
    return jax.ShapeDtypeStruct([int(dim) for dim in re.findall(r"\d+", match[2] or "")], dtype)


def mesh(text: str) -> AbstractMesh:
    """Return a mesh without devices: of one axis for `8`, of two for `data=8,model=2`."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.rpartition("="))
        name = name or "data"
        if not size.isdecimal() or int(size) < 1 or name in axes or (not equals and "," in text):
            raise CommandError(f"{text!r} is not a mesh such as data=8,model=2 or a number of devices.")
        axes[name] = int(size)
    if math.prod(axes.values()) > _MOST_DEVICES:
        raise CommandError(f"the mesh {text!r} has more than {_MOST_DEVICES:,} devices.")
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def function(reference: str) -> Callable[..., Any]:
    """Return the function that `file.py:function` or `module:function` names."""
    found = attribute(reference)
    if not callable(found):
        raise CommandError(f"{reference!r} is not a function, but {type(found).__name__}.")
    return found


def made_by(reference: str) -> list[Any]:
    """Return the arguments that the function of a reference makes."""
    make = function(reference)
    with users_code():
        made = make()
    return list(made) if type(made) in (tuple, list) else [made]  # a NamedTuple is one argument


def attribute(reference: str) -> Any:
    """Return what `file.py:name` or `module:name` names; the file is run, as an import runs it."""
    place, _, name = reference.rpartition(":")
    module = _imported(pathlib.Path(place).resolve()) if place.endswith(".py") or os.sep in place else place
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        with users_code():
            return pkgutil.resolve_name(f"{module}:{name}")
    except AttributeError as error:
        if module not in sys.modules:  # its import failed
            raise
        own = [n for n, value in vars(sys.modules[module]).items() if not n.startswith("_") and callable(value)]
        raise CommandError(f"{place} has no {name!r}. It has {_errors.listed(own, 10)}.") from error
    except ValueError as error:
        raise CommandError(f"{reference!r} is neither file.py:function nor module:function.") from error
    except ModuleNotFoundError as error:
        raise CommandError(f"{error}, for {place!r}. A file is given as path/to/file.py:function.") from error


@functools.cache
def _imported(path: pathlib.Path) -> str:
    """Import a file under a name of its own, since `train` may be another module, and return that name."""
    if not path.is_file():
        raise CommandError(f"there is no file {os.path.relpath(path)}.")
    sys.path.insert(0, str(path.parent))  # as `python file.py` does, for what lies beside it
    name = "_given_" + re.sub(r"\W", "_", path.stem)
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with users_code():
        spec.loader.exec_module(module)
    return name


def rule(text: str) -> Any:
    """Return an Optax rule by its name, or the rule that `file.py:name` names or makes."""
    if ":" in text:
        found = attribute(text)
        with users_code():
            return found() if callable(found) and not hasattr(found, "init") else found
    make = getattr(optax, text, None) or getattr(optax.contrib, text, None)
    is_rule = inspect.isfunction(make)
    settings = inspect.signature(make).parameters.values() if is_rule else ()
    needed = {setting.name for setting in settings if setting.default is setting.empty}
    if not is_rule or needed - {"learning_rate"}:
        raise CommandError(
            f"Optax has no rule {text!r} that needs at most a learning rate. Write a function that makes the rule, and "
            "give it as file.py:function."
        )
    return make(**dict.fromkeys(needed, 1e-3))
