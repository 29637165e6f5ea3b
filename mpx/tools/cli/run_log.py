"""Run logs: files of JSON lines, one for each report of a training."""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from mpx import _tables
from mpx.tools.cli.errors import CommandError

_KEYS = ("step", "loss", "loss_scale", "skipped_steps")
_LISTED = 20  # changes of the scale in a printed summary
_TOO_MANY = 10  # steps skipped in a row, as for `check_health`


@dataclasses.dataclass(frozen=True)
class Line:
    """What is read of a line: the step, its loss, and the scale and the count of skipped steps after it."""

    step: int
    loss: float
    loss_scale: float
    skipped_steps: int


@dataclasses.dataclass(frozen=True)
class Summary(_tables.OldTable):
    """How a run went; prints as tables.

    Attributes:
        lines: those of the log, one or more, in the order of their steps.
    """

    lines: tuple[Line, ...]

    @property
    def smallest(self) -> Line | None:
        """The line of the smallest finite loss; None if there is none."""
        return min((line for line in self.lines if math.isfinite(line.loss)), key=lambda x: x.loss, default=None)

    @property
    def scales(self) -> list[Line]:
        """The first line, and each at which the loss scale is another one than before."""
        pairs = itertools.pairwise(self.lines)
        return [self.lines[0], *[line for before, line in pairs if line.loss_scale != before.loss_scale]]

    @property
    def stuck_since(self) -> int | None:
        """The step after which every step was skipped, to the last line, under a scale that shrinks no further.

        None if those are fewer than 10. While the scale still shrinks it looks for its range, and nothing is stuck.
        """
        start = len(self.lines) - 1
        while start and _is_stuck(self.lines[start - 1], self.lines[start]):
            start -= 1
        since = self.lines[start].step
        return since if self.lines[-1].step - since >= _TOO_MANY else None

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        first, last, smallest = self.lines[0], self.lines[-1], self.smallest
        return {
            "lines": len(self.lines),
            "first_step": first.step,
            "last_step": last.step,
            "first_loss": first.loss,
            "last_loss": last.loss,
            "smallest_loss": None if smallest is None else smallest.loss,
            "smallest_loss_step": None if smallest is None else smallest.step,
            "nonfinite_losses": [line.step for line in self.lines if not math.isfinite(line.loss)],
            "skipped_steps": last.skipped_steps,
            "loss_scales": [{"step": line.step, "loss_scale": line.loss_scale} for line in self.scales],
            "stuck_since": self.stuck_since,
        }

    def __str__(self) -> str:
        """The tables as text."""
        return "\n\n".join(f"{title}\n{_tables.text_table(lines)}" for title, lines in self._tables())

    def __rich__(self) -> Any:
        """The tables as Rich shows them; only Rich calls this, so it is there."""
        from rich.console import Group

        return Group(*[_tables.rich_table(title, lines) for title, lines in self._tables()])

    def _tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        first, last, smallest, stuck = self.lines[0], self.lines[-1], self.smallest, self.stuck_since
        nonfinite = sum(not math.isfinite(line.loss) for line in self.lines)
        how = [
            ("of the run", ""),
            ("steps", f"{first.step:,} to {last.step:,}"),
            ("first loss", f"{first.loss:.4g}"),
            ("last loss", f"{last.loss:.4g}"),
            ("smallest loss", "none" if smallest is None else f"{smallest.loss:.4g} at step {smallest.step:,}"),
            ("losses that are infinite or NaN", f"{nonfinite:,}"),
            ("skipped steps", f"{last.skipped_steps:,}"),
            ("stuck", "no" if stuck is None else f"since step {stuck:,}: every step was skipped"),
        ]
        shown = self.scales[-_LISTED:]
        title = f"Loss scale: {len(self.scales) - 1:,} changes" + (", the last ones" if shown != self.scales else "")
        rows = [(f"{line.step:,}", f"{line.loss_scale:g}") for line in shown]
        return [(f"{len(self.lines):,} lines", how), (title, [("from step", "loss scale"), *rows])]


def read(path: pathlib.Path) -> tuple[Summary, list[str]]:
    """The summary of a run log, and what a reader of it must know.

    Raises:
        CommandError: if the file is no run log; the message names the line.
    """
    try:
        texts = path.read_bytes().splitlines()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.") from error
    lines, notes = [], []
    for number, text in enumerate(texts, start=1):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            if number < len(texts) or not lines:
                raise CommandError(f"{path}, line {number}: this is no JSON.") from error
            notes.append("The last line is cut off, and left out.")
        else:
            lines.append(_line(content, f"{path}, line {number}"))
    if not lines:
        raise CommandError(f"{path} is empty.")
    _require_ascending(lines, path)
    return Summary(tuple(lines)), notes


def _line(content: Any, where: str) -> Line:
    missing = [key for key in _KEYS if not isinstance(content, dict) or key not in content]
    if missing:
        raise CommandError(
            f"{where}: there is no {', '.join(missing)}. Each line of a run log is a JSON object with "
            f"{', '.join(_KEYS)}."
        )
    step, loss, scale, skipped = (content[key] for key in _KEYS)
    loss = math.nan if loss is None else loss  # JSON has no other way to say it
    if not _is_number(loss, (int, float)) or not _is_number(scale, (int, float)):
        raise CommandError(f"{where}: loss and loss_scale must be numbers, but are {loss!r} and {scale!r}.")
    if not _is_number(step, int) or not _is_number(skipped, int):
        raise CommandError(f"{where}: step and skipped_steps must be integers, but are {step!r} and {skipped!r}.")
    return Line(step, float(loss), float(scale), skipped)


def _is_number(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _require_ascending(lines: Sequence[Line], path: pathlib.Path) -> None:
    for number, (before, line) in enumerate(itertools.pairwise(lines), start=2):
        if line.step <= before.step:
            raise CommandError(
                f"{path}, line {number}: step {line.step} comes after step {before.step}. Are there several runs in it?"
            )


def _is_stuck(before: Line, line: Line) -> bool:
    skipped = line.skipped_steps - before.skipped_steps
    return skipped == line.step - before.step and line.loss_scale >= before.loss_scale
