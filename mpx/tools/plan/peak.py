"""Count what a transformer's step needs at its peak beside what it holds, by how its program is written.

A program needs most at one of three moments: at its logits, in the backward pass of a layer, or in the update of its
largest array. Each term is what must be in memory at once by reason, such as the scores of attention, in the dtype in
which XLA keeps it under `autocast`; where XLA has a choice, it has two ends. `tests/gpu_program/test_plans.py` holds
the terms against programs for GPUs of models that were written elsewhere.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

Kept = Literal["bf16", "8bit"]
PARTS = 8  # of logits that are not whole
_KEPT = {None: 4, "bf16": 2, "8bit": 1}  # bytes of a number that a checkpoint keeps
# Parameters, layers, width, widths of the perceptron and of keys, and vocabulary of GPT-2 and of Llamas with a head of
# their own (7B: arXiv 2307.09288, others: 2407.21783).
_KNOWN = [[1, 1, 1, 1, 1, 1], [124e6, 12, 768, 3072, 768, 50_257], [1.498e9, 16, 2048, 8192, 512, 128_256]]
_KNOWN += [[6.738e9, 32, 4096, 11_008, 4096, 32_000], [8.03e9, 32, 4096, 14_336, 1024, 128_256]]
_KNOWN += [[70.55e9, 80, 8192, 28_672, 1024, 128_256], [405.9e9, 126, 16_384, 53_248, 1024, 128_256]]


class Program(NamedTuple):
    """How a step is written."""

    attention: Literal["xla", "kernel"]  # whether scores are arrays
    logits: Literal["whole", "parts"]
    checkpoint: bool  # whether a layer keeps its input alone, and is computed again
    scan: bool  # over layers; else they are unrolled

    def __str__(self) -> str:
        return ", ".join(
            (
                "layers in a scan" if self.scan else "layers unrolled",
                "a checkpoint a layer" if self.checkpoint else "no checkpoint",
                "logits whole" if self.logits == "whole" else f"logits in {PARTS} parts",
                "attention by XLA" if self.attention == "xla" else "attention in a kernel",
            )
        )


class Need(NamedTuple):
    """Bytes that a device needs at the peak beside those that it holds, and why."""

    term: str
    least: int
    most: int
    why: str


class Peak(NamedTuple):
    """What a program needs at its peak: at the moment when it needs most for certain, and when it may need most."""

    program: Program
    at_least: tuple[Need, ...]
    at_most: tuple[Need, ...]

    @property
    def least(self) -> int:
        """Bytes that it needs for certain beside those that it holds."""
        return sum(need.least for need in self.at_least)

    @property
    def most(self) -> int:
        """Bytes that it may need beside those that it holds."""
        return sum(need.most for need in self.at_most)


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


def shapes_of(parameters: int) -> list[tuple[int, ...]]:
    """Return the shapes of a Llama with so many parameters, on a logarithmic scale between the two next to it."""
    known, *sizes = np.log(_KNOWN).T
    at = math.log(parameters)
    layers, width, hidden, keys, words = (round(math.exp(np.interp(at, known, size))) for size in sizes)
    sides = [(width, width)] * 2 + [(width, keys)] * 2 + [(width, hidden)] * 2 + [(hidden, width)]
    return [(words, width), (width, words), *((layers, *side) for side in sides)]


def sizes_of(shapes: Iterable[tuple[int, ...]], heads: int | None = None) -> Sizes:
    """Return the sizes of a transformer with parameters of these shapes, one by one or in stacks of layers or experts.

    The width is the side of most elements. What occurs more often than an embedding and a head is in a layer.
    """
    shapes = [shape for shape in shapes if len(shape) > 1]
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
    leaves = [stacked for stacked, matrix in matrices if matrix in both]
    is_scan = len(leaves) % max(layers, 1) > 0
    experts = max(1, max(leaves, default=1) // (layers if is_scan else 1))
    return Sizes(
        layers=layers,
        width=width,
        hidden=(hidden, hidden * min(2, experts)),
        ups=max(times[matrix] for matrix in both) // max(layers * experts, 1) or 1,
        heads=(heads, heads) if heads else (max(1, width // 128), max(1, width // 64)),
        head=max((math.prod(matrix) for matrix in times if matrix not in repeated), default=0),
        in_a_layer=sum(size[matrix] for matrix in repeated) // max(layers, 1),
        largest=max(map(math.prod, shapes), default=0),
    )


def _matrix(shape: tuple[int, ...], width: int) -> tuple[int, tuple[int, int]]:
    """Return how many matrices an array holds, and their shape, in which heads and their sizes are one axis."""
    at = len(shape) - 1 - shape[::-1].index(width) if width in shape else len(shape) - 2
    if 0 < at == len(shape) - 1:  # the matrix leads to the width
        start = at - 2 if at > 1 and shape[at - 2] * shape[at - 1] == width else at - 1
        return math.prod(shape[:start]), (math.prod(shape[start:at]), width)
    return math.prod(shape[:at]), (shape[at], math.prod(shape[at + 1 :]))


def programs(given: Mapping[str, str | bool | None]) -> list[Program]:
    """Return the programs that are written as is said; what is None is open."""
    choices = {"attention": ("xla", "kernel"), "logits": ("whole", "parts"), "checkpoint": (False, True)}
    open_or_given = [x if given[n] is None else (given[n],) for n, x in {**choices, "scan": (False, True)}.items()]
    return [Program(*chosen) for chosen in itertools.product(*open_or_given)]  # pyright: ignore[reportArgumentType]


def peak_of(
    program: Program,
    sizes: Sizes,
    batch: int,
    sequence: int,
    kept: Kept | None,
    narrow: int,
    wide: int,
    gradients: int,
    devices: int,
    is_rounded: bool,
) -> Peak:
    """Return the bytes that a device needs at the peak beside those that it holds.

    A number in a product has `narrow` bytes, and a gradient that devices add up `wide`. `gradients` are the bytes that
    a device holds of those of layers. Of several `devices` each has a part of all weights.
    """
    moments = [tuple(moment) for moment in _moments(**locals())]
    total = lambda end: lambda moment: sum(getattr(need, end) for need in moment)
    return Peak(program, max(moments, key=total("least")), max(moments, key=total("most")))


def _moments(
    program: Program,
    sizes: Sizes,
    batch: int,
    sequence: int,
    kept: Kept | None,
    narrow: int,
    wide: int,
    gradients: int,
    devices: int,
    is_rounded: bool,
) -> Iterator[Sequence[Need]]:
    """Yield what a device needs at the logits, in a layer's backward pass, and in the update of the largest array."""
    tokens, n, (layers, width, _, ups, *_) = batch * sequence, narrow, sizes
    is_sharded = devices > 1

    def need(term, numbers, why):
        """Return a need of bytes, or of ends of them."""
        least, most = numbers if isinstance(numbers, tuple) else (numbers, numbers)
        return Need(term, int(least), int(most), why)

    def both(count):
        return tuple(count(*ends) for ends in zip(sizes.hidden, sizes.heads, (0, 1), strict=True))

    scores = sequence * (program.attention == "xla")

    def of_a_layer(hidden, heads, end):
        """Return the bytes of a token that a layer keeps for the backward pass, without a checkpoint."""
        if not program.scan:  # XLA computes some again: float32 sums, operands of products, an activation's derivative
            return (8 + 6 * n) * width + (n * ups + n + 4) * hidden + (n + (4 if end else n)) * heads * scores
        if n == 4:  # all that JAX saves, in float32
            return n * (12 * width + 6 * hidden + 2 * heads * scores)
        # `autocast` saves the sum and results of products. XLA may lay queries, keys and values out again.
        return (4 + (5 + 3 * end) * n) * width + n * ups * hidden + n * heads * scores

    if program.checkpoint:
        size = _KEPT[kept]
        between = need("inputs of layers", layers * tokens * width * size, f"{layers} x {width:,} x {size} a token")
    else:
        each = both(of_a_layer)
        between = need(
            "kept by layers",
            tuple(layers * tokens * count for count in each),
            f"{layers} x {each[1]:,} bytes a token: operands of products, activations, scores",
        )
    part = 1 if program.checkpoint else 0.5  # the rest is kept

    def in_a_layer(hidden, heads, end):
        return part * (2 * n * (ups + 1) * hidden + (12 + 5 * n) * width)

    words = sizes.head // max(width, 1)
    parts = PARTS if program.logits == "parts" else 1
    logits = f"{tokens:,} x {words:,} x {{}} bytes"
    common = [between]
    if not program.scan:
        common.append(need("gradients not yet made", (-gradients, 0), "XLA may free each as soon as it is used"))
        whole = wide * layers * sizes.in_a_layer * is_sharded
        common.append(need("whole gradients", (0, whole), "XLA may add up all of them at the end"))
    elif is_sharded:
        copies = wide * layers * sizes.in_a_layer // devices
        common.append(need("second layout", (0, copies), "XLA may copy stacks of weights or gradients"))
    summed = need("head's gradient", (8 - n) * sizes.head, "in float32, twice: summed over parts")
    of_head = need("gathered weights", n * sizes.head * is_sharded, "the head")
    yield [
        *common,
        need("logits", (4 + n) * tokens * words // parts, logits.format(f"(4 + {n})") + f" / {parts}" * (parts > 1)),
        *([summed] if parts > 1 else []),
        *([of_head] if is_sharded else []),
    ]
    of_scores = both(lambda hidden, heads, end: (3 + end) * n * heads * scores * tokens * part)
    yield [
        *common,
        need("one layer", tuple(tokens * x for x in both(in_a_layer)), "its activations, and their gradients"),
        *([need("scores", of_scores, f"3 or 4 x {sizes.heads[1]} heads x {sequence:,} a token")] if scores else []),
        summed if parts > 1 else need("logits", n * tokens * words, logits.format(n) + ": their gradient"),
        need("embedding's gradient", (4 if is_sharded else 4 - n) * sizes.head, "in float32, whole"),
        *([need("gathered weights", 2 * n * sizes.in_a_layer, "two layers")] if is_sharded else []),
    ]
    update = 8 * sizes.largest // devices * is_rounded
    yield [need("update", (0, update), "the largest array in float32, before and after it is rounded to 24 bits")]
