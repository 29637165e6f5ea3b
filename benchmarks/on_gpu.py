"""Measure all that has not been measured on a GPU, in the order of what matters most,
and stop in time.

    PYTHONPATH=. python -m benchmarks.on_gpu --minutes 25 --out found
    PYTHONPATH=. python -m benchmarks.on_gpu --out found --report

One optimizer step of one recipe, or one rung of GPT-2, is a unit: it runs in a process
of its own, has a budget of seconds, and begins only if half of it is left. One that
outlasts it is stopped, marked so, and measured again when the command is repeated; if
its budget was whole, with twice as much. One that fails, or that lacks a package, says
why and stops none of the others. In the end the command names what it left out.
Repeated, it goes on there, with a copy of the folder too.

The folder has one JSON file, written after each unit, with the device and its driver,
versions and date, and the programs and kernels that XLA compiled and tried, so that a
unit that was stopped compiles faster the next time: the seconds of compiling are then
too few. Folders of different devices or versions are not mixed. `--report` prints the
tables of `benchmarks/RESULTS.md` as Markdown, each time beside the bound of the program
that ran.

Times are medians of several rounds after a warm-up; two programs that are compared run
in turn, A B B A. Without a GPU sizes are the smallest, so that the command can be
tried; `--size cpu` measures what means something on a CPU.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.on_gpu_units import SIZES, Unit, all_units, sheets_of
from benchmarks.report import Row, Sheet
from benchmarks.workers import run_worker

SAME = ("device", "driver", "jax")  # of all results in one folder
SPARED = 10.0  # seconds at the end, to write and to say what is left
VERSIONS = ("jax", "jaxlib", "flax", "optax", "numpy", "mpx")


class Book:
    """What has been measured, in a file of a folder: the device, and an entry for each
    unit.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "found.json"
        there = json.loads(self.path.read_text("utf-8")) if self.path.exists() else None
        self.found: Row = there or {"device": None, "units": {}}

    def check(self, device: Row) -> None:
        """Note the device; raise if what is there was measured on another one or with
        other versions.
        """
        there, here = (
            [found and found.get(name) for name in SAME]
            for found in (self.found["device"], device)
        )
        if self.found["device"] and there != here:
            raise ValueError(
                f"{self.path} was measured on {there}, but this is {here}: take another"
                " folder."
            )
        self.found["device"] = device

    def keep(self, unit: Unit, entry: Row) -> None:
        """Write the result of a unit."""
        self.found["units"][unit.name] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        new.replace(self.path)  # so that a command that is killed leaves a whole file
        print(
            f"{unit.name}: {entry['status']}, {entry['seconds']:.0f} s. {entry['note']}".rstrip(),
            flush=True,
        )

    def report(self) -> str:
        """Return all tables in Markdown."""
        device, units = self.found["device"], self.found["units"]
        if device is None:
            return "Nothing has been measured."
        versions = ", ".join(f"{name} {device[name]}" for name in VERSIONS)
        driver = device["driver"] or "none"
        blocks = [
            f"Measured on {device['date']} on {device['device']}, driver {driver},"
            f" {versions}."
        ]
        rows: dict[str, list[Row]] = {}
        for entry in units.values():
            rows.setdefault(entry["table"], []).extend(entry["rows"])
        blocks += [sheet.markdown() for sheet in sheets_of(rows, device["FLOP/s"])]
        missing = [
            {"unit": name} | entry
            for name, entry in units.items()
            if entry["status"] != "done"
        ]
        columns = {"unit": "{unit}", "what became of it": "{status}", "why": "{note}"}
        return "\n\n".join(
            [*blocks, Sheet("not measured", missing, columns).markdown()]
            if missing
            else blocks
        )


def measure_units(
    units: Iterable[Unit], book: Book, left: Callable[[], float], run: Callable
) -> list[Unit]:
    """Measure what is not measured yet and fits into the time; return the units that
    are still to be measured.

    `left` returns the seconds that are left, and `run` calls a function.
    """
    waiting = []
    for unit in units:
        known = book.found["units"].get(unit.name, {})
        if known.get("status") in ("done", "failed"):
            continue
        stops = known.get("stops", 0)
        budget, remaining = unit.seconds * 2**stops, left() - SPARED
        if remaining < budget / 2:
            waiting.append(unit)
            continue
        start = time.monotonic()
        found = run(
            unit.function,
            unit.arguments,
            timeout=min(budget, remaining),
            environment=unit.environment,
        )
        rows = [unit.about | row for row in found]
        failures = [row["failed"] for row in rows if "failed" in row]
        stopped = any("stopped" in row for row in rows)
        status = "stopped" if stopped else "failed" if failures else "done"
        entry = {
            "table": unit.table,
            "status": status,
            "note": "; ".join(failures),
            "rows": rows,
        }
        if stopped:
            waiting.append(unit)
            entry["stops"] = stops + (budget <= remaining)
        book.keep(unit, entry | {"seconds": time.monotonic() - start})
    return waiting


def main(
    out: Annotated[Path, typer.Option(help="The folder for what is measured.")],
    minutes: Annotated[float, typer.Option(help="For the whole command.")] = 9.0,
    parts: Annotated[
        str, typer.Option(help="Only these parts, separated by commas.")
    ] = "",
    size: Annotated[
        Literal["gpu", "cpu", "smallest"] | None,
        typer.Option(help="gpu on a GPU, elsewhere smallest, to try it."),
    ] = None,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Measure nothing: print the tables of the folder."
        ),
    ] = False,
) -> None:
    """Measure what is not measured yet, or print the tables of a folder."""
    if report:
        print(Book(out).report())
        return
    end = time.monotonic() + 60 * minutes
    # Kernels that XLA has tried, and programs of units that were stopped, need not be
    # made again.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(out.absolute() / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    (device,) = run_worker("benchmarks.gpt2_in_jax:device", {}, timeout=60 * minutes)
    if "failed" in device:
        raise typer.BadParameter(f"the device cannot be used: {device['failed']}")
    book = Book(out)
    try:
        book.check(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error
    names = parts.split(",") if parts else []
    chosen = all_units(
        SIZES[size or ("gpu" if device["backend"] == "gpu" else "smallest")]
    )
    units = [unit for unit in chosen if not names or unit.part in names]
    waiting = measure_units(units, book, lambda: end - time.monotonic(), run_worker)
    print(f"{len(units) - len(waiting)} of {len(units)} units are through.")
    if waiting:
        print(f"Left out: {'; '.join(unit.name for unit in waiting)}.")
        print("Repeat the command to go on.")


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command()(main)

if __name__ == "__main__":
    app()
