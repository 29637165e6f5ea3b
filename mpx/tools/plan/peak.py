"""Estimate what a step needs at its peak beside what it holds.

The step is that of `examples/llama.py`: layers in one `scan`, each in a checkpoint and with its own gathered weights;
attention of queries that share keys, one group after the other; logits of half a sequence; clipping by the global norm.
Each term stands for arrays of its programs for GPUs. A test compares plans with the peaks of some.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np

from mpx import _errors

Kept = Literal["bf16", "8bit"]
_KEPT = {None: ("jax.checkpoint", 4), "bf16": ('mpx.checkpoint(kept="bf16")', 2)}  # what is written, bytes of a number
_KEPT["8bit"] = ("mpx.checkpoint(kept=mpx.Blockwise8bit())", 1)
_MARGIN = 0.03  # for what no plan knows, such as gaps between arrays
# Parameters, layers, width, widths of the perceptron and of keys, and vocabulary of GPT-2 and of Llamas with a head of
# their own (7B: arXiv 2307.09288, others: 2407.21783).
_KNOWN = [[1, 1, 1, 1, 1, 1], [124e6, 12, 768, 3072, 768, 50_257], [1.498e9, 16, 2048, 8192, 512, 128_256]]
_KNOWN += [[6.738e9, 32, 4096, 11_008, 4096, 32_000], [8.03e9, 32, 4096, 14_336, 1024, 128_256]]
_KNOWN += [[70.55e9, 80, 8192, 28_672, 1024, 128_256], [405.9e9, 126, 16_384, 53_248, 1024, 128_256]]


def shapes_of(parameters: int) -> list[tuple[int, ...]]:
    """Return the shapes of a Llama with so many parameters, on a logarithmic scale between the two next to it."""
    known, *sizes = np.log(_KNOWN).T
    at = math.log(parameters)
    layers, width, hidden, keys, words = (round(math.exp(np.interp(at, known, size))) for size in sizes)
    sides = [(width, width)] * 2 + [(width, keys)] * 2 + [(width, hidden)] * 2 + [(hidden, width)]
    return [(words, width), (width, words), *((layers, *side) for side in sides)]


def peak_of(
    shapes: Iterable[tuple[int, ...]],
    held: int,
    batch: int,
    sequence: int,
    kept: Kept | None,
    narrow: int,
    wide: int,
    is_gathered: bool,
) -> tuple[dict[str, int], str]:
    """Return the bytes that a device needs at the peak beside those that it holds, and the step in words.

    It is the larger of two moments: the backward pass of a layer, and that of the head, when the gradients of layers
    have their memory already. A number in a product has `narrow` bytes, and a gradient that devices add up `wide`.
    Matrices of layers occur in each, or in a stack. Those below 1% of all, such as a stack of biases, do not count.
    """
    if kept is not None:
        _errors.require_choice(get_args(Kept), kept, "`memory_plan`: `kept`")
    times: Counter[tuple[int, ...]] = Counter()
    for *stacked, rows, columns in (shape for shape in shapes if len(shape) > 1):
        times[rows, columns] += math.prod(stacked)
    size = {shape: n * math.prod(shape) for shape, n in times.items()}
    once = min(2, max(times.values(), default=1) - 1)  # embedding and head may have one shape
    repeated = [shape for shape, n in times.items() if n > once and 100 * size[shape] > sum(size.values())] or [*times]
    sides = {n: sum(size[shape] for shape in repeated if n in shape) for shape in repeated for n in shape} or {0: 0}
    width, hidden, keys = max(sides, key=sides.__getitem__), max(sides), min(sides)
    layers = min((times[shape] for shape in repeated), default=0)
    in_a_layer = sum(size[shape] for shape in repeated) // max(layers, 1)
    head = max((math.prod(shape) for shape in times if shape not in repeated), default=0)

    tokens, queries = batch * sequence, min(width, max(1, width // max(keys, 128)))  # of a group
    gathered = narrow * is_gathered
    of_layer = [  # bytes of a token
        4 * narrow * hidden,  # both factors of a gated activation, and their gradients
        10 * 4 * width,  # float32 arrays as wide as the layer: its input, norms, queries and their gradients, and so on
        4 * queries * sequence,  # scores of attention in float32
        3 * narrow * queries * sequence,  # the same rounded, and the gradients of both
    ]
    of_head = [
        narrow * head // max(2 * width, 1),  # gradients of half of the logits
        4 * 4 * width,  # float32 arrays as wide as a layer
    ]
    # A layer has the weights of the next one too, on their way; the head its gradient, before each device gets a part.
    at_layer = {"gathered weights": 2 * gathered * in_a_layer, "activations": tokens * sum(of_layer)}
    at_head = {"gathered weights": gathered * head, "whole gradients": wide * head * is_gathered}
    at_head["activations"] = tokens * sum(of_head)
    peak = max(at_layer, at_head, key=lambda moment: sum(moment.values()))
    how, bytes_kept = _KEPT[kept]
    peak["activations"] += layers * tokens * width * bytes_kept
    peak["margin"] = int(_MARGIN * (held + sum(peak.values())))
    step = f"{batch:,} x {sequence:,} tokens a device, {layers:,} layers of width {width:,} in a scan, each in {how}"
    return {part: count for part, count in peak.items() if count}, step
