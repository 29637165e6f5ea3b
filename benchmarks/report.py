"""Report what was measured: a console, a JSON file, tables for the terminal and for Markdown, targets with verdicts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

SIDES = ("by hand", "mpx")


class Sheet(NamedTuple):
    """A table of text.

    Attributes:
        title: the line above it.
        rows: cells by the names of their columns; a row of something that failed has few of them.
        caption: the line below it.
    """

    title: str
    rows: Sequence[Mapping[str, str]]
    caption: str = ""

    @property
    def columns(self) -> list[str]:
        """Return the names of all columns, in the order of the fullest row."""
        return list(dict.fromkeys(name for row in sorted(self.rows, key=len, reverse=True) for name in row))

    def __rich__(self) -> Table:
        """Return it for the terminal; cells are text, since Rich reads brackets in strings as style."""
        table = Table(title=Text(self.title), caption=Text(self.caption))
        for name in self.columns:
            table.add_column(Text(name))
        for row in self.rows:
            table.add_row(*(Text(row.get(name, "")) for name in self.columns))
        return table

    def markdown(self) -> str:
        """Return it for a page."""
        lines = [self.columns, ["---"] * len(self.columns)]
        lines += [[row.get(name, "") for name in self.columns] for row in self.rows]
        table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        return "\n\n".join(part for part in (f"**{self.title}**", self.rows and table, self.caption) if part)


def make_console() -> Console:
    """Make a console; a file has room for the whole table."""
    console = Console()
    if not console.is_terminal:
        console.width = 240
    return console


def write_json(path: Path | None, found: dict[str, Any]) -> None:
    """Write what there is, after each part: the next one may not end."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")


def verdict(met: bool) -> str:
    """Return the word for a target in the tables."""
    return "met" if met else "missed"


def spread_cell(ends: list[float], digits: int = 3) -> str:
    """Return the two ends of a spread or an interval as text."""
    return " to ".join(f"{end:.{digits}f}" for end in ends)


def target_cell(row: dict[str, Any]) -> str:
    """Return a target and whether it is met; empty where there is none."""
    return f"at most {row['target']}: {verdict(row['met'])}" if "target" in row else ""


def ratio_cells(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of two steps that were timed in turn, and what their programs say beside them."""
    cells = {f"{side}, ms": f"{row[f'{side} ms']:.3f}" for side in SIDES}
    cells |= {"mpx / by hand": f"{row['ratio']:.3f}", "95%": spread_cell(row["ratio 95%"])}
    return cells | {"target": target_cell(row)} | program_cells(row) | bound_cells(row["program mpx"], row["mpx ms"])


def program_cells(row: dict[str, Any]) -> dict[str, str]:
    """Return what the programs of two steps move and need, in one cell each: by hand, and with mpx."""
    cell = lambda key, unit, digits: ", ".join(f"{row[f'program {side}'][key] / unit:,.{digits}f}" for side in SIDES)
    return {
        "moved by hand, mpx, MB": cell("moved bytes", 1e6, 2),
        "kernels": cell("kernels", 1, 0),
        "temporaries, MB": cell("temporary bytes", 1e6, 2),
    }


def bound_cells(program: dict[str, Any], ms: float) -> dict[str, str]:
    """Return the bound of a program beside a measured time; nothing where the device's figures are not known."""
    bound = program.get("bound ms")
    return {} if bound is None else {"bound, ms": f"{bound:.3f}", "mpx / bound": f"{ms / bound:.2f}"}


def judge(what: str, value: float, bound: float, *, least: bool) -> dict[str, Any]:
    """Return a target with its verdict; a value that is not a number meets none.

    Args:
        what: what was measured.
        value: the measured value.
        bound: the bound that was asked for.
        least: whether the value must be at least the bound, or at most.
    """
    met = value >= bound if least else value <= bound
    return {"target": what, "value": value, "bound": f"at {'least' if least else 'most'} {bound:.4g}", "met": met}


def targets_table(targets: list[dict[str, Any]]) -> Sheet:
    """Return the table of all targets that could be judged."""
    row = lambda judged: {
        "target": judged["target"],
        "measured": f"{judged['value']:.4g}",
        "asked": judged["bound"],
        "verdict": verdict(judged["met"]),
    }
    return Sheet("targets", list(map(row, targets)))
