"""What a step needs at its peak beside what it holds.

The step is that of `examples/llama.py`: layers in one `scan`, each in a checkpoint and with its own gathered weights,
attention by groups of queries and logits by parts, clipping by the global norm. Such a step needs most memory in the
backward pass of a layer. Each term is an array of the program that XLA makes of it for GPUs; a test compiles some.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from mpx.tools.plan.rows import PeakKind, PlanRow

Kept = Literal["bf16", "8bit"]
_KEPT_BYTES = {None: 4, "bf16": 2, "8bit": 1}  # of a number between the passes
_MARGIN = 0.03  # for what no plan knows, such as gaps between arrays
# Parameters, layers, width and vocabulary: GPT-2, and Llama 3 (arXiv 2407.21783) with a head of its own. A model between
# two of them lies between them on logarithmic scales, and a smaller one between GPT-2 and one parameter.
_FAMILY = (
    (1, 1, 1, 1),
    (124e6, 12, 768, 50_257),
    (1.498e9, 16, 2048, 128_256),
    (8.03e9, 32, 4096, 128_256),
    (70.55e9, 80, 8192, 128_256),
    (405.9e9, 126, 16_384, 128_256),
)


class Sizes(NamedTuple):
    """The sizes of a transformer that decide about the memory of its activations."""

    layers: int
    width: int  # of what goes from layer to layer
    hidden: int  # the widest activation inside of a layer
    keys: int  # the width of keys and of values, which groups of queries share
    in_a_layer: int  # parameters
    largest: int  # elements of the largest array outside of the layers

    @classmethod
    def of_count(cls, parameters: int) -> "Sizes":
        """Return the sizes of a Llama with so many parameters."""
        known, *sizes = np.log(np.array(_FAMILY)).T
        layers, width, vocabulary = (round(math.exp(np.interp(math.log(parameters), known, size))) for size in sizes)
        in_a_layer = max(0, parameters - 2 * vocabulary * width) // layers
        return cls(layers, width, 7 * width // 2, min(1024, -(-width // 4)), in_a_layer, vocabulary * width)

    @classmethod
    def of_shapes(cls, shapes: Sequence[tuple[int, ...]]) -> "Sizes | None":
        """Return the sizes of a model with arrays of these shapes: layers repeat theirs. None without any matrix.

        Matrices may be stacked. Small ones, such as a stack of biases, do not count.
        """
        times: Counter[tuple[int, ...]] = Counter()
        for *stacked, rows, columns in (shape for shape in shapes if len(shape) > 1):
            times[rows, columns] += math.prod(stacked)
        elements = {shape: math.prod(shape) * count for shape, count in times.items()}
        of_layers = {s: n for s, n in times.items() if n > 1 and 100 * elements[s] > sum(elements.values())} or times
        layers = min(of_layers.values(), default=0)
        if not layers:
            return None
        dims = Counter(dict.fromkeys((n for shape in of_layers for n in shape), 0))
        for shape in of_layers:
            dims.update(dict.fromkeys(shape, elements[shape]))
        in_a_layer = sum(elements[shape] for shape in of_layers) // layers
        largest = max((math.prod(shape) for shape in times if shape not in of_layers), default=0)
        return cls(layers, dims.most_common(1)[0][0], max(dims), min(dims), in_a_layer, largest)


def peak_rows_of(
    held: Sequence[PlanRow],
    sizes: Sizes | None,
    batch: int,
    sequence: int,
    kept: Kept | None,
    compute: np.dtype[Any],
    summed: np.dtype[Any],
    divided: int,
) -> tuple[tuple[PlanRow, ...], str]:
    """Return what one device needs at the peak beside what it holds, and in a sentence what step that is.

    Weights are `divided` among so many devices, and gathered again in the compute dtype.
    """
    sizes, tokens = sizes or Sizes(0, 0, 0, 1, 0, 0), batch * sequence
    found: list[tuple[PeakKind, tuple[str, ...], int]] = []
    if divided > 1:
        # Those of the largest layer, or of the head; the next ones are on their way.
        gathered = 2 * compute.itemsize * max(sizes.in_a_layer, sizes.largest)
        # The gradient of the head is whole until all devices have added theirs. Its shard is among the gradients.
        whole = summed.itemsize * (sizes.largest - sizes.largest // divided)
        found = [("gathered weights", (compute.name,), gathered), ("whole gradients", (summed.name,), whole)]
    between = sizes.layers * tokens * sizes.width * _KEPT_BYTES[kept]
    # Of one layer: both factors of a gated activation and their gradients, and ten arrays as wide as the layer in
    # float32, such as its input, norms, queries, what attention returns, and their gradients.
    inside = tokens * (4 * compute.itemsize * sizes.hidden + 10 * 4 * sizes.width)
    # Weights of attention of queries that share keys: in float32, rounded, and the gradients of both.
    heads = max(1, sizes.width // max(sizes.keys, 128))
    attention = heads * tokens * sequence * (4 + 3 * compute.itemsize)
    found.append(("activations", (), between + inside + attention))
    needed = sum(row.bytes_a_device for row in held) + sum(count for *_, count in found)
    found.append(("margin", (), int(_MARGIN * needed)))
    how = f'mpx.checkpoint(layer, kept="{kept}")' if kept else "jax.checkpoint(layer)"
    return (
        tuple(PlanRow(kind, kind, dtypes, count, count) for kind, dtypes, count in found),
        f"The peak is that of {batch:,} x {sequence:,} tokens on each device, through {sizes.layers:,} layers of "
        f"width {sizes.width:,} in a scan, each in {how}.",
    )
