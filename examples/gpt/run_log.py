"""What a run writes down: a line of JSON for each report, and at the end a plot of them."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from examples.gpt import output


@dataclasses.dataclass(frozen=True)
class Record:
    """A report on the step just done. Losses are in nats a token.

    Attributes:
        step: counted from 1.
        loss: of this step's tokens, before its update.
        learning_rate: of this step.
        gradient_norm: before clipping; not a number in a step that was skipped.
        loss_scale: after the step.
        skipped_steps: so far.
        seconds_per_step: mean since the last report, until the device had finished.
        tokens_per_second: at that speed.
        mfu: the share of the measured rate of matrix products that the model's own operations make up.
        memory_bytes: in use on the first device; None where nothing counts them.
        peak_memory_bytes: the most there were.
        validation_loss: None if it was not taken after this step.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    loss_scale: float
    skipped_steps: int
    seconds_per_step: float | None
    tokens_per_second: float | None
    mfu: float | None
    memory_bytes: int | None
    peak_memory_bytes: int | None
    validation_loss: float | None = None


class RunLog:
    """A file of records, one a line; None stands for numbers that JSON does not have.

    Args:
        path: of the file.
        resumed_from: the step of the checkpoint that the run goes on from. Later lines of the file belong to steps that
            are done again, and are removed. 0 begins anew.
    """

    def __init__(self, path: Path, resumed_from: int = 0) -> None:
        self.path = path
        kept = [record for record in read_records(path) if record.step <= resumed_from] if resumed_from else []
        # At once: a run that is killed here has its log.
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text("".join(_line(record) for record in kept), encoding="utf-8")
        partial.replace(path)

    def write(self, record: Record) -> None:
        """Adds a line, at once: a run that is killed has its log."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def read_records(path: Path) -> list[Record]:
    """The records of a file, none if there is no file. A last line that was cut off by a kill is left out.

    Raises:
        ValueError: if another line is none of a log.
    """
    if not path.exists():
        return []
    records = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: this is no line of a run's log: {error}") from error
    return records


def _record(content: dict[str, Any]) -> Record:
    """The record of a line."""
    values = []
    for field in dataclasses.fields(Record):
        value = content[field.name]
        value = math.nan if value is None and field.type is float else value
        if not isinstance(value, (int, field.type)) or isinstance(value, bool):
            raise TypeError(f"{field.name} is {value!r}.")
        values.append(value)
    return Record(*values)


def write_plot(path: Path, records: Sequence[Record], title: str) -> None:
    """Losses, gradient norm and learning rate over the steps."""
    figure, (losses, norms, rates) = plt.subplots(
        3, 1, figsize=(8, 8), sharex=True, layout="constrained", height_ratios=(3, 1, 1)
    )
    steps = [record.step for record in records]
    losses.plot(steps, [record.loss for record in records], color="#56B4E9", linewidth=1.0, label="training")
    evaluated = [record for record in records if record.validation_loss is not None]
    losses.plot(
        [record.step for record in evaluated],
        [record.validation_loss for record in evaluated],
        color="#D55E00", linewidth=1.8, marker="o", markersize=3, label="validation",
    )  # fmt: skip
    norms.plot(steps, [record.gradient_norm for record in records], color="#0072B2", linewidth=1.0)
    rates.plot(steps, [record.learning_rate for record in records], color="#009E73", linewidth=1.5)
    losses.set_title(title, loc="left")
    losses.legend(frameon=False)
    labels = ("loss (nats a token)", "gradient norm", "learning rate")
    for axes, label in zip((losses, norms, rates), labels, strict=True):
        axes.set_ylabel(label)
        output.tidy(axes)
    rates.set_xlabel("training step")
    output.save_plot(figure, path)


def _line(record: Record) -> str:
    return output.dumps(dataclasses.asdict(record)) + "\n"
