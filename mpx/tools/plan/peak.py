"""Count what a transformer's step needs at its peak beside what it holds, by how its
program is written.

A program needs most at one of three moments: at its logits, in the backward pass of a
layer, or in the update of its largest array. Each term is what must be in memory at
once by reason, such as the scores of attention, in the dtype in which XLA keeps it
under `autocast`; where XLA has a choice, it has two ends.
`tests/gpu_program/test_plans.py` holds the terms against programs for GPUs of models
that were written elsewhere.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from mpx import _errors

Kept = Literal["bf16", "8bit"]
Attention = Literal["xla", "kernel"]
Logits = Literal["whole", "parts"]
PARTS = 8  # of logits that are not whole
_KEPT = {None: 4, "bf16": 2, "8bit": 1}  # bytes of a number that a checkpoint keeps
# Parameters, layers, width, widths of the perceptron and of keys, and vocabulary of
# GPT-2 and of Llamas with a head of their own (7B: arXiv 2307.09288, others:
# 2407.21783).
_KNOWN = [
    [1, 1, 1, 1, 1, 1],
    [124e6, 12, 768, 3072, 768, 50_257],
    [1.498e9, 16, 2048, 8192, 512, 128_256],
]
_KNOWN += [
    [6.738e9, 32, 4096, 11_008, 4096, 32_000],
    [8.03e9, 32, 4096, 14_336, 1024, 128_256],
]
_KNOWN += [
    [70.55e9, 80, 8192, 28_672, 1024, 128_256],
    [405.9e9, 126, 16_384, 53_248, 1024, 128_256],
]


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
    """Holds what a device needs at the peak of a program, beside what it holds all the
    time.
    """

    program: Program
    least: int  # bytes that it needs for certain
    most: int  # and that it may need
    needs: dict[
        str, tuple[int, int, str]
    ]  # least and most bytes, and why, at the moment when it may need most


Need = tuple[str, float, str]  # a term, its bytes, and why


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
    """The sizes of a transformer. What shapes do not tell is a pair: the least and the
    most.
    """

    layers: int
    width: int
    hidden: tuple[
        int, int
    ]  # numbers of a token in a perceptron: those of one expert, or of two
    ups: int  # matrices that make them: two if one is a gate
    heads: tuple[int, int]  # of queries
    # elements of the largest matrix outside of layers, the embedding or the head
    head: int
    in_a_layer: int  # elements of its matrices


def shapes_of(parameters: int) -> list[tuple[int, ...]]:
    """Return the shapes of a Llama with so many parameters, on a logarithmic scale
    between the two next to it.
    """
    known, *sizes = np.log(_KNOWN).T
    at = math.log(parameters)
    layers, width, hidden, keys, words = (
        round(math.exp(np.interp(at, known, size))) for size in sizes
    )
    size = 128 if width > 2048 else 64  # of a head
    sides = [
        (width, width),
        (width // size, size, width),
        *[(width, keys), (width, hidden)] * 2,
        (hidden, width),
    ]
    return [(words, width), (width, words), *((layers, *side) for side in sides)]


def sizes_of(
    shapes: Iterable[tuple[int, ...]],
    heads: int | None = None,
    *,
    is_guess: bool = False,
) -> Sizes:
    """Return the sizes of a transformer with parameters of these shapes, one by one or
    in stacks of layers or experts.

    The width is the side of most elements, which heads must divide unless shapes are a
    guess. What occurs more often than an embedding and a head is in a layer.
    """
    shapes = [shape for shape in shapes if len(shape) > 1]

    def elements(side):
        return sum(math.prod(shape) for shape in shapes if side in shape)

    width = max(
        {*itertools.chain(*shapes)}, key=lambda side: (elements(side), side), default=1
    )
    arrays: dict[
        tuple[int, int], list[int]
    ] = {}  # of each matrix: how many of them each array holds
    for stacked, matrix in (_matrix(shape, width) for shape in shapes):
        arrays.setdefault(matrix, []).append(stacked)
    times = Counter({matrix: sum(counts) for matrix, counts in arrays.items()})

    once = min(
        2, max(times.values(), default=1) - 1
    )  # embedding and head may have one shape
    large = sum(map(math.prod, shapes)) / 100  # a stack of biases is smaller
    in_layers = {
        matrix: n
        for matrix, n in times.items()
        if n > once and n * math.prod(matrix) > large
    }
    stacks = [stacked for matrix in in_layers for stacked in arrays[matrix]]
    is_scan = statistics.median_low([1, *stacks]) > 1
    unrolled = min((len(arrays[matrix]) for matrix in in_layers), default=0)
    layers = min(stacked for stacked in stacks if stacked > 1) if is_scan else unrolled

    hidden = max(
        (n for n, last in in_layers if last == width != n and (width, n) in times),
        default=width,
    )
    perceptron = (hidden, width), (width, hidden)
    largest = max(
        stacked for matrix in perceptron for stacked in arrays.get(matrix, [1])
    )
    experts = max(1, largest // (layers if is_scan else 1))
    ups = max(times[matrix] for matrix in perceptron) // max(1, layers * experts)
    outside = (math.prod(matrix) for matrix in times if matrix not in in_layers)
    # Flax has an axis of heads: `[width, heads, size]`, `[heads, size, width]`.
    of_flax = [
        n
        for *_, n, size, last in (shape for shape in shapes if len(shape) > 2)
        if n * size == last == width
    ]
    if heads and layers and width % heads and not is_guess:
        raise ValueError(
            f"`memory_plan`: {heads} heads do not divide the width, which is {width:,}."
        )
    heads = heads or next(iter(of_flax), None)
    return Sizes(
        layers,
        width,
        hidden=(hidden, hidden * min(2, experts)),
        ups=max(1, ups),
        heads=(heads, heads) if heads else (max(1, width // 128), max(1, width // 64)),
        head=max(outside, default=0),
        in_a_layer=sum(n * math.prod(matrix) for matrix, n in in_layers.items())
        // max(1, layers),
    )


def _matrix(shape: tuple[int, ...], width: int) -> tuple[int, tuple[int, int]]:
    """Return how many matrices an array holds, and their shape, in which heads and
    their sizes are one axis.
    """
    at = len(shape) - 1 - shape[::-1].index(width) if width in shape else len(shape) - 2
    if 0 < at == len(shape) - 1:  # the matrix leads to the width
        start = at - 2 if at > 1 and shape[at - 2] * shape[at - 1] == width else at - 1
        return math.prod(shape[:start]), (math.prod(shape[start:at]), width)
    return math.prod(shape[:at]), (shape[at], math.prod(shape[at + 1 :]))


def listed(names: Iterable[str]) -> str:
    """Return names as a text lists them."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def programs(
    attention: Any, logits: Any, checkpoint: bool | None, scan: bool | None, kept: Any
) -> list[Program]:
    """Return the programs that are written as a user says; what is None is open."""
    for name, given, choices in (
        ("kept", kept, Kept),
        ("attention", attention, Attention),
        ("logits", logits, Logits),
    ):
        if given is not None:
            _errors.require_choice(get_args(choices), given, f"`memory_plan`: `{name}`")
    if kept is not None and checkpoint is False:
        raise ValueError(
            "`memory_plan`: `kept` says what a checkpoint keeps, but `checkpoint` is"
            " False."
        )
    kernel = None if attention is None else attention == "kernel"
    parts = None if logits is None else logits == "parts"
    given = (kernel, parts, checkpoint if kept is None else True, scan)
    return [
        Program._make(x)
        for x in itertools.product(
            *((True, False) if x is None else (x,) for x in given)
        )
    ]


def ways_to_fit(peaks: Sequence[Peak], free: float) -> list[str]:
    """Name each smallest set of choices that makes all programs fit; none if nothing is
    open.
    """
    ways: list[tuple[tuple[str, bool], ...]] = []
    choices = (
        [(name, chosen) for name in CHOICES for chosen in (True, False)]
        if len(peaks) > 1
        else []
    )
    for way in (
        way
        for count in range(len(CHOICES))
        for way in itertools.combinations(choices, count + 1)
    ):
        fit = [
            peak.most <= free
            for peak in peaks
            if {*way} <= peak.program._asdict().items()
        ]
        if fit and all(fit) and not any({*shorter} <= {*way} for shorter in ways):
            ways.append(way)
    return [listed(CHOICES[name][chosen] for name, chosen in way) for way in ways]


def peak_of(program: Program, sizes: Sizes, run: Run) -> Peak:
    """Return what a device needs at the moment of a program at which it may need
    most.
    """
    if not sizes.layers:
        return Peak(program, 0, 0, {})
    ends = zip(
        _moments(program, sizes, run, 0), _moments(program, sizes, run, 1), strict=True
    )
    moments = [
        {
            name: (int(low), int(high), why)
            for (name, low, _), (_, high, why) in zip(least, most, strict=True)
        }
        for least, most in ends
    ]

    def total(needs, end):
        return sum(need[end] for need in needs.values())

    worst = max(reversed(moments), key=lambda needs: total(needs, 1))
    needs = {term: need for term, need in worst.items() if need[0] or need[1]}
    return Peak(
        program, max(total(needs, 0) for needs in moments), total(worst, 1), needs
    )


def _moments(
    program: Program, sizes: Sizes, run: Run, end: Literal[0, 1]
) -> list[list[Need]]:
    """Return what is needed at the logits, in the backward pass of a layer, and in the
    update.

    The end is 0 for what is needed for certain, and 1 for what may be.
    """
    weights, head, n = sizes.layers * sizes.in_a_layer, sizes.head, run.narrow
    words, hidden, heads = (
        head // max(1, sizes.width),
        sizes.hidden[end],
        sizes.heads[end],
    )
    logits, of_logits = run.tokens * words, f"{run.tokens:,} tokens x {words:,} words"
    a_token = _kept_by_a_layer(program, sizes, run, end)
    scores = 0 if program.kernel else heads * run.sequence
    parts, is_scan, is_sharded = (
        PARTS if program.parts else 1,
        program.scan,
        run.devices > 1,
    )
    added_up = (
        1 if end else run.devices
    )  # XLA adds a gradient up for each device's part, or whole
    twice = end * run.wide * weights * is_sharded
    at_work = (
        run.tokens if program.checkpoint else run.tokens / 2
    )  # a layer keeps the other half

    freed = (
        "gradients freed",
        0 if end or is_scan else -run.gradient * weights,
        "XLA may use each at once",
    )
    always: list[Need] = [
        freed,
        (
            "kept by layers",
            sizes.layers * run.tokens * a_token,
            f"{sizes.layers} layers x {a_token:,} a token",
        ),
        ("whole gradients", twice * (not is_scan), "devices may sum them at the end"),
        ("second layout", twice * is_scan // run.devices, "of gradients or weights"),
        (
            "head's gradient",
            (8 - n) * head * program.parts / added_up,
            "in float32, twice: a sum over parts",
        ),
    ]
    at_logits: list[Need] = [
        (
            "logits",
            (4 + n) * logits // parts,
            f"{of_logits}, in float32 and {8 * n} bits",
        ),
        ("gathered weights", n * head * is_sharded, "the head"),
    ]
    in_a_layer: list[Need] = [
        (
            "one layer",
            at_work * (2 * n * (sizes.ups + 1) * hidden + (12 + 5 * n) * sizes.width),
            "and gradients in it",
        ),
        (
            "scores",
            at_work * n * (3 + end) * scores,
            f"3 or 4 of {heads} heads x {run.sequence:,} a token",
        ),
        ("logits", n * logits * (not program.parts), f"{of_logits}: their gradient"),
        (
            "embedding's gradient",
            (4 if is_sharded else 4 - n) * head / added_up,
            "in float32",
        ),
        ("gathered weights", 2 * n * sizes.in_a_layer * is_sharded, "two layers"),
    ]
    in_update: list[Need] = [
        freed,
        ("update", end * run.update, "of the largest array, in float32"),
    ]
    return [always + at_logits, always + in_a_layer, in_update]


def _kept_by_a_layer(
    program: Program, sizes: Sizes, run: Run, end: Literal[0, 1]
) -> int:
    """Return the bytes of a token that a layer keeps for its backward pass."""
    width, hidden, ups, n = sizes.width, sizes.hidden[end], sizes.ups, run.narrow
    scores = 0 if program.kernel else sizes.heads[end] * run.sequence
    if program.checkpoint:
        return _KEPT[run.kept] * width
    # two float32 sums, operands of six products, a float32 derivative; scores in either
    # dtype
    if not program.scan:
        return (
            (8 + 6 * n) * width
            + (n * ups + n + 4) * hidden
            + (n + (4 if end else n)) * scores
        )
    if n == 4:  # all that JAX saves
        return n * (12 * width + 6 * hidden + 2 * scores)
    # `autocast` saves a sum and results of products; XLA may lay queries, keys and
    # values out again.
    return (4 + (5 + 3 * end) * n) * width + n * ups * hidden + n * scores
