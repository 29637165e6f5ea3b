"""Find the arrays that a program holds at once where it needs most memory.

XLA does not say what is in the memory that it counts. The sum of what is found here was
within 0.2% of XLA's peak for steps of 61 billion parameters, and 0.87 to 1.23 of it for
73 small programs (jax 0.10.2).
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpx.tools.program.graph import Program
from mpx.tools.program.text import Instruction, Shape, root_of

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
        self._lives: dict[Array, list[float]] = {}  # when it begins and ends
        self._time = 0
        donated = {x.shapes[0][:2] for x in program.entry if x.is_donated}
        for array in set(self._follow(program.entry)):
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
        self,
        computation: Sequence[Instruction],
        given: Sequence[Sequence[Array]] = (),
    ) -> list[Array]:
        """Return the arrays that a computation returns; one inside of another is given
        its arguments.
        """
        lies_in: dict[Instruction, list[Array]] = {}
        for x in computation:
            of_operands = [lies_in[operand] for operand in x.operands]
            taken = list(itertools.chain.from_iterable(of_operands))
            if x.op.endswith(_HANDS_ON):
                first = int(x.attribute(r"^, index=(\d+)") or 0)
                lies_in[x] = taken[first : first + len(x.shapes)]
            elif x.number is not None and given:
                lies_in[x] = list(given[x.number])
            else:
                self._time += 1
                lies_in[x] = taken if x.op == "while" else self._made(x, lies_in)
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
        return lies_in[root_of(computation)]

    def _made(
        self, x: Instruction, lies_in: Mapping[Instruction, list[Array]]
    ) -> list[Array]:
        """Return where the results of a kernel lie: in new memory, or in an operand of
        which it writes a part.
        """
        made = [Array(x, number, shape) for number, shape in enumerate(x.results)]
        for number, part in enumerate(x.makers):
            whole = self._program.walk_back(part, "bitcast dynamic-update-slice")
            if whole is not part and whole in lies_in:
                made[number] = lies_in[whole][0]
                self.writers[made[number]] = x
        life = [0, math.inf] if x.op == "parameter" else [self._time, self._time]
        self._lives.update({array: [*life] for array in made if array.maker is x})
        return made
