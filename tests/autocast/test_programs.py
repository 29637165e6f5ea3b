"""What holds for each program of the table under autocast: bits, dtypes of
contractions, tags, sums in float32.

Oracle of bits: the same program with each matrix product's casts written by hand. A
program is put around a function, so one text makes both. Oracle of sums: gradients that
count uses; the compute dtype does not have the count.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

import mpx
from tests.autocast.helpers import (
    BF16,
    F16,
    F32,
    FORWARD_ONLY,
    PROGRAMS,
    SPLIT,
    WHOLE,
    all_in,
    contractions,
    exact_jit,
    integers,
    is_representable,
    narrow_dot,
    normal,
    on_devices,
    plan_of,
    rounding_cotangent,
    total,
    with_gradients,
)
from tests.helpers import all_eqns, assert_same_bits, eight_cpu_devices, types_of

all_programs = pytest.mark.parametrize("name", PROGRAMS)


def two_layers(dot, biased=lambda h: h):
    """A bias, a norm, and two products."""

    def fun(w, x):
        h = jnp.sin(biased(dot(x, w) + w[0][None]))
        return dot(h * lax.rsqrt((h * h).mean(-1, keepdims=True)), w)

    return fun


def by_hand(dtype):
    return two_layers(
        narrow_dot(dtype), functools.partial(rounding_cotangent, dtype=dtype)
    )


def arguments():
    return normal(0, 8, 8), normal(1, 64, 8)


def loss_of(fun):
    return lambda *args: jnp.cos(fun(*args)).mean()


# Around autocast.
TRANSFORMS = {
    "value": lambda f: f,
    "value and grad": with_gradients,
    "vmap of grad": lambda f: (
        lambda w, x: jax.vmap(lambda rows: jax.grad(loss_of(f))(w, rows))(
            x.reshape(8, 8, 8)
        )
    ),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, tuple(map(jnp.cos, args))),
    "hessian": lambda f: lambda w, x: jax.hessian(lambda x: loss_of(f)(w, x))(x[:3]),
}
# Much like these, and slow to compile.
ONLY_TRACED = {
    "vmap": PROGRAMS["vmap"],
    "jacfwd": lambda f: jax.jacfwd(f, argnums=1),
    "grad of grad": lambda f: jax.grad(
        lambda *args: (jax.grad(loss_of(f), argnums=1)(*args) ** 2).sum()
    ),
}
OF_A_CALL = [("a call", way) for way in TRANSFORMS][2:]
OF_ALL = [
    (name, "value" if name in FORWARD_ONLY else "value and grad") for name in PROGRAMS
]
TRACED = [
    *OF_ALL,
    *OF_A_CALL,
    *[("a call", way) for way in ONLY_TRACED],
    *[(name, "jvp") for name in FORWARD_ONLY],
]


# ---- bits and dtypes ------------------------------------------------------------------------------------------------


COMPOSED = {
    "scan of calls",
    "branch in a scan",
    "vmap of a scan",
    "checkpoint of names",
}


# Not all without jit: a while loop is compiled then too, with the liberty to leave out
# roundings.
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(
            *c,
            marks=[pytest.mark.eager] * (c[0] not in FORWARD_ONLY)
            + [pytest.mark.slow] * (c[0] in COMPOSED),
        )
        for c in OF_ALL + OF_A_CALL
    ],
)
def test_values_and_gradients_are_those_of_casts_written_by_hand(name, way):
    """Every bit, and the types of the plain program. Negative control: the float32
    program has other values.
    """
    args, transform = arguments(), TRANSFORMS[way]
    plain = PROGRAMS[name](two_layers(jnp.matmul))
    actual = exact_jit(transform(mpx.autocast(plain, BF16)))(*args)
    assert_same_bits(actual, exact_jit(transform(PROGRAMS[name](by_hand(BF16))))(*args))
    assert types_of(actual) == types_of(jax.eval_shape(transform(plain), *args))
    if way == "value and grad":
        assert not np.array_equal(actual[0], exact_jit(plain)(*args))


@pytest.mark.parametrize(("name", "way"), TRACED)
def test_every_contraction_is_narrowed_around_and_inside_of_a_transformation(name, way):
    args, program, transform = (
        arguments(),
        PROGRAMS[name](two_layers(jnp.matmul)),
        (TRANSFORMS | ONLY_TRACED)[way],
    )
    plain = len(contractions(transform(program), *args))
    for dtype in (BF16, F16):
        assert (
            contractions(transform(mpx.autocast(program, dtype)), *args)
            == [all_in(dtype)] * plain
        )
    assert (
        contractions(mpx.autocast(transform(program), BF16), *args)
        == [all_in(BF16)] * plain
    )


@all_programs
def test_a_result_is_tagged_unless_it_was_computed(name):
    w, x = arguments()
    for change, is_known in ((jnp.negative, True), (lambda x: x * 1.1, False)):
        fun = mpx.autocast(
            lambda w, x, f=change: PROGRAMS[name](lambda w, x: f(x))(w, x @ w), BF16
        )
        (tag,) = plan_of(fun, w, x).out_tags
        assert tag.representable_in == (BF16 if is_known else None)
        assert is_representable(exact_jit(fun)(w, x), BF16) == (change is jnp.negative)


@all_programs
def test_types_are_those_of_the_plain_program_also_weak_ones_and_those_with_shardings(
    name,
):
    weak = (
        lax.broadcast(jnp.asarray(1.0), (4, 4)),
        lax.broadcast(jnp.asarray(1.0), (16, 4)),
    )
    program = PROGRAMS[name](lambda w, x: x @ w * 2.0)
    assert weak[0].weak_type
    assert types_of(jax.eval_shape(mpx.autocast(program, BF16), *weak)) == types_of(
        jax.eval_shape(program, *weak)
    )
    mesh = jax.make_mesh(
        (8,), ("data",), (AxisType.Explicit,), devices=jax.devices("cpu")
    )
    with jax.set_mesh(mesh if name != "shard_map" else eight_cpu_devices()):
        args = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip(arguments(), (WHOLE, SPLIT), strict=True)
        ]
        transform = (
            with_gradients
            if name not in (*FORWARD_ONLY, "shard_map")
            else lambda fun: fun
        )
        plain = types_of(jax.eval_shape(transform(program), *args))
        assert (
            types_of(jax.eval_shape(transform(mpx.autocast(program, BF16)), *args))
            == plain
        )


@pytest.mark.parametrize("spec", [SPLIT, WHOLE], ids=["divided", "whole"])
def test_a_function_on_automatic_axes_inside_of_explicit_ones_is_narrowed(spec):
    mesh = jax.make_mesh(
        (8,), ("data",), (AxisType.Explicit,), devices=jax.devices("cpu")
    )
    w, x = arguments()
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, spec))
        loss = jax.sharding.auto_axes(
            lambda w, x: jnp.mean((x @ w) ** 2), out_sharding=WHOLE
        )
        found, expected = (
            jax.jit(jax.value_and_grad(fun))(w, x)
            for fun in (mpx.autocast(loss, BF16), loss)
        )
        assert contractions(mpx.autocast(loss, BF16), w, x) == [all_in(BF16)]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_allclose(a, b, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    "is_set", [True, False], ids=["a mesh that is set", "a mesh of the arguments alone"]
)
def test_a_weight_on_explicit_axes_is_gathered_in_16_bits(is_set):
    mesh = jax.make_mesh(
        (8,), ("data",), (AxisType.Explicit,), devices=jax.devices("cpu")
    )
    w, x = (jax.device_put(a, NamedSharding(mesh, SPLIT)) for a in arguments())
    gathered = lambda w: jax.sharding.reshard(
        w, NamedSharding(jax.typeof(w).sharding.mesh, WHOLE)
    )
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        eqns = all_eqns(
            jax.make_jaxpr(mpx.autocast(lambda w, x: x @ gathered(w), BF16))(w, x).jaxpr
        )
    assert [
        eqn.invars[0].aval.dtype for eqn in eqns if eqn.primitive.name == "reshard"
    ] == [BF16]


def test_what_the_program_casts_to_8_bits_behind_a_transfer_travels_as_it_is():
    gathered = on_devices(
        lambda w, x: lax.all_gather(x, "data").astype(jnp.float8_e4m3fn).astype(F32)
    )
    eqns = all_eqns(jax.make_jaxpr(mpx.autocast(gathered, BF16))(*arguments()).jaxpr)
    assert [
        eqn.invars[0].aval.dtype for eqn in eqns if eqn.primitive.name == "all_gather"
    ] == [F32]


# ---- one autocast inside of another ---------------------------------------------------------------------------------


DTYPES = {"f32": F32, "bf16": BF16, "f16": F16}
ISLANDS = {
    **{
        name: (functools.partial(mpx.autocast, policy_or_dtype=name), dtype)
        for name, dtype in DTYPES.items()
    },
    "full_precision": (mpx.full_precision, F32),
}


@pytest.mark.parametrize("name", [*PROGRAMS, "grad"])
def test_of_two_autocasts_the_inner_one_wins(name):
    """Also where a program stands between the two, or inside of the inner one.

    The operations outside of the island are the outer one's. Each pair of a program, an
    island and an outer dtype occurs.
    """
    w, x = arguments()
    around = PROGRAMS.get(
        name, lambda f: lambda w, x: jax.grad(lambda w, x: jnp.sin(f(w, x)).sum())(w, x)
    )
    for i, (inside, dtype) in enumerate(ISLANDS.values()):
        outer = list(DTYPES)[(i + len(name)) % 3]
        program = around(inside(lambda w, x: x @ w))
        *found, last = contractions(
            mpx.autocast(lambda w, x, f=program: (y := f(w, x)) @ y.T, outer), w, x
        )
        assert (set(found), last) == ({all_in(dtype)}, all_in(DTYPES[outer]))
        assert set(
            contractions(mpx.autocast(inside(around(lambda w, x: x @ w)), outer), w, x)
        ) == {all_in(dtype)}


@pytest.mark.parametrize("name", ["a call", "scan"])
def test_a_list_of_weights_that_is_closed_over_may_be_changed_between_calls(name):
    """Autocast remembers no trace."""
    weights, x = [], integers(0, 16, 4)
    fun = mpx.autocast(
        lambda x: PROGRAMS[name](lambda _, x: functools.reduce(jnp.matmul, weights, x))(
            x[:4], x
        ),
        BF16,
    )
    plain = fun(x)
    weights.append(2 * jnp.eye(4, dtype=F32))
    value, gradient = fun(x), jax.grad(total(fun))(x)
    assert (value == gradient * x).all()
    assert (jnp.abs(gradient) >= 2).all()
    weights.clear()
    assert_same_bits(fun(x), plain)


# ---- no hidden sums in 16 bits: a weight or a value that is used many times -----------------------------------------
#
# `use` is a product of a weight with ones: its gradient is one. 257 is the smallest
# whole number that bfloat16 has not, 2049 for float16.


def use(w):
    return (jnp.ones((1, len(w)), F32) @ w).sum()


def in_a_scan(f):
    return lambda w, n: lax.scan(
        lambda c, _: (c + f(w), None), jnp.float32(0), length=n + 1
    )[0]


def tied(w):
    """256 tokens, and 1 from the head."""
    return w.T[jnp.zeros(256, jnp.int32)].sum() + (jnp.ones((1, 2), w.dtype) @ w)[0, 0]


def activation_used_301_times(w):
    """Added to the weight itself: what goes through the product is rounded there."""
    hidden = w.T @ jnp.eye(2, dtype=w.dtype)
    return sum(
        (jnp.sin(hidden * 0).sum() + w.sum() for _ in range(301)),
        start=jnp.zeros((), w.dtype),
    )


def bias_of_1001_rows(w):
    rows = jnp.ones((1001, 4), w.dtype) @ jnp.ones((4, 2), w.dtype)
    return ((rows + w.T) * 1).sum()


def stacked_biases(w):
    """Of 257 rows: a stack of biases goes through the loop in float32."""
    step = lambda b: (
        jnp.ones((257, 3), w.dtype) @ jnp.ones((3, 2), w.dtype) + b.reshape(1, 2)
    ).sum()
    return lax.scan(lambda c, b: (c + step(b), None), jnp.zeros((), w.dtype), w[None])[
        0
    ]


# Losses of a weight (2, 1), and its gradient, in each element.
SUMS = {
    "a token seen 1001 times": (
        lambda w: (w.T[jnp.zeros(1001, jnp.int32)] @ jnp.ones((2, 1), w.dtype)).sum(),
        1001,
    ),
    "4097 iterations of a scan": (lambda w: in_a_scan(use)(w, 4096), 4097),
    "tied weights": (tied, 257),
    "an activation used 301 times": (activation_used_301_times, 301),
    "a bias of 1001 rows": (bias_of_1001_rows, 1001),
    "stacked biases": (stacked_biases, 257),
}


@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_added_up_in_float32(name):
    """Negative control: parameters, values and sums in bfloat16."""
    loss, count = SUMS[name]
    w = jnp.zeros((2, 1), BF16)
    gradient = exact_jit(mpx.grad(mpx.autocast(loss, BF16)))(w)
    assert (np.asarray(gradient).astype(int) == count).all(), gradient
    assert gradient.dtype == F32
    with jax.numpy_dtype_promotion("standard"):
        assert (
            exact_jit(jax.grad(lambda w: loss(w).astype(F32)))(w).astype(F32) != count
        ).all()


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_stacked_weights_are_summed_over_devices_before_they_are_rounded(
    check_vma,
):
    """33 on one of eight devices and 32 on the others are 257; each device's part is a
    bfloat16 number.
    """
    specs = dict(in_specs=(SPLIT, WHOLE), out_specs=SPLIT, check_vma=check_vma)
    product = jax.shard_map(jnp.matmul, mesh=eight_cpu_devices(), **specs)
    x = jnp.full((8, 2), 32.0).at[0].set(33.0)
    loss = lambda ws: lax.scan(lambda c, w: (c, product(x, w)), 0, ws)[1].sum()
    gradient = exact_jit(mpx.grad(mpx.autocast(loss, BF16)))(jnp.zeros((2, 2, 1), BF16))
    assert_same_bits(np.asarray(gradient), np.full((2, 2, 1), 257, F32))
