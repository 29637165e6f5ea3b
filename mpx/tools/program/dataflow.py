"""Follow an array of a compiled program to the kernels that use it."""

import math
from collections.abc import Callable, Iterator

from mpx.tools.program.kernels import HloProgram
from mpx.tools.program.text import Instruction

Uses = dict[Instruction, list[Instruction]]  # the instructions that use one
# Numbers stay the same.
_MOVES = {
    "bitcast",
    "copy",
    "transpose",
    "reshape",
    "slice",
    "dynamic-slice",
}


def uses_in(program: HloProgram) -> Uses:
    """Return the users of each instruction of a program, and of the computations that
    it calls.
    """
    found: Uses = {}
    for instruction in program:
        for operand in dict.fromkeys(instruction.operands):
            found.setdefault(operand, []).append(instruction)
        for inner in instruction.called:
            found.update(uses_in(inner))
    return found


def arrays_of(kernel: Instruction, uses: Uses) -> list[Instruction]:
    """Return the arrays that a kernel makes: itself, what ends an asynchronous one, or
    the parts of a tuple.
    """
    ends = [user for user in uses.get(kernel, ()) if user.op.endswith("-done")]
    made = ends[0] if kernel.op.endswith("-start") and ends else kernel
    parts = [user for user in uses.get(made, ()) if user.op == "get-tuple-element"]
    # A call may return nothing.
    return [array for array in parts or [made] if array.shapes]


def joined_in(array: Instruction) -> list[Instruction]:
    """Return the arrays that a kernel joins into one, as XLA sends many of them; else
    the array itself.
    """
    fusion = array.operands[0] if array.op == "bitcast" else array
    root = (
        next((part for part in fusion.called[0] if part.is_root), fusion)
        if fusion.op == "fusion"
        else fusion
    )
    if root.op != "concatenate":
        return [array]
    parts = [
        fusion.operands[part.number] if part.number is not None else part
        for part in root.operands
    ]
    return [part.operands[0] if part.op == "bitcast" else part for part in parts]


def narrowed_to(array: Instruction, uses: Uses) -> str | None:
    """Return the dtype with fewer bits that all uses of an array convert it to first;
    None if there is no such.
    """
    found: set[str | None] = set()
    for x, user in _ends(array, uses, lambda x, user, is_in_fusion: user.op in _MOVES):
        if (
            user is not None
            and user.op == "convert"
            and user.shapes[0].bits < x.shapes[0].bits
        ):
            found.add(user.shapes[0].dtype)
        else:
            found.add(None)
    return found.pop() if len(found) == 1 else None


def is_taken_in_parts(array: Instruction, uses: Uses) -> bool:
    """Return whether each kernel that uses an array needs at most half of it, another
    part on each device.
    """

    def is_half(x, user):
        if user is None or user.op != "dynamic-slice":
            return False
        return 2 * math.prod(user.shapes[0].dims) <= math.prod(x.shapes[0].dims)

    halves = [is_half(x, user) for x, user in _ends(array, uses, _stays_whole)]
    return bool(halves) and all(halves)


def _stays_whole(x: Instruction, user: Instruction, is_in_fusion: bool) -> bool:
    """Return whether a user computes of an array no more than its own users need, as
    all do in a fusion.

    A `slice` takes the same on every device: an array out of several that were joined.
    """
    return user.op in ("bitcast", "slice") or (
        is_in_fusion and user.shapes[0].dims == x.shapes[0].dims
    )


def _ends(
    array: Instruction,
    uses: Uses,
    hands_on: Callable[[Instruction, Instruction, bool], bool],
    fusion: Instruction | None = None,
) -> Iterator[tuple[Instruction, Instruction | None]]:
    """Yield the array as its last users see it, behind all that hands it on, and each
    user; None for a result.

    It follows the array into each fusion, and behind one that cuts it out of several
    that were joined.
    """
    if array.is_root and array.op == "slice" and fusion is not None:
        yield from _ends(fusion, uses, hands_on)
    elif array.is_root:
        yield array, None
    for user in uses.get(array, ()):
        if user.op == "fusion":
            for part in user.called[0]:
                if part.number is not None and user.operands[part.number] is array:
                    yield from _ends(part, uses, hands_on, user)
        elif hands_on(array, user, fusion is not None):
            yield from _ends(user, uses, hands_on, fusion)
        else:
            yield array, user
