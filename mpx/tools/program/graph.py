"""A program as a graph: what makes an array, and what uses it."""

from collections.abc import Callable, Iterator

from mpx.tools.program.text import Instruction, root_of

_TAKES = ("fusion", "while", "call", "conditional")  # as their parameters number it
# Who uses an array, after the array as it sees it; None if the program returns it.
Use = tuple[Instruction, Instruction | None]


class Program:
    """The operations of a program, and the arrays between them.

    What is given to a fusion, loop or call is used by its parameters, and what a
    computation returns by the one that runs it: so one can follow an array into a
    kernel and out of it.
    """

    def __init__(self, entry: tuple[Instruction, ...]) -> None:
        """Link the operations of a program, as `parse` returns them."""
        self.entry = entry  # in the order of execution
        self.result = root_of(entry)
        self.nodes = tuple(dict.fromkeys(_nodes(entry)))  # those that it calls, too
        self.used_by: dict[Instruction, list[Instruction]] = {x: [] for x in self.nodes}
        self.given: dict[Instruction, Instruction] = {}  # to a parameter
        for x in self.nodes:
            for i, inner in enumerate(x.called):
                self.used_by[root_of(inner)].append(x)
                for part in inner if x.op in _TAKES else ():
                    if part.number is not None:
                        # A conditional has the index of a branch before what it gives.
                        number = i + 1 if x.op == "conditional" else part.number
                        self.given.setdefault(part, x.operands[number])
                        self.used_by[x.operands[number]].append(part)
            for operand in dict.fromkeys(x.operands if x.op not in _TAKES else ()):
                self.used_by[operand].append(x)

    def walk_back(self, x: Instruction, through: str) -> Instruction:
        """Return what an array was before operations of these names took it, and before
        it was given to a fusion, loop or call.
        """
        while x in self.given or x.op in through.split():
            x = self.given.get(x) or x.operands[0]
        return x

    def last_users(
        self, array: Instruction, hands_on: Callable[[Instruction, Instruction], bool]
    ) -> Iterator[Use]:
        """Yield the users of an array behind all that hands it on, each after the array
        as it sees it; None for a result of the program.
        """
        views = [array]
        for view in views:  # which grow
            if view is self.result:
                yield view, None
            for user in self.used_by[view]:
                if user.op not in ("parameter", "fusion") and not hands_on(view, user):
                    yield view, user
                elif user not in views:
                    views.append(user)

    def arrays_of(self, kernel: Instruction) -> list[Instruction]:
        """Return the arrays that a kernel makes: itself, what ends an asynchronous one,
        or the parts of a tuple.
        """
        users = self.used_by[kernel]
        made = next((user for user in users if user.op.endswith("-done")), kernel)
        parts = [x for x in self.used_by[made] if x.op == "get-tuple-element"]
        # A call may return nothing.
        return [array for array in parts or [made] if array.shapes]


def _nodes(computation: tuple[Instruction, ...]) -> Iterator[Instruction]:
    for x in computation:
        yield x
        for inner in x.called:
            yield from _nodes(inner)
