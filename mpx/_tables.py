"""Tables as text."""

from collections.abc import Sequence


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
