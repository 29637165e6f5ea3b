"""Findings: what a compiled step does that its author would not want, what it costs, and the remedy."""

import dataclasses
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpx._dtypes import bytes_of
from mpx.tools.program.kernels import Kernel
from mpx.tools.program.text import shapes_of

_PARAMETER = re.compile(r"^\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>\S+) parameter\((?P<number>\d+)\)", re.MULTILINE)
_WORTH_A_WORD = 0.01  # of all arguments: a learning rate need not be donated, and XLA may copy a bias for other reasons
_COPY = re.compile(r"= (?P<type>\S+) copy\(%(?P<operand>[\w.\-]+)\)")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in a program that costs memory or time for nothing.

    Attributes:
        what: the finding.
        bytes: what it costs on one device: bytes of memory, or bytes that are copied.
        remedy: what to do.
    """

    what: str
    bytes: int
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


def of_donation(lowered: Any, compiled: Any, names: Sequence[str]) -> Iterator[Finding]:
    """Yield arguments that come back and are not donated, and donated buffers that XLA copies."""
    inputs = jax.tree.leaves_with_path(lowered.args_info)
    sizes = [_bytes(leaf, sharding) for (_, leaf), sharding in _with_shardings(inputs, compiled)]
    results = Counter(_type(leaf) for leaf in jax.tree.leaves(lowered.out_info))
    results -= Counter(_type(leaf) for _, leaf in inputs if leaf.donated)
    by_argument: dict[str, list[int]] = {}
    for i, (path, _) in enumerate(inputs):
        by_argument.setdefault(_argument(path, names), []).append(i)
    for argument, indices in by_argument.items():
        kept = Counter(_type(inputs[i][1]) for i in indices if not inputs[i][1].donated)
        size = sum(sizes[i] for i in indices if not inputs[i][1].donated)
        if size > _WORTH_A_WORD * sum(sizes) and kept <= results:
            results -= kept
            yield Finding(
                f"{argument} comes back in the same shape and is not donated, so that old and new are held at once",
                size,
                "If the new one takes its place, donate it (`donate_argnums` of `jax.jit`).",
            )
    donated = [[_type(inputs[i][1]) for i in indices if inputs[i][1].donated] for indices in by_argument.values()]
    if not _come_back_in_order(
        list(filter(None, donated)), [_type(leaf) for leaf in jax.tree.leaves(lowered.out_info)]
    ):
        yield from _copies(compiled.as_text())


def of_collectives(lowered: Any, compiled: Any, kernels: Sequence[Kernel]) -> Iterator[Finding]:
    """Yield gradients that devices add up in 16 bits, and optimizer states in 8 bits that they gather.

    A gradient is known by its shape, in any order of its axes: as an argument has, a device's shard of it, or a layer.
    """
    arguments = list(_with_shardings(jax.tree.leaves_with_path(lowered.args_info), compiled))
    size = sum(_bytes(leaf, sharding) for (_, leaf), sharding in arguments)
    floats = [(leaf.shape, sharding) for (_, leaf), sharding in arguments if jnp.issubdtype(leaf.dtype, jnp.floating)]
    whole = [tuple(shape) for shape, _ in floats]
    shards = [sharding.shard_shape(tuple(shape)) for shape, sharding in floats if sharding is not None]
    of_weights = {tuple(sorted(part)) for shape in (*whole, *shards) for part in (shape, shape[1:])}
    has_their_shape = lambda kernel: any(tuple(sorted(x.dims)) in of_weights for x in shapes_of(kernel.result))
    total = lambda kernels: sum(kernel.bytes * kernel.times for kernel in kernels)

    sums = [k for k in kernels if k.operation in ("all-reduce", "reduce-scatter") and k.dtype in ("bf16", "f16")]
    sums = list(filter(has_their_shape, sums))
    if total(sums) > _WORTH_A_WORD * size:
        yield Finding(
            f"Devices add up arrays of the shapes of weights in {sums[0].dtype}, which rounds at each addition; the "
            f"first at {sums[0].source or 'an unknown line'}",
            total(sums),
            "If they are gradients, leave out `reduce_dtype` of `mpx.autocast` and `reduce=` of its policy.",
        )
    is_state = lambda dtype: jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize == 1
    gathers = [k for k in kernels if k.operation == "all-gather" and k.dtype in ("s8", "u8", "u32")]
    if total(gathers) > _WORTH_A_WORD * size and any(is_state(leaf.dtype) for (_, leaf), _ in arguments):
        yield Finding(
            "Devices gather an optimizer state in 8 bits, whose blocks reach over several of them",
            total(gathers),
            "Give `block_size` a divisor of the columns that a device has, or use a mesh of explicit axes.",
        )


def _come_back_in_order(donated: list[list[Any]], results: list[Any]) -> bool:
    """Return whether donated arguments are found among the results one after another, and no two of them are alike.

    Nobody can tell the order of two that are alike.
    """
    start = 0
    for types in donated:
        ends = (end for end in range(start + len(types), len(results) + 1) if results[end - len(types) : end] == types)
        start = next(ends, -1)
        if start < 0 or donated.count(types) > 1:
            return False
    return True


def _copies(text: str) -> Iterator[Finding]:
    """Yield the donated buffers that are copied before they are written over."""
    donated = {int(number) for number in re.findall(r"\{[\d,]*\}: \((\d+),", text.partition("\n")[0])}
    entry = text[text.index("\nENTRY ") :] if "\nENTRY " in text else ""
    types = {m["name"]: m["type"] for m in _PARAMETER.finditer(entry) if int(m["number"]) in donated}
    copied = [m["type"] for m in _COPY.finditer(entry) if types.get(m["operand"]) == m["type"]]
    bytes_of_all = lambda types: sum(shape.bytes for text in types for shape in shapes_of(text))
    size = bytes_of_all(copied)
    if size > _WORTH_A_WORD * bytes_of_all(types.values()):
        yield Finding(
            f"XLA copies donated buffers ({len(copied)}) before it writes over them",
            size,
            "Return arguments in the order in which they are taken (JAX gives donated memory to results of the same "
            "type in turn), and do not use an old one after the new one is made.",
        )


def names_of(step: Callable[..., Any], args: Sequence[Any], lowered: Any) -> list[str]:
    """Return the names of the positional arguments of a function; none if it does not say, or if some are static."""
    if len(lowered.args_info[0]) != len(args):
        return []
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _argument(path: tuple[Any, ...], names: Sequence[str]) -> str:
    """Return how a message names the argument of a leaf, whose path begins with `args` or `kwargs`."""
    key = path[1]
    if isinstance(key, jax.tree_util.DictKey):
        return f"`{key.key}`"
    if key.idx < len(names):
        return f"Argument {key.idx} (`{names[key.idx]}`)"
    return f"Argument {key.idx}" if names else f"Argument {key.idx} (static ones not counted)"


def _with_shardings(inputs: Sequence[Any], compiled: Any) -> list[tuple[Any, Any]]:
    shardings = jax.tree.leaves(compiled.input_shardings)
    # XLA drops arguments that the program does not use, and their shardings.
    return list(zip(inputs, shardings if len(shardings) == len(inputs) else [None] * len(inputs), strict=True))


def _type(leaf: Any) -> tuple[tuple[int, ...], str]:
    return tuple(leaf.shape), str(leaf.dtype)


def _bytes(leaf: Any, sharding: Any) -> int:
    shape = leaf.shape if sharding is None else sharding.shard_shape(tuple(leaf.shape))
    return bytes_of(leaf.dtype, math.prod(shape))
