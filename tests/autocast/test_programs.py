"""One table of programs, and what holds for each under autocast: bits, dtypes of contractions, sums in float32.

Oracle of bits: the same program with each matrix product's casts written by hand. A program takes the product as an
argument, so one text makes both. Oracle of sums: gradients that count uses; the compute dtype does not have the count.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import mpx
from tests.autocast.helpers import (
    BF16,
    F16,
    F32,
    all_in,
    contractions,
    exact_jit,
    integers,
    narrow_dot,
    normal,
    rounding_cotangent,
    total,
)
from tests.helpers import assert_same_bits, eight_cpu_devices, types_of

SPLIT, WHOLE = PartitionSpec("data"), PartitionSpec()
NO_SCALE = mpx.NoOpLossScale()  # of numbers that float16 has


def on_devices(fun, out=SPLIT):
    """Return a function of weights, which all devices hold, and of rows, which are divided over eight devices."""
    varying = lambda w, x: fun(lax.pcast(w, "data", to="varying"), x)
    return jax.shard_map(varying, mesh=eight_cpu_devices(), in_specs=(WHOLE, SPLIT), out_specs=out)


# ---- the table: from a matrix product to functions of weights (4, 4), stacked weights (3, 4, 4), and rows (16, 4) ----


def two_layers(dot, biased=lambda h: h):
    """A bias, a norm, and two products."""

    def fun(w, ws, x):
        h = jnp.sin(biased(dot(x, w) + ws[0, :1]))
        return dot(h * lax.rsqrt((h * h).mean(-1, keepdims=True)), ws[1])

    return fun


def stacked_scan(dot):
    body = lambda c, w: (jnp.sin(y := dot(c, w)), y)
    return lambda w, ws, x: lax.scan(body, x, ws)


def reversed_scan(dot):
    def fun(w, ws, x):
        return lax.scan(lambda c, w2: (jnp.sin(dot(dot(c, w2), w)), c.sum()), x, ws, reverse=True, unroll=2)

    return fun


def branch(dot):
    first, second = lambda w, x: jnp.sin(dot(x, w)), lambda w, x: dot(jnp.cos(x), 2 * w)
    return lambda w, ws, x: lax.cond(x[0, 0] > 0, first, second, w, x)


def switch(dot):
    branches = [lambda w, x, i=i: jnp.sin(dot(x, w) * i) for i in (1.0, 2.0, 3.0)]
    return lambda w, ws, x: [lax.switch(index, branches, ws[0], x) for index in (0, 2, 7)]


def branch_in_scan(dot):
    def body(c, w):
        return lax.cond(c[0, 0] > 0, lambda c: (jnp.sin(dot(c, w)), c), lambda c: (c, dot(c, w)), c)

    return lambda w, ws, x: lax.scan(body, x, ws)


def checkpoint_names(dot):
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    fun = lambda w, x: jnp.sin(dot(checkpoint_name(jnp.sin(dot(x, w)), "hidden"), w))
    return lambda w, ws, x: jax.checkpoint(fun, policy=policy, prevent_cse=False)(w, x)


def checkpoint_in_scan(dot):
    body = jax.checkpoint(lambda c, w: (jnp.sin(dot(jnp.sin(dot(c, w)), w)), None), prevent_cse=False)
    return lambda w, ws, x: lax.scan(body, x, ws)[0]


def call_in_scan(dot):
    step = jax.jit(lambda c, w: jnp.sin(dot(c, w)))
    return lambda w, ws, x: lax.scan(lambda c, w: (step(c, w), step(c, 2 * w)), x, ws)


PROGRAMS = {
    "two layers": two_layers,
    "carry of a scan": lambda dot: lambda w, ws, x: lax.scan(lambda c, _: (jnp.sin(dot(c, w)), None), x, length=3)[0],
    "checkpoint": lambda dot: lambda w, ws, x: jax.checkpoint(lambda w: jnp.sin(dot(jnp.sin(dot(x, w)), w)))(w),
    "vectorized scan": lambda dot: lambda w, ws, x: jax.vmap(lambda row: stacked_scan(dot)(w, ws, row)[0])(x),
    "shard_map": lambda dot: lambda w, ws, x: on_devices(lambda w, x: jnp.sin(dot(x, w)))(w, x),
    "shard_map that sums": lambda dot: (
        lambda w, ws, x: on_devices(lambda w, x: lax.psum(dot(dot(x, w).T, x), "data"), WHOLE)(w, x)
    ),
    **{
        fun.__name__.replace("_", " "): fun
        for fun in (
            *(stacked_scan, reversed_scan, branch, switch, branch_in_scan),
            *(checkpoint_names, checkpoint_in_scan, call_in_scan),
        )
    },
}


def loss_of(fun):
    return lambda *args: jnp.cos(fun(*args)).mean()


def scanned(fun):
    return lambda w, ws, x: lax.scan(lambda c, row: (c + fun(w, ws, row[None]).sum(), None), jnp.float32(0), x)[0]


def repeated(fun):
    step = lambda w, ws, x, c: (c[0] + 1, c[1] + fun(w, ws, x).sum())
    return lambda *args: lax.while_loop(lambda c: c[0] < 2, functools.partial(step, *args), (0, jnp.float32(0)))


TRANSFORMS = {
    "value and grad": lambda f: lambda *args: (f(*args), jax.grad(total(f), argnums=(0, 1))(*args)),
    "vmap of grad": lambda f: lambda w, ws, x: jax.vmap(lambda row: jax.grad(loss_of(f))(w, ws, row[None]))(x),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, tuple(map(jnp.cos, args))),
    "hessian": lambda f: lambda w, ws, x: jax.hessian(lambda x: loss_of(f)(w, ws, x))(x[:3]),
    "grad of checkpoint": lambda f: jax.grad(loss_of(jax.checkpoint(f))),
    "grad of scan": lambda f: jax.grad(scanned(f)),
    "while": repeated,
    "cond": lambda f: lambda w, ws, x: lax.cond(x[0, 0] > 9, lambda w: f(w, ws, 2 * x), lambda w: f(w, ws, x), w),
}
# Much like these, and slow to compile.
ONLY_TRACED = {
    "vmap": lambda f: lambda w, ws, x: jax.vmap(lambda row: f(w, ws, row[None]))(x),
    "jacfwd": lambda f: jax.jacfwd(f, argnums=2),
    "grad of grad": lambda f: jax.grad(lambda *args: (jax.grad(loss_of(f), argnums=2)(*args) ** 2).sum()),
    "linearize": lambda f: lambda *args: jax.linearize(f, *args)[1](*args),
}
OF_A_MODEL = [("two layers", name) for name in TRANSFORMS]
OF_ALL = [(name, "value and grad") for name in PROGRAMS if name != "two layers"]


def arguments():
    return normal(0, 4, 4), normal(1, 3, 4, 4), normal(2, 16, 4)


# ---- bits and dtypes ------------------------------------------------------------------------------------------------


@pytest.mark.eager
@pytest.mark.parametrize(("name", "transform"), OF_ALL + OF_A_MODEL)
def test_values_and_gradients_are_those_of_casts_written_by_hand(name, transform):
    """Every bit, and the types of the plain program. Negative control: the float32 program has other values."""
    args, transform = arguments(), TRANSFORMS[transform]
    plain, by_hand = PROGRAMS[name](jnp.matmul), PROGRAMS[name](narrow_dot(BF16))
    if name == "two layers":
        by_hand = two_layers(narrow_dot(BF16), functools.partial(rounding_cotangent, dtype=BF16))
    actual = exact_jit(transform(mpx.autocast(plain, BF16)))(*args)
    assert_same_bits(actual, exact_jit(transform(by_hand))(*args))
    assert types_of(actual) == types_of(jax.eval_shape(transform(plain), *args))
    if name in ("carry of a scan", "checkpoint", "branch"):
        assert (actual[0] != exact_jit(plain)(*args)).any()


@pytest.mark.parametrize(("name", "transform"), OF_ALL + OF_A_MODEL + [("two layers", name) for name in ONLY_TRACED])
def test_every_contraction_is_narrowed_around_and_inside_of_a_transformation(name, transform):
    """Except inside, in a batch of one row: the gradient of a weight sums nothing there, and is kept."""
    args, program = arguments(), PROGRAMS[name](jnp.matmul)
    transform = (TRANSFORMS | ONLY_TRACED)[transform]
    plain = len(contractions(transform(program), *args))
    for dtype in (BF16, F16):
        assert contractions(transform(mpx.autocast(program, dtype)), *args) == [all_in(dtype)] * plain
    inside = contractions(mpx.autocast(transform(program), BF16), *args)
    in_float32 = int(transform in (TRANSFORMS["vmap of grad"], TRANSFORMS["grad of scan"]))
    assert (inside.count(all_in(BF16)), inside.count(all_in(F32))) == (plain - in_float32, in_float32)


# ---- programs of small whole numbers, which bfloat16 has: the bits of the plain program in all of jax's modes --------


def everything(w, x):
    """Scan, cond, jit, checkpoint, vmap, and a custom derivative."""
    y, _ = lax.scan(lambda c, _: (jnp.abs(c @ w), None), x, length=2)
    y = lax.cond(y[0, 0] > 9, lambda y: y @ w, lambda y: y - y @ w, y)
    y = jax.checkpoint(lambda y: jnp.maximum(y @ w, -1.0))(y)
    y = jax.jit(lambda y: jax.nn.relu(y @ w))(y)
    return jax.vmap(lambda row: row @ w)(y)


def reference(w, x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] @ w
    ref[0, 0] += 1.0
    return ref[...] @ w


def dropout(w, x):
    drop = lambda key, c: jnp.where(jax.random.bernoulli(key, 0.5, c.shape), c, 0.0)
    return lax.scan(lambda c, key: (drop(key, c @ w), None), x, jax.random.split(jax.random.key(1), 3))[0]


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
    "dropout in a loop": dropout,
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
    "64-bit types": lambda: jax.enable_x64(True),
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
    with_gradient = lambda fun: lambda *args: (fun(*args), jax.grad(total(fun), argnums=(0, 1))(*args))
    transform = with_gradient if name == "everything" else lambda fun: fun
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
    return (jnp.ones((1, 2), F32) @ w).sum()


def in_checkpoint(w, n):
    return jax.checkpoint(lambda w: n * use(w) + use(w))(w)


def beside_a_product(w, n):
    """Like the embedding of a first token in front of a sequence."""
    rows = jnp.concatenate([w, jnp.ones((2, 2), F32) @ jnp.ones((2, 1), F32)]).reshape(2, 2, 1)
    return lax.scan(lambda c, row: (c + in_checkpoint(row, n), None), jnp.float32(0), rows)[0]


def returned_by_a_loop(w, n):
    (turned,) = lax.scan(lambda c, w: (c + use(w) * 0, w[::-1]), jnp.float32(0), w[None])[1]
    return in_checkpoint(turned, n)


def on_several_devices(w, n):
    """An eighth on each of eight devices, and one more on the first."""
    counts = jnp.full(8, n / 8.0, F32).at[0].add(1.0)
    return on_devices(lambda w, count: lax.psum(count[0] * use(w), "data"), WHOLE)(w, counts)


def added_up(body, xs=None, length=None):
    return lax.scan(lambda c, x: (c + body(x), None), jnp.float32(0), xs, length)[0]


# Each uses a weight n + 1 times: the sum of the uses is not rounded, wherever they are.
USES = {
    "in a scan": lambda w, n: added_up(lambda _: use(w), length=n + 1),
    "in checkpoints": lambda w, n: n * jax.checkpoint(use)(w) + jax.checkpoint(use)(w),
    "in a checkpoint": in_checkpoint,
    "in a checkpoint in a scan": lambda w, n: added_up(
        lambda _: jax.checkpoint(use, prevent_cse=False)(w), None, n + 1
    ),
    "in a branch in a scan": lambda w, n: added_up(
        lambda i: lax.cond(i >= 0, use, lambda w: jnp.float32(0), w), jnp.arange(n + 1)
    ),
    # Twice in each iteration: the slice must not travel in 16 bits.
    "in a stack": lambda w, n: added_up(lambda w: n * use(w) + use(w), w[None]),
    "in a checkpoint of a stack": lambda w, n: added_up(lambda w: in_checkpoint(w, n), w[None]),
    "on several devices": on_several_devices,
    "beside a product": beside_a_product,
    "carried by a loop": lambda w, n: lax.fori_loop(
        0, 1, lambda i, c: (c[0][::-1], c[1] + in_checkpoint(c[0], n)), (w, jnp.float32(0))
    )[1],
    "returned by a loop": returned_by_a_loop,
}


@pytest.mark.parametrize(("dtype", "n"), [(BF16, 256), (F16, 2048)], ids=str)
@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_the_gradient_of_a_weight_is_the_number_of_its_uses(uses, dtype, n):
    gradient = exact_jit(mpx.grad(mpx.autocast(lambda w: uses(w, n), dtype), NO_SCALE))(jnp.zeros((2, 1), dtype))
    assert_same_bits(np.asarray(gradient), np.full((2, 1), n + 1, F32))
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
    "4097 iterations of a scan": (lambda w: added_up(lambda _: use(w), length=4097), 4097),
    "tied weights": (tied, 257),
    "an activation used 301 times": (activation_used_301_times, 301),
    "a bias of 1001 rows": (bias_of_1001_rows, 1001),
    "stacked biases": (stacked_biases, 257),
}


@pytest.mark.parametrize("rules", [mpx.DEFAULT_RULES, mpx.FAST_RULES], ids=["default", "fast"])
@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_added_up_in_float32(name, rules):
    """Negative control: parameters, values and sums in bfloat16."""
    loss, count = SUMS[name]
    w = jnp.zeros((2, 1), BF16)
    gradient = exact_jit(mpx.grad(mpx.autocast(loss, BF16, rules=rules)))(w)
    assert (np.asarray(gradient).astype(int) == count).all(), gradient
    assert gradient.dtype == F32
    with jax.numpy_dtype_promotion("standard"):
        assert (exact_jit(jax.grad(lambda w: loss(w).astype(F32)))(w).astype(F32) != count).all()


@pytest.mark.parametrize("rules", [mpx.DEFAULT_RULES, mpx.FAST_RULES], ids=["default", "fast"])
@pytest.mark.parametrize("start", ["zeros", "an argument"])
def test_a_loop_carries_sums_in_float32(rules, start):
    """A thousand halves, from zeros, which every dtype has: in bfloat16 the sum stops at 128."""
    carried = lambda xs, c: lax.scan(lambda c, x: (c + x @ x, None), c, xs)[0]
    xs, zeros = jnp.full((1000, 2, 2), 0.5), jnp.zeros((2, 2))
    fun = carried if start == "an argument" else lambda xs, _: carried(xs, jnp.zeros((2, 2)))
    assert (mpx.autocast(fun, "bf16", rules=rules)(xs, zeros) == 500).all()


def test_the_gradient_of_a_bfloat16_weight_is_rounded_once_by_jax_itself():
    """`jax.grad` gives it the weight's dtype; and slices of a stack that is cast first lose a use. `mpx.grad`: 257."""
    w = jnp.zeros((2, 1), BF16)
    loss = mpx.autocast(lambda w: USES["in a scan"](w, 256), BF16)
    assert_same_bits(jax.grad(loss)(w), jnp.full((2, 1), 256, BF16))
    once = lambda w: (jnp.ones((1, 2), BF16) @ w).astype(F32).sum()
    cast_first = lambda ws: added_up(lambda w: 256 * once(w) + once(w), ws.astype(BF16))
    assert (exact_jit(jax.grad(cast_first))(jnp.zeros((1, 2, 1))) == 256).all()


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_stacked_weights_are_summed_over_devices_before_they_are_rounded(check_vma):
    """33 on one of eight devices and 32 on the others are 257; each device's part is a bfloat16 number."""
    specs = dict(in_specs=(SPLIT, WHOLE), out_specs=SPLIT, check_vma=check_vma)
    product = jax.shard_map(jnp.matmul, mesh=eight_cpu_devices(), **specs)
    x = jnp.full((8, 2), 32.0).at[0].set(33.0)
    loss = lambda ws: lax.scan(lambda c, w: (c, product(x, w)), 0, ws)[1].sum()
    gradient = exact_jit(mpx.grad(mpx.autocast(loss, BF16)))(jnp.zeros((2, 2, 1), BF16))
    assert_same_bits(np.asarray(gradient), np.full((2, 2, 1), 257, F32))


AROUND_A_SUM = {
    "a call": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda w, x: lax.map(lambda row: f(w, row), x),
    "cond": lambda f: lambda w, x: lax.cond(x.sum() > 0, f, lambda w, x: f(w, 2 * x), w, x),
}


@pytest.mark.parametrize("transform", AROUND_A_SUM.values(), ids=AROUND_A_SUM)
def test_a_float32_reduce_dtype_composes(transform):
    """The gradient of the sum of `x @ w` is a sum of 257 ones, which bfloat16 does not have: there it is 256."""
    x, w = jnp.ones((1, 257, 2), F32), jnp.zeros((2, 1), F32)
    fun = lambda w, x: x @ w
    for dtype, count in ((F32, 257.0), (None, 256.0)):
        autocast = functools.partial(mpx.autocast, policy_or_dtype=BF16, reduce_dtype=dtype)
        for program in (autocast(transform(fun)), transform(autocast(fun))):
            gradient = exact_jit(jax.grad(lambda w, program=program: program(w, x).sum()))(w)
            assert_same_bits(gradient, jnp.full((2, 1), count, F32))


@pytest.mark.parametrize("prevented", [(False, True), (True, False)], ids=str)
def test_a_checkpoint_may_keep_some_of_its_operands_from_being_merged(prevented):
    """Gradients that are summed in float32 make two operands of a weight in bfloat16."""
    fun = jax.checkpoint(lambda w, x: (x @ w).sum(), prevent_cse=prevented)
    grad = mpx.grad(mpx.autocast(fun, "bf16", reduce_dtype="f32"))
    assert_same_bits(np.asarray(grad(jnp.ones((2, 2), BF16), jnp.full((3, 2), 2, F32))), np.full((2, 2), 6, F32))
