"""Follow an array of a compiled program to the kernels that use it."""

import math
from collections.abc import Iterator

from mpx.tools.program.kernels import Program
from mpx.tools.program.text import Instruction

Uses = dict[Instruction, list[Instruction]]  # the instructions that use one
_MOVES = {"bitcast", "copy", "transpose", "reshape", "slice", "dynamic-slice"}  # numbers stay the same


def uses_in(program: Program) -> Uses:
    """Return the users of each instruction of a program, and of the computations that it calls."""
    found: Uses = {}
    for instruction in program:
        for operand in dict.fromkeys(instruction.operands):
            found.setdefault(operand, []).append(instruction)
        for inner in instruction.called:
            found.update(uses_in(inner))
    return found


def arrays_of(kernel: Instruction, uses: Uses) -> list[Instruction]:
    """Return the arrays that a kernel makes: itself, what ends an asynchronous one, or the parts of a tuple."""
    ends = [user for user in uses.get(kernel, ()) if user.op.endswith("-done")]
    made = ends[0] if kernel.op.endswith("-start") and ends else kernel
    parts = [user for user in uses.get(made, ()) if user.op == "get-tuple-element"]
    return [array for array in parts or [made] if array.shapes]  # a call may return nothing


def narrowed_to(array: Instruction, uses: Uses) -> str | None:
    """Return the dtype with fewer bits that all uses of an array convert it to first; None if there is no such."""
    found = set(_first_dtypes(array, uses))
    return found.pop() if len(found) == 1 else None


def is_taken_in_parts(array: Instruction, uses: Uses) -> bool:
    """Return whether each kernel that uses an array needs at most half of it, another part on each device."""
    shares = list(_shares(array, uses))
    return bool(shares) and max(shares) <= 0.5


def joined_in(array: Instruction) -> list[Instruction]:
    """Return the arrays that a kernel joins into one, as XLA sends many of them; else the array itself."""
    fusion = array.operands[0] if array.op == "bitcast" else array
    root = next((part for part in fusion.called[0] if part.is_root), fusion) if fusion.op == "fusion" else fusion
    if root.op != "concatenate":
        return [array]
    parts = [fusion.operands[part.number] if part.number is not None else part for part in root.operands]
    return [part.operands[0] if part.op == "bitcast" else part for part in parts]


def _first_dtypes(array: Instruction, uses: Uses) -> Iterator[str | None]:
    """Yield the dtype that each use converts an array to, or None for any other use."""
    if array.is_root or not uses.get(array):
        yield None
    for user in uses.get(array, ()):
        if user.op == "convert":
            yield user.shapes[0].dtype if user.shapes[0].bits < array.shapes[0].bits else None
        elif user.op in _MOVES and array not in user.operands[1:]:
            yield from _first_dtypes(user, uses)
        elif user.op == "fusion":
            for parameter in _parameters(user, array):
                yield from _first_dtypes(parameter, uses)
        else:
            yield None


def _shares(array: Instruction, uses: Uses, *, is_in_fusion: bool = False) -> Iterator[float]:
    """Yield the share of an array that each use needs: a fusion computes no more than its result needs.

    A `slice` takes the same on every device: an array out of several that were joined.
    """
    if array.is_root:
        yield 1
    for user in uses.get(array, ()):
        if user.op == "fusion" and any(part.is_root and part.op == "slice" for part in user.called[0]):
            yield from _shares(user, uses)
        elif user.op == "fusion":
            for parameter in _parameters(user, array):
                yield from _shares(parameter, uses, is_in_fusion=True)
        elif user.op == "dynamic-slice" and array not in user.operands[1:]:
            yield math.prod(user.shapes[0].dims) / max(1, math.prod(array.shapes[0].dims))
        elif user.op in ("bitcast", "slice") or (is_in_fusion and user.shapes[0].dims == array.shapes[0].dims):
            yield from _shares(user, uses, is_in_fusion=is_in_fusion)
        else:
            yield 1


def _parameters(fusion: Instruction, array: Instruction) -> list[Instruction]:
    """Return what stands for an array inside of a fusion."""
    places = [i for i, operand in enumerate(fusion.operands) if operand is array]
    return [part for part in fusion.called[0] if part.op == "parameter" and part.number in places]
