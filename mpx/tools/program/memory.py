"""Find the arrays that a program holds at once where it needs most memory.

XLA does not say what is in the memory that it counts. The sum of what is found here was
within 0.2% of XLA's peak for steps of 61 billion parameters, and 0.87 to 1.23 of it for
73 small programs (jax 0.10.2).
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpx.tools.program.graph import Program
from mpx.tools.program.text import Instruction, Shape, root_of

_ALWAYS = sys.maxsize - 1  # later than any kernel
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

    def __init__(self, program: Program) -> None:
        """Follow the arrays through a program."""
        # Those that compute with an array, in loops too.
        self.users: dict[Array, list[Instruction]] = {}
        # Of an array whose parts are written one by one.
        self.writers: dict[Array, Instruction] = {}
        self._program = program
        self._lies_in: dict[Instruction, list[Array]] = {}  # of its results
        self._lives: dict[Array, list[int]] = {}  # when it begins and ends
        self._time = 0
        donated = {x.shapes[0][:2] for x in program.entry if x.is_donated}
        for array in set(self._follow(program.entry)):
            self._lives[array][1] = _ALWAYS
            if array.maker.op != "parameter" and array.shape[:2] in donated:
                del self._lives[array]  # it takes the memory of an argument
        held = np.zeros(self._time + 1)
        for array, (start, end) in self._lives.items():
            held[start : end + 1] += array.shape.bytes
        at = held.argmax()
        self.peak = [
            array for array, (start, end) in self._lives.items() if start <= at <= end
        ]

    def _follow(self, computation: Sequence[Instruction]) -> list[Array]:
        """Return the arrays that a computation returns."""
        lies_in, given = self._lies_in, self._program.given
        for x in computation:
            taken = [array for operand in x.operands for array in lies_in[operand]]
            if x.op.endswith(_HANDS_ON):
                first = int(x.attribute(r"^, index=(\d+)") or 0)
                lies_in[x] = taken[first : first + len(x.shapes)]
            elif x in given:
                lies_in[x] = lies_in[given[x]]
            else:
                self._time += 1
                lies_in[x] = taken if x.op == "while" else self._made(x)
                if x.op in ("while", "call", "conditional"):
                    for array in set().union(*map(self._follow, x.called)) - {*taken}:
                        # It takes the memory of what the loop or call returns.
                        self._lives.pop(array, None)
                for array in taken:
                    self.users.setdefault(array, []).append(x)
                    life = self._lives.get(array, [0, 0])
                    life[1] = max(life[1], self._time)
        return lies_in[root_of(computation)]

    def _made(self, x: Instruction) -> list[Array]:
        """Return where the results of a kernel lie: in new memory, or in an operand of
        which it writes a part.
        """
        made = [Array(x, number, shape) for number, shape in enumerate(x.results)]
        for number, part in enumerate(x.makers):
            whole = self._program.walk_back(part, "bitcast dynamic-update-slice")
            if whole is not part and whole in self._lies_in:
                made[number] = self._lies_in[whole][0]
                self.writers[made[number]] = x
        life = [0, _ALWAYS] if x.op == "parameter" else [self._time, self._time]
        self._lives.update({array: [*life] for array in made if array.maker is x})
        return made
