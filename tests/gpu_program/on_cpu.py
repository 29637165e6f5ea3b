"""Run on this CPU the program that XLA compiled for another device, to compare what
became of its arithmetic.

The optimized program is read as text and made one for a CPU: fusions, which are
kernels, become calls, and what says where an array lies is left out. Contraction of a
product and a sum into one operation is not seen: it comes later.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding
from jaxlib import _hlo, _jax
from jaxlib.mlir.dialects import stablehlo

from tests.helpers import unfused


def as_written(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a step for this CPU such that each operation rounds once, as the program
    says, and none is left out.
    """
    return jax.jit(
        step, compiler_options=unfused() | {"xla_allow_excess_precision": False}
    )


def program_for(
    device: Any, step: Callable[..., Any], *args: Any
) -> Callable[..., Any]:
    """Return a function that computes on this CPU what the program of a step computes
    on a device that is not here.

    Args:
        device: one of `mpx.tools.program.target_devices`.
        step: a function of arrays, whose program does without calls of libraries.
        args: its arguments, or their shapes.

    Raises:
        ValueError: if the program has something in it that has no meaning elsewhere.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    placed = jax.tree.map(
        lambda x: x.update(sharding=SingleDeviceSharding(device)), shapes
    )
    jitted = jax.jit(step, keep_unused=True)
    # There is nothing to time it on.
    options = {"xla_gpu_autotune_level": 0} if device.platform != "tpu" else {}
    text = jitted.lower(*placed).compile(compiler_options=options).as_text()
    module = parsed(portable(text)).as_serialized_hlo_module_proto()
    portable_bytes = _jax.mlir.serialize_portable_artifact(
        _jax.mlir.hlo_to_stablehlo(module), stablehlo.get_current_version()
    )
    # Trees, shapes and dtypes are those of the step as JAX exports it; only its program
    # is another one.
    exported = jax.export.export(jitted, platforms=("cpu",))(*shapes)
    return dataclasses.replace(exported, mlir_module_serialized=portable_bytes).call


def portable(text: str) -> str:
    """Return the text of an optimized program without what only its device knows."""
    require_row_major(text)
    options = _hlo.HloPrintOptions()
    options.print_metadata = options.print_backend_config = (
        options.include_layout_in_shapes
    ) = False
    options.print_large_constants = options.print_operand_shape = True
    # The first line is about devices.
    body = parsed(text).to_string(options).partition("\n")[2]
    if match := re.search(r"^.* custom-call.*$", body, re.MULTILINE):
        raise ValueError(f"This program calls what is not in it: {match[0].strip()}")
    body = re.sub(r" fusion\((.*)\), kind=\w+, calls=", r" call(\1), to_apply=", body)
    # A copy to faster memory has two parts.
    body = re.sub(r"= \((\w+\[[\d,]*\]), [^)]*\) copy-start\(", r"= \1 copy(", body)
    body = re.sub(r"= (\w+\[[\d,]*\]) copy-done\(\(.*?\) ", r"= \1 copy(\1 ", body)
    return "HloModule portable\n" + re.sub(
        r"= ((\w+)\[.*?\]) (?:bitcast|copy)\((\w+)\[", _same_bytes, body
    )


def parsed(text: str) -> _hlo.HloModule:
    """Return the program of a text. XLA's parser takes -0 for an integer, which has no
    sign: write it as a float.
    """
    return _hlo.hlo_module_from_text(re.sub(r"(?<=[({, ])-0(?=[,)} ])", "-0.0", text))


def require_row_major(text: str) -> None:
    """Raise unless all arrays lie in memory in the order of their elements: then a
    bitcast is a reshape.
    """
    for order in set(re.findall(r"\w\[[\d,]*\]\{([\d,]+)", text)):
        places = [int(place) for place in order.split(",")]
        if places != sorted(places, reverse=True):
            raise ValueError(
                f"This program has an array in the order {{{order}}}, which has no"
                " meaning elsewhere."
            )


def _same_bytes(match: re.Match[str]) -> str:
    """Return what an operation does that gives the bytes of an array another dtype or
    shape, or another place.
    """
    result, dtype, operand_dtype = match.groups()
    return f"= {result} {'reshape' if dtype == operand_dtype else 'bitcast-convert'}({operand_dtype}["
