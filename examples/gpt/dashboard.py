"""The progress of a run on a terminal, or line by line in a file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from examples.gpt.run_log import Record


@contextmanager
def progress_of(console: Console, steps: int, done: int) -> Iterator[Callable[[Record], None]]:
    """Yields what shows a record: in a terminal on a line that moves, else on a line of its own."""
    whole = lambda: Column(no_wrap=True)
    columns = (
        MofNCompleteColumn(table_column=whole()),
        BarColumn(bar_width=10, table_column=whole()),
        TimeRemainingColumn(table_column=whole()),
        # What a narrow terminal has no room for is the end of this.
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    with Progress(
        *columns, console=console, expand=True, refresh_per_second=4, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("compiling", total=steps, completed=done)

        def show(record: Record) -> None:
            progress.update(task, completed=record.step, description=line_of(record))
            if record.validation_loss is not None or not console.is_terminal:
                line = f"step {record.step}: {line_of(record)}"
                progress.console.print(line, soft_wrap=True, markup=False, highlight=False)

        yield show


def line_of(record: Record) -> str:
    """A record in one line."""
    parts = [f"loss {record.loss:.4f}"]
    if record.validation_loss is not None:
        parts.append(f"validation {record.validation_loss:.4f}")
    parts += [f"lr {record.learning_rate:.2e}", f"norm {record.gradient_norm:.2f}"]
    if record.loss_scale != 1 or record.skipped_steps:
        parts.append(f"scale {record.loss_scale:g}, {record.skipped_steps} skipped")
    if record.seconds_per_step:
        parts += [f"{record.seconds_per_step * 1e3:,.1f} ms", f"{record.tokens_per_second:,.0f} tokens/s"]
        parts.append(f"MFU {record.mfu:.1%}")
    if record.memory_bytes is not None and record.peak_memory_bytes is not None:
        parts.append(f"memory {record.memory_bytes / 1e9:.2f} GB, peak {record.peak_memory_bytes / 1e9:.2f} GB")
    return ", ".join(parts)
