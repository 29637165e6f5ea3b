"""Tables as text, and as Rich shows them."""

from collections.abc import Collection, Sequence
from typing import Any, ClassVar


def text_table(lines: Sequence[Sequence[str]], right: Sequence[int] = (-1,)) -> str:
    """Lines of cells in columns; those numbered in `right` are aligned to the right."""
    count = len(lines[0])
    rights = {column % count for column in right}
    widths = [max(len(line[column]) for line in lines) for column in range(count)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in rights else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def rich_table(
    title: str,
    lines: Sequence[Sequence[str]],
    right: Collection[int] = (-1,),
    folded: Collection[int] | None = None,
) -> Any:
    """The same for Rich; for `__rich__`, which only Rich calls.

    Where the terminal is too narrow, Rich folds the cells of the columns in `folded`, of all if it is None.
    """
    from rich.table import Table
    from rich.text import Text

    header, *rest = lines
    rights = {column % len(header) for column in right}
    table = Table(title=title, title_justify="left")
    for column, name in enumerate(header):
        stiff = folded is not None and column not in folded
        table.add_column(name, justify="right" if column in rights else "left", overflow="fold", no_wrap=stiff)
    for line in rest:
        table.add_row(*map(Text, line))  # not markup: brackets are style tags there
    return table


class Table:
    """What prints as a table, with `rich.print` too."""

    _texts: ClassVar[int]  # how many columns, from the left, are no numbers

    def _title_and_lines(self) -> tuple[str, list[tuple[str, ...]]]:
        raise NotImplementedError

    def __str__(self) -> str:
        """The table as text."""
        title, lines = self._title_and_lines()
        return f"{title}\n{text_table(lines, right=range(self._texts, len(lines[0])))}"

    def __rich__(self) -> Any:
        """The table as Rich shows it; only Rich calls this, so it is there."""
        title, lines = self._title_and_lines()
        return rich_table(title, lines, right=range(self._texts, len(lines[0])))
