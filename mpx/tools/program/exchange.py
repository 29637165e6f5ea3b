"""Find what devices send each other in the wrong dtype, whole where a part is enough, or without need."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from mpx.tools.program.dataflow import arrays_of, is_taken_in_parts, joined_in, narrowed_to
from mpx.tools.program.findings import Finding, Step, worth_a_word
from mpx.tools.program.kernels import Kernel
from mpx.tools.program.text import Instruction, Shape

Found = list[tuple[Kernel, int]]  # collectives, and how many of their bytes are found fault with


def sums_in_16_bits(step: Step) -> Iterator[Finding]:
    """Yield the sums of gradients, which are known by their shapes in any order of the axes.

    A gradient has the shape of a weight, of a device's shard of it, or of one layer of a stack. A weight is an argument
    with the shape of a result: a new weight, or its gradient.
    """
    results = {shape for shape, _ in step.results}
    weights = [x for x in step.arguments if jnp.issubdtype(x.dtype, jnp.floating) and x.shape in results]
    shapes = {tuple(sorted(part)) for x in weights for whole in (x.shape, x.shard) for part in (whole, whole[1:])}
    found: Found = []
    dtypes: set[str] = set()
    for instruction, kernel in _sent(step, "all-reduce", "reduce-scatter"):
        added = [shape for given in instruction.operands for part in joined_in(given) for shape in part.shapes]
        narrow = [x for x in added if x.dtype in ("bf16", "f16") and tuple(sorted(x.dims)) in shapes]
        dtypes |= {x.dtype for x in narrow}
        found.append((kernel, _part_of(kernel, narrow, added)))
    yield from worth_a_word(
        [each for each in found if each[1]],
        f"Devices add up arrays of the shapes of weights in {' and '.join(sorted(dtypes))}, which rounds at each "
        "addition",
        "If they are gradients, differentiate with float32 sums: `mpx.autocast` has them if you leave out "
        "`reduce_dtype`, and `reduce=` of its policy.",
        step.least_bytes,
    )


def sums_of_which_a_part_is_used(step: Step) -> Iterator[Finding]:
    """Yield sums that all devices get whole, though each of them keeps a part."""
    halves = [
        (kernel, kernel.sent_bytes * kernel.times // 2)
        for instruction, kernel in _sent(step, "all-reduce")
        if all(is_taken_in_parts(array, step.uses) for array in arrays_of(instruction, step.uses))
    ]
    yield from worth_a_word(
        halves,
        f"Every device gets a whole sum and keeps a part of it ({_count(halves)})",
        "XLA has not made them reduce-scatters, which send half. `mpx.data_parallel(..., scatter=True)` or "
        "`jax.lax.psum_scatter` in a `jax.shard_map` does.",
        step.least_bytes,
    )


def gathers_of_float32(step: Step) -> Iterator[Finding]:
    """Yield float32 arrays that are sent whole: to be rounded right after, or in a program of narrow products."""
    rounded: Found = []
    others: Found = []
    dtypes: set[str] = set()
    for instruction, kernel in _sent(step, "all-gather", "all-to-all"):
        for array in arrays_of(instruction, step.uses):
            if array.shapes[0].dtype != "f32":
                continue
            size, dtype = _part_of(kernel, array.shapes[:1], kernel.shapes), narrowed_to(array, step.uses)
            if dtype is not None:
                dtypes.add(dtype)
                rounded.append((kernel, size // 2))
            elif kernel.operation == "all-gather":
                others.append((kernel, size))
    yield from worth_a_word(
        rounded,
        f"Devices send float32 arrays that are rounded to {' or '.join(sorted(dtypes))} right after "
        f"({_count(rounded)})",
        "Cast them before they are sent, as `mpx.autocast` does: with `.astype` in front of the gather.",
        step.least_bytes,
    )
    if any(dtype.startswith(("bf16", "f16", "f8")) for _, kernel in step.runs for dtype in kernel.flops):
        yield from worth_a_word(
            others,
            f"Devices gather float32 arrays that are used in float32 ({_count(others)})",
            "A rule that mixes the numbers of a matrix (Muon, Shampoo, clipping by layer) needs it whole, and so does "
            "the gradient of an embedding that is sharded by rows. A weight is gathered so if some use of it is in "
            "float32: `mpx.explain` shows which.",
            step.least_bytes,
        )


def gathers_of_states(step: Step) -> Iterator[Finding]:
    """Yield optimizer states in 8 bits that devices gather."""
    size = lambda kernel: sum(n for dtype, n in kernel.sent_by_dtype.items() if dtype in ("s8", "u8", "u32"))
    is_state = lambda x: jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize == 1
    if any(map(is_state, step.arguments)):
        yield from worth_a_word(
            [(kernel, size(kernel)) for _, kernel in _sent(step, "all-gather") if size(kernel)],
            "Devices gather an optimizer state in 8 bits, whose blocks reach over several of them",
            "Give `block_size` a divisor of the columns that a device has, or use a mesh of explicit axes.",
            step.least_bytes,
        )


def _sent(step: Step, *operations: str) -> list[tuple[Instruction, Kernel]]:
    return [(instruction, kernel) for instruction, kernel in step.runs if kernel.operation in operations]


def _part_of(kernel: Kernel, part: Sequence[Shape], whole: Sequence[Shape]) -> int:
    """Return the bytes of some arrays among all that a collective sends in its runs."""
    size = lambda shapes: sum(shape.size for shape in shapes)
    return kernel.times * kernel.sent_bytes * size(part) // max(1, size(whole))


def _count(found: Found) -> str:
    """Return how many collectives run, and which."""
    runs = sum({id(kernel): kernel.times for kernel, _ in found}.values())
    return f"{runs:,} of {' and '.join(sorted({kernel.operation for kernel, _ in found}))}"
