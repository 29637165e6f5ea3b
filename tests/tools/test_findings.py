"""Check what findings read off programs that are written by hand: of kernels and of
what devices send each other.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mpx.tools.program import TARGETS, findings
from mpx.tools.program.findings import Argument, CompiledStep, arguments_of
from mpx.tools.program.graph import Program
from mpx.tools.program.kernels import kernels
from mpx.tools.program.text import parse
from tests.helpers import eight_cpu_devices

MANY = 'channel_id=1, replica_groups={{0,1,2,3}}, metadata={op_name="gather"}'
NARROWING = """
%narrowing (p: f32[512,512], q: bf16[512,512]) -> bf16[512,512] {
  %q = bf16[512,512]{1,0} parameter(1)
  %p = f32[512,512]{1,0} parameter(0)
  %moved = f32[512,512]{0,1} transpose(%p), dimensions={1,0}
  %c = bf16[512,512]{0,1} convert(%moved)
  ROOT %r = bf16[512,512]{1,0} add(%c, %q)
}
"""
HALVING = """
%halving (p: f32[512,512], i: s32[]) -> f32[128,512] {
  %p = f32[512,512]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %double = f32[512,512]{1,0} add(%p, %p)
  ROOT %r = f32[128,512]{1,0} dynamic-slice(%double, %i, %i), dynamic_slice_sizes={128,512}
}
"""
WRITING = """
%writing (p: f32[512,512]) -> f32[512,512] {
  %p = f32[512,512]{1,0} parameter(0)
  ROOT %r = f32[512,512]{1,0} exponential(%p)
}
"""
ADDING = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %r = f32[] add(%x, %y)
}
"""
SIZE = 512 * 512
NAMED = ", metadata={{op_name=\"{}[\\'b\\']\"}}"


def program(*lines, called=""):
    """Return a program with float32 parameters `a` of 128 x 512 and `b` of 512 x 512,
    `n` in bfloat16, and an index.
    """
    head = (
        "ENTRY %main (a: f32[128,512], b: f32[512,512], n: bf16[512,512], i: s32[]) ->"
        " f32[] {"
    )
    parameters = (
        "%a = f32[128,512]{1,0} parameter(0)",
        "%b = f32[512,512]{1,0} parameter(1)" + NAMED.format("w"),
    )
    parameters += (
        "%n = bf16[512,512]{1,0} parameter(2)" + NAMED.format("m"),
        "%i = s32[] parameter(3)",
    )
    body = [f"  {line}" for line in (*parameters, *lines)]
    return Program(parse("\n".join([ADDING, called, head, *body, "}"])))


def step(program, arguments=((512, 512),), results=None):
    """Return the step of a program, with float32 arguments of some shapes, which it
    returns.
    """
    given = [Argument(0, "w", shape, shape, np.dtype("float32")) for shape in arguments]
    returned = [argument.type for argument in given] if results is None else results
    return CompiledStep(
        None,
        program,
        kernels(program),
        given,
        returned,
        "f32",
    )


def found(finder, *lines, called="", **options):
    return list(finder(step(program(*lines, called=called), **options)))


def gathers(*lines, **options):
    return found(findings.float32_that_is_rounded, *lines, **options)


GATHER = "%g = f32[512,512]{1,0} all-gather(%a), dimensions={0}, " + MANY
NARROW_USE = "%u = bf16[512,512]{1,0} fusion(%g, %n), kind=kLoop, calls=%narrowing"


ASYNCHRONOUS = (
    "%s = ((f32[128,512]), (f32[512,512])) all-gather-start(%a), dimensions={0}, "
    + MANY,
    "%d = (f32[512,512]) all-gather-done(%s)",
    "%g = f32[512,512]{1,0} get-tuple-element(%d), index=0",
)


@pytest.mark.parametrize(
    "gather", [(GATHER,), ASYNCHRONOUS], ids=["at once", "asynchronous, in a tuple"]
)
def test_a_float32_array_that_is_gathered_and_then_rounded_is_found_with_half_of_what_is_sent(
    gather,
):
    (finding,) = gathers(*gather, NARROW_USE, called=NARROWING)
    assert (
        finding.what
        == "Devices send float32 arrays that are rounded to bf16 right after"
    )
    assert finding.bytes == 3 * SIZE * 4 // 4 // 2
    # Little beside them.
    assert (
        gathers(*gather, NARROW_USE, called=NARROWING, arguments=((2**15, 2**12),))
        == []
    )


@pytest.mark.parametrize(
    "other_use",
    [
        "%v = f32[512,512]{1,0} add(%g, %b)",
        "%v = f16[512,512]{1,0} convert(%g)",
        "%v = f64[512,512]{1,0} convert(%g)",
        "ROOT %v = (f32[512,512]) tuple(%g)",
        "%v = f32[512,512]{1,0} fusion(%g), kind=kLoop, calls=%writing",
    ],
)
def test_another_use_of_a_gathered_array_keeps_it_in_float32(other_use):
    assert gathers(GATHER, NARROW_USE, other_use, called=NARROWING + WRITING) == []
    assert gathers(GATHER, other_use, called=WRITING) == [] or "f16" in other_use


def sum_in(dtype, name="n"):
    return f"%s = {dtype}[512,512]{{1,0}} all-reduce(%{name}), to_apply=%add, " + MANY


def sums(*lines, **options):
    return found(findings.sums_in_16_bits, *lines, **options)


@pytest.mark.parametrize(
    ("line", "arguments", "count"),
    [
        (sum_in("bf16"), (512, 512), 1),
        (sum_in("bf16"), (8, 512, 512), 1),  # a layer of a stack
        (sum_in("bf16"), (512, 256), 0),
        (sum_in("bf16"), (512,), 0),
        (sum_in("f32", "b"), (512, 512), 0),
    ],
)
def test_a_sum_in_16_bits_is_a_gradient_if_a_weight_has_its_shape_in_any_order(
    line, arguments, count
):
    findings = sums(line, "ROOT %r = (bf16[512,512]) tuple(%s)", arguments=(arguments,))
    assert [finding.bytes for finding in findings] == [2 * 3 * SIZE * 2 // 4] * count
    for finding in findings:
        assert finding.what.startswith(
            "Devices add up arrays of the shapes of weights in bf16"
        )
    # The shape of the batch.
    assert sums(line, arguments=(arguments,), results=()) == []


def parts(*lines, **options):
    return found(findings.sums_of_which_a_part_is_used, *lines, **options)


def test_a_whole_sum_is_found_if_each_device_keeps_a_part():
    keep = "%k = f32[128,512]{1,0} fusion(%s, %i), kind=kLoop, calls=%halving"
    (finding,) = parts(sum_in("f32", "b"), keep, called=HALVING)
    assert finding.what == "Every device gets a whole sum and keeps a part of it"
    assert finding.bytes == 3 * SIZE * 4 // 4
    for other_use in (
        "%v = f32[512,512]{1,0} add(%s, %b)",
        "ROOT %v = (f32[512,512]) tuple(%s)",
    ):
        assert parts(sum_in("f32", "b"), keep, other_use, called=HALVING) == []
    assert (
        parts(sum_in("f32", "b").replace("%s", "ROOT %s"), keep, called=HALVING) == []
    )


def test_an_argument_that_is_not_used_does_not_hide_the_shardings_of_others():
    mesh = eight_cpu_devices()
    placed = jax.ShapeDtypeStruct(
        (64, 64), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )
    traced = jax.jit(lambda used, unused: used + 1).trace(
        placed, jax.ShapeDtypeStruct((2,), jnp.uint32)
    )
    lowered = traced.lower()
    used, _ = arguments_of(traced.jaxpr, lowered, lowered.compile())
    assert (used.name, used.shard, used.bytes) == ("used", (8, 64), 4 * 8 * 64)


def test_float32_numbers_between_kernels_that_all_round_them_are_found_with_the_bytes_that_16_bits_would_save():
    between = lambda *lines: found(
        findings.float32_that_is_rounded, *lines, called=NARROWING + WRITING
    )
    write = "%g = f32[512,512]{1,0} fusion(%b), kind=kLoop, calls=%writing"
    (finding,) = between(write, NARROW_USE, NARROW_USE.replace("%u", "%w"))
    assert (
        finding.what
        == "Kernels write float32 numbers that all others round to bf16 before they use"
        " them"
    )
    assert finding.bytes == 3 * 2 * SIZE  # written once, read twice
    assert not between(write, NARROW_USE, "ROOT %v = (f32[512,512]) tuple(%g)")
    # Returns nothing.
    assert not between('%c = () custom-call(%b), custom_call_target="log"')


FORWARD = ', metadata={op_name="jit(step)/jvp()/dot_general"}'
BACKWARD = ', metadata={op_name="jit(step)/transpose(jvp())/dot_general"}'


def kept(use, shard=(128, 512), of=FORWARD):
    """Return findings on a weight of 512 x 512, gathered as `g`, of which each device
    has a part.
    """
    given = step(program(GATHER.replace(', metadata={op_name="gather"}', of), *use))
    weights = [Argument(0, "w", (512, 512), shard, np.dtype("float32"))]
    return list(
        findings.gathered_weights_that_are_kept(
            dataclasses.replace(given, arguments=weights)
        )
    )


def test_a_gathered_weight_is_kept_if_the_backward_pass_uses_what_the_forward_pass_gathered():
    use = [
        "%x = f32[512,512] negate(%g)" + FORWARD,
        "%y = f32[512,512] negate(%g)" + BACKWARD,
    ]
    (finding,) = kept(use)
    assert (
        finding.what
        == "Weights that were gathered for the forward pass are kept for the backward"
        " pass (1)"
    )
    assert finding.bytes == 4 * SIZE
    assert "`jax.checkpoint(layer)`" in finding.remedy
    assert kept(use[:1]) == []
    assert kept(use, of=BACKWARD) == []
    assert kept(use, shard=(64, 512)) == []  # another array, such as a batch


def test_a_copy_of_a_gathered_weight_is_kept_in_its_own_dtype():
    copy = "%c = bf16[512,512]{1,0} convert(%g)" + FORWARD
    (finding,) = kept([copy, "%x = bf16[512,512] negate(%c)" + BACKWARD])
    assert finding.bytes == 2 * SIZE
    assert (
        kept(
            [
                copy.replace("convert", "negate"),
                "%x = bf16[512,512] negate(%c)" + BACKWARD,
            ]
        )
        == []
    )


def beyond(*lines, memory_bytes=4 * 10**6 // 3):
    """Return findings on the peak of 2 MB of a program with a weight of 1,024 x 1,024."""
    weights = [Argument(0, "w", (4096, 1024), (1024, 1024), np.dtype("float32"))]
    target = dataclasses.replace(TARGETS["h200"], memory_bytes=memory_bytes)
    given = dataclasses.replace(
        step(program(*lines)),
        arguments=weights,
        results=[weights[0].type],
        peak_bytes=2 * 10**6,
        target=target,
    )
    return list(findings.beyond_the_memory(given))


def test_the_peak_of_a_program_that_does_not_fit_is_told_by_its_three_largest_groups():
    twice = [f"%{name} = bf16[512,512]{{1,0}} negate(%n)" for name in "xy"]
    lines = [
        *twice,
        "%z = bf16[512,256]{1,0} negate(%n)",
        "ROOT %r = f32[] reduce(%x, %y, %z)",
    ]
    found = beyond(*lines)
    assert [finding.bytes for finding in found] == [5 * SIZE, 5 * SIZE, 2 * SIZE]
    head = (
        "The peak of 0.002 GB is above the 0.001 GB that JAX takes of one H200. It"
        " holds "
    )
    assert [finding.what.removeprefix(head) for finding in found] == [
        "2 arrays up to f32[512,512], such as `w['b']`",
        "3 arrays up to bf16[512,512]",
        "1 x bf16[512,512], such as `m['b']`",
    ]
    assert len(beyond(*lines, memory_bytes=2 * 10**6)) == 3  # of which JAX takes 1.5
    assert beyond(*lines, memory_bytes=3 * 10**6) == []


@pytest.mark.parametrize(
    ("array", "remedy"),
    [
        ("f32[1024,1024]{1,0} negate(%a)" + BACKWARD, "Keep gradients in 16 bits"),
        ("f32[1024,1024]{1,0} negate(%a)", "`mpx.fused_update`"),
        ("f32[2048,1024]{1,0} negate(%a)" + FORWARD, "Keep activations in fewer bits"),
        ("f32[2048,1024]{1,0} negate(%a)" + BACKWARD, "Take a smaller batch"),
        ("bf16[1024,1024]{1,0} negate(%a)" + BACKWARD, "Take a smaller batch"),
        (
            "f32[4096,1024]{1,0} all-gather(%s), " + MANY,
            "Gather each weight in a checkpoint",
        ),
    ],
)
def test_what_the_peak_holds_has_a_remedy_of_its_own(array, remedy):
    shard = "%s = f32[1024,1024]{1,0} bitcast(%b)"
    finding = beyond(shard, f"%x = {array}", "ROOT %r = f32[] reduce(%x)")[0]
    assert finding.remedy.startswith(remedy)
    result = beyond(shard, f"ROOT %x = {array}")[0]
    assert result.remedy.startswith("Donate the argument")


DOT = (
    "%{name} = {dtype}[512,512]{{1,0}} dot({operands}), lhs_contracting_dims={{1}},"
    " rhs_contracting_dims={{0}}"
)
IN_FLOAT32 = DOT.format(name="x", dtype="f32", operands="%b, %b")
IN_BFLOAT16 = [
    DOT.format(name=f"y{i}", dtype="bf16", operands="%n, %n") for i in range(3)
]


def test_a_float32_product_is_found_beside_products_in_few_bits():
    (finding,) = found(findings.float32_products, IN_FLOAT32, *IN_BFLOAT16)
    assert (
        finding.what
        == "25% of all FLOPs multiply float32 numbers, though others multiply in fewer"
        " bits"
    )
    assert finding.bytes == 2 * SIZE * 4
    for alike in ([IN_FLOAT32], IN_BFLOAT16):
        assert not found(findings.float32_products, *alike)
    asked_for = step(program(IN_FLOAT32, *IN_BFLOAT16))
    asked_for = dataclasses.replace(asked_for, float32="tf32")
    assert not list(findings.float32_products(asked_for))


@pytest.mark.parametrize(
    ("line", "sent_by_a_device"),
    [
        ("%x = f32[512,512]{1,0} all-gather(%a), dimensions={0}", 3 * SIZE),
        (
            "%x = f32[128,512]{1,0} reduce-scatter(%b), dimensions={0}, to_apply=%add",
            3 * SIZE,
        ),
        ("%x = f32[512,512]{1,0} all-reduce(%b), to_apply=%add", 6 * SIZE),
        ("%x = f32[512,512]{1,0} all-to-all(%b), dimensions={0}", 3 * SIZE),
        (
            (
                "%x = f32[512,512]{1,0} collective-permute(%b),"
                " source_target_pairs={{0,1}}"
            ),
            4 * SIZE,
        ),
    ],
)
def test_what_a_device_sends_in_a_ring(line, sent_by_a_device):
    ((_, kernel),) = step(program(f"{line}, {MANY}")).runs
    assert kernel.sent_bytes == sent_by_a_device
