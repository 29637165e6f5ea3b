"""Show numbers of bytes in a few characters, so that tables fit into 80 columns."""

from collections.abc import Iterable

Unit = tuple[str, int]  # its name and how many bytes it is

_UNITS: tuple[Unit, ...] = (("GB", 10**9), ("MB", 10**6))
BYTES: Unit = ("bytes", 1)


def unit_for(numbers: Iterable[int]) -> Unit:
    """Return the unit for numbers of bytes: GB, or less where the largest number is below 0.1 of one."""
    largest = max(numbers)
    return next((unit for unit in _UNITS if largest >= 0.1 * unit[1]), BYTES)


def shown(number: int, unit: Unit) -> str:
    """Return an exact number of bytes, or the first four digits of larger units."""
    return f"{number:,}" if unit == BYTES else digits(number / unit[1])


def shown_with_unit(number: int) -> tuple[str, str]:
    """Return a number of bytes in a unit for it, and the unit."""
    unit = unit_for([number])
    return shown(number, unit), unit[0]


def digits(number: float) -> str:
    """Return a number of at most six characters: four digits, or all before the point, or three behind it."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:#.4g}" if number >= 1 else f"{number:.3f}"
