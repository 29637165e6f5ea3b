"""What a compiled step does that its author would not want, with what it costs and the remedy."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpx._dtypes import bytes_of
from mpx.tools.program.dataflow import Uses
from mpx.tools.program.kernels import Kernel, Program
from mpx.tools.program.text import Instruction

WORTH_A_WORD = 0.01  # of all bytes of its kind: XLA may copy a bias, or gather one in float32, for other reasons
Type = tuple[tuple[int, ...], str]  # the shape and the dtype of an array


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


class Argument(NamedTuple):
    """An array that a step takes."""

    position: int  # of the argument that holds it
    shape: tuple[int, ...]
    shard: tuple[int, ...]  # the shape of what one device holds
    dtype: np.dtype
    is_donated: bool = False

    @property
    def type(self) -> Type:
        """Its shape and dtype."""
        return self.shape, str(self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes that one device holds."""
        return bytes_of(self.dtype, math.prod(self.shard))


class Step(NamedTuple):
    """A step as it was lowered and compiled: what finders look at."""

    lowered: Any
    program: Program
    runs: Sequence[tuple[Instruction, Kernel]]
    uses: Uses
    arguments: Sequence[Argument]
    results: Sequence[Type]
    float32: str  # how the device multiplies float32 numbers unless more is asked for

    @property
    def least_bytes(self) -> float:
        """Bytes that are held or sent for nothing and worth a word."""
        return WORTH_A_WORD * sum(argument.bytes for argument in self.arguments)


def arguments_of(lowered: Any, compiled: Any) -> Iterator[Argument]:
    """Yield the arrays that a step takes."""
    leaves = jax.tree.leaves_with_path(lowered.args_info)
    # There is None for the sharding of an argument that the program does not use.
    shardings = jax.tree.structure(lowered.args_info).flatten_up_to(compiled.input_shardings)
    for (path, leaf), sharding in zip(leaves, shardings, strict=True):
        shape = tuple(leaf.shape)
        shard = shape if sharding is None else sharding.shard_shape(shape)
        yield Argument(path[1].idx, shape, shard, leaf.dtype, leaf.donated)


def worth_a_word(found: Sequence[tuple[Kernel, int]], what: str, remedy: str, least: float = 0) -> Iterator[Finding]:
    """Yield a finding on kernels, each with the bytes that it has for nothing, if there are more than `least` bytes."""
    size = sum(size for _, size in found)
    if size > least:
        yield Finding(what, size, remedy, next((kernel.source for kernel, _ in found if kernel.source), ""))
