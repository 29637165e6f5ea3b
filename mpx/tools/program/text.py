"""Read the text of a program of XLA: as it was lowered, or compiled, which is optimized
and scheduled.
"""

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

_COMPUTATION = re.compile(
    r"^(?P<is_entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\([^\n]*)?\{\n(?P<body>.*?)^\}",
    re.MULTILINE | re.DOTALL,
)
_LINE = re.compile(
    r"^ +(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shapes>.*?) "
    r"(?P<op>[a-z][\w\-]*)\((?P<operands>[^)\n]*)\)(?P<attributes>.*)$",
    re.MULTILINE,
)
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\](\{[^{}]*\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)"
)
# A TPU's own memories, which only its layouts in tiles have, and the host's.
_ELSEWHERE = re.compile(r"T\(.*S\(|\{:S\(|S\(5\)")
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+).* line=(\d+)", re.MULTILINE)
_FRAME = re.compile(
    r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE
)
_INSTALLED = {"site-packages", "dist-packages"}
_MPX = pathlib.Path(__file__).parents[2]


class Shape(NamedTuple):
    """The dtype of an array, as XLA calls it, its dimensions, and how and where it lies
    in memory.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def bits(self) -> int:
        """Bits of a number; 0 of a token."""
        bits = re.search(r"\d+", "8" if self.dtype == "pred" else self.dtype)
        return 0 if bits is None else int(bits[0])

    @property
    def size(self) -> int:
        """Bytes of the array, without padding."""
        return math.ceil(math.prod(self.dims) * self.bits / 8)

    @property
    def bytes(self) -> int:
        """Bytes of the array in the device's memory: none on the chip of a TPU, or on
        the host.
        """
        return 0 if _ELSEWHERE.search(self.layout) else self.size

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One operation of a program: a kernel, or a part of one."""

    op: str
    hlo_name: str  # its own, in the program
    shapes: tuple[Shape, ...]  # of its results
    operands: tuple["Instruction", ...]  # one that stands twice stands twice
    # The computations that it runs; of a loop the body.
    called: tuple[tuple["Instruction", ...], ...]
    attributes: str  # the rest of the line
    source: str  # `file.py:line`; empty if it is not known
    is_root: bool  # whether it is the result of its computation
    number: int | None  # of a parameter
    is_donated: bool  # of a parameter of the program: whether a result takes its memory

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of a regular expression in the attributes."""
        match = re.search(pattern, self.attributes)
        return match and match[1]

    @functools.cached_property
    def name(self) -> str:
        """The name that JAX gives it, with the transformations that made it, or that of
        an argument.
        """
        return (self.attribute(r'op_name="([^"]*)') or "").replace("\\", "")

    @functools.cached_property
    def operation(self) -> str:
        """The name of a library call, or the operation without the word that says that
        others run beside it.
        """
        return self.attribute(r'custom_call_target="([^"]+)"') or self.op.removesuffix(
            "-start"
        )

    @property
    def trips(self) -> int | None:
        """How often it runs what it calls; None for a loop of unknown length."""
        if self.op != "while":
            return 1
        known = self.attribute(r'known_trip_count":\{"n":"(\d+)"')
        return int(known) if known else None

    @property
    def results(self) -> tuple[Shape, ...]:
        """Return what it makes: of the start of an asynchronous operation, not what
        that hands on.
        """
        if self.op == "copy-start":
            return self.shapes[:1]
        hands_on = self.op.endswith("-start") and len(self.shapes) > len(self.operands)
        return self.shapes[len(self.operands) :] if hands_on else self.shapes

    @property
    def bytes(self) -> int:
        """Bytes of what it makes."""
        return sum(shape.bytes for shape in self.results)

    @property
    def parts(self) -> tuple["Instruction", ...]:
        """The operations of a fusion; of another operation itself."""
        return (
            sum((part.parts for part in self.called[0]), ())
            if self.op == "fusion"
            else (self,)
        )

    @property
    def makers(self) -> tuple["Instruction", ...]:
        """The operations that make its results: of a fusion, those in it."""
        root = root_of(self.called[0]) if self.op == "fusion" else self
        return root.operands if root.op == "tuple" else (root,)


def root_of(computation: Sequence[Instruction]) -> Instruction:
    """Return the operation whose result a computation returns."""
    return next((x for x in computation if x.is_root), computation[-1])


def parse(text: str) -> tuple[Instruction, ...]:
    """Return the operations of a program in the order of execution."""
    sources = _sources(text)
    computations: dict[str, tuple[Instruction, ...]] = {}
    donated = re.findall(r"\{[\d,]*\}: \((\d+),", text.partition("\n")[0])
    for found in _COMPUTATION.finditer(text):
        body: dict[str, Instruction] = {}
        for line in _LINE.finditer(found["body"]):
            frame = re.search(r"stack_frame_id=(\d+)", line["attributes"])
            called = _names(" ".join(_CALLED.findall(line["attributes"])))
            number = line["operands"] if line["op"] == "parameter" else ""
            body[line["name"]] = Instruction(
                op=line["op"],
                hlo_name=line["name"],
                shapes=_shapes(line["shapes"]),
                operands=tuple(
                    body[name] for name in _names(line["operands"]) if name in body
                ),
                # They stand in front of it.
                called=tuple(computations[name] for name in called),
                attributes=line["attributes"],
                source=sources.get(frame[1], "") if frame else "",
                is_root=bool(line["root"]),
                number=int(number) if number else None,
                is_donated=number in donated,
            )
        computations[found["name"]] = tuple(body.values())
        if found["is_entry"]:
            return computations[found["name"]]
    raise ValueError(
        "This text has no entry computation: it is not a compiled program of XLA."
    )


def _names(text: str) -> list[str]:
    return re.findall(r"%?([\w.\-]+)", text)


def _shapes(text: str) -> tuple[Shape, ...]:
    """Return the arrays of a type: `f32[8,4]{1,0}`, or a tuple of such."""
    return tuple(
        Shape(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n), layout)
        for dtype, dims, layout in _SHAPE.findall(text)
    )


def _sources(text: str) -> dict[str, str]:
    """Return the line of each stack frame, or of the innermost frame around it outside
    of installed packages.

    A file below the working directory is shown relative to it, another one by its last
    two parts.
    """
    # The table of files is the first one; that of functions has the same form.
    files = dict(_FILE.findall(text.partition("\nFunctionNames\n")[0]))
    locations = {
        number: (files[file], line) for number, file, line in _LOCATION.findall(text)
    }
    lines: dict[str, str] = {}
    own: dict[str, str] = {}
    here = pathlib.Path.cwd()
    for frame, location, parent in _FRAME.findall(text):
        file, line = locations[location]
        path = pathlib.Path(file).absolute()
        is_near = path.is_relative_to(here)
        short = path.relative_to(here) if is_near else pathlib.Path(*path.parts[-2:])
        # XLA may know no file.
        lines[frame] = f"{short}:{line}" if file else ""
        # A frame stands behind those around it. XLA counts parents from 1 for "none",
        # so that the outermost frame seems to be its own.
        outer = own.get(str(int(parent or 0) - 1), "")
        is_own = _INSTALLED.isdisjoint(path.parts) and not path.is_relative_to(_MPX)
        own[frame] = lines[frame] if is_own else outer
    return {frame: own[frame] or line for frame, line in lines.items()}
