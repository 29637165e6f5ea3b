"""Autocast with effects, names, source lines, unknown sizes and all kinds of arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import mpx
from tests.autocast.helpers import (
    BF16,
    F16,
    F32,
    all_in,
    contractions,
    eqns_of,
    half_dtypes,
    integers,
    normal,
)
from tests.helpers import assert_same_bits, types_of


def test_under_jit_it_is_traced_once_and_debug_nans_sees_its_nans():
    traces = []
    fun = jax.jit(mpx.autocast(lambda x: traces.append(x) or jnp.sqrt(-(x @ x)), BF16))
    for i in range(3):
        fun(-jnp.full((2, 2), i, F32))
    assert len(traces) == 1
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        fun(jnp.ones((2, 2)))


def test_an_inner_function_compiled_before_is_the_same_inside_and_outside_of_autocast():
    """Jax remembers its trace: narrowed inside of an autocast, plain outside, in any
    order.
    """
    inner = jax.jit(lambda w, x: x @ w)
    w, x = normal(0, 8, 8), normal(1, 8, 8)
    programs = [
        inner,
        mpx.autocast(inner, BF16),
        mpx.autocast(inner, F16),
        inner,
        mpx.full_precision(inner),
    ]
    expected = [all_in(dtype) for dtype in (F32, BF16, F16, F32, F32)]
    for _ in range(2):
        assert [contractions(fun, w, x)[0] for fun in programs] == expected


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_effects_happen_once_and_in_order_see_float32_and_happen_not_while_tracing(
    transform, capfd
):
    w, x, seen = jnp.eye(4), jnp.ones((2, 4)), []

    def tell(name, value):
        io_callback(
            lambda value: seen.append((name, value.dtype)), None, value, ordered=True
        )
        return value

    def fun(w, x):
        y = tell("start", x) @ w
        y, _ = lax.scan(lambda c, _: (tell("step", c) @ w, None), y, length=2)
        y = lax.cond(
            y.sum() > -1e9,
            lambda y: tell("branch", y) @ w,
            lambda y: tell("other", y),
            y,
        )
        y = jax.jit(lambda y: tell("call", y) @ w)(y)
        y = lax.fori_loop(0, 2, lambda i, y: tell("loop", y) @ w, y)
        jax.debug.print("sum {s}", s=y.sum(), ordered=True)
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((2, 4), F32), y) @ w

    program = transform(mpx.autocast(fun, BF16))
    jax.make_jaxpr(program)(w, x)
    assert seen == []
    np.testing.assert_allclose(program(w, x), np.sin(x), rtol=2.0**-8)
    jax.effects_barrier()
    names = ["start", "step", "step", "branch", "call", "loop", "loop"]
    assert seen == [(name, F32) for name in names]
    assert capfd.readouterr().out == "sum 8.0\n"


def named_model(w, x):
    with jax.named_scope("first"):
        y = jnp.tanh(x @ w)
    with jax.named_scope("loop"):
        y, _ = lax.scan(lambda c, _: (jnp.sin(c @ w), None), y, length=3)
    with jax.named_scope("recomputed"):
        y = jax.checkpoint(lambda y: jnp.cos(y @ w))(y)
    with jax.named_scope("called"):
        return jax.jit(lambda y: jnp.log1p((y @ w) ** 2))(y).sum()


@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.grad], ids=["forward", "backward"]
)
def test_contractions_keep_their_scopes_and_source_lines(transform):
    """Those of the backward pass have the line of the forward one."""
    args = normal(0, 8, 8), normal(1, 3, 8)

    def lines(fun):
        found = [
            eqn.source_info.traceback.frames
            for eqn in eqns_of(transform(fun), *args, primitive="dot_general")
        ]
        places = [
            next(f for f in frames if "named_model" in f.function_name)
            for frames in found
        ]
        return {f.line_num - named_model.__code__.co_firstlineno for f in places}

    autocast = mpx.autocast(named_model, BF16)
    assert lines(named_model) == lines(autocast) == {2, 4, 6, 8}
    text = jax.jit(transform(autocast)).lower(*args).compile().as_text()
    assert all(
        f"{scope}/" in text or f"({scope})/" in text
        for scope in ("first", "loop", "recomputed", "called")
    )


@half_dtypes
def test_16_bit_arguments_are_viewed_as_float32_and_others_are_as_they_are(dtype):
    seen = []

    def fun(*args):
        seen.extend(types_of(x) for x in args)
        return args

    keys = jax.random.key(0), jax.random.PRNGKey(0)
    others = [
        jnp.ones(2, other)
        for other in (F32, jnp.int32, jnp.uint8, bool, jnp.complex64, jnp.float8_e4m3fn)
    ]
    others += [*keys, jnp.asarray(1.0), np.ones(2, np.float32), np.float32(2)]
    results = mpx.autocast(fun, dtype)(jnp.ones(2, dtype), *others)
    plain = [jnp.asarray(x) for x in (jnp.ones(2, F32), *others)]
    assert seen == [types_of(x) for x in plain]
    assert_same_bits(list(results), plain)


def test_arguments_and_results_that_are_no_arrays_are_passed_on_as_they_are():
    given = (
        "text",
        None,
        3,
        2.5,
        True,
        jnp.sin,
        {"mode": "train", "none": None},
        (1, "two"),
    )
    x = integers(0, 8, 8)
    result = mpx.autocast(lambda x, *args, activation: (activation(x @ x), args), BF16)(
        x, *given, activation=jnp.abs
    )
    assert result[1] == given
    assert [type(value) for value in result[1][2:5]] == [int, float, bool]
    # A flag of NumPy is one of Python.
    chosen = mpx.autocast(lambda x, training: x if training else 2 * x, BF16)
    assert_same_bits(
        [chosen(x, np.bool_(value)) for value in (True, False)], [x, 2 * x]
    )
    assert_same_bits(result[0], jnp.abs(x @ x))
