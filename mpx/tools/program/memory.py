"""Find the arrays that a program holds at once where it needs most memory.

XLA does not say what is in the memory that it counts. The sum of what is found here was
within 0.2% of XLA's peak for steps of 61 billion parameters, and 0.87 to 1.23 of it for
73 small programs (jax 0.10.2).
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mpx.tools.program.kernels import HloProgram
from mpx.tools.program.text import Instruction, Shape

_HANDS_ON = (
    "bitcast",
    "tuple",
    "get-tuple-element",
    "opt-barrier",
    "add-dependency",
    "-done",
    "-update",
)


class Array(NamedTuple):
    """The memory of one result of an instruction."""

    maker: Instruction
    number: int  # of the result
    shape: Shape


class Memory:
    """The arrays of a program. Each lives from the kernel that makes it to the last one
    that uses it.
    """

    def __init__(self, program: HloProgram) -> None:
        """Follow the arrays through a program."""
        self.users: dict[
            Array, list[Instruction]
        ] = {}  # those that compute with an array, in loops too
        self.writers: dict[
            Array, Instruction
        ] = {}  # of an array whose parts are written one by one
        self._lives: dict[Array, list[float]] = {}  # when it begins and ends
        self._time = 0
        donated = {x.shapes[0][:2] for x in program if x.is_donated}
        for array in set(self._follow(program)):
            self._lives[array][1] = math.inf
            if array.maker.op != "parameter" and array.shape[:2] in donated:
                del self._lives[array]  # it takes the memory of an argument
        changes: Counter[float] = Counter()
        for array, (start, end) in self._lives.items():
            changes[start] += array.shape.bytes
            changes[end + 1] -= array.shape.bytes
        sizes = list(
            itertools.accumulate(changes[time] for time in range(self._time + 1))
        )
        at = sizes.index(max(sizes))
        self.peak = [
            array for array, (start, end) in self._lives.items() if start <= at <= end
        ]

    def _follow(
        self, program: HloProgram, given: Sequence[Sequence[Array]] = ()
    ) -> list[Array]:
        """Return the arrays that a computation returns; one inside of another is given
        its arguments.
        """
        lies_in: dict[Instruction, list[Array]] = {}
        for x in program:
            of_operands = [lies_in[operand] for operand in x.operands]
            taken = list(itertools.chain.from_iterable(of_operands))
            if x.op.endswith(_HANDS_ON):
                first = int(x.attribute(r"^, index=(\d+)") or 0)
                lies_in[x] = taken[first : first + len(x.shapes)]
            elif x.number is not None and given:
                lies_in[x] = list(given[x.number])
            else:
                self._time += 1
                lies_in[x] = taken if x.op == "while" else self._made(x, of_operands)
                for i, inner in enumerate(
                    x.called if x.op in ("while", "call", "conditional") else ()
                ):
                    arguments = {
                        "while": [taken],
                        "conditional": of_operands[i + 1 : i + 2],
                    }.get(x.op, of_operands)
                    for array in set(self._follow(inner, arguments)).difference(taken):
                        # It takes the memory of what the loop or call returns.
                        self._lives.pop(array, None)
                for array in taken:
                    self.users.setdefault(array, []).append(x)
                    life = self._lives.get(array, [0, 0])
                    life[1] = max(life[1], self._time)
        return next((lies_in[x] for x in program if x.is_root), [])

    def _made(
        self, x: Instruction, of_operands: Sequence[Sequence[Array]]
    ) -> list[Array]:
        """Return where the results of a kernel lie: in new memory, or in an operand of
        which it writes a part.
        """
        made = [Array(x, number, shape) for number, shape in enumerate(x.results)]
        root = (
            next(part for part in x.called[0] if part.is_root)
            if x.op == "fusion"
            else x
        )
        for number, part in enumerate(root.operands if root.op == "tuple" else [root]):
            whole = part
            while whole.op in ("bitcast", "dynamic-update-slice"):
                whole = whole.operands[0]
            operand = whole.number if x.op == "fusion" else 0
            if whole is not part and operand is not None:
                made[number] = of_operands[operand][0]
                self.writers[made[number]] = x
        life = [0, math.inf] if x.op == "parameter" else [self._time, self._time]
        self._lives.update({array: [*life] for array in made if array.maker is x})
        return made
