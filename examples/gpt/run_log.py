"""Record a training run: a line of JSON and a line on the terminal for each report, and a plot at the end."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.gpt import output
from examples.gpt.output import plt

NEIGHBORS = 2  # on each side of a report, in the plot


@dataclasses.dataclass(frozen=True)
class Record:
    """A report on the step just done. Losses are in nats a token."""

    step: int  # counted from 1
    loss: float  # of this step's tokens, before its update
    learning_rate: float
    gradient_norm: float  # before clipping; NaN in a skipped step
    loss_scale: float  # after the step
    skipped_steps: int  # so far
    seconds_per_step: float | None  # mean since the last report
    tokens_per_second: float | None
    mfu: float | None  # the model's own operations as a share of the measured rate of matrix products
    memory_bytes: int | None  # in use on the first device; None where nothing counts them
    peak_memory_bytes: int | None
    validation_loss: float | None = None  # None if it was not measured after this step

    def __str__(self) -> str:
        """Return the record in one line."""
        parts = [f"loss {self.loss:.4f}"]
        if self.validation_loss is not None:
            parts.append(f"validation {self.validation_loss:.4f}")
        parts += [f"lr {self.learning_rate:.2e}", f"norm {self.gradient_norm:.2f}"]
        if self.loss_scale != 1 or self.skipped_steps:
            parts.append(f"scale {self.loss_scale:g}, {self.skipped_steps} skipped")
        if self.seconds_per_step:
            parts += [f"{self.seconds_per_step * 1e3:,.1f} ms", f"{self.tokens_per_second:,.0f} tokens/s"]
            parts.append(f"MFU {self.mfu:.1%}")
        if self.memory_bytes is not None and self.peak_memory_bytes is not None:
            parts.append(f"memory {self.memory_bytes / 1e9:.2f} GB, peak {self.peak_memory_bytes / 1e9:.2f} GB")
        return ", ".join(parts)


# --- The file. ---
class RunLog:
    """A file of records, one a line. A resumed run removes the lines of later steps, which it repeats."""

    def __init__(self, path: Path, resumed_from: int = 0) -> None:
        self.path = path
        kept = [record for record in read_records(path) if record.step <= resumed_from] if resumed_from else []
        # Replaced at once, so that a run that is killed here still has its log.
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text("".join(map(_line, kept)), encoding="utf-8")
        partial.replace(path)

    def write(self, record: Record) -> None:
        """Add a line to the file, at once."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, none if there is no file. A last line that a kill cut off is left out."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(json.loads(line)))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: this is no line of a run's log: {error}") from error
    return records


def _record(content: dict[str, Any]) -> Record:
    numbers = {f.name: math.nan for f in dataclasses.fields(Record) if f.type is float and content[f.name] is None}
    return Record(**content | numbers)  # JSON has no NaN


def _line(record: Record) -> str:
    return output.dumps(dataclasses.asdict(record)) + "\n"


# --- The terminal and the plot. ---
@contextmanager
def progress_of(console: Console, steps: int, done: int) -> Iterator[Callable[[Record], None]]:
    """Yield a function that shows a record: on the line of a progress bar in a terminal, else on a line of its own."""
    columns = MofNCompleteColumn(), BarColumn(bar_width=10), TimeRemainingColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=steps, completed=done)

        def show(record: Record) -> None:
            progress.update(task, completed=record.step, description=str(record))
            if record.validation_loss is not None or not console.is_terminal:
                progress.console.print(f"step {record.step}: {record}", soft_wrap=True, markup=False, highlight=False)

        yield show


def write_plot(path: Path, records: Sequence[Record], title: str) -> None:
    """Plot losses, gradient norm and learning rate over the steps."""
    figure, (losses, norms, rates) = plt.subplots(
        3, 1, figsize=(8, 8), sharex=True, layout="constrained", height_ratios=(3, 1, 1)
    )
    steps = [record.step for record in records]
    training = np.array([record.loss for record in records])
    # The loss of a single batch is noisy, so the line is a mean of neighbors.
    means = [training[max(0, i - NEIGHBORS) : i + NEIGHBORS + 1].mean() for i in range(len(training))]
    losses.plot(steps, training, color="#56B4E9", linewidth=1.0, alpha=0.4)
    losses.plot(steps, means, color="#56B4E9", linewidth=1.5, label=f"training, mean of {2 * NEIGHBORS + 1} reports")
    evaluated = [(record.step, record.validation_loss) for record in records if record.validation_loss is not None]
    losses.plot(*np.array(evaluated).reshape(-1, 2).T, color="#D55E00", marker=".", label="validation")
    norms.plot(steps, [record.gradient_norm for record in records], color="#0072B2", linewidth=1.0)
    rates.plot(steps, [record.learning_rate for record in records], color="#009E73", linewidth=1.5)
    losses.set_title(title, loc="left")
    losses.legend(frameon=False)
    for axes, label in ((losses, "loss (nats a token)"), (norms, "gradient norm"), (rates, "learning rate")):
        axes.set_ylabel(label)
    rates.set_xlabel("training step")
    output.save_plot(figure, path)
