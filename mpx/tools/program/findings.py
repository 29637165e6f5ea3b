"""Find what a compiled step does that its author would not want, with what it costs and the remedy."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from mpx._dtypes import bytes_of

WORTH_A_WORD = 0.01  # of all bytes of its kind: XLA may copy a bias, or gather one in float32, for other reasons


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in a program that costs memory, time or precision for nothing.

    Attributes:
        what: the finding.
        bytes: what it costs on one device: bytes that are held, moved or sent.
        remedy: what to do.
        source: the line of the user's code that it comes from, the first if there are several; empty if not known.
    """

    what: str
    bytes: int
    remedy: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.what}{self.source and f' ({self.source})'}. {self.remedy}"


def first_source(places: Iterable[Any]) -> str:
    """Return the first line that is known of some kernels."""
    return next((place.source for place in places if place.source), "")


def arguments_of(lowered: Any, compiled: Any) -> list[tuple[tuple[Any, ...], Any, Any]]:
    """Return the path, the shape and the sharding of each array that a step takes; None for a sharding not known."""
    inputs = jax.tree.leaves_with_path(lowered.args_info)
    # There is None for the sharding of an argument that the program does not use.
    shardings = jax.tree.structure(lowered.args_info).flatten_up_to(compiled.input_shardings)
    return [(path, leaf, sharding) for (path, leaf), sharding in zip(inputs, shardings, strict=True)]


def bytes_on_a_device(leaf: Any, sharding: Any) -> int:
    """Return the bytes of an array that one device holds."""
    shape = leaf.shape if sharding is None else sharding.shard_shape(tuple(leaf.shape))
    return bytes_of(leaf.dtype, math.prod(shape))
