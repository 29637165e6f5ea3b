"""Reports of compiled steps, for `mpx program`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mpx.tools.cli import given, output
from mpx.tools.cli.errors import CommandError, users_code
from mpx.tools.plan import largest_that_fits
from mpx.tools.program import ReportComparison, StepReport, compare_reports, step_report
from mpx.tools.program.targets import get_target, target_devices

RESOLUTION = 0.03  # of the largest batch that fits: each try is a compilation


def require_target(name: str) -> None:
    """Raise if a target is not known or its compiler not installed, before any of the user's code runs."""
    try:
        target_devices(name)
    except RuntimeError as error:
        raise CommandError(str(error)) from error


def report(reference: str, shapes: Sequence[str], target: str | None, donate: Sequence[int]) -> StepReport:
    """Return the report of a step with arguments of some shapes, or of what a function without arguments returns."""
    function = given.function(reference)
    if not shapes:
        return _compiled(reference, function, target)
    arguments = tuple(map(given.shape, shapes))
    return _compiled(reference, lambda: (function, arguments, tuple(donate)), target)


def by_batch(
    reference: str, batches: Sequence[int], target: str | None, limit: int | None
) -> tuple[ReportComparison, int | None]:
    """Return reports by batch size, and the largest batch that fits, if a memory is given or the target's is known."""
    function = given.function(reference)
    report_of = functools.cache(lambda batch: _compiled(reference, function, target, batch))
    reports = {f"batch {batch:,}": report_of(batch) for batch in sorted(set(batches))}
    if limit is None and target is not None:
        limit = get_target(target).usable_bytes
    peak = lambda batch: report_of(batch).peak_bytes
    return compare_reports(reports), None if limit is None else largest_batch(peak, batches, limit)


def largest_batch(peak: Callable[[int], int], batches: Sequence[int], limit: int) -> int:
    """Return the largest batch that fits, to `RESOLUTION`; each peak is a compilation.

    Peaks are nearly a constant and so much for an example: two of them that are not far below tell where to begin.
    """
    an_example = lambda: (peak(large) - peak(small)) / max(1, large - small)
    small, large = min(batches), max(batches)
    if small == large:
        small, large = (large, 8 * large) if peak(large) <= limit else (max(1, large // 8), large)
    while large < 2**60 and limit - peak(large) > 7 * large * an_example():
        small, large = large, 8 * large
    start = small + (limit - peak(small)) / an_example() if an_example() > 0 else large
    return largest_that_fits(peak, limit, start=max(1, int(start)), resolution=RESOLUTION)


def _compiled(reference: str, make: Callable[..., Any], target: str | None, *batch: int) -> StepReport:
    size = f" for a batch of {batch[0]:,}" if batch else ""
    with output.status(f"Compiling the step{size} ..."), users_code():
        made = make(*batch)
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[1], (tuple, list)):
            raise CommandError(
                f"{reference} must return the step, a tuple of its arguments or their shapes, and (if it is not what "
                "jax.jit returned) the positions of donated ones. For a step itself give a shape for each argument."
            )
        return step_report(made[0], *made[1], target=target, donate_argnums=made[2] if len(made) == 3 else ())
