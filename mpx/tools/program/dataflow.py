"""Follow an array of a compiled program to the kernels that use it."""

import math
import re
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
    return parts or [made]


def narrowed_to(array: Instruction, uses: Uses) -> str | None:
    """Return the dtype with fewer bits that all uses of an array convert it to first; None if there is no such."""
    found = set(_first_dtypes(array, uses))
    return found.pop() if len(found) == 1 else None


def is_taken_in_parts(array: Instruction, uses: Uses) -> bool:
    """Return whether each kernel that uses an array needs at most half of it."""
    needed = list(_needed(array, uses))
    return bool(needed) and all(2 * count <= _size(array) for count in needed)


def _first_dtypes(array: Instruction, uses: Uses) -> Iterator[str | None]:
    """Yield the dtype that each use converts an array to, or None for any other use."""
    if array.is_root or not uses.get(array):
        yield None
    for user in uses.get(array, ()):
        if user.op == "convert":
            yield user.shapes[0].dtype if _bits(user) < _bits(array) else None
        elif user.op in _MOVES and array not in user.operands[1:]:
            yield from _first_dtypes(user, uses)
        elif user.op == "fusion":
            for parameter in _parameters(user, array):
                yield from _first_dtypes(parameter, uses)
        else:
            yield None


def _needed(array: Instruction, uses: Uses, *, is_in_fusion: bool = False) -> Iterator[int]:
    """Yield how many numbers of an array each use needs: a fusion computes no more than its result needs."""
    if array.is_root:
        yield _size(array)
    for user in uses.get(array, ()):
        if user.op == "fusion":
            for parameter in _parameters(user, array):
                yield from _needed(parameter, uses, is_in_fusion=True)
        elif user.op in ("slice", "dynamic-slice") and array not in user.operands[1:]:
            yield _size(user)
        elif user.op == "bitcast" or (is_in_fusion and user.shapes[0].dims == array.shapes[0].dims):
            yield from _needed(user, uses, is_in_fusion=is_in_fusion)
        else:
            yield _size(array)


def _parameters(fusion: Instruction, array: Instruction) -> list[Instruction]:
    """Return what stands for an array inside of a fusion."""
    places = [i for i, operand in enumerate(fusion.operands) if operand is array]
    return [part for part in fusion.called[0] if part.op == "parameter" and part.number in places]


def _size(instruction: Instruction) -> int:
    return math.prod(instruction.shapes[0].dims)


def _bits(instruction: Instruction) -> int:
    return int(re.findall(r"\d+", instruction.shapes[0].dtype)[0])
