"""Check which arrays a program holds where it needs most memory, against programs that
are counted by hand.
"""

import jax
import jax.numpy as jnp
import pytest

from mpx.tools.program.graph import Program
from mpx.tools.program.memory import Memory
from mpx.tools.program.text import parse

ADDING = """
%adding (p: f32[256], q: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %q = f32[256]{0} parameter(1)
  ROOT %r = f32[256]{0} add(%p, %q)
}
"""
FILLING = """
%writing (s: f32[4,256], x: f32[256], i: s32[]) -> f32[4,256] {
  %s = f32[4,256]{1,0} parameter(0)
  %x = f32[256]{0} parameter(1)
  %i = s32[] parameter(2)
  %row = f32[1,256]{1,0} bitcast(%x)
  ROOT %w = f32[4,256]{1,0} dynamic-update-slice(%s, %row, %i, %i)
}

%body (c: (f32[256], f32[4,256], s32[])) -> (f32[256], f32[4,256], s32[]) {
  %c = (f32[256]{0}, f32[4,256]{1,0}, s32[]) parameter(0)
  %cx = f32[256]{0} get-tuple-element(%c), index=0
  %cs = f32[4,256]{1,0} get-tuple-element(%c), index=1
  %ci = s32[] get-tuple-element(%c), index=2
  %square = f32[64]{0} multiply(%cx, %cx)
  %new = f32[256]{0} exponential(%square)
  %filled = f32[4,256]{1,0} fusion(%cs, %new, %ci), kind=kLoop, calls=%writing
  ROOT %t = (f32[256]{0}, f32[4,256]{1,0}, s32[]) tuple(%new, %filled, %ci)
}
"""


def peak(*lines, called="", alias=""):
    """Return the shapes at the peak of a program with an argument `a` of 256 numbers
    and an index.
    """
    head = (
        f"HloModule m, is_scheduled=true{alias}\n{ADDING}{called}\nENTRY %main (a:"
        " f32[256], i: s32[]) -> f32[] {"
    )
    arguments = ("%a = f32[256]{0} parameter(0)", "%i = s32[] parameter(1)")
    body = [f"  {line}" for line in (*arguments, *lines)]
    memory = Memory(Program(parse("\n".join([head, *body, "}"]))))
    return sorted(str(array.shape) for array in memory.peak if array.shape.dims)


def test_an_array_is_held_from_the_kernel_that_makes_it_to_the_last_one_that_uses_it():
    """Of three in a row two exist at once, with the argument; a view of one is the same
    memory.
    """
    chain = [
        "%x = f32[300]{0} negate(%a)",
        "%v = f32[300]{0} bitcast(%x)",
        "%y = f32[200]{0} negate(%v)",
    ]
    chain.append("%z = f32[250]{0} negate(%y)")
    assert peak(*chain, "ROOT %r = f32[] reduce(%z)") == [
        "f32[200]",
        "f32[256]",
        "f32[300]",
    ]
    assert peak(*chain, "ROOT %r = f32[] reduce(%z, %v)") == [
        "f32[200]",
        "f32[250]",
        "f32[256]",
        "f32[300]",
    ]


@pytest.mark.parametrize(
    ("alias", "held"), [("", 2), (", input_output_alias={ {}: (0, {}, may-alias) }", 1)]
)
def test_a_result_of_the_type_of_a_donated_argument_takes_its_memory(alias, held):
    add = "ROOT %r = f32[256]{0} fusion(%a, %a), kind=kLoop, calls=%adding"
    assert peak(add, alias=alias) == ["f32[256]"] * held


def test_a_stack_that_a_loop_fills_is_held_once_and_what_the_loop_carries_too():
    """In an iteration there is one array more, which no other one needs."""
    lines = [
        "%b = f32[256]{0} copy(%a)",
        "%zeros = f32[4,256]{1,0} broadcast()",
        "%t = (f32[256]{0}, f32[4,256]{1,0}, s32[]) tuple(%b, %zeros, %i)",
        (
            "%w = (f32[256]{0}, f32[4,256]{1,0}, s32[]) while(%t), condition=%no,"
            ' body=%body, backend_config={"n":"4"}'
        ),
        "%stack = f32[4,256]{1,0} get-tuple-element(%w), index=1",
        "ROOT %r = f32[] reduce(%stack)",
    ]
    assert peak(*lines, called=FILLING) == [
        "f32[256]",
        "f32[256]",
        "f32[4,256]",
        "f32[64]",
    ]


def test_branches_and_calls_hold_one_at_a_time():
    branch = (
        "\n%{0} (p: f32[256]) -> f32[256] {{\n  %p = f32[256]{{0}} parameter(0)\n  %q ="
        " f32[{1}]{{0}} negate(%p)\n"
    )
    branch += "  ROOT %r = f32[256]{{0}} negate(%q)\n}}\n"
    called = branch.format("small", 64) + branch.format("large", 512)
    choose = (
        "%x = f32[256]{0} conditional(%i, %a, %a), branch_computations={%small, %large}"
    )
    assert peak(choose, "ROOT %r = f32[] reduce(%x)", called=called) == [
        "f32[256]",
        "f32[256]",
        "f32[512]",
    ]
    call = "%x = f32[256]{0} call(%a), to_apply=%large"
    assert peak(call, "ROOT %r = f32[] reduce(%x)", called=called) == [
        "f32[256]",
        "f32[256]",
        "f32[512]",
    ]


def test_the_sum_of_what_a_step_holds_is_near_the_peak_that_xla_counts():
    layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
    loss = lambda w, x: jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)
    step = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss)(w, x), donate_argnums=0)
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((8, 128, 128), (512, 128))
    ]
    compiled = step.lower(*shapes).compile()
    memory = compiled.memory_analysis()
    program = Program(parse(compiled.as_text()))
    held = sum(array.shape.bytes for array in Memory(program).peak)
    assert held == pytest.approx(
        memory.argument_size_in_bytes + memory.temp_size_in_bytes, rel=0.05
    )
