"""Results of tools: printed as text, shown by Rich, written as JSON."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Unit = tuple[str, int]  # the name of a unit and how many bytes it is
_BYTES: Unit = ("bytes", 1)


def unit_for(numbers: Iterable[int]) -> Unit:
    """Return the unit for numbers of bytes: GB, or less where the largest number is below 0.1 of one."""
    largest = max(numbers)
    units = ("GB", 10**9), ("MB", 10**6)
    return next((unit for unit in units if largest >= 0.1 * unit[1]), _BYTES)


def shown(number: int, unit: Unit) -> str:
    """Return an exact number of bytes, or the first four digits of larger units."""
    return f"{number:,}" if unit == _BYTES else digits(number / unit[1])


def digits(number: float) -> str:
    """Return a number of at most six characters: four digits, or all before the point, or three behind it."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:#.4g}" if number >= 1 else f"{number:.3f}"


class Table(NamedTuple):
    """A table of text."""

    title: str  # the line above the table; none if empty
    lines: Sequence[Sequence[str]]  # of cells; the first one is the header
    right: Collection[int] = (-1,)  # the columns that are aligned to the right

    def __str__(self) -> str:
        """Return the title and the table as text."""
        columns = []
        for column, is_right in zip(zip(*self.lines, strict=True), self._are_right(), strict=True):
            width = max(map(len, column))
            columns.append([cell.rjust(width) if is_right else cell.ljust(width) for cell in column])
        lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
        return "\n".join([self.title, *lines] if self.title else lines)

    def __rich__(self) -> Any:
        """Return Rich's own table. Only Rich calls this, so it is installed."""
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        # No lines between columns: they take a third of a terminal's 80 columns. And no number is folded.
        table = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name, is_right in zip(self.lines[0], self._are_right(), strict=True):
            table.add_column(Text(name), justify="right" if is_right else "left", overflow="fold", no_wrap=is_right)
        for line in self.lines[1:]:
            table.add_row(*map(Text, line))  # text, not strings: Rich reads brackets in strings as style tags
        return Group(Text(self.title, style="bold"), table) if self.title else table

    def _are_right(self) -> list[bool]:
        count = len(self.lines[0])
        return [column in self.right or column - count in self.right for column in range(count)]


class Result:
    """Base of the dataclasses that tools return: they print as text, with Rich, and go into JSON."""

    def _parts(self) -> Iterable[Table | str]:
        """Return the tables and paragraphs that are printed, in order."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Return the public fields and properties, as dictionaries, lists, strings and finite numbers, for JSON."""
        return _members(self)

    def __str__(self) -> str:
        """Return the parts as text, with an empty line between two of them."""
        return "\n\n".join(map(str, self._parts()))

    def __rich__(self) -> Any:
        """Return the parts for Rich. Only Rich calls this, so it is installed."""
        from rich.console import Group
        from rich.text import Text

        parts = [part if isinstance(part, Table) else Text(part) for part in self._parts()]
        return Group(parts[0], *[line for part in parts[1:] for line in ("", part)])


def json_values(value: Any) -> Any:
    """Return a value as JSON can hold it: None for a number that is not finite, a string for what JSON lacks."""
    if isinstance(value, Result):
        return value.as_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _members(value)
    if isinstance(value, Mapping):
        return {str(name): json_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return json_values(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _members(value: Any) -> dict[str, Any]:
    """Return the public fields of a dataclass, then its public properties, as JSON values."""
    names = [field.name for field in dataclasses.fields(value)]
    names += [name for kind in type(value).__mro__ for name, x in vars(kind).items() if isinstance(x, property)]
    return {name: json_values(getattr(value, name)) for name in names if not name.startswith("_")}
