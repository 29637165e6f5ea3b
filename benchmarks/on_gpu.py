"""Measure all that has not been measured on a GPU, in the order of what matters most, and stop in time.

    PYTHONPATH=. python -m benchmarks.on_gpu --minutes 9 --out first
    PYTHONPATH=. python -m benchmarks.on_gpu --minutes 9 --continue first --out second
    PYTHONPATH=. python -m benchmarks.on_gpu --out second --report

One optimizer step of one recipe, one rung of GPT-2, one file of tests is a unit: it runs in processes of its own, has a
budget of seconds, and begins only if half of it is left. One that outlasts it is stopped, marked so, and measured again
when the command goes on with `--continue`; if its budget was whole, with twice as much. One that fails, or for which a
package is missing, says why and stops none of the others; `--again` repeats those that failed.

What there is stands in the folder after each unit: a JSON file a part, with the device and its driver, versions and
date, and `log.txt`. Folders of different devices or versions are not mixed. `--report` prints the tables of
`benchmarks/RESULTS.md` as Markdown, each time beside the bound of the program that ran.

Times are medians of several rounds after a warm-up; two programs that are compared run in turn, A B B A. Compiled
programs are kept in a folder for temporary files, so that a unit that was stopped compiles faster the next time: the
seconds of compiling are then too few. Elsewhere than on a GPU sizes are the smallest, so that the command can be tried;
`--size cpu` measures what means something on a CPU.
"""

import dataclasses
import enum
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import ladder
from benchmarks.on_gpu_report import markdown
from benchmarks.on_gpu_units import SIZES, Unit, all_units
from benchmarks.report import make_console
from benchmarks.workers import Clock, Result, run_worker

SAME = ("device", "driver", "jax")  # of all results in one folder
SPARED = 10.0  # seconds at the end, to write and to say what is left


class Book:
    """What has been measured, in a folder: a JSON file a part, and a log."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Open a folder, which is made if it is not there.

        Args:
            folder: the folder.
            say: prints a line that is also written to the log.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._say, self.parts = folder, say, read(folder)

    def take_over(self, folder: Path) -> None:
        """Copy what stands in another folder."""
        self.parts = read(folder) | self.parts
        for part in self.parts:
            self._write(part)

    def check(self, device: Result) -> None:
        """Raise if what is there was measured on another device or with other versions."""
        for part, kept in self.parts.items():
            there, here = ([found["conditions"].get(name) for name in SAME] for found in (kept["device"], device))
            if there != here:
                raise ValueError(f"{part}.json was measured on {there}, but this is {here}: take another folder.")

    def entry(self, unit: Unit) -> Result:
        """Return what is known of a unit."""
        return self.parts.get(unit.part, {}).get("units", {}).get(unit.name, {})

    def keep(self, unit: Unit, entry: Result, device: Result) -> None:
        """Write the result of a unit, and a line to the log, with what the processes wrote that failed."""
        self.parts.setdefault(unit.part, {"device": device, "units": {}})["units"][unit.name] = entry
        self._write(unit.part)
        self.log(f"{unit.part}, {unit.name}: {entry['status']}, {entry['seconds']:.0f} s. {entry.get('note', '')}")
        with (self.folder / "log.txt").open("a", encoding="utf-8") as file:
            file.writelines(row["log"] + "\n" for row in entry["rows"] if "log" in row)

    def log(self, line: str) -> None:
        """Print a line and write it to the log."""
        line = f"{time.strftime('%H:%M:%S')} {line}".rstrip()
        self._say(line)
        with (self.folder / "log.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _write(self, part: str) -> None:
        path, new = (self.folder / f"{part}.{ending}" for ending in ("json", "new"))
        new.write_text(json.dumps(self.parts[part], indent=1), encoding="utf-8")
        new.replace(path)  # so that a command that is killed leaves whole files


def read(folder: Path) -> dict[str, Any]:
    """Return the parts in a folder."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}


def measure_units(units: Iterable[Unit], book: Book, bench: ladder.Bench, *, again: bool = False) -> list[Unit]:
    """Measure what is not measured yet and fits into the time; return the units that are still to be measured."""
    waiting = []
    for unit in units:
        known = book.entry(unit)
        if known.get("status") == "done" or (known.get("status") == "failed" and not again):
            continue
        missing = [package for package in unit.packages if importlib.util.find_spec(package) is None]
        stops = known.get("stops", 0)
        budget, left = unit.seconds * 2**stops, bench.clock.left() - SPARED
        if missing:
            note = f"not installed: {', '.join(missing)}"
            entry = {"table": unit.table, "seconds": 0.0, "rows": [], "status": "left out", "note": note}
        elif left < budget / 2:
            waiting.append(unit)
            continue
        else:
            entry = measure(unit, bench, min(budget, left))
        if entry["status"] == "stopped":
            waiting.append(unit)
            entry["stops"] = stops + (budget <= left)
        book.keep(unit, entry, bench.device)
    return waiting


def measure(unit: Unit, bench: ladder.Bench, seconds: float) -> Result:
    """Return the entry of a unit, of all whose processes together may take so long: how it ended, and its rows."""
    start = time.monotonic()
    try:
        setting = dataclasses.replace(bench.setting, timeout=seconds)
        answer = unit.measure(dataclasses.replace(bench, setting=setting, clock=Clock(seconds)))
    except Exception as error:  # of any kind: what is wrong with one unit must not cost the others
        answer = {"failed": f"{type(error).__name__}: {error}"}
    entry = {"table": unit.table, "seconds": time.monotonic() - start, "rows": answer.get("rows", [answer])}
    if not entry["rows"]:
        return entry | {"status": "left out", "note": "nothing of it can be measured on this device"}
    failures = [row["failed"] for row in entry["rows"] if "failed" in row]
    if len(failures) < len(entry["rows"]):
        return entry | {"status": "done"}
    stopped = any("stopped" in row for row in entry["rows"])
    return entry | {"status": "stopped" if stopped else "failed", "note": "; ".join(failures)}


SizeName = enum.StrEnum("SizeName", {name: name for name in SIZES})


def main(
    out: Annotated[Path, typer.Option(help="The folder for what is measured.")],
    minutes: Annotated[float, typer.Option(help="For the whole command.")] = 9.0,
    go_on: Annotated[Path | None, typer.Option("--continue", help="A folder to go on from; it is not changed.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Repeat what failed.")] = False,
    parts: Annotated[str | None, typer.Option(help="Only these parts, separated by commas.")] = None,
    size: Annotated[SizeName | None, typer.Option(help="gpu on a GPU, elsewhere smallest, to try it.")] = None,
    report: Annotated[bool, typer.Option("--report", help="Measure nothing: print the tables of the folder.")] = False,
) -> None:
    """Measures what is not measured yet, or prints the tables of a folder."""
    if report:
        print(markdown(read(out)))
        return
    clock, console = Clock(60 * minutes), make_console()
    # Kernels that XLA has tried, and programs of units that were stopped, need not be made again.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "mpx-compiled"))
    book = Book(out, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
    if go_on is not None:
        book.take_over(go_on)
    bench = ladder.start_bench(clock, run_worker)
    chosen = SIZES[size or ("gpu" if bench.on_gpu else "smallest")]
    bench = dataclasses.replace(bench, setting=chosen.setting)
    try:
        book.check(bench.device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--continue") from error
    book.log(f"{bench.device}")
    names = parts and parts.split(",")
    units = [unit for unit in all_units(chosen, bench.on_gpu) if not names or unit.part in names]
    waiting = measure_units(units, book, bench, again=again)
    book.log(f"{len(units) - len(waiting)} of {len(units)} units are through.")
    if waiting:
        book.log(f"go on with --continue {out}; next: {waiting[0].part}, {waiting[0].name}.")


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
