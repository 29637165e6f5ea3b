"""List what is to be measured on a GPU, in the order of what matters most, in units of
a minute or two.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks import autocast, autocast_forms, ladder, optimizer_step, overhead
from benchmarks.report import Row, Sheet
from benchmarks.rungs import EXTRAS, LADDER, ON_CPU, ON_GPU, Rung, Setting


class Unit(NamedTuple):
    """One measurement: a call of a function in a process of its own."""

    name: str  # the part that it belongs to, and what it is
    table: str  # the table of its rows
    function: str  # named as `module:name`
    arguments: Row = {}  # keyword arguments that JSON can hold
    about: Row = {}  # what stands in its rows beside what the function returns
    # after which it is stopped; it does not begin with less than half of them left
    seconds: float = 150.0

    @property
    def part(self) -> str:
        """Return the part of the command."""
        return self.name.partition(":")[0]


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured."""

    setting: Setting  # of GPT-2
    scale: int = 1  # what the sizes of the optimizer's tensors are divided by
    starts: int = 8  # fresh states of what is timed
    turns: int = 6  # timed turns from each
    autocast: str = (
        "gpt2"  # the name of the size of the model in `benchmarks.autocast_forms`
    )
    overhead: tuple[int, int, int] | None = (
        None  # the size of the model there; None leaves it to the backend
    )


SIZES = {
    "gpu": Size(ON_GPU),
    "cpu": Size(ON_CPU, scale=64, autocast="tiny"),
    "smallest": Size(
        dataclasses.replace(ON_CPU, steps=1, rounds=1), 512, 1, 1, "tiny", (64, 1, 8)
    ),
}


def all_units(size: Size) -> list[Unit]:
    """Return all units."""
    later = (rung_unit(rung, size) for rung in EXTRAS)
    return list(
        itertools.chain(
            optimizers(size), gpt2(size), autocasts(size), overheads(size), later
        )
    )


def optimizers(size: Size) -> Iterator[Unit]:
    """Yield the optimizer steps."""
    times = {"starts": size.starts, "turns": size.turns}
    for tensors in ("one", "gpt2"):
        given = {"tensors": tensors, "scale": size.scale} | times
        for recipe in optimizer_step.RECIPES:
            job = {"recipe": recipe} | given
            yield Unit(
                f"optimizer: {tensors}, {recipe}",
                "optimizer",
                "benchmarks.optimizer_step:measure",
                job,
            )


def gpt2(size: Size) -> Iterator[Unit]:
    """Yield the rungs, the bottom and the top one first."""
    rungs = sorted(LADDER, key=lambda rung: rung not in (LADDER[0], LADDER[-1]))
    return (rung_unit(rung, size) for rung in rungs)


def rung_unit(rung: Rung, size: Size) -> Unit:
    """Return the unit of a rung."""
    job, about = ladder.job_of(rung, size.setting), {"rung": rung.name}
    return Unit(
        f"ladder: {rung.name}",
        "ladder",
        "benchmarks.gpt2_in_jax:measure_step",
        job,
        about,
        200.0,
    )


def autocasts(size: Size) -> Iterator[Unit]:
    """Yield the forms of autocast beside those by hand, those with a target first."""
    forms = [
        name for name, form in autocast_forms.FORMS.items() if form.beside is not None
    ]
    forms.sort(key=lambda name: name not in autocast.STEP_TARGETS)
    for params, form in itertools.product(("f32", "bf16"), forms):
        job = {
            "form": form,
            "size": size.autocast,
            "params": params,
            "starts": size.starts,
            "turns": size.turns,
        }
        yield Unit(
            f"autocast: {params}, {form}",
            "autocast",
            "benchmarks.autocast:measure_steps",
            job,
        )


def overheads(size: Size) -> Iterator[Unit]:
    """Yield whole training steps beside those by hand, and casts beside jmp's."""
    for dtype in ("bfloat16", "float16"):
        job = {
            "dtype_name": dtype,
            "size": size.overhead,
            "starts": size.starts,
            "turns": size.turns,
        }
        yield Unit(
            f"overhead: {dtype}", "steps", "benchmarks.overhead:measure_steps", job
        )
    yield Unit("overhead: casts", "casts", "benchmarks.overhead:measure_casts")


# --- Tables. ---
def sheets_of(rows: dict[str, list[Row]], rate: float) -> list[Sheet]:
    """Return the tables of rows, which come by table; `rate` is the measured rate of
    bfloat16 products.
    """
    rows = {
        table: [row for row in found if "failed" not in row]
        for table, found in rows.items()
    }
    sheets = [
        sheet
        for table, make in TABLES.items()
        if rows.get(table)
        for sheet in make(rows[table])
    ]
    return sheets + ladder.sheets(rows.get("ladder", []), rate)


TABLES: dict[str, Callable[[list[Row]], Any]] = {
    "optimizer": optimizer_step.sheets,
    "autocast": autocast.steps_sheets,
    "steps": overhead.steps_sheets,
    "casts": lambda rows: [Sheet("casts", rows, overhead.CASTS)],
}
