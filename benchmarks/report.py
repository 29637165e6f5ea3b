"""Report what was measured: a console, a JSON file, and targets with their verdicts."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def make_console() -> Console:
    """Make a console; a file has room for the whole table."""
    console = Console()
    if not console.is_terminal:
        console.width = 180
    return console


def write_json(path: Path | None, found: dict[str, Any]) -> None:
    """Write what there is, after each part: the next one may not end."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")


def verdict(met: bool) -> str:
    """Return the word for a target in the tables."""
    return "[green]met[/]" if met else "[red]missed[/]"


def spread_cell(ends: list[float], digits: int = 3) -> str:
    """Return the two ends of a spread or an interval as text."""
    return " to ".join(f"{end:.{digits}f}" for end in ends)


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


def targets_table(targets: list[dict[str, Any]]) -> Table:
    """Return the table of all targets that could be judged."""
    table = Table("target", "measured", "asked", "", title="targets")
    for row in targets:
        table.add_row(row["target"], f"{row['value']:.3g}", row["bound"], verdict(row["met"]))
    return table
