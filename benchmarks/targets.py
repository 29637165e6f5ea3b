"""Targets: a number, its bound, and whether it is met."""

from typing import Any

from rich.table import Table


def judge(what: str, value: float, bound: float, *, least: bool) -> dict[str, Any]:
    """A target with its verdict; a value that is not a number meets none.

    Args:
        what: the value is.
        value: as measured.
        bound: of it.
        least: whether the value must be at least the bound, or at most.
    """
    met = value >= bound if least else value <= bound
    return {"target": what, "value": value, "bound": f"at {'least' if least else 'most'} {bound:.4g}", "met": met}


def targets_table(targets: list[dict[str, Any]]) -> Table:
    """All targets that could be judged."""
    table = Table("target", "measured", "asked", "", title="targets")
    for row in targets:
        table.add_row(
            row["target"], f"{row['value']:.3g}", row["bound"], "[green]met[/]" if row["met"] else "[red]missed[/]"
        )
    return table
