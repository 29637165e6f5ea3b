"""Find arguments of a step that are not donated, and donated buffers that are copied."""

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpx.tools.program.findings import WORTH_A_WORD, Finding, Step


def of_donation(step: Step, names: Sequence[str]) -> Iterator[Finding]:
    """Yield arguments that come back and are not donated, and donated buffers that XLA copies."""
    of_position = lambda argument: argument.position
    arguments = {i: list(leaves) for i, leaves in itertools.groupby(step.arguments, of_position)}
    free = Counter(step.results) - Counter(leaf.type for leaf in step.arguments if leaf.is_donated)
    for i, leaves in arguments.items():
        kept = [leaf for leaf in leaves if not leaf.is_donated]
        size, types = sum(leaf.bytes for leaf in kept), Counter(leaf.type for leaf in kept)
        if size > step.least_bytes and types <= free:
            free -= types
            yield Finding(
                f"Argument {i}{f' ({names[i]})' if i < len(names) else ''} comes back in the same shape and is not "
                "donated, so that old and new are held at once",
                size,
                "If the new one takes its place, donate it (`donate_argnums` of `jax.jit`).",
            )
    donated = [tuple(leaf.type for leaf in leaves if leaf.is_donated) for leaves in arguments.values()]
    donated = [types for types in donated if types]
    rest = iter(step.results)
    come_back_in_order = all(each in rest for types in donated for each in types)
    # Nobody can tell the order of two arguments that are alike.
    if not come_back_in_order or len(set(donated)) < len(donated):
        yield from _copies(step)


def _copies(step: Step) -> Iterator[Finding]:
    """Yield the donated buffers that are copied, in the same layout, before they are written over."""
    donated = [part for part in step.program if part.is_donated]
    copied = [
        x for x in step.program if x.op == "copy" and x.operands[0].is_donated and x.shapes == x.operands[0].shapes
    ]
    bytes_of_all = lambda parts: sum(shape.bytes for part in parts for shape in part.shapes)
    if bytes_of_all(copied) > WORTH_A_WORD * bytes_of_all(donated):
        yield Finding(
            f"XLA copies donated buffers ({len(copied)}) before it writes over them",
            bytes_of_all(copied),
            "Return arguments in the order in which they are taken (JAX gives donated memory to results of the same "
            "type in turn), and do not use an old one after the new one is made.",
        )


def names_of(step: Callable[..., Any], args: Sequence[Any], lowered: Any) -> list[str]:
    """Return the names of the positional arguments of a function, as far as it says them."""
    if len(lowered.args_info[0]) != len(args):
        return ["static ones not counted"] * len(args)
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # functions that are not written in Python
        return []
    return [f"`{p.name}`" for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
