"""Write tables in Markdown, and judge targets."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# What was measured; a measurement that failed has the reason under "failed".
Row = dict[str, Any]


class Sheet(NamedTuple):
    """A table."""

    title: str  # the line above it
    rows: Sequence[Mapping[str, Any]]  # the figures
    # For each name the template of its cells, which `str.format` fills from a row.
    columns: Mapping[str, str]
    caption: str = ""  # the text below it

    def markdown(self) -> str:
        """Return it for a page. Columns without a single cell are left out."""
        used = {
            name: form
            for name, form in self.columns.items()
            if any(cell(form, row) for row in self.rows)
        }
        parts = (
            f"**{self.title}**",
            table(self.rows, used) if self.rows else "",
            self.caption,
        )
        return "\n\n".join(filter(None, parts))


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return a table in Markdown."""
    lines = [
        columns,
        *([cell(template, row) for template in columns.values()] for row in rows),
    ]
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def cell(template: str, row: Mapping[str, Any]) -> str:
    """Fill a template; a cell is empty if the row lacks a value."""
    try:
        return template.format_map(row).replace("|", "/")
    except (KeyError, TypeError, IndexError):
        return ""


def judged(
    value: float, *, least: float | None = None, most: float | None = None
) -> str:
    """Return a bound and whether a value keeps it. NaN keeps none."""
    met = value >= least if least is not None else most is not None and value <= most
    bound = f"at most {most:.4g}" if least is None else f"at least {least:.4g}"
    return f"{bound}: {'met' if met else 'missed'}"
