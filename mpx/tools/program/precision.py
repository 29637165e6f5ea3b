"""Find float32 numbers that a program moves or multiplies though fewer bits would do, and products in another dtype."""

from collections.abc import Iterator
from typing import Any

from mpx.tools.program.dataflow import Uses, arrays_of, narrowed_to
from mpx.tools.program.exchange import Runs
from mpx.tools.program.findings import WORTH_A_WORD, Finding, first_source
from mpx.tools.program.kernels import dtype_of_product, is_product_of_matrices, products_in
from mpx.tools.program.text import parse

_NARROW = ("bf16", "f16", "f8")
_MANY = 0.1  # of all FLOPs: a program with so many narrow products is meant to multiply in few bits


def of_products(runs: Runs, float32: str) -> Iterator[Finding]:
    """Yield products of float32 numbers in a program that mostly multiplies in fewer bits."""
    flops = lambda is_meant: sum(n * k.times for _, k in runs for dtype, n in k.flops.items() if is_meant(dtype))
    wide = [kernel for _, kernel in runs if float32 in kernel.flops]
    total, of_wide = flops(lambda dtype: True), flops(lambda dtype: dtype == float32)
    if of_wide > WORTH_A_WORD * total and flops(lambda dtype: dtype.startswith(_NARROW)) > _MANY * total:
        yield Finding(
            f"{of_wide / total:.0%} of all FLOPs multiply float32 numbers, though others multiply in fewer bits",
            sum(kernel.bytes * kernel.times for kernel in wide),
            "Look for an array that nobody cast: one that the function closes over, or a gradient of a product with "
            "`preferred_element_type=float32`. `mpx.autocast` casts both. An optimizer that multiplies matrices (Muon) "
            "does it in float32.",
            first_source(wide),
        )


def of_other_dtypes(lowered: Any, runs: Runs, float32: str) -> Iterator[Finding]:
    """Yield products that XLA computes in another dtype than the step asks for, by lines of its code."""
    asked: dict[str, set[frozenset[str]]] = {}
    found: dict[tuple[str, str], int] = {}
    for part in products_in(parse(lowered.as_text("hlo", debug_info=True))):
        asked.setdefault(part.source, set()).add(_operands(dtype_of_product(part, float32)))
    for instruction, kernel in runs:
        for part in filter(is_product_of_matrices, instruction.parts):
            dtype = dtype_of_product(part, float32)
            if _operands(dtype) not in asked.get(part.source, [_operands(dtype)]):
                place = dtype, part.source
                found[place] = found.get(place, 0) + kernel.bytes * kernel.times
    for (dtype, source), size in found.items():
        names = sorted(" with ".join(sorted(each)) for each in asked[source])
        yield Finding(
            f"A product of {' or '.join(names)} runs in {dtype}",
            size,
            "The device or the library has no such product of these sizes: change them, or the dtype.",
            source,
        )


def of_kernels(runs: Runs, uses: Uses) -> Iterator[Finding]:
    """Yield float32 arrays that one kernel writes and others read, though each of them rounds them first."""
    found, size = [], 0
    for instruction, kernel in runs:
        for array in arrays_of(instruction, uses) if kernel.kind != "collectives" else ():
            dtype = narrowed_to(array, uses) if array.shapes[0].dtype == "f32" else None
            if dtype is not None:
                found.append((dtype, kernel))
                size += kernel.times * array.shapes[0].bytes // 2 * (1 + len(uses[array]))
    if size > WORTH_A_WORD * sum(kernel.bytes * kernel.times for _, kernel in runs):
        yield Finding(
            f"Kernels write float32 numbers that all others round to {found[0][0]} before they use them",
            size,
            "Cast them where they are made. The gradient of a look-up, as in a cross-entropy of integer labels, is "
            "one: with one-hot labels there is none.",
            first_source(kernel for _, kernel in found),
        )


def _operands(dtype: str) -> frozenset[str]:
    """Return the dtypes of a product's operands: XLA may swap them."""
    return frozenset(dtype.split(" with "))
