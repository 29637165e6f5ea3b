"""Check what findings read off programs that are written by hand: of kernels and of what devices send each other."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mpx.tools.program.dataflow import uses_in
from mpx.tools.program.exchange import of_collectives
from mpx.tools.program.findings import arguments_of
from mpx.tools.program.kernels import kernels
from mpx.tools.program.precision import of_kernels, of_other_dtypes, of_products
from mpx.tools.program.targets import TARGETS
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


def program(*lines, called=""):
    """Return a program with float32 parameters `a` of 128 x 512 and `b` of 512 x 512, `n` in bfloat16, and an index."""
    head = "ENTRY %main (a: f32[128,512], b: f32[512,512], n: bf16[512,512], i: s32[]) -> f32[] {"
    parameters = ("%a = f32[128,512]{1,0} parameter(0)", "%b = f32[512,512]{1,0} parameter(1)")
    parameters += ("%n = bf16[512,512]{1,0} parameter(2)", "%i = s32[] parameter(3)")
    return parse("\n".join([ADDING, called, head, *(f"  {line}" for line in (*parameters, *lines)), "}"]))


def runs(text):
    return list(kernels(text, mesh_shape={"data": 4}))


def sent(*lines, called="", arguments=((512, 512),), results=None):
    """Return the findings on collectives of a step with arguments of some shapes, which it returns."""
    text = program(*lines, called=called)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in arguments]
    out_info = shapes if results is None else results
    stage = types.SimpleNamespace(
        args_info=(tuple(shapes), {}), input_shardings=((None,) * len(shapes), {}), out_info=out_info
    )
    return list(of_collectives(stage, stage, runs(text), uses_in(text)))


GATHER = "%g = f32[512,512]{1,0} all-gather(%a), dimensions={0}, " + MANY
NARROW_USE = "%u = bf16[512,512]{1,0} fusion(%g, %n), kind=kLoop, calls=%narrowing"


def test_a_float32_array_that_is_gathered_and_then_rounded_is_found_with_half_of_what_is_sent():
    (finding,) = sent(GATHER, NARROW_USE, called=NARROWING)
    assert finding.what == "Devices send float32 arrays that are rounded to bf16 right after (1 of all-gather)"
    assert finding.bytes == 3 * SIZE * 4 // 4 // 2


def test_it_is_found_behind_the_end_of_an_asynchronous_gather_of_several_arrays():
    (finding,) = sent(
        "%s = ((f32[128,512]), (f32[512,512])) all-gather-start(%a), dimensions={0}, " + MANY,
        "%d = (f32[512,512]) all-gather-done(%s)",
        "%g = f32[512,512]{1,0} get-tuple-element(%d), index=0",
        NARROW_USE,
        called=NARROWING,
    )
    assert "right after" in finding.what


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
    assert sent(GATHER, NARROW_USE, other_use, called=NARROWING + WRITING) == []


def test_of_arrays_that_are_gathered_together_only_float32_counts():
    """XLA sends several arrays at once, of any dtypes."""
    together = "%t = (pred[512,512], f32[512,512], bf16[512,512]) all-gather(%p, %a, %n), dimensions={0}, " + MANY
    parts = ("pred", "f32", "bf16")
    lines = [f"%g{i} = {dtype}[512,512]{{1,0}} get-tuple-element(%t), index={i}" for i, dtype in enumerate(parts)]
    lines += [f"%u{i} = bf16[512,512]{{1,0}} convert(%g{i})" for i in range(2)]
    (finding,) = sent("%p = pred[128,512]{1,0} parameter(4)", together, *lines)
    assert finding.bytes == 3 * SIZE * 4 // 4 // 2
    text = program("%p = pred[128,512]{1,0} parameter(4)", together, *lines)
    (kernel,) = [kernel for _, kernel in runs(text) if kernel.sent_bytes]
    assert kernel.sent_by_dtype == {"f32": 3 * SIZE, "bf16": 3 * SIZE // 2, "pred": 3 * SIZE // 4}


def test_which_operand_of_a_kernel_is_rounded_is_told_by_its_number():
    swapped = NARROWING.replace("parameter(1)", "parameter(x)").replace("parameter(0)", "parameter(1)")
    swapped = swapped.replace("parameter(x)", "parameter(0)")
    assert len(sent(GATHER, NARROW_USE.replace("%g, %n", "%n, %g"), called=swapped)) == 1
    assert sent(GATHER, NARROW_USE.replace("%g, %n", "%b, %g"), called=NARROWING) == []


def test_a_gather_used_in_float32_is_found_only_beside_products_in_few_bits():
    product = "%d = bf16[512,512]{1,0} dot(%n, %n), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    use = "%v = f32[512,512]{1,0} add(%g, %b)"
    (finding,) = sent(GATHER, use, product)
    assert finding.what == "Devices gather float32 arrays that are used in float32 (1 of all-gather)"
    assert finding.bytes == 3 * SIZE
    assert sent(GATHER, use, product.replace("bf16", "f32").replace("%n", "%b")) == []


def sum_in(dtype, name="n"):
    return f"%s = {dtype}[512,512]{{1,0}} all-reduce(%{name}), to_apply=%add, " + MANY


def test_a_sum_in_16_bits_is_a_gradient_if_a_weight_has_its_shape_in_any_order():
    for shape in ((512, 512), (8, 512, 512)):
        (finding,) = sent(sum_in("bf16"), "ROOT %r = (bf16[512,512]) tuple(%s)", arguments=(shape,))
        assert finding.what.startswith("Devices add up arrays of the shapes of weights in bf16")
        assert finding.bytes == 2 * 3 * SIZE * 2 // 4
    for shape in ((512, 256), (512,)):
        assert sent(sum_in("bf16"), "ROOT %r = (bf16[512,512]) tuple(%s)", arguments=(shape,)) == []
    assert sent(sum_in("bf16"), "ROOT %r = (bf16[512,512]) tuple(%s)", results=()) == []  # shape of the batch
    assert sent(sum_in("f32", "b"), "ROOT %r = (f32[512,512]) tuple(%s)") == []


def test_a_whole_sum_is_found_if_each_device_keeps_a_part():
    keep = "%k = f32[128,512]{1,0} fusion(%s, %i), kind=kLoop, calls=%halving"
    (finding,) = sent(sum_in("f32", "b"), keep, called=HALVING)
    assert finding.what == "Every device gets a whole sum and keeps a part of it (1 of all-reduce)"
    assert finding.bytes == 3 * SIZE * 4 // 4
    assert sent(sum_in("f32", "b"), keep, "%v = f32[512,512]{1,0} add(%s, %b)", called=HALVING) == []
    assert sent(sum_in("f32", "b"), keep, "ROOT %v = (f32[512,512]) tuple(%s)", called=HALVING) == []


JOINING = """
%joining (p: bf16[1024,512], q: bf16[512,512]) -> bf16[1536,512] {
  %p = bf16[1024,512]{1,0} parameter(0)
  %q = bf16[512,512]{1,0} parameter(1)
  ROOT %r = bf16[1536,512]{1,0} concatenate(%p, %q), dimensions={0}
}
"""
CUTTING = """
%cutting (p: bf16[1536,512]) -> bf16[512,512] {
  %p = bf16[1536,512]{1,0} parameter(0)
  ROOT %r = bf16[512,512]{1,0} slice(%p), slice={[1024:1536], [0:512]}
}
"""
JOINED = (
    "%m = bf16[1024,512]{1,0} concatenate(%n, %n), dimensions={0}",
    "%j = bf16[1536,512]{1,0} fusion(%m, %n), kind=kLoop, calls=%joining",
    "%s = bf16[1536,512]{1,0} all-reduce(%j), to_apply=%add, " + MANY,
    "%c = bf16[512,512]{1,0} fusion(%s), kind=kLoop, calls=%cutting",
)


def test_sums_that_are_joined_into_one_array_count_by_the_weights_among_them():
    (finding,) = sent(*JOINED, "ROOT %v = (bf16[512,512]) tuple(%c)", called=JOINING + CUTTING)
    assert finding.what.startswith("Devices add up arrays of the shapes of weights in bf16")
    assert finding.bytes == 2 * 3 * SIZE * 2 // 4  # a third of the joined array


def test_an_array_cut_out_of_a_joined_sum_is_whole_unless_each_device_takes_its_own_part():
    keep = "%k = bf16[128,512]{1,0} dynamic-slice(%c, %i, %i), dynamic_slice_sizes={128,512}"
    found = sent(*JOINED, keep, called=JOINING + CUTTING)
    assert [finding.what[:32] for finding in found] == [
        "Devices add up arrays of the sha",
        "Every device gets a whole sum an",
    ]


def test_an_argument_that_is_not_used_does_not_hide_the_shardings_of_others():
    mesh = eight_cpu_devices()
    placed = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    lowered = jax.jit(lambda used, unused: used + 1).lower(placed, jax.ShapeDtypeStruct((2,), jnp.uint32))
    (*_, sharding), _ = arguments_of(lowered, lowered.compile())
    assert sharding.shard_shape((64, 64)) == (8, 64)


def test_a_collective_that_is_small_beside_the_arguments_is_not_worth_a_word():
    assert sent(GATHER, NARROW_USE, called=NARROWING, arguments=((2**15, 2**12),)) == []


def kernel_findings(*lines, called):
    text = program(*lines, called=called)
    return list(of_kernels(runs(text), uses_in(text)))


def test_float32_numbers_between_kernels_that_all_round_them_are_found_with_the_bytes_that_16_bits_would_save():
    write = "%g = f32[512,512]{1,0} fusion(%b), kind=kLoop, calls=%writing"
    other = NARROW_USE.replace("%u", "%w")
    (finding,) = kernel_findings(write, NARROW_USE, other, called=NARROWING + WRITING)
    assert finding.what == "Kernels write float32 numbers that all others round to bf16 before they use them"
    assert finding.bytes == 3 * 2 * SIZE  # written once, read twice
    assert not kernel_findings(write, NARROW_USE, "ROOT %v = (f32[512,512]) tuple(%g)", called=NARROWING + WRITING)


def test_a_call_that_returns_nothing_writes_no_float32_numbers():
    assert not kernel_findings('%c = () custom-call(%b), custom_call_target="log"', called=WRITING)


DOT = "%{name} = {dtype}[512,512]{{1,0}} dot({operands}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
IN_FLOAT32 = DOT.format(name="x", dtype="f32", operands="%b, %b")
IN_BFLOAT16 = [DOT.format(name=f"y{i}", dtype="bf16", operands="%n, %n") for i in range(3)]


def test_a_float32_product_is_found_beside_products_in_few_bits():
    (finding,) = of_products(runs(program(IN_FLOAT32, *IN_BFLOAT16)), "f32")
    assert finding.what == "25% of all FLOPs multiply float32 numbers, though others multiply in fewer bits"
    assert finding.bytes == 2 * SIZE * 4
    assert not list(of_products(runs(program(IN_FLOAT32)), "f32"))
    assert not list(of_products(runs(program(*IN_BFLOAT16)), "f32"))
    assert not list(of_products(runs(program(IN_FLOAT32, *IN_BFLOAT16)), "tf32"))  # float32 was asked for


def test_a_product_in_another_dtype_than_the_step_asked_for_is_found_by_its_line():
    @jax.jit
    def step(a):
        return a @ a

    asked = step.lower(jax.ShapeDtypeStruct((512, 512), jnp.bfloat16))
    other = step.lower(jax.ShapeDtypeStruct((512, 512), jnp.float32))
    ran = lambda lowered: runs(parse(lowered.as_text("hlo", debug_info=True)))
    (finding,) = of_other_dtypes(asked, ran(other), "f32")
    assert finding.what == "A product of bf16 runs in f32"
    assert finding.source.startswith("tests/tools/test_findings.py:")
    assert not list(of_other_dtypes(asked, ran(asked), "f32"))


@pytest.mark.parametrize(
    ("line", "sent_by_a_device"),
    [
        ("%x = f32[512,512]{1,0} all-gather(%a), dimensions={0}", 3 * SIZE),
        ("%x = f32[128,512]{1,0} reduce-scatter(%b), dimensions={0}, to_apply=%add", 3 * SIZE),
        ("%x = f32[512,512]{1,0} all-reduce(%b), to_apply=%add", 6 * SIZE),
        ("%x = f32[512,512]{1,0} all-to-all(%b), dimensions={0}", 3 * SIZE),
        ("%x = f32[512,512]{1,0} collective-permute(%b), source_target_pairs={{0,1}}", 4 * SIZE),
    ],
)
def test_what_a_device_sends_in_a_ring(line, sent_by_a_device):
    (kernel,) = [kernel for _, kernel in runs(program(line))]
    assert kernel.sent_bytes == sent_by_a_device


@pytest.mark.parametrize(
    ("groups", "rate"), [("{{0,1,2,3}}", 450e9), ("{{0,8,16,24}}", 50e9), ("{{8,9,10,11}}", 450e9), ("{}", 450e9)]
)
def test_links_between_machines_are_slower(groups, rate):
    line = f"%x = f32[512,512]{{1,0}} all-reduce(%b), to_apply=%add, replica_groups={groups}"
    (_, kernel), *_ = kernels(program(line), TARGETS["h200"], mesh_shape={"data": 4})
    assert kernel.link_seconds == pytest.approx(6 * SIZE / rate)
