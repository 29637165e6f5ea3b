"""Find float32 numbers that a program moves or multiplies though fewer bits would do, and products in another dtype."""

from collections.abc import Iterator

from mpx.tools.program.dataflow import arrays_of, narrowed_to
from mpx.tools.program.findings import WORTH_A_WORD, Finding, Step, worth_a_word
from mpx.tools.program.kernels import Kernel, dtype_of_product, products_in, totals
from mpx.tools.program.text import parse

_NARROW = ("bf16", "f16", "f8")
_MANY = 0.1  # of all FLOPs: a program with so many narrow products is meant to multiply in few bits


def float32_products(step: Step) -> Iterator[Finding]:
    """Yield products of float32 numbers in a program that mostly multiplies in fewer bits."""
    flops = totals((dtype, n * kernel.times) for _, kernel in step.runs for dtype, n in kernel.flops.items())
    total, wide = sum(flops.values()), flops.get(step.float32, 0)
    narrow = sum(n for dtype, n in flops.items() if dtype.startswith(_NARROW))
    if wide > WORTH_A_WORD * total and narrow > _MANY * total:
        yield from worth_a_word(
            [(kernel, kernel.bytes * kernel.times) for _, kernel in step.runs if step.float32 in kernel.flops],
            f"{wide / total:.0%} of all FLOPs multiply float32 numbers, though others multiply in fewer bits",
            "Look for an array that nobody cast: one that the function closes over, or a gradient of a product with "
            "`preferred_element_type=float32`. `mpx.autocast` casts both. An optimizer that multiplies matrices (Muon) "
            "does it in float32.",
        )


def products_in_another_dtype(step: Step) -> Iterator[Finding]:
    """Yield products that XLA computes in another dtype than the step asks for, by lines of its code."""
    operands = lambda dtype: frozenset(dtype.split(" with "))  # XLA may swap them
    asked: dict[str, set[frozenset[str]]] = {}
    for part in products_in(parse(step.lowered.as_text("hlo", debug_info=True))):
        asked.setdefault(part.source, set()).add(operands(dtype_of_product(part, step.float32)))
    found: dict[tuple[str, str], list[tuple[Kernel, int]]] = {}
    for instruction, kernel in step.runs:
        for part in products_in([instruction]):
            dtype = dtype_of_product(part, step.float32)
            if operands(dtype) not in asked.get(part.source, [operands(dtype)]):
                found.setdefault((dtype, part.source), []).append((kernel, kernel.bytes * kernel.times))
    for (dtype, source), kernels in found.items():
        names = sorted(" with ".join(sorted(each)) for each in asked[source])
        yield from worth_a_word(
            kernels,
            f"A product of {' or '.join(names)} runs in {dtype}",
            "The device or the library has no such product of these sizes: change them, or the dtype.",
        )


def float32_between_kernels(step: Step) -> Iterator[Finding]:
    """Yield float32 arrays that one kernel writes and others read, though each of them rounds them first."""
    found: list[tuple[Kernel, int]] = []
    dtypes: set[str] = set()
    for instruction, kernel in step.runs:
        for array in arrays_of(instruction, step.uses) if kernel.kind != "collectives" else ():
            dtype = narrowed_to(array, step.uses) if array.shapes[0].dtype == "f32" else None
            if dtype is not None:
                dtypes.add(dtype)
                found.append((kernel, kernel.times * array.shapes[0].bytes // 2 * (1 + len(step.uses[array]))))
    yield from worth_a_word(
        found,
        f"Kernels write float32 numbers that all others round to {' or '.join(sorted(dtypes))} before they use them",
        "Cast them where they are made. The gradient of a look-up, as in a cross-entropy of integer labels, is one: "
        "with one-hot labels there is none.",
        WORTH_A_WORD * sum(kernel.bytes * kernel.times for _, kernel in step.runs),
    )
