"""Read what the commands of `mpx_cli` are given, and write what they find, or their
errors.
"""

import importlib
import inspect
import json
import operator
import os
import pathlib
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optax.contrib
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from mpx._dtypes import dtype_or_none
from mpx._parallel.placement import sharded_spec
from mpx._tables import Result
from mpx.tools.plan.compare_plans import PlanComparison, compare_plans
from mpx.tools.plan.memory_plan import evaluate
from mpx.tools.program.targets import TARGETS

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}  # of 1000, or 1024


def parameters(text: str) -> int:
    """Return a number of parameters: 124000000 for `124M`."""
    return _number(
        text,
        "([kmgbt]?)()",
        "a number of parameters such as 124M, 7B or 70e9, or file.py:function",
    )


def usable_bytes(text: str) -> int:
    """Return what JAX takes of a device with a memory of `80GB` or `80 GiB`, or of one
    that is called `h100`.

    Of a GPU it takes the fraction that the environment says.
    """
    target, names = TARGETS.get(text.strip().lower()), ", ".join(TARGETS)
    wanted = (
        "a memory with its unit, such as 80GB (80e9 bytes) or 80GiB (80 * 2**30), or"
        f" one of {names}"
    )
    memory = target.memory_bytes if target else _number(text, "([kmgt]?)(i?)b", wanted)
    part = "1" if target and target.tpu else os.environ.get(FRACTION, "0.75")
    if not re.fullmatch(r"\d+\.?\d*|\.\d+", part) or not float(part):
        raise ValueError(
            f"The variable {FRACTION} must be a number such as 0.75, but is {part!r}."
        )
    return int(memory * float(part))


def _number(text: str, unit: str, wanted: str) -> int:
    match = re.fullmatch(
        rf"(\d[\d_]*(?:\.\d+)?(?:e\d\d?)?)\s*{unit}", text.strip().lower()
    )
    number = 0
    if match is not None:
        base = 1024 if match[3] else 1000
        number = round(float(match[1]) * base ** _POWERS[match[2]])
    if not 0 < number < 2**63:
        raise ValueError(f"{text!r} is not {wanted}.")
    return number


def shape(text: str) -> jax.ShapeDtypeStruct:
    """Return the shape that a text such as `bf16[768,3072]` or `i32[]` describes."""
    match = re.fullmatch(r"(\w+)(?:\[([\d, ]*)\])?", text.strip())
    name = re.sub(r"^(?:[is]|(u))(\d+)$", r"\1int\2", match[1] if match else "")
    dtype = dtype_or_none(name)
    if match is None or dtype is None:
        raise ValueError(
            f"{text!r} is not a shape such as bf16[768,3072], i32[8], float8_e4m3fn[8]"
            " or f32[]."
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"{text!r} has a type of 64 bits. Set JAX_ENABLE_X64=1.")
    dims = [int(dim) for dim in re.findall(r"\d+", match[2] or "")]
    return jax.ShapeDtypeStruct(dims, dtype)


def attribute(reference: str) -> Any:
    """Return what `file.py:name` or `module:name` names; the file is run, as an import
    runs it.
    """
    place, _, name = reference.rpartition(":")
    folder, module = os.path.split(place)
    if not module or not name:
        raise ValueError(
            f"{reference!r} is neither file.py:function nor module:function."
        )
    if module.endswith(".py") and not os.path.isfile(place):
        raise ValueError(f"There is no file {place!r}.")
    # As `python file.py` does, for what lies beside it.
    sys.path.insert(0, os.path.abspath(folder))
    return operator.attrgetter(name)(
        importlib.import_module(module.removesuffix(".py"))
    )


def step(reference: str) -> tuple[Any, ...]:
    """Return a step, its arguments and the positions of donated ones, as the function
    returns them.
    """
    make = attribute(reference)
    wanted = (
        f"{reference} must be a function without arguments that returns (step,"
        " arguments, donated)"
    )
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(
            f"{wanted}: {error}. If it is the step, write such a function around it."
        ) from None
    returned = make()
    if not _is_step(returned):
        raise ValueError(f"{wanted}, but it returns {type(returned).__name__}.")
    return (*returned, ())[:3]


def model(reference: str) -> Any:
    """Return a function that makes the parameters, which may be the first argument of a
    step that `step` reads; or what else the reference names.
    """
    make = attribute(reference)
    if not inspect.isroutine(make):
        return make

    def parameters():
        made = make()
        return jax.tree.map(
            # A traced function cannot return shapes.
            lambda x: jnp.zeros_like(x) if isinstance(x, jax.ShapeDtypeStruct) else x,
            made[1][0] if _is_step(made) else made,
        )

    return parameters


def _is_step(made: Any) -> bool:
    return (
        isinstance(made, tuple)
        and len(made) in (2, 3)
        and callable(made[0])
        and isinstance(made[1], (tuple, list))
        and len(made[1]) > 0
    )


def rule(text: str) -> tuple[Any, str]:
    """Return an Optax rule by its name, or the rule that `file.py:name` names or makes;
    and the code for it.
    """
    if ":" in text:
        found, name = attribute(text), text.rpartition(":")[2]
        return (found(), f"{name}()") if callable(found) else (found, name)
    modules = (optax, optax.contrib)
    module = next((module for module in modules if hasattr(module, text)), None)
    if module is None:
        raise ValueError(
            f"Optax has no rule {text!r}. Write a function that makes it, and give"
            " file.py:function."
        )
    return getattr(module, text)(learning_rate=1e-3), f"{module.__name__}.{text}(1e-3)"


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name."""
    if path.suffix not in (".npz", ".npy", ".safetensors"):
        raise ValueError(f"{path} is not a .npz, .npy or .safetensors file.")
    with path.open("rb") as stream:
        # `np.load` takes a file of any other kind for a pickle, and its error says how
        # to run it.
        if path.suffix == ".npz":
            found = dict(np.lib.npyio.NpzFile(stream, allow_pickle=False))
        elif path.suffix == ".npy":
            found = {path.stem: np.lib.format.read_array(stream, allow_pickle=False)}
        else:
            import safetensors

            with safetensors.safe_open(path, framework="numpy") as file:
                # NumPy has no floats of 8 bits and fewer, and a report leaves them out.
                found = {
                    name: file.get_tensor(name)
                    for name in file.keys()
                    if not re.match("F[468]", file.get_slice(name).get_dtype())
                }
    # NumPy saves bfloat16, which it does not know, as two bytes without a name.
    return {
        name: x.view(ml_dtypes.bfloat16) if x.dtype == np.dtype("V2") else x
        for name, x in found.items()
    }


def plan(
    model: Any,
    rule: optax.GradientTransformation,
    *,
    recipe: Sequence[str],
    devices: int,
    fsdp: bool,
    grad_dtype: str | None,
    **options: Any,
) -> PlanComparison:
    """Plan the recipes with these names (all if there are none), on devices as the
    command line gives them.
    """
    if fsdp and devices == 1:
        raise ValueError(
            "--fsdp shards parameters over devices: say over how many, as in"
            " --devices 64."
        )
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    model = evaluate(model)

    specs = (
        PartitionSpec(*["data"][: devices <= model])
        if isinstance(model, int)
        else jax.tree.map(
            lambda p: sharded_spec(np.shape(p), PartitionSpec(), mesh, "data"), model
        )
    )
    if devices > 1 and not any(jax.tree.leaves(specs)):
        raise ValueError(
            f"--devices {devices}: there is no parameter with an axis that so many"
            " devices can divide."
        )
    if fsdp:
        options |= {"mesh": mesh, "axis": None, "param_specs": specs}
    elif devices > 1:
        options |= {"mesh": mesh, "axis": "data"}
    # Which is what a plan counts by itself.
    gradient_dtype = None if grad_dtype == "as_computed" else grad_dtype
    return compare_plans(
        model, rule, recipe or None, gradient_dtype=gradient_dtype, **options
    )


def plan_parts(
    comparison: PlanComparison, rule: str, model: str, memory: str
) -> Iterator[Any]:
    """Yield the parts of a single recipe, and the table of several ones or for a
    memory; the code for one that may fit; and the command that tells more.
    """
    plans, left = comparison.plans, comparison.left
    limit, found = comparison.usable_bytes, TARGETS.get(memory)
    if len(plans) == 1:
        yield from plans.values()
    if len(plans) > 1 or limit is not None:
        yield comparison
    if limit is not None:
        # At most 95% of it: CUDA and NCCL need the rest.
        of_gpu = (
            f" JAX takes 75% of a GPU, or what the variable {FRACTION} says:"
            " 0.95 where nothing else runs."
        )
        yield (
            f"Training may use {limit / 1e9:.4g} GB of a"
            f" device.{'' if found and found.tpu else of_gpu}"
        )
    if ":" not in model and "muon" in rule:
        yield (
            "A number of parameters is one vector, for which Muon is AdamW. Give"
            " file.py:function, which makes matrices."
        )
    possible = [
        name
        for name, plan in plans.items()
        if limit is None or not plan.is_too_large(limit)
    ]
    fit = [name for name in possible if left.get(name, 0) >= 0] or possible
    if not fit:
        yield (
            "Nothing fits. Less is held with another --recipe, or on more --devices"
            " with --fsdp."
        )
    elif limit is not None or len(plans) == 1:
        name = "bf16-split" if "bf16-split" in fit else fit[0]
        yield f"tx = mpx.mixed_precision({rule}, {json.dumps(name)})"
    file = model.rpartition(":")[0] or "train.py"
    target = memory if found and (found.gpu or found.tpu) else "h100"
    yield (
        "What a step needs besides is read off its program: mpx program"
        f" {file}:make --target {target}"
    )


def write(result: Result, as_json: bool, parts: Iterable[Any] = ()) -> None:
    """Write a result, or parts in its place, for people; or as JSON, with null for a
    number that is not finite.
    """
    if as_json:
        text = json.dumps(result.as_dict(), indent=2, allow_nan=False)
    else:
        text = "\n\n".join(map(str, parts or [result]))
    sys.stdout.write(f"{text}\n")


_PACKAGE = pathlib.Path(__file__).parents[1]
_NOT_THE_USERS = (
    _PACKAGE,
    _PACKAGE.with_name("mpx_cli.py"),
    pathlib.Path(sysconfig.get_path("stdlib")),
)


def exit_code_of(error: BaseException) -> int:
    """Return 2 for what cannot be on a command line, 1 for an error in a user's code
    and for all others.
    """
    return 2 if isinstance(error, ValueError) and not _where(error) else 1


def message_of(error: BaseException) -> str:
    """Return an error in one line, with the line of the user's code where it arose, if
    it did there.
    """
    text = textwrap.shorten(str(error), 600, placeholder=" ...")
    text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    return ": ".join([*_where(error)[-1:], text])


def _where(error: BaseException) -> list[str]:
    """Return the lines of the user's code in the traceback of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        f"{os.path.relpath(frame.filename)}:{frame.lineno} ({frame.name})"
        for frame in frames
        if _is_users(frame.filename)
    ]


def _is_users(file: str) -> bool:
    path = pathlib.Path(file)
    return not (
        {"site-packages", "dist-packages"} & set(path.parts)
        or file.startswith("<")
        or any(map(path.is_relative_to, _NOT_THE_USERS))
    )
