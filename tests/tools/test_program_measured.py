"""Check how the times of a profile are joined with the kernels of a report: of real
profiles of this machine, and of written ones as a GPU makes them.
"""

import dataclasses
import os
import pathlib
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from mpx.tools.program import MeasuredStep, Target, step_report
from mpx.tools.program.graph import Program
from mpx.tools.program.kernels import kernels
from mpx.tools.program.text import parse

PROGRAMS = pathlib.Path(__file__).parent / "programs"
W = jnp.full((256, 256), 1e-3)


@jax.jit
def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


@jax.jit
def chain(x, w):
    """Each product takes the one before: no two can run at the same time."""
    for _ in range(6):
        x = x @ w
    return x


@jax.jit
def loop(x, w):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5)[0]


def traced(folder, *calls, times=1):
    """Trace calls of functions that are compiled before, one after another."""
    for fun, *args in calls:
        jax.block_until_ready(fun(*args))
    with jax.profiler.trace(folder):
        for _ in range(times):
            for fun, *args in calls:
                jax.block_until_ready(fun(*args))


def seconds_in(folder, module):
    """Return the sum of the durations of each instruction of a module in a trace."""
    (file,) = folder.rglob("*.xplane.pb")
    seconds = Counter()
    for plane in ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module") == module:
                    seconds[stats["hlo_op"]] += (event.end_ns - event.start_ns) / 1e9
    return seconds


@pytest.mark.parametrize(("fun", "args"), [(step, (W, W)), (chain, (W, W))])
def test_each_kernel_of_a_step_has_its_time_in_the_trace(tmp_path, fun, args):
    report = step_report(fun, *args)
    traced(tmp_path, (fun, *args))
    found = report.measured(tmp_path)
    of_trace = seconds_in(tmp_path, report.module)
    assert {x.name for x in report.kernels} == {x.name for x in found.kernels}
    for kernel in found.kernels:
        assert kernel.measured_seconds == pytest.approx(of_trace[kernel.name])
        assert kernel.measured_seconds > 0
        assert kernel.lost_seconds == kernel.measured_seconds  # without a bound
    assert found.others == {}
    # Where kernels run at the same time, their sum is more than the time they take.
    assert found.step_seconds <= found.kernel_seconds + found.idle_seconds + 1e-9
    assert 0 <= found.idle_seconds < found.step_seconds


def test_kernels_that_wait_for_each_other_take_no_longer_than_the_step(tmp_path):
    report = step_report(chain, W, W)
    traced(tmp_path, (chain, W, W), times=3)
    found = report.measured(tmp_path)
    assert found.step_count == 3
    assert 0 < found.kernel_seconds <= found.step_seconds


def test_a_function_and_what_jax_jit_returns_for_it_have_the_same_names(tmp_path):
    """What the user runs is compiled a second time, and donates as the report is
    told.
    """
    plain = lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    report = step_report(plain, W, W, donate_argnums=0)
    run = jax.jit(plain, donate_argnums=0)
    traced(tmp_path, (lambda: run(W + 0, W),))
    found = report.measured(tmp_path)
    assert all(kernel.measured_seconds for kernel in found.kernels)
    assert found.others == {}


def test_the_kernels_of_a_loop_run_as_often_as_it_does_and_the_loop_is_none(tmp_path):
    report = step_report(loop, W, W)
    assert report.callers
    traced(tmp_path, (loop, W, W), times=2)
    found = report.measured(tmp_path)
    of_trace = seconds_in(tmp_path, report.module)
    assert set(report.callers) <= set(of_trace)  # a CPU traces the loop too
    (product,) = [x for x in found.kernels if x.flops]
    assert product.times == 5
    assert 0 < product.measured_seconds < of_trace[product.name]  # of two steps
    assert not set(report.callers) & set(found.others)


def test_another_program_in_the_trace_does_not_count(tmp_path):
    """Both have a product and what is behind it, and so names in common."""
    other = jax.jit(lambda w, x: jnp.sin(x @ w))
    report = step_report(chain, W, W)
    traced(tmp_path, (chain, W, W), (other, W, W))
    found = report.measured(tmp_path)
    assert (found.step_count, found.others) == (1, {})
    of_trace = seconds_in(tmp_path, report.module)
    of_other = seconds_in(tmp_path, step_report(other, W, W).module)
    assert of_other.total() > 0
    assert found.kernel_seconds == pytest.approx(of_trace.total())


def test_a_folder_without_the_program_is_refused_in_words(tmp_path):
    report = step_report(chain, W, W)
    with pytest.raises(
        ValueError, match="no event of `jit_chain`, the program of this"
    ):
        report.measured(tmp_path)
    traced(tmp_path, (loop, W, W))
    with pytest.raises(ValueError, match=r"but of \['jit_loop'\]. Report the function"):
        report.measured(tmp_path)


def test_events_of_another_step_with_the_same_name_are_told(tmp_path):
    """Both are called `jit_step`, as two steps of one training may be."""

    def of_loop(x, w):
        return jax.lax.sort(loop(x, w))

    of_loop.__name__ = "step"
    traced(tmp_path, (jax.jit(of_loop), W, W))
    found = step_report(step, W, W).measured(tmp_path)
    assert found.others
    assert list(found.others.values()) == sorted(found.others.values(), reverse=True)
    assert not all(kernel.measured_seconds for kernel in found.kernels)
    own = step_report(jax.jit(of_loop), W, W).measured(tmp_path)
    assert own.others == {}


MODULE, GPU, HOST = "jit_layers", "/device:GPU:0", "/host:CPU"
FIGURES = Target(
    "a device", 10**6, 1e9, {"bf16": 1e9, "tf32": 1e8}, launch_seconds=1e-3
)
LOOP = (
    "loop_dynamic_slice_fusion",
    "loop_dynamic_update_slice_fusion",
    "loop_add_fusion",
    "gemm_fusion_dot",
    "loop_reduce_fusion",
)
# What one step runs on a GPU, and for how many nanoseconds.
STEP = [
    ("copy.13", 10),
    ("copy.12", 20),
    ("loop_broadcast_fusion", 30),
    *[(name, 100 * (i + 1)) for i, name in enumerate(LOOP)] * 3,
]


def gpu_report():
    """Return the report of the saved loop of three layers, for a device whose figures
    are known.
    """
    text = (PROGRAMS / "scan.txt").read_text()
    return dataclasses.replace(
        step_report(chain, W, W),
        module=MODULE,
        callers=("while.6",),
        kernels=tuple(x for _, x in kernels(Program(parse(text)), FIGURES, "tf32")),
    )


def one_step(start, scale=1, device=GPU, stream="Stream #7(Kernel)", **stats):
    """Return the events of a step, one nanosecond apart, and when the last one ends."""
    events = []
    for name, duration in STEP:
        stat = {"hlo_op": name, "hlo_module": MODULE, "program_id": 5} | stats
        event = device, stream, f"void {name}_kernel", start, scale * duration, stat
        events.append(event)
        start += scale * duration + 1
    return events, start - 1


def written(folder, events):
    """Write events (plane, line, name, start and duration in nanoseconds, stats) as a
    profile.
    """
    planes = {plane: {} for plane, *_ in events}
    for plane, line, *event in events:
        planes[plane].setdefault(line, []).append(event)
    text = ""
    for plane, lines in planes.items():
        text += f'planes {{ name: "{plane}"\n'
        ids = {}  # of the names of events and stats
        for line, of_line in lines.items():
            text += f'lines {{ name: "{line}"\n'
            for name, start, duration, stats in of_line:
                text += f"events {{ metadata_id: {ids.setdefault(name, len(ids) + 1)}"
                text += f" offset_ps: {1000 * start} duration_ps: {1000 * duration}"
                for stat, value in stats.items():
                    kind = "str_value" if isinstance(value, str) else "int64_value"
                    value = f'"{value}"' if isinstance(value, str) else value
                    number = ids.setdefault(stat, len(ids) + 1)
                    text += f" stats {{ metadata_id: {number} {kind}: {value} }}"
                text += " }\n"
            text += "}\n"
        for kind in ("event", "stat"):
            for name, number in ids.items():
                text += f"{kind}_metadata {{ key: {number} value {{ id: {number}"
                text += f' name: "{name}" }} }}\n'
        text += "}\n"
    file = folder / "plugins" / "profile" / "then" / "host.xplane.pb"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return file


def test_a_gpu_has_the_times_of_its_step_of_median_length(tmp_path):
    """Three steps, whose kernels take one, three and two times as long. Idle are the
    nanoseconds between the events of the last one, and not those between steps.
    """
    events = []
    start = 1000
    for scale in (1, 3, 2):
        of_step, end = one_step(start, scale)
        events += of_step
        start = end + 5000  # the host prepares the next one
    written(tmp_path, events)
    found = gpu_report().measured(tmp_path)
    assert found.step_count == 3
    seconds = {x.name: round(1e9 * x.measured_seconds) for x in found.kernels}
    assert seconds["copy.12"] == 2 * 20
    assert seconds["gemm_fusion_dot"] == 3 * 2 * 400
    total = 2 * sum(duration for _, duration in STEP)
    assert round(1e9 * found.kernel_seconds) == total
    assert round(1e9 * found.step_seconds) == total + len(STEP) - 1
    assert round(1e9 * found.idle_seconds) == len(STEP) - 1


def test_a_kernel_without_an_event_takes_no_time_and_starts_no_step(tmp_path):
    events, start = [], 0
    for _ in range(3):
        of_step, start = one_step(start + 1000)
        events += of_step[1:]
    written(tmp_path, events)
    found = gpu_report().measured(tmp_path)
    assert found.step_count == 3
    (unseen,) = [x.name for x in found.kernels if not x.measured_seconds]
    assert unseen == "copy.13"
    total = sum(duration for _, duration in STEP[1:])
    assert round(1e9 * found.kernel_seconds) == total


def test_the_largest_loss_above_the_bound_stands_first(tmp_path):
    report = gpu_report()
    bounds = {x.name: (x.seconds or 0) / x.times for x in report.kernels}
    assert all(bounds.values())
    # A second above the bound for each nanosecond that it takes of a step.
    events, start = [], 0
    for name, duration in STEP:
        length = round(1e9 * (bounds[name] + duration))
        stats = {"hlo_op": name, "hlo_module": MODULE, "program_id": 5}
        events.append((GPU, "Stream #7(Kernel)", "kernel", start, length, stats))
        start += length
    written(tmp_path, events)
    found = report.measured(tmp_path)
    expected = Counter()
    for name, duration in STEP:
        expected[name] += duration
    losses = {x.name: x.lost_seconds for x in found.kernels}
    assert losses == pytest.approx(dict(expected))
    assert list(losses) == [name for name, _ in expected.most_common()]


def test_launches_other_streams_and_other_devices_count_as_what_they_are(tmp_path):
    """The host's launches have the names of kernels. What runs on a second stream
    meanwhile leaves less idle time: 300 nanoseconds from the start, beside the first
    kernels. It and a second run of a name belong to the step.
    """
    events, end = one_step(0)
    beside = {"hlo_module": MODULE, "program_id": 5}
    split = beside | {"hlo_op": "loop_reduce_fusion"}
    others = [
        *one_step(0, 50, HOST, "python")[0] * 2,
        *one_step(7, 1, "/device:GPU:1")[0][:-1],
        (GPU, "Stream #14(MemcpyD2D)", "MemcpyD2D", 5, 300, beside),
        (GPU, "Stream #7(Kernel)", "second half", end, 11, split),
        (GPU, "Stream #7(Kernel)", "of nobody", 90_000, 11, {}),
        *one_step(50_000, 1, program_id=6)[0][:-1],
    ]
    written(tmp_path, [*others, *events])
    found = gpu_report().measured(tmp_path)
    assert found.step_count == 1
    assert {name: round(1e9 * x) for name, x in found.others.items()} == {
        "MemcpyD2D": 300
    }
    seconds = {x.name: round(1e9 * x.measured_seconds) for x in found.kernels}
    assert seconds["loop_reduce_fusion"] == 3 * 500 + 11
    assert round(1e9 * found.step_seconds) == end + 11
    gaps = [start for *_, start, _, _ in events[1:] if start > 305]
    assert round(1e9 * found.idle_seconds) == len(gaps)


def test_a_trace_that_begins_within_a_step_has_the_times_of_whole_ones(tmp_path):
    events, start = one_step(0)
    events = events[10:]
    for _ in range(3):
        of_step, start = one_step(start + 1000)
        events += of_step
    written(tmp_path, events)
    found = gpu_report().measured(tmp_path)
    assert found.step_count == 3
    total = sum(duration for _, duration in STEP)
    assert round(1e9 * found.kernel_seconds) == total
    assert round(1e9 * found.step_seconds) == total + len(STEP) - 1


def test_a_cpu_tells_runs_apart_that_overlap_and_devices(tmp_path):
    """The second run takes twice as long and begins within the first one; a second
    device runs less.
    """
    cpu = {"device": HOST, "device_ordinal": 0}
    first, _ = one_step(0, 1, stream="one", run_id=-3, **cpu)
    second, _ = one_step(40, 2, stream="two", run_id=4, **cpu)
    elsewhere, _ = one_step(0, 1, HOST, device_ordinal=1, run_id=4)
    written(tmp_path, [*elsewhere, *first, *second])
    found = gpu_report().measured(tmp_path)
    assert found.step_count == 2
    total = sum(duration for _, duration in STEP)
    assert round(1e9 * found.kernel_seconds) == total
    assert round(1e9 * found.step_seconds) == total + len(STEP) - 1


def test_kernels_that_a_command_buffer_hides_are_told_with_the_remedy(tmp_path):
    stats = {"hlo_module": MODULE, "program_id": 5}
    hidden = [
        (GPU, "Stream #7(Kernel)", "gemm", 0, 500, stats | {"hlo_op": "while.6"}),
        (GPU, "Stream #7(Kernel)", "loop", 600, 100, stats),
        (GPU, "Stream #7(Kernel)", "copy", 800, 10, stats | {"hlo_op": "copy.12"}),
    ]
    written(tmp_path, hidden)
    found = gpu_report().measured(tmp_path)
    assert {name: round(1e9 * x) for name, x in found.others.items()} == {
        "while.6": 500,
        "loop": 100,
    }
    unseen = [x.name for x in found.kernels if not x.measured_seconds]
    assert len(unseen) == len(found.kernels) - 1
    assert "7 of 8 kernels have no event." in str(found)
    assert "Most of the trace is not in the report" in str(found)
    assert "XLA_FLAGS=--xla_gpu_enable_command_buffer=" in str(found)


def test_the_newest_trace_is_read(tmp_path):
    for name, scale, age in (("new", 2, 0), ("old", 1, 100)):
        file = written(tmp_path / name, one_step(0, scale)[0])
        os.utime(file, (1e9 - age, 1e9 - age))
    found = gpu_report().measured(tmp_path)
    total = sum(duration for _, duration in STEP)
    assert round(1e9 * found.kernel_seconds) == 2 * total


def test_what_was_measured_is_printed_and_goes_into_json(tmp_path):
    beside = {"hlo_module": MODULE, "program_id": 5, "hlo_op": "fusion.99"}
    events, end = one_step(0)
    events.append((GPU, "Stream #7(Kernel)", "other", end + 9, 40, beside))
    written(tmp_path, events)
    found = gpu_report().measured(tmp_path)
    assert isinstance(found, MeasuredStep)
    text = str(found)
    assert "Most of the trace" not in text
    for line in (
        "A step takes 4.6 us from its first event to its last, the median of 1: kernels"
        " 4.6 us, other events 0.0 us, idle 0.0 us. 0 of 8 kernels have no event.",
        "Kernels that lose most",
        "\ntimes   us    bound       lost  name ",
        "\n    3  0.4  9,388.6  -28,164.6  gemm_fusion_dot  ",
        "Events that no kernel has\nname        us\nfusion.99  0.0",
    ):
        assert line in text, text
    values = found.as_dict()
    assert values["kernels"][0]["measured_seconds"] >= 0
    assert values["kernels"][0]["lost_seconds"] == found.kernels[0].lost_seconds
    assert values["others"] == {"fusion.99": pytest.approx(40e-9)}
