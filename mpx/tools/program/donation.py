"""Find arguments of a step that are not donated, and donated buffers that are copied."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mpx.tools.program.findings import WORTH_A_WORD, Finding, arguments_of, bytes_on_a_device
from mpx.tools.program.text import shapes_of

_PARAMETER = re.compile(r"^\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>\S+) parameter\((?P<number>\d+)\)", re.MULTILINE)
_COPY = re.compile(r"= (?P<type>\S+) copy\(%(?P<operand>[\w.\-]+)\)")


def of_donation(lowered: Any, compiled: Any, names: Sequence[str]) -> Iterator[Finding]:
    """Yield arguments that come back and are not donated, and donated buffers that XLA copies."""
    arguments = arguments_of(lowered, compiled)
    inputs = [(path, leaf) for path, leaf, _ in arguments]
    sizes = [bytes_on_a_device(leaf, sharding) for _, leaf, sharding in arguments]
    results = Counter(_type(leaf) for leaf in jax.tree.leaves(lowered.out_info))
    results -= Counter(_type(leaf) for _, leaf in inputs if leaf.donated)
    by_argument: dict[str, list[int]] = {}
    for i, (path, _) in enumerate(inputs):
        by_argument.setdefault(_argument(path, names), []).append(i)
    for argument, indices in by_argument.items():
        kept = Counter(_type(inputs[i][1]) for i in indices if not inputs[i][1].donated)
        size = sum(sizes[i] for i in indices if not inputs[i][1].donated)
        if size > WORTH_A_WORD * sum(sizes) and kept <= results:
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
    if size > WORTH_A_WORD * bytes_of_all(types.values()):
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


def _type(leaf: Any) -> tuple[tuple[int, ...], str]:
    return tuple(leaf.shape), str(leaf.dtype)
