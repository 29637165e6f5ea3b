"""What holds for each program of the table under autocast: bits, dtypes of contractions, tags, sums in float32.

Oracle of bits: the same program with each matrix product's casts written by hand. A program is put around a function,
so one text makes both. Oracle of sums: gradients that count uses; the compute dtype does not have the count.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding

import mpx
from tests.autocast.helpers import (
    BF16,
    CARRIED,
    DIFFERENTIABLE,
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
    plan_of,
    rounding_cotangent,
    total,
    with_gradients,
)
from tests.helpers import assert_same_bits, eight_cpu_devices, types_of

NO_SCALE = mpx.NoOpLossScale()  # of numbers that float16 has
all_programs = pytest.mark.parametrize("name", PROGRAMS)
with_a_gradient = pytest.mark.parametrize("name", DIFFERENTIABLE)


def two_layers(dot, biased=lambda h: h):
    """A bias, a norm, and two products."""

    def fun(w, x):
        h = jnp.sin(biased(dot(x, w) + w[0][None]))
        return dot(h * lax.rsqrt((h * h).mean(-1, keepdims=True)), w)

    return fun


def by_hand(dtype):
    return two_layers(narrow_dot(dtype), functools.partial(rounding_cotangent, dtype=dtype))


def arguments():
    return normal(0, 4, 4), normal(1, 16, 4)


def loss_of(fun):
    return lambda *args: jnp.cos(fun(*args)).mean()


# Around autocast.
TRANSFORMS = {
    "value": lambda f: f,
    "value and grad": with_gradients,
    "vmap of grad": lambda f: lambda w, x: jax.vmap(lambda row: jax.grad(loss_of(f))(w, row[None]))(x),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, tuple(map(jnp.cos, args))),
    "hessian": lambda f: lambda w, x: jax.hessian(lambda x: loss_of(f)(w, x))(x[:3]),
}
# Much like these, and slow to compile.
ONLY_TRACED = {
    "vmap": PROGRAMS["vmap"],
    "jacfwd": lambda f: jax.jacfwd(f, argnums=1),
    "grad of grad": lambda f: jax.grad(lambda *args: (jax.grad(loss_of(f), argnums=1)(*args) ** 2).sum()),
}
OF_A_CALL = [("a call", way) for way in TRANSFORMS][2:]
OF_ALL = [(name, "value" if name in FORWARD_ONLY else "value and grad") for name in PROGRAMS]
TRACED = [*OF_ALL, *OF_A_CALL, *[("a call", way) for way in ONLY_TRACED], *[(name, "jvp") for name in FORWARD_ONLY]]


# ---- bits and dtypes ------------------------------------------------------------------------------------------------


# Not all without jit: a while loop is compiled then too, with the liberty to leave out roundings.
@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(*c, marks=[] if c[0] in FORWARD_ONLY else pytest.mark.eager) for c in OF_ALL + OF_A_CALL],
)
def test_values_and_gradients_are_those_of_casts_written_by_hand(name, way):
    """Every bit, and the types of the plain program. Negative control: the float32 program has other values."""
    args, transform = arguments(), TRANSFORMS[way]
    plain = PROGRAMS[name](two_layers(jnp.matmul))
    actual = exact_jit(transform(mpx.autocast(plain, BF16)))(*args)
    assert_same_bits(actual, exact_jit(transform(PROGRAMS[name](by_hand(BF16))))(*args))
    assert types_of(actual) == types_of(jax.eval_shape(transform(plain), *args))
    if way == "value and grad":
        assert not np.array_equal(actual[0], exact_jit(plain)(*args))


@pytest.mark.parametrize(("name", "way"), TRACED)
def test_every_contraction_is_narrowed_around_and_inside_of_a_transformation(name, way):
    """Except inside, in a batch of one row: the gradient of a weight sums nothing there, and is kept."""
    args, program, transform = arguments(), PROGRAMS[name](two_layers(jnp.matmul)), (TRANSFORMS | ONLY_TRACED)[way]
    plain = len(contractions(transform(program), *args))
    for dtype in (BF16, F16):
        assert contractions(transform(mpx.autocast(program, dtype)), *args) == [all_in(dtype)] * plain
    inside = contractions(mpx.autocast(transform(program), BF16), *args)
    in_float32 = 2 * (way == "vmap of grad")
    assert (inside.count(all_in(BF16)), inside.count(all_in(F32))) == (plain - in_float32, in_float32)


@all_programs
def test_a_result_is_tagged_unless_it_was_carried_or_computed(name):
    """A value that a loop carries and computes anew in each iteration has no tag, whatever it is."""
    w, x = arguments()
    for change, is_known in ((jnp.negative, name not in CARRIED), (lambda x: x * 1.1, False)):
        fun = mpx.autocast(lambda w, x, f=change: PROGRAMS[name](lambda w, x: f(x))(w, x @ w), BF16)
        (tag,) = plan_of(fun, w, x).out_tags
        assert tag.representable_in == (BF16 if is_known else None)
        assert is_representable(exact_jit(fun)(w, x), BF16) == (change is jnp.negative)


@all_programs
def test_types_are_those_of_the_plain_program_also_weak_ones_and_those_with_shardings(name):
    weak = lax.broadcast(jnp.asarray(1.0), (4, 4)), lax.broadcast(jnp.asarray(1.0), (16, 4))
    program = PROGRAMS[name](lambda w, x: x @ w * 2.0)
    assert weak[0].weak_type
    assert types_of(jax.eval_shape(mpx.autocast(program, BF16), *weak)) == types_of(jax.eval_shape(program, *weak))
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Explicit,), devices=jax.devices("cpu"))
    with jax.set_mesh(mesh if name != "shard_map" else eight_cpu_devices()):
        args = [
            jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arguments(), (WHOLE, SPLIT), strict=True)
        ]
        transform = with_gradients if name not in (*FORWARD_ONLY, "shard_map") else lambda fun: fun
        plain = types_of(jax.eval_shape(transform(program), *args))
        assert types_of(jax.eval_shape(transform(mpx.autocast(program, BF16)), *args)) == plain


# ---- one autocast inside of another ---------------------------------------------------------------------------------


DTYPES = {"f32": F32, "bf16": BF16, "f16": F16}
ISLANDS = {
    **{name: (functools.partial(mpx.autocast, policy_or_dtype=name), dtype) for name, dtype in DTYPES.items()},
    "full_precision": (mpx.full_precision, F32),
}


@pytest.mark.parametrize("name", [*PROGRAMS, "grad"])
def test_of_two_autocasts_the_inner_one_wins(name):
    """Also where a program stands between the two, or inside of the inner one.

    The operations outside of the island are the outer one's. Each pair of a program, an island and an outer dtype
    occurs.
    """
    w, x = arguments()
    around = PROGRAMS.get(name, lambda f: lambda w, x: jax.grad(lambda w, x: jnp.sin(f(w, x)).sum())(w, x))
    for i, (inside, dtype) in enumerate(ISLANDS.values()):
        outer = list(DTYPES)[(i + len(name)) % 3]
        program = around(inside(lambda w, x: x @ w))
        *found, last = contractions(mpx.autocast(lambda w, x, f=program: (y := f(w, x)) @ y.T, outer), w, x)
        assert (set(found), last) == ({all_in(dtype)}, all_in(DTYPES[outer]))
        assert set(contractions(mpx.autocast(inside(around(lambda w, x: x @ w)), outer), w, x)) == {all_in(dtype)}


@with_a_gradient
def test_a_list_of_weights_that_is_closed_over_may_be_changed_between_calls(name):
    """Autocast remembers no trace."""
    weights, x = [], integers(0, 16, 4)
    fun = mpx.autocast(lambda x: PROGRAMS[name](lambda _, x: functools.reduce(jnp.matmul, weights, x))(x[:4], x), BF16)
    plain = fun(x)
    weights.append(2 * jnp.eye(4, dtype=F32))
    value, gradient = fun(x), jax.grad(total(fun))(x)
    assert (value == gradient * x).all()
    assert (jnp.abs(gradient) >= 2).all()
    weights.clear()
    assert_same_bits(fun(x), plain)


# ---- programs of small whole numbers, which bfloat16 has: the bits of the plain program in all of jax's modes --------


ALL_IN_ONE = ("scan", "branch", "checkpoint", "jit", "vmap")
everything = functools.reduce(lambda f, name: PROGRAMS[name](f), ALL_IN_ONE[::-1], lambda w, x: jax.nn.relu(x @ w))


def reference(w, x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] @ w
    ref[0, 0] += 1.0
    return ref[...] @ w


def for_a_tpu(w):
    """A kernel that must not be compiled for a CPU."""
    copy = lambda source, target: target.__setitem__(..., source[...])
    return pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(w.shape, w.dtype))(w @ w)


def until_100(w, row):
    """Mapped over rows, each has a number of iterations of its own, and the loop one condition a row."""
    return lax.while_loop(lambda c: jnp.abs(c).sum() < 100, lambda c: 2 * (c @ w), row + 1)


CHOICES = [lambda w, i=i: (w @ w) * i for i in (1.0, 2.0, 3.0)]
EXACT = {
    "everything": everything,
    "a reference": reference,
    "while": lambda w, x: jax.vmap(lambda row: until_100(w, row))(x * x),
    "switch, out of range too": lambda w, x: [lax.switch(jnp.int32(i), CHOICES, w) for i in (-3, 0, 1, 2, 9)],
    "cond of Python's truth": lambda w, x: [lax.cond(c, jnp.matmul, lambda x, w: x, x, w) for c in (True, False)],
    "platforms": lambda w, x: lax.platform_dependent(w, tpu=for_a_tpu, default=lambda w: w @ w),
}
MODES = {
    "eager": contextlib.nullcontext,
    "disable_jit": jax.disable_jit,
    "enable_checks": lambda: jax.enable_checks(True),
    "debug_nans": lambda: jax.debug_nans(True),
}


def whole_numbers():
    """The weight permutes and changes signs."""
    return jnp.eye(4, dtype=F32)[jnp.array([2, 0, 3, 1])] * jnp.array([[1.0, -1.0, 1.0, -1.0]], F32), integers(1, 3, 4)


@pytest.mark.parametrize(
    ("name", "mode"), [*[("everything", mode) for mode in MODES], *[(name, "eager") for name in EXACT]][1:]
)
def test_programs_of_whole_numbers_keep_every_bit(name, mode):
    """And their gradients, where they have some; also with the loop's `vmap` around autocast."""
    fun, args = EXACT[name], whole_numbers()
    transform = with_gradients if name == "everything" else lambda fun: fun
    expected = exact_jit(transform(fun))(*args)
    with MODES[mode]():
        assert_same_bits(exact_jit(transform(mpx.autocast(fun, BF16)))(*args), expected)
    if name == "while":
        outside = jax.vmap(mpx.autocast(until_100, BF16), in_axes=(None, 0))
        assert_same_bits(outside(args[0], args[1] ** 2), expected)


@pytest.mark.slow
def test_it_leaks_no_tracer():
    """Only traced: jax remembers nothing in this mode, and would compile everything anew."""
    with jax.checking_leaks():
        jax.make_jaxpr(jax.grad(total(mpx.autocast(everything, BF16)), argnums=(0, 1)))(*whole_numbers())


# ---- no hidden sums in 16 bits: a weight or a value that is used many times -----------------------------------------
#
# `use` is a product of a weight with ones: its gradient is one. 257 is the smallest whole number that bfloat16 has not,
# 2049 for float16.


def use(w):
    return (jnp.ones((1, len(w)), F32) @ w).sum()


def beside_a_product(f):
    """Like the embedding of a first token in front of a sequence."""

    def fun(w, x):
        rows = jnp.concatenate([w, jnp.ones((4, 4), F32) @ jnp.ones((4, 4), F32)]).reshape(2, 4, 4)
        return lax.scan(lambda c, row: (jax.checkpoint(f)(row, c), None), x, rows)[0]

    return fun


def returned_by_a_loop(f):
    def fun(w, x):
        (turned,) = lax.scan(lambda c, w: (c + use(w) * 0, w[::-1]), jnp.float32(0), w[None])[1]
        return jax.checkpoint(f)(turned, x)

    return fun


USES = {name: PROGRAMS[name] for name in DIFFERENTIABLE}
USES |= {"beside a product": beside_a_product, "returned by a loop": returned_by_a_loop}


def in_a_scan(f):
    return lambda w, n: lax.scan(lambda c, _: (c + f(w), None), jnp.float32(0), length=n + 1)[0]


@pytest.mark.parametrize(("dtype", "n"), [(BF16, 256), (F16, 2048)], ids=str)
@pytest.mark.parametrize("name", USES)
def test_the_gradient_of_a_weight_is_the_number_of_its_uses(name, dtype, n):
    """Wherever they are, their sum is not rounded: n + 1 uses, a prime number, for each element of the result."""
    loss = mpx.autocast(total(USES[name](lambda w, x: x + n * use(w) + use(w))), dtype)
    gradient = exact_jit(mpx.grad(loss, NO_SCALE))(jnp.zeros((4, 4), dtype), jnp.zeros((8, 1), F32))
    assert gradient.dtype == F32
    assert ((gradient > 0) & (gradient % (n + 1) == 0)).all()
    assert np.asarray(n + 1).astype(dtype) == n  # negative control: the sum is no number of the dtype


def tied(w):
    """256 tokens, and 1 from the head."""
    return w.T[jnp.zeros(256, jnp.int32)].sum() + (jnp.ones((1, 2), w.dtype) @ w)[0, 0]


def activation_used_301_times(w):
    """Added to the weight itself: what goes through the product is rounded there."""
    hidden = w.T @ jnp.eye(2, dtype=w.dtype)
    return sum((jnp.sin(hidden * 0).sum() + w.sum() for _ in range(301)), start=jnp.zeros((), w.dtype))


def bias_of_1001_rows(w):
    rows = jnp.ones((1001, 4), w.dtype) @ jnp.ones((4, 2), w.dtype)
    return ((rows + w.T) * 1).sum()


def stacked_biases(w):
    """Of 257 rows: a stack of biases goes through the loop in float32."""
    step = lambda b: (jnp.ones((257, 3), w.dtype) @ jnp.ones((3, 2), w.dtype) + b.reshape(1, 2)).sum()
    return lax.scan(lambda c, b: (c + step(b), None), jnp.zeros((), w.dtype), w[None])[0]


# Losses of a weight (2, 1), and its gradient, in each element.
SUMS = {
    "a token seen 1001 times": (lambda w: (w.T[jnp.zeros(1001, jnp.int32)] @ jnp.ones((2, 1), w.dtype)).sum(), 1001),
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
        assert (exact_jit(jax.grad(lambda w: loss(w).astype(F32)))(w).astype(F32) != count).all()


@pytest.mark.parametrize("start", ["zeros", "an argument"])
def test_a_loop_carries_sums_in_float32(start):
    """A thousand halves, from zeros, which every dtype has: in bfloat16 the sum stops at 128."""
    carried = lambda xs, c: lax.scan(lambda c, x: (c + x @ x, None), c, xs)[0]
    xs, zeros = jnp.full((1000, 2, 2), 0.5), jnp.zeros((2, 2))
    fun = carried if start == "an argument" else lambda xs, _: carried(xs, jnp.zeros((2, 2)))
    assert (mpx.autocast(fun, "bf16")(xs, zeros) == 500).all()


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_stacked_weights_are_summed_over_devices_before_they_are_rounded(check_vma):
    """33 on one of eight devices and 32 on the others are 257; each device's part is a bfloat16 number."""
    specs = dict(in_specs=(SPLIT, WHOLE), out_specs=SPLIT, check_vma=check_vma)
    product = jax.shard_map(jnp.matmul, mesh=eight_cpu_devices(), **specs)
    x = jnp.full((8, 2), 32.0).at[0].set(33.0)
    loss = lambda ws: lax.scan(lambda c, w: (c, product(x, w)), 0, ws)[1].sum()
    gradient = exact_jit(mpx.grad(mpx.autocast(loss, BF16)))(jnp.zeros((2, 2, 1), BF16))
    assert_same_bits(np.asarray(gradient), np.full((2, 2, 1), 257, F32))


@with_a_gradient
def test_a_float32_reduce_dtype_composes(name):
    """Each of eight devices adds up 257 ones, a prime number. Negative control: bfloat16, where it is 256."""
    around, fun, w, x = PROGRAMS[name], lambda w, x: x @ w, jnp.eye(4, dtype=BF16), jnp.ones((8 * 257, 4), F32)
    wide, narrow = (functools.partial(mpx.autocast, policy_or_dtype=BF16, reduce_dtype=dtype) for dtype in (F32, None))
    for gradient, is_wide in (
        (lambda w, x: jax.grad(total(around(wide(fun))))(w.astype(F32), x), True),
        (mpx.grad(wide(total(around(fun))), NO_SCALE), True),
        (mpx.grad(narrow(total(around(fun))), NO_SCALE), False),
    ):
        sums = exact_jit(gradient)(w, x)
        assert ((sums != 0) & (sums % 257 == 0)).all() == is_wide


@pytest.mark.parametrize("prevented", [(False, True), (True, False)], ids=str)
def test_a_checkpoint_may_keep_some_of_its_operands_from_being_merged(prevented):
    """Gradients that are summed in float32 make two operands of a weight in bfloat16."""
    fun = jax.checkpoint(lambda w, x: (x @ w).sum(), prevent_cse=prevented)
    grad = mpx.grad(mpx.autocast(fun, "bf16", reduce_dtype="f32"))
    assert_same_bits(np.asarray(grad(jnp.ones((2, 2), BF16), jnp.full((3, 2), 2, F32))), np.full((2, 2), 6, F32))
