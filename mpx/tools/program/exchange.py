"""Find what devices send each other in the wrong dtype, whole where a part is enough, or without need."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpx.tools.program.dataflow import Uses, arrays_of, is_taken_in_parts, joined_in, narrowed_to
from mpx.tools.program.findings import WORTH_A_WORD, Finding, arguments_of, bytes_on_a_device, first_source
from mpx.tools.program.kernels import Kernel
from mpx.tools.program.text import Instruction, Shape

Runs = Sequence[tuple[Instruction, Kernel]]
Found = Sequence[tuple[Kernel, int]]  # collectives, and how many of their bytes are found fault with
_GATHERS = ("all-gather", "all-to-all")
_SUMS = ("all-reduce", "reduce-scatter")


def of_collectives(lowered: Any, compiled: Any, runs: Runs, uses: Uses, *, is_cpu: bool = False) -> Iterator[Finding]:
    """Yield what a program sends that it need not send, or should send in another dtype.

    XLA on a CPU sends 16-bit numbers as float32 ones, so float32 says nothing there.
    """
    inputs = [(leaf, sharding) for _, leaf, sharding in arguments_of(lowered, compiled)]
    least = WORTH_A_WORD * sum(bytes_on_a_device(*each) for each in inputs)
    sent = [(instruction, kernel) for instruction, kernel in runs if kernel.kind == "collectives"]
    for finding in (
        *_sums_in_16_bits(sent, inputs, jax.tree.leaves(lowered.out_info)),
        *_sums_of_which_a_part_is_used(sent, uses),
        *([] if is_cpu else _gathers_of_float32(sent, uses, runs)),
        *_gathers_of_states([kernel for _, kernel in sent], inputs),
    ):
        if finding.bytes > least:
            yield finding


def _sums_in_16_bits(sent: Runs, inputs: Sequence[tuple[Any, Any]], outputs: Sequence[Any]) -> Iterator[Finding]:
    """Yield the sums of gradients, which are known by their shapes in any order of the axes.

    A gradient has the shape of a weight, of a device's shard of it, or of one layer of a stack. A weight is an argument
    with the shape of a result: a new weight, or its gradient.
    """
    results = {tuple(x.shape) for x in outputs}
    is_weight = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and tuple(x.shape) in results
    floats = [(tuple(x.shape), sharding) for x, sharding in inputs if is_weight(x)]
    shards = [sharding.shard_shape(shape) for shape, sharding in floats if sharding is not None]
    of_weights = {tuple(sorted(part)) for shape in (*dict(floats), *shards) for part in (shape, shape[1:])}
    found: list[tuple[Kernel, int]] = []
    for instruction, kernel in sent:
        added = [x for given in instruction.operands for part in joined_in(given) for x in part.shapes]
        narrow = [x for x in added if x.dtype in ("bf16", "f16") and tuple(sorted(x.dims)) in of_weights]
        if kernel.operation in _SUMS and narrow:
            found.append((kernel, _part_of(kernel, narrow, added)))
    if found:
        dtype = "bf16" if "bf16" in found[0][0].sent_by_dtype else "f16"
        yield _finding(
            found,
            f"Devices add up arrays of the shapes of weights in {dtype}, which rounds at each addition",
            "If they are gradients, differentiate with float32 sums: `mpx.autocast` has them if you leave out "
            "`reduce_dtype`, and `reduce=` of its policy.",
        )


def _sums_of_which_a_part_is_used(sent: Runs, uses: Uses) -> Iterator[Finding]:
    """Yield sums that all devices get whole, though each of them keeps a part."""
    sums = [(instruction, kernel) for instruction, kernel in sent if kernel.operation == "all-reduce"]
    is_cut = lambda instruction: all(is_taken_in_parts(array, uses) for array in arrays_of(instruction, uses))
    halves = [(kernel, kernel.sent_bytes * kernel.times // 2) for instruction, kernel in sums if is_cut(instruction)]
    if halves:
        yield _finding(
            halves,
            f"Every device gets a whole sum and keeps a part of it ({_count(halves)} of all-reduce)",
            "XLA has not made them reduce-scatters, which send half. `mpx.data_parallel(..., scatter=True)` or "
            "`jax.lax.psum_scatter` in a `jax.shard_map` does.",
        )


def _gathers_of_float32(sent: Runs, uses: Uses, runs: Runs) -> Iterator[Finding]:
    """Yield float32 arrays that are sent whole: to be rounded right after, or in a program of narrow products."""
    rounded: list[tuple[Kernel, int]] = []
    others: list[tuple[Kernel, int]] = []
    dtypes: set[str] = set()
    for instruction, kernel in sent:
        for array in arrays_of(instruction, uses) if kernel.operation in _GATHERS else ():
            if array.shapes[0].dtype != "f32":
                continue
            size, dtype = _part_of(kernel, array.shapes[:1], kernel.shapes), narrowed_to(array, uses)
            if dtype is not None:
                dtypes.add(dtype)
                rounded.append((kernel, size // 2))
            elif kernel.operation == "all-gather":
                others.append((kernel, size))
    if rounded:
        yield _finding(
            rounded,
            f"Devices send float32 arrays that are rounded to {' or '.join(sorted(dtypes))} right after "
            f"({_count(rounded)} of {rounded[0][0].operation})",
            "Cast them before they are sent, as `mpx.autocast` does: with `.astype` in front of the gather.",
        )
    if others and any(dtype.startswith(("bf16", "f16", "f8")) for _, kernel in runs for dtype in kernel.flops):
        yield _finding(
            others,
            f"Devices gather float32 arrays that are used in float32 ({_count(others)} of all-gather)",
            "A rule that mixes the numbers of a matrix (Muon, Shampoo, clipping by layer) needs it whole, and so does "
            "the gradient of an embedding that is sharded by rows. A weight is gathered so if some use of it is in "
            "float32: `mpx.explain` shows which.",
        )


def _gathers_of_states(sent: Sequence[Kernel], inputs: Sequence[tuple[Any, Any]]) -> Iterator[Finding]:
    size = lambda kernel: sum(n for dtype, n in kernel.sent_by_dtype.items() if dtype in ("s8", "u8", "u32"))
    gathers = [(kernel, size(kernel)) for kernel in sent if kernel.operation == "all-gather" and size(kernel)]
    is_state = lambda dtype: jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize == 1
    if gathers and any(is_state(leaf.dtype) for leaf, _ in inputs):
        yield _finding(
            gathers,
            "Devices gather an optimizer state in 8 bits, whose blocks reach over several of them",
            "Give `block_size` a divisor of the columns that a device has, or use a mesh of explicit axes.",
        )


def _finding(found: Found, what: str, remedy: str) -> Finding:
    return Finding(what, sum(size for _, size in found), remedy, first_source(kernel for kernel, _ in found))


def _part_of(kernel: Kernel, part: Sequence[Shape], whole: Sequence[Shape]) -> int:
    """Return the bytes of some arrays among all that a collective sends in its runs."""
    size = lambda shapes: sum(shape.size for shape in shapes)
    return kernel.times * kernel.sent_bytes * size(part) // max(1, size(whole))


def _count(found: Found) -> str:
    return f"{sum({id(kernel): kernel.times for kernel, _ in found}.values()):,}"
