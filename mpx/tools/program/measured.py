"""Join the times of a profile with the kernels of a compiled step."""

import dataclasses
import os
import pathlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from jax.profiler import ProfileData

from mpx import _tables
from mpx.tools.program.kernels import Kernel

_MOST_ROWS = 12  # of kernels that are printed


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredKernel(Kernel):
    """A kernel of a report, with the time that it took in a trace."""

    measured_seconds: float  # of all its runs in a step; 0 if it has no event

    @property
    def lost_seconds(self) -> float:
        """The time above the bound, which counts as 0 if it is not known."""
        return self.measured_seconds - (self.seconds or 0)


@dataclasses.dataclass(frozen=True)
class MeasuredStep(_tables.Result):
    """The times of a step in a trace, on one device; prints as tables.

    Of several steps it is the one of median length.
    """

    step_count: int  # how many steps the trace has
    step_seconds: float  # from the start of the first event to the end of the last
    idle_seconds: float  # of them, those in which nothing runs: launches and the host
    kernels: tuple[MeasuredKernel, ...]  # the largest loss first
    others: Mapping[str, float]  # seconds of events that no kernel has, by their names

    @property
    def kernel_seconds(self) -> float:
        """The sum over kernels, which is more than their time where some run at the
        same time.
        """
        return sum(kernel.measured_seconds for kernel in self.kernels)

    def _parts(self) -> Iterator[_tables.Table | str]:
        other_seconds = sum(self.others.values())
        yield (
            f"A step takes {1e6 * self.step_seconds:,.1f} us from its first event to"
            f" its last, the median of {self.step_count}: kernels"
            f" {1e6 * self.kernel_seconds:,.1f} us, other events"
            f" {1e6 * other_seconds:,.1f} us, idle {1e6 * self.idle_seconds:,.1f} us."
            f" {sum(not x.measured_seconds for x in self.kernels)} of"
            f" {len(self.kernels)} kernels have no event."
        )
        if other_seconds > self.kernel_seconds:
            yield (
                "Most of the trace is not in the report. Either this is another"
                " program: report the step that runs, with the same arguments, options"
                " and device. Or command buffers hide the names: run and report with"
                " XLA_FLAGS=--xla_gpu_enable_command_buffer="
            )
        rows = [
            (
                str(x.times),
                f"{1e6 * x.measured_seconds / x.times:,.1f}",
                f"{1e6 * (x.seconds or 0) / x.times:,.1f}",
                f"{1e6 * x.lost_seconds:,.1f}",
                x.name,
                x.kind,
                x.result[:40],
                x.source,
            )
            for x in self.kernels[:_MOST_ROWS]
        ]
        head = "times us bound lost name kind writes source".split()
        title = (
            "Kernels that lose most: us and bound of a run, lost in all runs of a step"
        )
        yield _tables.Table(title, [head, *rows], right=range(4))
        rows = [(name, f"{1e6 * x:,.1f}") for name, x in self.others.items()]
        if rows:
            yield _tables.Table("Events that no kernel has", [("name", "us"), *rows])


class _Event(NamedTuple):
    start: int  # in nanoseconds
    end: int
    name: str  # of its instruction, where the trace tells it
    run: object  # of the program; a GPU's trace does not tell it


def measured_step(
    folder: str | pathlib.Path,
    module: str,
    kernels: Sequence[Kernel],
    callers: Sequence[str],
) -> MeasuredStep:
    """Return what the kernels of a program took in the newest trace below a folder.

    `callers` are the instructions that only run others.
    """
    events = sorted(_events(folder, module, callers))
    # Kernels in loops have more events. The first one of the others starts a step.
    counts = Counter(x.name for x in events)
    first = min(kernels, key=lambda x: counts[x.name] or len(events)).name
    number, steps = 0, defaultdict(list)
    for x in events:
        number += x.name == first
        steps[x.run or number or 1].append(x)
    length, step = median_low(
        (max(y.end for y in x) - x[0].start, x) for x in steps.values()
    )
    times = Counter[str]()
    idle, end = 0, step[0].start
    for x in step:
        times[x.name] += x.end - x.start
        idle += max(0, x.start - end)
        end = max(end, x.end)
    measured = [
        MeasuredKernel(**vars(x), measured_seconds=times.pop(x.name, 0) / 1e9)
        for x in kernels
    ]
    return MeasuredStep(
        len(steps),
        length / 1e9,
        idle / 1e9,
        tuple(sorted(measured, key=lambda x: -x.lost_seconds)),
        {name: time / 1e9 for name, time in times.most_common()},
    )


def _events(
    folder: str | pathlib.Path, module: str, callers: Sequence[str]
) -> list[_Event]:
    """Return the events of a module in the newest trace, those of one device."""
    found = defaultdict(list)
    files = pathlib.Path(folder).rglob("*.xplane.pb")
    for file in sorted(files, key=os.path.getmtime)[-1:]:
        data = ProfileData.from_file(str(file))
        # Beside a GPU's kernels, their launches by the host have the same names.
        devices = [plane for plane in data.planes if plane.name.startswith("/device:")]
        for plane in devices or data.planes:
            for line in plane.lines:
                for x in line.events:
                    of = defaultdict(str, x.stats)
                    place = f"{of['program_id']} {of['device_ordinal']} {plane.name}"
                    # A CPU's event of a loop is around those of its kernels.
                    if of["hlo_module"] and x.name not in callers:
                        name = of["hlo_op"] or x.name
                        event = _Event(
                            int(x.start_ns), int(x.end_ns), name, of["run_id"]
                        )
                        found[of["hlo_module"], place].append(event)
    # Another program may have the same name.
    events = max((found[x] for x in found if x[0] == module), key=len, default=[])
    if not events:
        raise ValueError(
            f"`measured`: the newest trace (`*.xplane.pb`) in {folder} has no event of"
            f" `{module}`, the program of this report, but of"
            f" {sorted({x[0] for x in found}) or 'none'}. Report the function that"
            " `jax.jit` returned, run it under `with jax.profiler.trace(folder):`, and"
            " wait for its results there."
        )
    return events
