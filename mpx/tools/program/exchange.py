"""Find what devices send each other in the wrong dtype, whole where a part is enough, or not at all needed."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpx.tools.program.dataflow import Uses, arrays_of, is_taken_in_parts, narrowed_to
from mpx.tools.program.findings import WORTH_A_WORD, Finding, arguments_of, bytes_on_a_device, first_source
from mpx.tools.program.kernels import Kernel
from mpx.tools.program.text import Instruction

Runs = Sequence[tuple[Instruction, Kernel]]
_GATHERS = ("all-gather", "all-to-all")
_SUMS = ("all-reduce", "reduce-scatter")


def of_collectives(lowered: Any, compiled: Any, runs: Runs, uses: Uses) -> Iterator[Finding]:
    """Yield what a program sends that it need not send, or should send in another dtype."""
    inputs = [(leaf, sharding) for _, leaf, sharding in arguments_of(lowered, compiled)]
    least = WORTH_A_WORD * sum(bytes_on_a_device(*each) for each in inputs)
    sent = [(instruction, kernel) for instruction, kernel in runs if kernel.kind == "collectives"]
    for finding in (
        *_sums_in_16_bits([kernel for _, kernel in sent], inputs, jax.tree.leaves(lowered.out_info)),
        *_sums_of_which_a_part_is_used(sent, uses),
        *_gathers_of_float32(sent, uses, runs),
        *_gathers_of_states([kernel for _, kernel in sent], inputs),
    ):
        if finding.bytes > least:
            yield finding


def _sums_in_16_bits(
    sent: Sequence[Kernel], inputs: Sequence[tuple[Any, Any]], outputs: Sequence[Any]
) -> Iterator[Finding]:
    """Yield the sums of gradients, which are known by their shapes in any order of the axes.

    A gradient has the shape of a weight, of a device's shard of it, or of one layer of a stack. A weight is an argument
    with the shape of a result: a new weight, or its gradient.
    """
    results = {tuple(x.shape) for x in outputs}
    is_weight = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and tuple(x.shape) in results
    floats = [(tuple(x.shape), sharding) for x, sharding in inputs if is_weight(x)]
    shards = [sharding.shard_shape(shape) for shape, sharding in floats if sharding is not None]
    of_weights = {tuple(sorted(part)) for shape in (*dict(floats), *shards) for part in (shape, shape[1:])}
    is_sum = lambda kernel: kernel.operation in _SUMS and kernel.dtype in ("bf16", "f16")
    sums = [k for k in filter(is_sum, sent) if any(tuple(sorted(x.dims)) in of_weights for x in k.shapes)]
    if sums:
        yield Finding(
            f"Devices add up arrays of the shapes of weights in {sums[0].dtype}, which rounds at each addition",
            sum(kernel.sent_bytes * kernel.times for kernel in sums),
            "If they are gradients, differentiate with float32 sums: `mpx.autocast` has them if you leave out "
            "`reduce_dtype`, and `reduce=` of its policy.",
            first_source(sums),
        )


def _sums_of_which_a_part_is_used(sent: Runs, uses: Uses) -> Iterator[Finding]:
    """Yield sums that all devices get whole, though each of them keeps a part."""
    sums = [(instruction, kernel) for instruction, kernel in sent if kernel.operation == "all-reduce"]
    halves = [k for i, k in sums if all(is_taken_in_parts(array, uses) for array in arrays_of(i, uses))]
    if halves:
        yield Finding(
            f"Every device gets a whole sum and keeps a part of it ({_count(halves)} of all-reduce)",
            sum(kernel.sent_bytes * kernel.times // 2 for kernel in halves),
            "XLA has not made them reduce-scatters, which send half. `mpx.data_parallel(..., scatter=True)` or "
            "`jax.lax.psum_scatter` in a `jax.shard_map` does.",
            first_source(halves),
        )


def _gathers_of_float32(sent: Runs, uses: Uses, runs: Runs) -> Iterator[Finding]:
    """Yield float32 arrays that are sent whole: to be rounded right after, or in a program of narrow products."""
    wide = [(i, k) for i, k in sent if k.operation in _GATHERS and k.dtype == "f32"]
    to = {i: {narrowed_to(array, uses) for array in arrays_of(i, uses)} for i, _ in wide}
    rounded = [k for i, k in wide if len(to[i]) == 1 and None not in to[i]]
    dtypes = sorted({str(dtype) for i, k in wide if k in rounded for dtype in to[i]})
    if rounded:
        yield Finding(
            f"Devices send float32 arrays that are rounded to {' or '.join(dtypes)} right after "
            f"({_count(rounded)} of {rounded[0].operation})",
            sum(kernel.sent_bytes * kernel.times // 2 for kernel in rounded),
            "Cast them before they are sent, as `mpx.autocast` does: with `.astype` in front of the gather.",
            first_source(rounded),
        )
    others = [k for _, k in wide if k.operation == "all-gather" and k not in rounded]
    if others and any(dtype.startswith(("bf16", "f16", "f8")) for _, k in runs for dtype in k.flops):
        yield Finding(
            f"Devices gather float32 arrays that are used in float32 ({_count(others)} of {others[0].operation})",
            sum(kernel.sent_bytes * kernel.times for kernel in others),
            "A rule that mixes the numbers of a matrix (Muon, Shampoo, clipping by layer) needs it whole. A weight is "
            "gathered so if some use of it is in float32: `mpx.explain` shows which.",
            first_source(others),
        )


def _gathers_of_states(sent: Sequence[Kernel], inputs: Sequence[tuple[Any, Any]]) -> Iterator[Finding]:
    gathers = [kernel for kernel in sent if kernel.operation == "all-gather" and kernel.dtype in ("s8", "u8", "u32")]
    is_state = lambda dtype: jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize == 1
    if gathers and any(is_state(leaf.dtype) for leaf, _ in inputs):
        yield Finding(
            "Devices gather an optimizer state in 8 bits, whose blocks reach over several of them",
            sum(kernel.sent_bytes * kernel.times for kernel in gathers),
            "Give `block_size` a divisor of the columns that a device has, or use a mesh of explicit axes.",
            first_source(gathers),
        )


def _count(kernels: Sequence[Kernel]) -> str:
    return f"{sum(kernel.times for kernel in kernels):,}"
