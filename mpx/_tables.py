"""Results of tools: printed as text, written as JSON."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Unit = tuple[str, int]  # the name of a unit and how many bytes it is
_BYTES: Unit = ("bytes", 1)


def unit_for(numbers: Iterable[int]) -> Unit:
    """Return the unit for numbers of bytes: GB, or less where the largest number is
    below 0.1 of one.
    """
    largest = max(numbers)
    units = ("GB", 10**9), ("MB", 10**6)
    return next((unit for unit in units if largest >= 0.1 * unit[1]), _BYTES)


def shown(number: int, unit: Unit) -> str:
    """Return an exact number of bytes, or the first four digits of larger units."""
    return f"{number:,}" if unit == _BYTES else digits(number / unit[1])


def digits(number: float) -> str:
    """Return a number of at most six characters: four digits, or all before the point,
    or three behind it.
    """
    return (
        f"{number:,.0f}"
        if number >= 1000
        else f"{number:#.4g}"
        if number >= 1
        else f"{number:.3f}"
    )


class Table(NamedTuple):
    """A table of text."""

    title: str  # the line above the table; none if empty
    lines: Sequence[Sequence[str]]  # of cells; the first one is the header
    right: Collection[int] = (-1,)  # the columns that are aligned to the right

    def __str__(self) -> str:
        """Return the title and the table as text."""
        count, columns = len(self.lines[0]), []
        for i, column in enumerate(zip(*self.lines, strict=True)):
            width = max(map(len, column))
            is_right = i in self.right or i - count in self.right
            columns.append(
                [
                    cell.rjust(width) if is_right else cell.ljust(width)
                    for cell in column
                ]
            )
        lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
        return "\n".join([self.title, *lines] if self.title else lines)


class Result:
    """Base of the dataclasses that tools return: they print as text, and go into
    JSON.
    """

    def _parts(self) -> Iterable[Table | str]:
        """Return the tables and paragraphs that are printed, in order."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Return the public fields and properties, as dictionaries, lists, strings and
        finite numbers, for JSON.
        """
        return _members(self)

    def __str__(self) -> str:
        """Return the parts as text, with an empty line between two of them."""
        return "\n\n".join(map(str, self._parts()))


def json_values(value: Any) -> Any:
    """Return a value as JSON can hold it: None for a number that is not finite, a
    string for what JSON lacks.
    """
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
    """Return the public fields of a dataclass, then its public properties, as JSON
    values.
    """
    names = [field.name for field in dataclasses.fields(value)]
    names += [
        name
        for kind in type(value).__mro__
        for name, x in vars(kind).items()
        if isinstance(x, property)
    ]
    return {
        name: json_values(getattr(value, name))
        for name in names
        if not name.startswith("_")
    }
