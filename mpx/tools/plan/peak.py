"""Count what a transformer's step needs at its peak beside what it holds, by how its program is written.

A program needs most at one of three moments: at its logits, in the backward pass of a layer, or in the update of its
largest array. Each term is what must be in memory at once by reason, such as the scores of attention, in the dtype in
which XLA keeps it under `autocast`; where XLA has a choice, it has two ends. `tests/gpu_program/test_plans.py` holds
the terms against programs for GPUs of models that were written elsewhere.
"""

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from mpx import _errors

Kept = Literal["bf16", "8bit"]
Attention = Literal["xla", "kernel"]
Logits = Literal["whole", "parts"]
PARTS = 8  # of logits that are not whole
_KEPT = {None: 4, "bf16": 2, "8bit": 1}  # bytes of a number that a checkpoint keeps
# Parameters, layers, width, widths of the perceptron and of keys, and vocabulary of GPT-2 and of Llamas with a head of
# their own (7B: arXiv 2307.09288, others: 2407.21783).
_KNOWN = [[1, 1, 1, 1, 1, 1], [124e6, 12, 768, 3072, 768, 50_257], [1.498e9, 16, 2048, 8192, 512, 128_256]]
_KNOWN += [[6.738e9, 32, 4096, 11_008, 4096, 32_000], [8.03e9, 32, 4096, 14_336, 1024, 128_256]]
_KNOWN += [[70.55e9, 80, 8192, 28_672, 1024, 128_256], [405.9e9, 126, 16_384, 53_248, 1024, 128_256]]


class Program(NamedTuple):
    """How a step is written; what needs less memory is true."""

    kernel: bool  # of attention; else XLA makes an array of scores
    parts: bool  # of logits; else they are whole
    checkpoint: bool  # a layer keeps its input alone, and is computed again
    scan: bool  # over layers; else they are unrolled

    def __str__(self) -> str:
        """Name the program."""
        return listed(CHOICES[name][chosen] for name, chosen in self._asdict().items())


# What each choice is called, by whether it needs less memory.
CHOICES = {
    "kernel": ("attention by XLA", "attention in a kernel"),
    "parts": ("logits whole", f"logits in {PARTS} parts"),
    "checkpoint": ("no checkpoint", "a checkpoint a layer"),
    "scan": ("layers unrolled", "layers in a scan"),
}


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes that a device needs at the peak beside those that it holds."""

    term: str
    least: int
    most: int
    why: str


class Peak(NamedTuple):
    """What a program needs at its peak: at the moment when it needs most for certain, and when it may need most."""

    program: Program
    at_least: Sequence[Need]
    at_most: Sequence[Need]

    @property
    def least(self) -> int:
        """Bytes that it needs for certain beside those that it holds."""
        return sum(need.least for need in self.at_least)

    @property
    def most(self) -> int:
        """Bytes that it may need beside those that it holds."""
        return sum(need.most for need in self.at_most)


class Run(NamedTuple):
    """What a step computes with."""

    batch: int  # sequences of a device
    sequence: int  # tokens of each
    kept: Kept | None  # how a checkpoint keeps the input of a layer
    narrow: int  # bytes of a number in a product
    wide: int  # and of a gradient that devices add up
    gradients: int  # bytes that a device holds
    devices: int  # over which all weights are divided
    update: int  # bytes of an element that XLA may write while it rounds the largest array's state


class Sizes(NamedTuple):
    """The sizes of a transformer; those that shapes do not tell have two ends."""

    layers: int
    width: int
    hidden: tuple[int, int]  # numbers of a token in a perceptron: those of one expert, or of two
    ups: int  # matrices that make them: two if one is a gate
    heads: tuple[int, int]  # of queries
    head: int  # elements of the largest matrix outside of layers, the embedding or the head
    in_a_layer: int  # elements of its matrices
    largest: int  # elements of the largest array
    share: float  # of all elements, that are in layers


def shapes_of(parameters: int) -> list[tuple[int, ...]]:
    """Return the shapes of a Llama with so many parameters, on a logarithmic scale between the two next to it."""
    known, *sizes = np.log(_KNOWN).T
    at = math.log(parameters)
    layers, width, hidden, keys, words = (round(math.exp(np.interp(at, known, size))) for size in sizes)
    sides = [(width, width)] * 2 + [(width, keys)] * 2 + [(width, hidden)] * 2 + [(hidden, width)]
    return [(words, width), (width, words), *((layers, *side) for side in sides)]


def llama_of(parameters: int, heads: int | None = None) -> Sizes:
    """Return the sizes of a Llama with so many parameters, whose heads have 128 numbers, or 64 in a small one."""
    sizes = sizes_of(shapes_of(parameters))
    heads = heads or max(1, sizes.width // (128 if sizes.width > 2048 else 64))
    return sizes._replace(heads=(heads, heads))


def sizes_of(shapes: Sequence[tuple[int, ...]], heads: int | None = None) -> Sizes:
    """Return the sizes of a transformer with parameters of these shapes, one by one or in stacks of layers or experts.

    The width is the side of most elements. What occurs more often than an embedding and a head is in a layer.
    """
    every, shapes = shapes, [shape for shape in shapes if len(shape) > 1]
    sides: Counter[int] = Counter()
    for shape in shapes:
        sides.update({n: math.prod(shape) for n in shape})
    width = max(sides, key=lambda n: (sides[n], n), default=1)
    found = {n for *_, n, size, last in (shape for shape in shapes if len(shape) > 2) if n * size == last == width}
    heads = heads or next(iter(found), None)
    matrices = [_matrix(shape, width) for shape in shapes]
    times: Counter[tuple[int, int]] = Counter()
    for stacked, matrix in matrices:
        times[matrix] += stacked
    size = {matrix: n * math.prod(matrix) for matrix, n in times.items()}
    once = min(2, max(times.values(), default=1) - 1)  # embedding and head may have one shape
    repeated = [matrix for matrix, n in times.items() if n > once]
    layers = min((times[matrix] for matrix in repeated), default=0)
    hidden = max((n for n, last in repeated if last == width != n and (width, n) in times), default=width)
    both = (hidden, width), (width, hidden)
    in_stacks = statistics.median_low([1, *(stacked for stacked, matrix in matrices if matrix in repeated)]) >= layers
    experts = max((stacked for stacked, matrix in matrices if matrix in both), default=1)
    experts = max(1, experts // layers) if in_stacks and layers else experts
    return Sizes(
        layers=layers,
        width=width,
        hidden=(hidden, hidden * min(2, experts)),
        ups=max(times[matrix] for matrix in both) // max(layers * experts, 1) or 1,
        heads=(heads, heads) if heads else (max(1, width // 128), max(1, width // 64)),
        head=max((math.prod(matrix) for matrix in times if matrix not in repeated), default=0),
        in_a_layer=sum(size[matrix] for matrix in repeated) // max(layers, 1),
        largest=max(map(math.prod, shapes), default=0),
        share=sum(map(size.__getitem__, repeated)) / max(sum(map(math.prod, every)), 1),
    )


def _matrix(shape: tuple[int, ...], width: int) -> tuple[int, tuple[int, int]]:
    """Return how many matrices an array holds, and their shape, in which heads and their sizes are one axis."""
    at = len(shape) - 1 - shape[::-1].index(width) if width in shape else len(shape) - 2
    if 0 < at == len(shape) - 1:  # the matrix leads to the width
        start = at - 2 if at > 1 and shape[at - 2] * shape[at - 1] == width else at - 1
        return math.prod(shape[:start]), (math.prod(shape[start:at]), width)
    return math.prod(shape[:at]), (shape[at], math.prod(shape[at + 1 :]))


def listed(names: Iterable[str]) -> str:
    """Return names as a text lists them."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def programs(attention: Any, logits: Any, checkpoint: bool | None, scan: bool | None, kept: Any) -> list[Program]:
    """Return the programs that are written as a user says; what is None is open."""
    for name, given, choices in (("kept", kept, Kept), ("attention", attention, Attention), ("logits", logits, Logits)):
        if given is not None:
            _errors.require_choice(get_args(choices), given, f"`memory_plan`: `{name}`")
    if kept is not None and checkpoint is False:
        raise ValueError("`memory_plan`: `kept` says what a checkpoint keeps, but `checkpoint` is False.")
    kernel, parts = attention and attention == "kernel", logits and logits == "parts"
    given = (kernel, parts, checkpoint if kept is None else True, scan)
    return [Program._make(x) for x in itertools.product(*((True, False) if x is None else (x,) for x in given))]


def peak_of(program: Program, sizes: Sizes, run: Run) -> Peak:
    """Return the bytes that a device needs at the peak beside those that it holds."""
    moments = [list(moment) for moment in _moments(program, sizes, run)] if sizes.layers else [[]]
    total = lambda end: lambda moment: sum(getattr(need, end) for need in moment)
    return Peak(program, max(moments, key=total("least")), max(moments, key=total("most")))


def merged(least: Peak, most: Peak) -> tuple[Need, ...]:
    """Return what one program needs at least, and another one at most, term by term."""
    terms = {need.term: need for need in (*least.at_least, *most.at_most)}
    at_least = {need.term: need.least for need in least.at_least}
    at_most = {need.term: need.most for need in most.at_most}
    return tuple(Need(name, at_least.get(name, 0), at_most.get(name, 0), need.why) for name, need in terms.items())


def _kept_by_a_layer(program: Program, sizes: Sizes, run: Run, end: int) -> int:
    """Return the bytes of a token that a layer without a checkpoint keeps for the backward pass, at one end."""
    n, width, hidden = run.narrow, sizes.width, sizes.hidden[end]
    scores = 0 if program.kernel else sizes.heads[end] * run.sequence
    if not program.scan:  # two float32 sums, operands of six products, a float32 derivative; scores in either dtype
        return (8 + 6 * n) * width + (n * sizes.ups + n + 4) * hidden + (n + (4 if end else n)) * scores
    if n == 4:  # all that JAX saves
        return n * (12 * width + 6 * hidden + 2 * scores)
    # `autocast` saves a sum and results of products. XLA may lay queries, keys and values out again.
    return (4 + (5 + 3 * end) * n) * width + n * sizes.ups * hidden + n * scores


def _needs(*rows: tuple[str, Any, str]) -> list[Need]:
    """Return what needs any bytes, of rows with one number or with both ends."""
    ends = [(x if isinstance(x, tuple) else (x, x)) for _, x, _ in rows]
    found = [Need(term, int(x[0]), int(x[1]), why) for (term, _, why), x in zip(rows, ends, strict=True)]
    return [need for need in found if need.least or need.most]


def _moments(program: Program, sizes: Sizes, run: Run) -> Iterator[Iterable[Need]]:
    """Yield what a device needs at the logits, in a layer's backward pass, and in the update of the largest array."""
    tokens, n, sharded = run.batch * run.sequence, run.narrow, run.devices > 1
    layers, width, head, words = sizes.layers, sizes.width, sizes.head, sizes.head // max(sizes.width, 1)
    heads, weights = sizes.heads, layers * sizes.in_a_layer

    each = tuple(_kept_by_a_layer(program, sizes, run, end) for end in (0, 1))
    if program.checkpoint:
        each, part = (_KEPT[run.kept] * width,) * 2, 1.0
    else:
        part = 0.5  # a layer keeps the other half
    freed = ("gradients freed", (-int(run.gradients * sizes.share) * (not program.scan), 0), "XLA may use each at once")
    common = _needs(
        ("kept by layers", tuple(layers * tokens * x for x in each), f"{layers} layers x {each[1]:,} bytes a token"),
        freed,
        (
            "whole gradients",
            (0, run.wide * weights * sharded * (not program.scan)),
            "devices may sum them at the end",
        ),
        ("second layout", (0, run.wide * weights * sharded * program.scan // run.devices), "of gradients or weights"),
    )
    parts = PARTS if program.parts else 1
    summed = ("head's gradient", (8 - n) * head * program.parts, "in float32, twice: a sum over parts")
    of_logits = f"{tokens:,} tokens x {words:,} words"
    yield common + _needs(
        ("logits", (4 + n) * tokens * words // parts, f"{of_logits}, in float32 and {8 * n} bits"),
        summed,
        ("gathered weights", n * head * sharded, "the head"),
    )
    activations = (tokens * part * (2 * n * (sizes.ups + 1) * x + (12 + 5 * n) * width) for x in sizes.hidden)
    scores = tuple(part * n * (3 + i) * tokens * heads[i] * run.sequence * (not program.kernel) for i in (0, 1))
    yield common + _needs(
        ("one layer", tuple(activations), "activations and their gradients"),
        ("scores", scores, f"3 or 4 of {heads[1]} heads x {run.sequence:,} numbers a token"),
        ("logits", n * tokens * words * (not program.parts), f"{of_logits}: their gradient"),
        summed,
        ("embedding's gradient", (4 if sharded else 4 - n) * head, "in float32, whole"),
        ("gathered weights", 2 * n * sizes.in_a_layer * sharded, "two layers"),
    )
    yield _needs(freed, ("update", (0, run.update * sizes.largest // run.devices), "of the largest array, in float32"))
