"""Profile a training step of GPT-2 and say which kernels lose most above their bounds:
what `benchmarks.on_gpu` calls.

Command buffers would hide the names of a GPU's kernels: the process needs
`ENVIRONMENT` before JAX starts. So a step may take longer than one that is timed.
"""

import tempfile

import jax

from benchmarks.gpt2_in_jax import compile_step, make_job_here, training
from benchmarks.report import Row, Sheet
from mpx.tools.program.step_report import report_of
from mpx.tools.program.targets import target_here

ENVIRONMENT = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
STEPS = 5  # in the trace
MOST_KERNELS = 12  # in the table
STEP_COLUMNS = {
    "step, us": "{step us:,.1f}",
    "kernels": "{kernels us:,.1f}",
    "other events": "{others us:,.1f}",
    "idle": "{idle us:,.1f}",
    "bound": "{bound us:,.1f}",
    "steps": "{steps}",
    "most of the other events": "{others}",
    "note": "{note}",
}
KERNEL_COLUMNS = {
    "kernel": "{kernel}",
    "kind": "{kind}",
    "times": "{times}",
    "us a step": "{measured us:,.1f}",
    "bound": "{bound us:,.1f}",
    "lost": "{lost us:,.1f}",
    "writes": "{writes}",
    "source": "{source}",
}


def measure(rung: Row, setting: Row) -> list[Row]:
    """Return a row of the step of median length, and one of each kernel that loses
    most; microseconds are of a step, and a bound that is not known is 0.
    """
    job, note = make_job_here(rung, setting)
    step = compile_step(job)
    report = report_of(step, target=target_here(), compile_seconds=0.0)
    run = training(job, step)
    run(STEPS)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(STEPS)
        found = report.measured(folder)
    of_step = {
        "step us": 1e6 * found.step_seconds,
        "kernels us": 1e6 * found.kernel_seconds,
        "others us": 1e6 * sum(found.others.values()),
        "idle us": 1e6 * found.idle_seconds,
        "bound us": 1e6 * (report.bound_seconds or 0),
        "steps": found.step_count,
        "others": ", ".join(list(found.others)[:3]),
    }
    of_kernels = [
        {
            "kernel": kernel.name,
            "kind": kernel.kind,
            "times": kernel.times,
            "measured us": 1e6 * kernel.measured_seconds,
            "bound us": 1e6 * (kernel.seconds or 0),
            "lost us": 1e6 * kernel.lost_seconds,
            "writes": kernel.result[:40],
            "source": kernel.source,
        }
        for kernel in found.kernels[:MOST_KERNELS]
    ]
    return [of_step | note, *of_kernels]


def sheets(rows: list[Row]) -> list[Sheet]:
    """Return the table of the step and that of its kernels."""
    kernels = [row for row in rows if "kernel" in row]
    steps = [row for row in rows if "kernel" not in row]
    return [
        Sheet("The profile of GPT-2's step", steps, STEP_COLUMNS),
        Sheet("Kernels that lose most in a step", kernels, KERNEL_COLUMNS),
    ]
