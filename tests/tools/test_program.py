"""Check what is read off compiled programs, against programs that are counted by hand.

The programs in `programs/` were compiled by XLA for an H200 (jax 0.10.2) and are saved
without the settings of their kernels, so that they are read on any machine.
"""

import dataclasses
import pathlib
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mpx.tools.program import TARGETS, StepReport, Target, step_report
from mpx.tools.program.graph import Program
from mpx.tools.program.kernels import kernels
from mpx.tools.program.targets import target_here
from mpx.tools.program.text import parse
from tests.helpers import eight_cpu_devices

PROGRAMS = pathlib.Path(__file__).parent / "programs"
SHAPE = jax.ShapeDtypeStruct


def read(name):
    return Program(parse((PROGRAMS / f"{name}.txt").read_text()))


def counted(program):
    return [kernel for _, kernel in kernels(program, None, "tf32")]


def lengths(program):
    return [x.trips for x in program.nodes if x.op == "while"]


def test_a_loop_counts_each_kernel_as_often_as_it_runs_and_a_part_of_an_array_as_that_part():
    """Three layers of 128 x 128 weights on 256 x 128 activations, which the loop
    stacks.
    """
    program = read("scan")
    assert sum(kernel.times for kernel in counted(program)) == 3 + 5 * 3
    weights, activations = 2 * 128 * 128, 2 * 256 * 128
    in_loop = [kernel for kernel in counted(program) if kernel.times == 3]
    slices = [
        kernel.bytes for kernel in in_loop if kernel.kind == "conversions and copies"
    ]
    assert slices == [2 * weights + 4, 2 * activations + 4]  # and the index
    (product,) = [kernel for kernel in in_loop if kernel.flops]
    # Split in four, each part in float32.
    assert product.bytes == activations + weights + 4 * 4 * 256 * 128
    assert product.flops == {"bf16": 2 * 256 * 128 * 128}
    assert lengths(program) == [3]


def test_a_loop_of_unknown_length_runs_once_and_is_told():
    text = (
        (PROGRAMS / "scan.txt").read_text().replace('"known_trip_count":{"n":"3"}', "")
    )
    program = Program(parse(text))
    assert lengths(program) == [None]
    assert {kernel.times for kernel in counted(program)} == {1}


def test_collectives_have_their_dtype_and_bytes():
    """A sum over `data` of 16 x 32 float32 numbers, and a gathering over `model` in
    bfloat16, on 4 x 2 devices.
    """
    sent = [k for k in counted(read("collectives")) if k.kind == "collectives"]
    found = {(k.operation, k.dtype, k.bytes, k.sent_bytes) for k in sent}
    numbers = 16 * 32
    assert found == {
        ("all-reduce", "f32", 2 * 4 * numbers, 2 * 4 * numbers * 3 // 4),
        ("all-gather", "bf16", (1 + 2) * 2 * numbers, 2 * numbers),
    }


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2),
        ("replica_groups=[4,2]<=[8]", 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", 4),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", 8),
        ("replica_groups=[1,8]<=[8]", 8),
        ("replica_groups={}", 2**30),
    ],
)
def test_groups_of_devices_are_read_in_each_form(groups, size):
    text = (
        (PROGRAMS / "collectives.txt")
        .read_text()
        .replace("replica_groups={{0,2,4,6},{1,3,5,7}}", groups)
    )
    (sent,) = (
        kernel.sent_bytes
        for kernel in counted(Program(parse(text)))
        if kernel.operation == "all-reduce"
    )
    assert sent == 2 * 4 * 16 * 32 * (size - 1) // size


def test_a_convolution_and_its_gradients_compute_the_same_number_of_flops():
    flops = [
        sum(kernel.flops.values())
        for kernel in counted(read("convolution"))
        if kernel.flops
    ]
    assert flops == [2 * (8 * 16 * 16 * 32) * (3 * 3 * 16)] * 3


def test_float32_products_are_tf32_unless_more_is_asked_for():
    dot = "ENTRY %main (a: f32[8,4], b: f32[4,2]) -> f32[8,2] {{\n"
    dot += "  %a = f32[8,4]{{1,0}} parameter(0)\n  %b = f32[4,2]{{1,0}} parameter(1)\n"
    dot += (
        "  ROOT %d = f32[8,2]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}},"
        " rhs_contracting_dims={{0}}{}\n}}\n"
    )
    asked = {
        "": "tf32",
        ", operand_precision={highest,highest}": "f32",
        ", algorithm=dot_bf16_bf16_f32_x3": "bf16 x 3",
        ", algorithm=dot_f32_f32_f32": "f32",
    }
    for attributes, dtype in asked.items():
        (kernel,) = counted(Program(parse(dot.format(attributes))))
        assert kernel.flops == {dtype: 2 * 8 * 2 * 4}
        assert kernel.bytes == 4 * (8 * 4 + 4 * 2 + 8 * 2)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 80GB HBM3"),
        ("TPU v5 lite", "TPU v5e"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GB300", None),
        ("TPU v5p", None),
        ("cpu", None),
    ],
)
def test_a_device_has_figures_only_if_its_whole_name_is_known(monkeypatch, kind, name):
    monkeypatch.setattr(
        jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind)]
    )
    found = target_here()
    assert (found and found.name) == name


def update(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)


W, X = SHAPE((256, 256), jnp.float32), SHAPE((64, 256), jnp.float32)


def test_memory_is_that_of_the_compiler_and_a_step_that_donates_holds_less():
    compiled = jax.jit(update, donate_argnums=0).lower(W, X).compile().memory_analysis()
    kept, donating = (
        step_report(update, W, X),
        step_report(jax.jit(update, donate_argnums=0), W, X),
    )
    same = step_report(update, W, X, donate_argnums=0)
    assert donating == dataclasses.replace(
        same, kernels=donating.kernels, compile_seconds=donating.compile_seconds
    )
    assert (kept.argument_bytes, kept.output_bytes, kept.donated_bytes) == (
        4 * (65536 + 16384),
        4 * 65536,
        0,
    )
    assert (donating.donated_bytes, donating.temporary_bytes) == (
        4 * 65536,
        compiled.temp_size_in_bytes,
    )
    assert (
        donating.peak_bytes
        == donating.argument_bytes + donating.temporary_bytes + donating.code_bytes
    )
    assert ["and is not donated" in str(report) for report in (kept, donating)] == [
        True,
        False,
    ]


def momentum_step(weights, momentum, grads):
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda w, m: w - m, weights, momentum), momentum


THREE = [
    {"kernel": W, "bias": SHAPE((256,), jnp.float32)}
] * 3  # weights, momentum, gradients
BYTES = 4 * (256 * 256 + 256)


def other_types_step(weights, state):
    momentum = 0.9 * state["m"] + weights
    return weights - momentum, {"m": momentum, "count": state["count"] + 1}


def test_an_argument_that_comes_back_and_is_not_donated_is_a_finding_with_its_bytes():
    """The gradients have the same shapes, but only two trees come back."""
    findings = step_report(momentum_step, *THREE).findings
    assert [
        (finding.what.split(" comes back")[0], finding.bytes) for finding in findings
    ] == [
        ("Argument 0 (`weights`)", BYTES),
        ("Argument 1 (`momentum`)", BYTES),
    ]
    (half,) = step_report(momentum_step, *THREE, donate_argnums=1).findings
    assert half == findings[0]


@pytest.mark.parametrize(
    ("step", "args"),
    [
        (momentum_step, THREE),
        (other_types_step, [W, {"m": W, "count": SHAPE((), jnp.int32)}]),
    ],
)
def test_donated_buffers_that_come_back_in_another_order_are_a_finding(step, args):
    """In order nothing is said, whatever the compiler copies."""
    assert step_report(step, *args, donate_argnums=(0, 1)).findings == ()
    report = step_report(lambda *args: step(*args)[::-1], *args, donate_argnums=(0, 1))
    (finding,) = report.findings
    assert "copies donated buffers" in finding.what
    assert finding.bytes >= 4 * 256 * 256
    assert f"MB: {finding}" in str(report)


def test_shapes_with_shardings_give_what_one_device_holds():
    w = SHAPE(
        (256, 256), jnp.float32, sharding=NamedSharding(eight_cpu_devices(), P("data"))
    )
    report = step_report(lambda w: (w + 1, w.sum(axis=0)), w)
    assert report.argument_bytes == report.findings[0].bytes == 4 * 256 * 256 // 8
    # The sum too, which all hold.
    assert report.argument_bytes < report.output_bytes < 2 * report.argument_bytes
    assert {c.operation for c in report.collectives} == {"all-reduce"}


@pytest.mark.parametrize("is_product", [True, False])
def test_what_is_no_array_in_the_arguments_stays_as_it_is(is_product):
    """A step may call it, branch on it, or take it for a size, and return it."""

    def step(model, times, is_product):
        y = model["w"] @ model["w"] if is_product else model["w"]
        return model | {"w": model["function"](jnp.concatenate([y] * times))}

    report = step_report(
        step,
        {"w": W, "function": jnp.tanh, "is_deep": "yes", "none": None},
        3,
        is_product,
    )
    assert report.output_bytes == 3 * 4 * 256 * 256
    assert report.flops == ({"f32": 2 * 256**3} if is_product else {})


FIGURES = Target(
    "a device", 10**6, 1e9, {"bf16": 1e9, "tf32": 1e8}, launch_seconds=1e-3
)


def test_the_bound_is_the_larger_of_memory_and_products_and_a_launch_for_each_kernel():
    """Momentum: 20 MiB at 1 GB a second. A layer: 8.4 MFLOP at 1 GFLOP a second, more
    than its bytes take.
    """
    ((_, kernel),) = kernels(read("momentum"), FIGURES)
    assert kernel.seconds == pytest.approx(5 * 4 * 2**20 / 1e9 + 1e-3)
    product = next(
        kernel for _, kernel in kernels(read("scan"), FIGURES) if kernel.flops
    )
    assert product.seconds == pytest.approx(3 * (2 * 256 * 128 * 128 / 1e9 + 1e-3))


def saved_report(name, target=FIGURES):
    """Return the report of a saved program on the device of the test."""
    empty = step_report(lambda x: x, W)
    return dataclasses.replace(
        empty,
        target=target,
        kernels=tuple(k for _, k in kernels(read(name), target, "tf32")),
        compile_seconds=1.5,
    )


def test_a_report_prints_what_one_asks_of_a_step():
    report = saved_report("scan")
    for line in (
        "moved by kernels, MB         4.555",
        "  products                   1.868",
        "products in bf16, GFLOP      0.025",
        "bound, ms ",
        "compiled in, s                 1.5",
        "fits: yes, ",
        "Kernels that move most",
    ):
        assert line in str(report)
    assert "code" not in str(report)  # of which there is none
    fits = lambda memory: str(
        dataclasses.replace(
            report, target=dataclasses.replace(FIGURES, memory_bytes=memory)
        )
    )
    assert "fits: no, " in fits(10)
    assert "fits: only with XLA_PYTHON_CLIENT_MEM_FRACTION=1.00, " in fits(
        report.peak_bytes
    )
    large = dataclasses.replace(
        report,
        temporary_bytes=61_200_000_000 - report.peak_bytes,
        target=TARGETS["h100"],
    )
    assert "fits: yes, 61.2 of 64.42 GB of one H100 80GB HBM3\n" in str(large)
    assert "give a target" in str(dataclasses.replace(report, target=None))


@pytest.mark.parametrize("donate", [(), 0])
def test_a_step_of_equinox_is_compiled_for_shapes_and_donates_what_one_says_here(
    donate,
):
    """`eqx.filter_jit` takes shapes for settings of the step, and does not say what it
    donates.
    """
    step = eqx.filter_jit(
        lambda model, x: eqx.tree_at(
            lambda m: m.weight, model, jax.vmap(model)(x).T @ x
        )
    )
    model = eqx.filter_eval_shape(
        eqx.nn.Linear, 256, 256, key=jax.eval_shape(lambda: jax.random.key(0))
    )
    report = step_report(step, model, X, donate_argnums=donate)
    assert report.flops == {"f32": 2 * 2 * 64 * 256 * 256}
    assert report.donated_bytes == (4 * (256 * 256 + 256) if donate == 0 else 0)
    assert report.findings == ()


def test_a_step_is_traced_for_the_device_of_the_target(monkeypatch):
    """Pallas asks the abstract mesh for which device it writes a kernel. Without arrays
    there is none.
    """
    monkeypatch.setattr(
        sys.modules[StepReport.__module__],
        "target_devices",
        lambda target: jax.devices(),
    )
    seen = []
    step_report(
        lambda x: seen.append(jax.sharding.get_abstract_mesh().abstract_device) or x,
        X,
        target="v5e",
    )
    assert {device.device_kind for device in seen} == {jax.devices()[0].device_kind}
    with pytest.raises(ValueError, match="a step without arrays among its arguments"):
        step_report(lambda: jnp.ones(3), target="h100")


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for target, what in {"h100": r"jax\[cuda13-local\]", "v5e": r"jax\[tpu\]"}.items():
        with pytest.raises(RuntimeError, match=what):
            step_report(update, W, X, target=target)


def test_a_device_whose_chip_is_not_described_can_be_planned_for_and_not_compiled_for():
    with pytest.raises(ValueError, match="but not compiled for"):
        step_report(update, W, X, target="l40s")
