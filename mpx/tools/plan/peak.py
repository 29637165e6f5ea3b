"""Count what a transformer's step needs at its peak beside what it holds, by how its program is written.

A program needs most at one of three moments: at its logits, in the backward pass of a layer, or in the update of its
largest array. Each term is what must be in memory at once by reason, such as the scores of attention, in the dtype in
which XLA keeps it under `autocast`; where XLA has a choice, it has two ends. `tests/gpu_program/test_plans.py` holds
the terms against programs for GPUs of models that were written elsewhere.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable
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


# Choices of a program, each as it needs more memory and as it needs less.
CHOICES = {
    "kernel": ("attention by XLA", "attention in a kernel"),
    "parts": ("logits whole", f"logits in {PARTS} parts"),
    "checkpoint": ("no checkpoint", "a checkpoint a layer"),
    "scan": ("layers unrolled", "layers in a scan"),
}


class Program(NamedTuple):
    """How a step is written."""

    kernel: bool  # of attention; else XLA makes an array of scores
    parts: bool  # of logits, which are computed again
    checkpoint: bool  # a layer keeps its input alone, and is computed again
    scan: bool  # over layers

    def __str__(self) -> str:
        """Name the program."""
        return listed(CHOICES[name][chosen] for name, chosen in self._asdict().items())


class Peak(NamedTuple):
    """Holds what a device needs at the peak of a program, beside what it holds all the time."""

    program: Program
    least: int  # bytes that it needs for certain
    most: int  # and that it may need
    needs: dict[str, tuple[int, int, str]]  # least and most bytes, and why, at the moment when it may need most


class Run(NamedTuple):
    """Holds what a step computes with."""

    tokens: int  # of a device
    sequence: int  # tokens of a sequence
    kept: Kept | None  # how a checkpoint keeps the input of a layer
    narrow: int  # bytes of a number in a product
    wide: int  # and of a gradient that devices add up
    gradient: float  # bytes that a device holds of a weight's gradient
    devices: int  # over which all weights are divided
    update: int  # bytes that XLA may need to round the largest array


class Sizes(NamedTuple):
    """The sizes of a transformer. What shapes do not tell is a pair: the least and the most."""

    layers: int
    width: int
    hidden: tuple[int, int]  # numbers of a token in a perceptron: those of one expert, or of two
    ups: int  # matrices that make them: two if one is a gate
    heads: tuple[int, int]  # of queries
    head: int  # elements of the largest matrix outside of layers, the embedding or the head
    in_a_layer: int  # elements of its matrices


def shapes_of(parameters: int) -> list[tuple[int, ...]]:
    """Return the shapes of a Llama with so many parameters, on a logarithmic scale between the two next to it."""
    known, *sizes = np.log(_KNOWN).T
    at = math.log(parameters)
    layers, width, hidden, keys, words = (round(math.exp(np.interp(at, known, size))) for size in sizes)
    size = 128 if width > 2048 else 64  # of a head
    sides = [(width, width), (width // size, size, width), *[(width, keys), (width, hidden)] * 2, (hidden, width)]
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
    found = [n for *_, n, size, last in (shape for shape in shapes if len(shape) > 2) if n * size == last == width]
    heads = heads or next(iter(found), None)
    stacks: dict[tuple[int, int], list[int]] = {}  # of each matrix
    for stacked, matrix in (_matrix(shape, width) for shape in shapes):
        stacks.setdefault(matrix, []).append(stacked)
    times = Counter({matrix: sum(found) for matrix, found in stacks.items()})
    once = min(2, max(times.values(), default=1) - 1)  # embedding and head may have one shape
    large = sum(map(math.prod, shapes)) / 100  # a stack of biases is smaller
    repeated = [matrix for matrix, n in times.items() if n > once and n * math.prod(matrix) > large]
    in_layers = [stacked for matrix in repeated for stacked in stacks[matrix]]
    layers = min((len(stacks[matrix]) for matrix in repeated), default=0)
    if is_scan := statistics.median_low([1, *in_layers]) > 1:
        layers = min(stacked for stacked in in_layers if stacked > 1)
    hidden = max((n for n, last in repeated if last == width != n and (width, n) in times), default=width)
    both = (hidden, width), (width, hidden)
    experts = max(1, *(n for matrix in both for n in stacks.get(matrix, [1]))) // (layers if is_scan else 1)
    return Sizes(
        layers,
        width,
        hidden=(hidden, hidden * min(2, experts)),
        ups=max(times[matrix] for matrix in both) // max(layers * experts, 1) or 1,
        heads=(heads, heads) if heads else (max(1, width // 128), max(1, width // 64)),
        head=max((math.prod(matrix) for matrix in times if matrix not in repeated), default=0),
        in_a_layer=sum(times[matrix] * math.prod(matrix) for matrix in repeated) // max(layers, 1),
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
    kernel = None if attention is None else attention == "kernel"
    parts = None if logits is None else logits == "parts"
    given = (kernel, parts, checkpoint if kept is None else True, scan)
    return [Program._make(x) for x in itertools.product(*((True, False) if x is None else (x,) for x in given))]


def peak_of(program: Program, sizes: Sizes, run: Run) -> Peak:
    """Return what a device needs at the moment of a program at which it may need most."""
    if not sizes.layers:
        return Peak(program, 0, 0, {})
    kernel, parts, checkpoint, scan = program
    layers, width, hidden, ups, heads, head, in_a_layer = sizes
    tokens, sequence, kept, n, wide, gradient, devices, update = run
    hidden, end, sharded = np.array(hidden), np.arange(2), devices > 1  # arrays have both ends
    scores = np.array(heads) * sequence * (not kernel)
    if checkpoint:
        kept_by_layer = _KEPT[kept] * width
    elif not scan:  # two float32 sums, operands of six products, a float32 derivative; scores in either dtype
        kept_by_layer = (8 + 6 * n) * width + (n * ups + n + 4) * hidden + (n + np.array([n, 4])) * scores
    elif n == 4:  # all that JAX saves
        kept_by_layer = n * (12 * width + 6 * hidden + 2 * scores)
    else:  # `autocast` saves a sum and results of products; XLA may lay queries, keys and values out again
        kept_by_layer = (4 + (5 + 3 * end) * n) * width + n * ups * hidden + n * scores
    at_work = tokens if checkpoint else tokens / 2  # a layer keeps the other half
    divided = np.array([devices, 1])  # what XLA may add up for each device, or whole
    weights, words = layers * in_a_layer, head // max(width, 1)
    logits, of_logits = tokens * words, f"{tokens:,} tokens x {words:,} words"
    freed = {"gradients freed": ((end - 1) * gradient * weights * (not scan), "XLA may use each at once")}
    common = freed | {
        "kept by layers": (layers * tokens * kept_by_layer, f"{layers} layers x {np.max(kept_by_layer):,} a token"),
        "whole gradients": (end * wide * weights * sharded * (not scan), "devices may sum them at the end"),
        "second layout": (end * wide * weights * sharded * scan // devices, "of gradients or weights"),
        "head's gradient": ((8 - n) * head * parts / divided, "in float32, twice: a sum over parts"),
    }
    moments = [
        common
        | {
            "logits": ((4 + n) * logits // (PARTS if parts else 1), f"{of_logits}, in float32 and {8 * n} bits"),
            "gathered weights": (n * head * sharded, "the head"),
        },
        common
        | {
            "one layer": (at_work * (2 * n * (ups + 1) * hidden + (12 + 5 * n) * width), "and gradients in it"),
            "scores": (at_work * n * (3 + end) * scores, f"3 or 4 of {max(heads)} heads x {sequence:,} a token"),
            "logits": (n * logits * (not parts), f"{of_logits}: their gradient"),
            "embedding's gradient": ((4 if sharded else 4 - n) * head / divided, "in float32"),
            "gathered weights": (2 * n * in_a_layer * sharded, "two layers"),
        },
        freed | {"update": (end * update, "of the largest array, in float32")},
    ]
    rows = [{term: (*np.broadcast_to(x, 2).astype(int).tolist(), why) for term, (x, why) in m.items()} for m in moments]
    sums = [tuple(sum(need[i] for need in needs.values()) for i in (0, 1)) for needs in rows]
    least, (most, at) = max(low for low, _ in sums), max((high, i) for i, (_, high) in enumerate(sums))
    return Peak(program, least, most, {term: need for term, need in rows[at].items() if need[0] or need[1]})
