"""Read the text of a compiled program: XLA's optimized, scheduled HLO."""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\](\{[^{}]*\})?")
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_TABLE = re.compile(r"^(\d+) (?:\"(.*)\"|\{(.*)\})$")
_MPX = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", os.path.normpath(_MPX) + os.sep)


class Shape(NamedTuple):
    """The dtype, as XLA calls it, and the dimensions of an array, and whether a TPU keeps it on the chip."""

    dtype: str
    dims: tuple[int, ...]
    is_on_chip: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the array in the device's memory, without padding."""
        if self.is_on_chip:
            return 0
        return math.ceil(math.prod(self.dims) * _bits(self.dtype) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program."""

    name: str
    shapes: tuple[Shape, ...]  # of the results
    op: str
    operands: tuple[str, ...]  # their names; one that stands twice stands twice
    attributes: str  # the rest of the line
    is_root: bool

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of a regular expression in the attributes."""
        match = re.search(pattern, self.attributes)
        return match and match[1]

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it runs once each."""
        found = re.findall(
            r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)", self.attributes
        )
        branches = self.attribute(r"branch_computations=\{([^}]*)\}")
        return (*found, *re.findall(r"%?([\w.\-]+)", branches or ""))


@dataclasses.dataclass(frozen=True)
class Program:
    """The computations of a program by their names, and the tables that say where its operations come from."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    tables: Mapping[str, Mapping[int, str]]

    def source_of(self, instruction: Instruction) -> str:
        """Return `file.py:line` of the innermost frame of an operation outside of installed packages, if any."""
        frame = instruction.attribute(r"stack_frame_id=(\d+)")
        if frame is None:
            file, line = (instruction.attribute(rf"source_{part}=\"?([^\"\s}}]+)") for part in ("file", "line"))
            return f"{_short(file)}:{line}" if file and line else ""
        places = list(self._frames(int(frame)))
        own = [place for place in places if not any(part in place[0] for part in _INSTALLED)]
        file, line = (own or places or [("", "")])[0]
        return f"{_short(file)}:{line}" if file else ""

    def _frames(self, frame: int) -> Iterator[tuple[str, str]]:
        """Yield the file and line of a frame, then of those around it."""
        frames, locations = self.tables.get("StackFrames", {}), self.tables.get("FileLocations", {})
        # XLA counts parents from 1 for "none", so that the outermost frame seems to be its own.
        while frame in frames:
            fields = dict(re.findall(r"(\w+)=(\d+)", frames[frame]))
            place = dict(re.findall(r"(\w+)=(\d+)", locations.get(int(fields["file_location_id"]), "")))
            yield self.tables["FileNames"].get(int(place.get("file_name_id", 0)), "?"), place.get("line", "?")
            frame = int(fields.get("parent_frame_id", 0)) - 1


@functools.cache
def _bits(dtype: str) -> int:
    """Return the bits of a number: 8 for `f8e4m3fn`, 16 for `bf16`."""
    return _BITS[dtype] if dtype in _BITS else int(re.sub(r"^[a-z]+(\d+).*", r"\1", dtype))


def _short(file: str) -> str:
    """Return a file relative to the working directory if it is below it, else its last two parts."""
    relative = os.path.relpath(file)
    return relative if not relative.startswith(os.pardir) else os.sep.join(file.split(os.sep)[-2:])


def parse(text: str) -> Program:
    """Read a program.

    Raises:
        ValueError: if there is no entry computation, as in a text that is no compiled program.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    tables: dict[str, dict[int, str]] = {}
    entry, table, lines = "", "", None
    name = ""
    for line in text.splitlines():
        if match := _HEAD.match(line):
            name, lines = match["name"], []
            entry = name if match["entry"] else entry
        elif lines is not None and line.startswith("}"):
            computations[name], lines = tuple(lines), None
        elif lines is not None:
            if match := _LINE.match(line):
                lines.append(_instruction(match))
        elif match := _TABLE.match(line):
            tables.setdefault(table, {})[int(match[1])] = match[2] if match[2] is not None else match[3]
        elif line and line.isalpha():
            table = line
    if not entry:
        raise ValueError("This text has no entry computation: it is not a compiled program of XLA.")
    return Program(computations, entry, tables)


def _instruction(match: re.Match[str]) -> Instruction:
    rest = match["rest"]
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shapes = tuple(
        Shape(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n), bool(re.search(r"S\([1-9]", layout)))
        for dtype, dims, layout in _SHAPE.findall(rest[:end])
    )
    op, _, rest = rest[end:].strip().partition("(")
    end = _closing("(" + rest) - 1
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[: end - 1]))
    return Instruction(match["name"], shapes, op, operands, rest[end:], bool(match["root"]))


def _closing(text: str) -> int:
    """Return the position behind the bracket that closes the first one."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position + 1
    raise ValueError(f"A bracket is not closed in {text[:60]!r}.")
