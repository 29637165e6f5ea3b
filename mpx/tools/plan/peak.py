"""What a step needs at its peak beside what it holds.

The step is that of `examples/llama.py`: layers in one `scan`, each in a checkpoint and with its own gathered weights;
attention of queries that share keys, one group after the other; logits of half a sequence; clipping by the global norm.
Each term stands for arrays of its programs for GPUs. A test compares plans with the peaks of some.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from mpx import _errors
from mpx.tools.plan.rows import PeakKind, PlanRow

Kept = Literal["bf16", "8bit"]
_MARGIN = 0.03  # for what no plan knows, such as gaps between arrays
# Parameters, layers, width and vocabulary of GPT-2 and of Llama 3 (arXiv 2407.21783) with a head of its own.
_KNOWN = (
    (1, 1, 1, 1),
    (124e6, 12, 768, 50_257),
    (1.498e9, 16, 2048, 128_256),
    (8.03e9, 32, 4096, 128_256),
    (70.55e9, 80, 8192, 128_256),
    (405.9e9, 126, 16_384, 128_256),
)


class Sizes(NamedTuple):
    """The sizes of a transformer."""

    layers: int
    width: int  # of what goes from layer to layer
    hidden: int  # the widest activation inside of a layer
    keys: int  # the width of keys, which groups of queries share
    in_a_layer: int  # parameters
    head: int  # elements of the largest array outside of the layers

    @classmethod
    def of_count(cls, parameters: int) -> "Sizes":
        """Return the sizes of a Llama with so many parameters, on a logarithmic scale between the two next ones."""
        known, *sizes = np.log(_KNOWN).T
        layers, width, vocabulary = (round(math.exp(np.interp(math.log(parameters), known, size))) for size in sizes)
        head = vocabulary * width
        in_a_layer = max(0, parameters - 2 * head) // layers
        return cls(layers, width, 7 * width // 2, min(1024, -(-width // 4)), in_a_layer, head)

    @classmethod
    def of_shapes(cls, shapes: Iterable[tuple[int, ...]]) -> "Sizes":
        """Return the sizes of a model of arrays with these shapes. Those of a layer occur in each, or in a stack.

        Arrays below 1% of all, such as a stack of biases, do not count.
        """
        times: Counter[tuple[int, ...]] = Counter()
        for *stacked, rows, columns in (shape for shape in shapes if len(shape) > 1):
            times[rows, columns] += math.prod(stacked)
        least = sum(math.prod(shape) * n for shape, n in times.items()) / 100
        repeated = {shape: n for shape, n in times.items() if n > 1 and math.prod(shape) * n > least} or times
        elements: Counter[int] = Counter()
        for shape, n in repeated.items():
            elements.update(dict.fromkeys(shape, n * math.prod(shape)))  # of the matrices that have such a side
        layers, width = min(repeated.values(), default=0), max(elements, key=elements.__getitem__, default=0)
        in_a_layer = sum(math.prod(shape) * n for shape, n in repeated.items()) // max(layers, 1)
        head = max((math.prod(shape) for shape in times if shape not in repeated), default=0)
        return cls(layers, width, max(elements, default=0), min(elements, default=1), in_a_layer, head)


def peak_of(
    held: int, sizes: Sizes, batch: int, sequence: int, kept: Kept | None, bits: tuple[int, int], is_gathered: bool
) -> tuple[tuple[PlanRow, ...], str]:
    """Return what a device needs at the peak beside bytes that it holds, and in a sentence what step that is.

    It is the larger of two moments: the backward pass of a layer, and that of the head, when the gradients of layers
    have their memory already. `bits` are the bytes of a number in products, and of a gradient that devices add up.
    """
    if kept is not None:
        _errors.require_choice(get_args(Kept), kept, "`memory_plan`: `kept`")
    tokens, (narrow, wide) = batch * sequence, bits
    # Both factors of a gated activation and their gradients; ten float32 arrays as wide as the layer, such as its
    # input, norms, queries and their gradients; scores of attention in float32, rounded, and the gradients of both.
    queries = max(1, sizes.width // max(sizes.keys, 128))  # that share keys
    layer = tokens * (4 * narrow * sizes.hidden + 40 * sizes.width + queries * sequence * (4 + 3 * narrow))
    # Gradients of the logits of one half, and four float32 arrays.
    head = tokens * (narrow * sizes.head // max(1, 2 * sizes.width) + 16 * sizes.width)
    # Weights of a layer and of the next one, which are on their way; those of the head, and their gradient before each
    # device gets its part.
    moments: list[dict[PeakKind, int]] = [
        {"gathered weights": 2 * narrow * sizes.in_a_layer * is_gathered, "activations": layer},
        {
            "gathered weights": narrow * sizes.head * is_gathered,
            "whole gradients": wide * sizes.head * is_gathered,
            "activations": head,
        },
    ]
    found = max(moments, key=lambda moment: sum(moment.values()))
    found["activations"] += sizes.layers * tokens * sizes.width * {None: 4, "bf16": 2, "8bit": 1}[kept]
    found["margin"] = int(_MARGIN * (held + sum(found.values())))
    how = f'mpx.checkpoint(layer, kept="{kept}")' if kept else "jax.checkpoint(layer)"
    rows = tuple(PlanRow(kind, kind, (), count, count) for kind, count in found.items() if count)
    return rows, (
        f"Peak: {batch:,} x {sequence:,} tokens a device, {sizes.layers:,} layers of width {sizes.width:,} in a scan, "
        f"{how}."
    )
