"""List what is to be measured on a GPU, in the order of what matters most, in units of
a minute or two.

To add one, yield a `Unit` from a function in `all_units`. Its rows make a table of all
their keys, unless `TABLES` has a table for them.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from benchmarks import (
    autocast,
    autocast_forms,
    ladder,
    optimizer_step,
    overhead,
    parity_at_size,
    profile_gpt2,
    torch_gpt2,
)
from benchmarks.report import Row, Sheet
from benchmarks.rungs import EXTRAS, ON_CPU, ON_GPU, RUNGS, Rung, Setting

# What trains fastest, what it stands beside, and what pays with time for memory.
RUNG_ORDER = (
    *("8bit", "stacked", "accumulate", "flash", "bf16", "padded", "split"),
    *("f32", "tf32", "chunked", "dots", "thin"),
)


class Unit(NamedTuple):
    """One measurement: a call of a function in a process of its own."""

    name: str  # the part that it belongs to, and what it is
    table: str  # the table of its rows
    function: str  # named as `module:name`
    arguments: Row = {}  # keyword arguments that JSON can hold
    about: Row = {}  # what stands in its rows beside what the function returns
    # after which it is stopped; it does not begin with less than half of them left
    seconds: float = 150.0
    environment: Mapping[str, str] = {}  # variables of its process

    @property
    def part(self) -> str:
        """Return the part of the command."""
        return self.name.partition(":")[0]


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured."""

    setting: Setting  # of GPT-2
    beside: Literal["gpu", "smallest"] = "smallest"  # beside PyTorch, and of parity
    parity_steps: int = 3
    larger: tuple[str, ...] = ()  # models for FP8, beside that of `setting`
    llama: tuple[str, int] = ("tiny", 64)  # its name, and the tokens of a sequence
    one_value: tuple[str, ...] = ("64x1",)  # widths and layers
    scale: int = 1  # what the sizes of the optimizer's tensors are divided by
    starts: int = 3  # fresh states of what is timed
    turns: int = 4  # timed turns from each
    autocast: str = (
        "gpt2"  # the name of the size of the model in `benchmarks.autocast_forms`
    )
    overhead: tuple[int, int, int] | None = (
        None  # the size of the model there; None leaves it to the backend
    )

    @property
    def times(self) -> Row:
        """Return how often two steps are timed."""
        return {"starts": self.starts, "turns": self.turns}


SIZES = {
    "gpu": Size(
        ON_GPU,
        beside="gpu",
        parity_steps=parity_at_size.STEPS,
        larger=("gpt2-350m", "gpt2-1.5b"),
        llama=("8B", 4096),
        one_value=("2048x16", "512x8"),
    ),
    "cpu": Size(ON_CPU, scale=64, autocast="tiny"),
    "smallest": Size(
        dataclasses.replace(ON_CPU, steps=1, rounds=1),
        scale=512,
        starts=1,
        turns=1,
        autocast="tiny",
        overhead=(64, 1, 8),
    ),
}


def all_units(size: Size) -> list[Unit]:
    """Return all units."""
    fused, by_hand = optimizer_step.FUSED, optimizer_step.BY_HAND
    return [
        *optimizers(size, fused, ("one", "gpt2")),
        *optimizers(size, by_hand, ("gpt2",)),
        profile(RUNGS["padded"], size.setting),
        *beside_torch(size),
        *parity(size),
        *(rung_unit(RUNGS[name], size.setting) for name in RUNG_ORDER),
        *fp8(size),
        *one_values(size),
        *llamas(size),
        *autocasts(size),
        *overheads(size),
        *optimizers(size, by_hand, ("one",)),
        *(rung_unit(rung, size.setting) for rung in EXTRAS if rung.name != "fp8"),
    ]


def optimizers(
    size: Size, recipes: Iterable[str], tensors: Iterable[str]
) -> Iterator[Unit]:
    """Yield optimizer steps."""
    for name, recipe in itertools.product(tensors, recipes):
        yield Unit(
            f"optimizer: {name}, {recipe}",
            "optimizer",
            "benchmarks.optimizer_step:measure",
            {"recipe": recipe, "tensors": name, "scale": size.scale} | size.times,
            seconds=90.0,
        )


def profile(rung: Rung, setting: Setting) -> Unit:
    """Return the unit of what kernels of GPT-2's step lose."""
    return Unit(
        f"profile: {setting.preset}, {rung.name}",
        "profile",
        "benchmarks.profile_gpt2:measure",
        ladder.job_of(rung, setting),
        environment=profile_gpt2.ENVIRONMENT,
    )


def beside_torch(size: Size) -> Iterator[Unit]:
    """Yield GPT-2 by PyTorch and by mpx in turn."""
    for i, side in enumerate(torch_gpt2.TURNS, 1):
        yield Unit(
            f"torch: {i} {side}",
            "torch",
            "benchmarks.torch_gpt2:measure",
            {"size": size.beside, "side": side},
            seconds=180.0,
        )


def parity(size: Size) -> Iterator[Unit]:
    """Yield trainings whose last losses are compared."""
    for recipe, seed in parity_at_size.RUNS:
        job = {"size": size.beside, "steps": size.parity_steps, "seed": seed}
        yield Unit(
            f"parity: {recipe}, {seed}",
            "parity",
            "benchmarks.parity_at_size:measure",
            {"recipe": recipe} | job,
            seconds=240.0,
        )


def rung_unit(rung: Rung, setting: Setting) -> Unit:
    """Return the unit of a rung."""
    return Unit(
        f"ladder: {setting.preset}, {rung.name}",
        f"ladder {setting.preset}",
        "benchmarks.gpt2_in_jax:measure_step",
        ladder.job_of(rung, setting),
        {"rung": rung.name},
        200.0,
    )


def fp8(size: Size) -> Iterator[Unit]:
    """Yield GPT-2 with its linear layers in FP8, larger ones beside bfloat16."""
    yield rung_unit(RUNGS["fp8"], size.setting)
    for preset, rung in itertools.product(size.larger, ("split", "fp8")):
        setting = dataclasses.replace(size.setting, preset=preset)
        yield rung_unit(RUNGS[rung], setting)


def one_values(size: Size) -> Iterator[Unit]:
    """Yield how far samplers are from trainers."""
    for name, sequences in itertools.product(size.one_value, (16, 256)):
        yield Unit(
            f"one value: {name}, {sequences}",
            "one value: mean |difference of log p|",
            "benchmarks.one_value:measure",
            {"size": name, "sequences": sequences, "length": 24},
        )


def llamas(size: Size) -> Iterator[Unit]:
    """Yield a Llama as large as one GPU trains, its layers' inputs in 8 bits and as
    they are.
    """
    name, length = size.llama
    for kept in (True, False):
        yield Unit(
            f"llama: {name}{', inputs in 8 bits' * kept}",
            "llama",
            "benchmarks.llama:measure",
            {"size": name, "kept": kept, "length": length},
            seconds=240.0,
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
        } | size.times
        yield Unit(
            f"autocast: {params}, {form}",
            "autocast",
            "benchmarks.autocast:measure_steps",
            job,
        )


def overheads(size: Size) -> Iterator[Unit]:
    """Yield whole training steps beside those by hand, and casts beside jmp's."""
    for dtype in ("bfloat16", "float16"):
        job = {"dtype_name": dtype, "size": size.overhead} | size.times
        yield Unit(
            f"overhead: {dtype}", "steps", "benchmarks.overhead:measure_steps", job
        )
    yield Unit("overhead: casts", "casts", "benchmarks.overhead:measure_casts")


# --- Tables. ---
def sheets_of(rows: dict[str, list[Row]], rate: float) -> list[Sheet]:
    """Return the tables of rows, which come by table; `rate` is the measured rate of
    bfloat16 products.
    """
    found = []
    for table, all_rows in rows.items():
        ran = [row for row in all_rows if "failed" not in row]
        kind, _, preset = table.partition(" ")
        if kind == "ladder":
            found.append(ladder.measured_sheet(all_rows, preset, rate))
        elif ran:
            make = TABLES.get(kind)
            found += make(ran) if make else [of_keys(table, ran)]
    return found


def of_keys(title: str, rows: list[Row]) -> Sheet:
    """Return a table with a column for each key."""
    examples = {name: value for row in rows for name, value in row.items()}
    columns = {
        name: f"{{{name}:.4g}}" if isinstance(value, float) else f"{{{name}}}"
        for name, value in examples.items()
    }
    return Sheet(title, rows, columns)


TABLES: dict[str, Callable[[list[Row]], Any]] = {
    "optimizer": optimizer_step.sheets,
    "profile": profile_gpt2.sheets,
    "torch": torch_gpt2.sheets,
    "parity": parity_at_size.sheets,
    "autocast": autocast.steps_sheets,
    "steps": overhead.steps_sheets,
    "casts": lambda rows: [Sheet("casts", rows, overhead.CASTS)],
}
