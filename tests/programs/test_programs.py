"""One matrix: what plain JAX runs, autocast runs, no leaf over three times as wrong as
by casting by hand.

A property that plain JAX itself has not (a second derivative of a `custom_vjp`, a
symbolic batch) is skipped, with the words of plain JAX. By default programs are traced,
and the values of a quarter are computed.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

import mpx
from mpx._autocast import recompute
from mpx._stored.state_format import FLOAT32
from tests.autocast.helpers import SPLIT, WHOLE
from tests.helpers import BF16, F16, F32, assert_same_bits, eight_cpu_devices
from tests.programs import ROWS, _traced, all_programs

# What has convolutions alone (in 8 bits), or products in custom derivatives alone, is
# told so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.autocast.. no matrix product:UserWarning"
)
PROGRAMS = all_programs()
each_program = pytest.mark.parametrize("name", PROGRAMS)


def some(every, first):
    """Return programs for what takes long: every so many, or all of them with
    `MPX_ALL_PROGRAMS=1`.
    """
    return (
        list(PROGRAMS)
        if "MPX_ALL_PROGRAMS" in os.environ
        else list(PROGRAMS)[first::every]
    )


def slow_test(every, first):
    return lambda test: pytest.mark.slow(
        pytest.mark.parametrize("name", some(every, first))(test)
    )


FP8 = mpx.Fp8(min_extent=0)  # whatever is small runs in 8 bits too
# The gradients of some have numbers of 1,000, and float16 none above 65,504.
SCALE = mpx.StaticLossScale(2.0**6)


@contextlib.contextmanager
def as_plain_jax(plain):
    """Skip the test if what is inside raises, and plain JAX raises too."""
    try:
        yield
    except Exception:
        try:
            plain()
        except Exception as error:
            pytest.skip(
                f"plain JAX: {type(error).__name__}:"
                f" {str(error).strip().splitlines()[0][:90]}"
            )
        raise


def cast(tree, dtype):
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, np.floating) else x, tree
    )


def paths(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


# ---- what plain JAX runs, runs --------------------------------------------------------------------------------------
#
# A way takes a loss and a function like `jax.value_and_grad`, and returns a function of
# parameters and a batch.


def product_with_the_hessian(loss, value_and_grad):
    """A derivative in a direction of a gradient: all of JAX's own transformations."""
    return lambda p, batch: jax.jvp(lambda p: jax.grad(loss)(p, batch), (p,), (p,))


def steps_in_a_scan(loss, value_and_grad):
    """The loss may be called inside of a jit, a lambda and a partial."""
    called = jax.jit(functools.partial(lambda loss, p, batch: loss(p, batch), loss))

    def step(p, batch):
        value, grads = value_and_grad(called)(p, batch)
        return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), p, grads), value

    return lambda p, batch: lax.scan(lambda p, _: step(p, batch), p, length=2)


def one_gradient_for_each_of_two(loss, value_and_grad):
    twice = lambda tree: jax.tree.map(lambda x: jnp.stack([x, x]), tree)
    return lambda p, batch: jax.vmap(value_and_grad(loss), in_axes=(0, None))(
        twice(p), batch
    )


def checkpoint_around(loss, value_and_grad):
    return lambda p, batch: value_and_grad(jax.checkpoint(loss))(p, batch)


def in_a_jit(loss, value_and_grad):
    return jax.jit(value_and_grad(jax.jit(loss)))


def value_alone(loss, value_and_grad):
    return loss


def jacobian_forwards(loss, value_and_grad):
    """A value and its derivative in one direction, mapped over two directions."""
    along = lambda p, batch, t: jax.jvp(lambda p: loss(p, batch), (p,), (t,))
    return lambda p, batch: jax.vmap(along, in_axes=(None, None, 0))(
        p, batch, jax.tree.map(lambda x: jnp.stack([x, -x]), p)
    )


def symbolic(batch):
    """Return the types of a batch with a symbol for its rows."""
    (size,) = jax.export.symbolic_shape("b")
    shape = lambda x: (size, *x.shape[1:]) if x.shape[:1] == (ROWS,) else x.shape
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype), batch)


WIDE = {"reduce_dtype": "f32"}  # as on several devices
DOTS, NOTHING, EVERYTHING = (
    {"checkpoint": kept} for kept in ("dots", "nothing", "everything")
)


class Mode(NamedTuple):
    """A way to differentiate, and what it is tried with."""

    way: Callable
    how: Any  # the precision
    options: dict[str, str]  # of autocast
    dtype: np.dtype  # of the parameters
    is_symbolic: bool = False  # whether the batch has a symbol for its rows


quick = [
    Mode(product_with_the_hessian, "bf16", {}, F32),
    Mode(steps_in_a_scan, "f16", WIDE | NOTHING, BF16),
    Mode(in_a_jit, FP8, {}, BF16),
    Mode(checkpoint_around, "bf16", WIDE, F32, True),
]
slow = [
    Mode(product_with_the_hessian, "bf16", WIDE, BF16),
    Mode(steps_in_a_scan, FP8, WIDE, F32),
    Mode(one_gradient_for_each_of_two, "f16", WIDE, F32),
    Mode(one_gradient_for_each_of_two, FP8, DOTS, BF16),
    Mode(checkpoint_around, "bf16", EVERYTHING, F32),
    Mode(in_a_jit, "f16", {}, F16),
    Mode(in_a_jit, "bf16", WIDE | NOTHING, BF16),
    Mode(value_alone, FP8, WIDE, BF16, True),
    Mode(jacobian_forwards, "bf16", DOTS, BF16),
]


def label(mode):
    words = (
        mode.way.__name__,
        "fp8" if mode.how is FP8 else mode.how,
        *mode.options.values(),
        f"{mode.dtype} parameters",
    )
    return ", ".join(words + ("symbolic",) * mode.is_symbolic)


# By default each program is traced in one of the quick modes.
TRACED = [
    pytest.param(
        name,
        mode,
        id=f"{name}-{label(mode)}",
        marks=[] if (i + j) % len(quick) == 1 else pytest.mark.slow,
    )
    for i, mode in enumerate(quick)
    for j, name in enumerate(PROGRAMS)
]
TRACED += [
    pytest.param(name, mode, id=f"{name}-{label(mode)}", marks=pytest.mark.slow)
    for i, mode in enumerate(slow)
    for name in some(every=18, first=i)
]


@pytest.mark.parametrize(("name", "mode"), TRACED)
def test_what_plain_jax_traces_is_traced(name, mode):
    way, how, options, dtype, is_symbolic = mode
    loss, (p, batch) = PROGRAMS[name].loss, PROGRAMS[name].make(0)
    p, batch = cast(p, dtype), symbolic(batch) if is_symbolic else batch
    policy = getattr(
        jax.checkpoint_policies, f"{options.get('checkpoint', 'everything')}_saveable"
    )
    plain = jax.checkpoint(loss, policy=policy) if "checkpoint" in options else loss
    with as_plain_jax(lambda: jax.eval_shape(way(plain, jax.value_and_grad), p, batch)):
        differentiate = functools.partial(mpx.value_and_grad, loss_scale=SCALE)
        jax.eval_shape(way(mpx.autocast(loss, how, **options), differentiate), p, batch)


@slow_test(every=12, first=0)
def test_no_tracer_leaks(name):
    loss, args = PROGRAMS[name].loss, PROGRAMS[name].make(0)
    with (
        jax.checking_leaks(),
        as_plain_jax(lambda: jax.make_jaxpr(jax.grad(loss))(*args)),
    ):
        jax.make_jaxpr(mpx.grad(mpx.autocast(loss, "bf16", **WIDE)))(*args)


@slow_test(every=12, first=3)
def test_a_checkpoint_keeps_few_bits_of_any_program(name):
    """Of parameters too, which a user would leave as they are; without a loss of bits
    it changes none.
    """
    loss, (p, batch) = PROGRAMS[name].loss, PROGRAMS[name].make(0)
    kept = functools.partial(mpx.checkpoint, loss, argnums=(0, 1))
    with as_plain_jax(
        lambda: jax.eval_shape(jax.grad(jax.checkpoint(loss)), p, symbolic(batch))
    ):
        jax.eval_shape(
            mpx.grad(mpx.autocast(kept(kept=mpx.Blockwise8bit()), "bf16", **WIDE)),
            p,
            symbolic(batch),
        )
    gradients = [
        jax.jit(jax.grad(loss))(p, batch)
        for loss in (kept(kept=FLOAT32), jax.checkpoint(loss))
    ]
    assert_same_bits(*gradients)


@slow_test(every=12, first=6)
def test_it_exports_with_any_number_of_rows(name):
    loss, (p, batch) = PROGRAMS[name].loss, PROGRAMS[name].make(0)
    export = lambda differentiated: jax.export.export(jax.jit(differentiated))(
        p, symbolic(batch)
    )
    with as_plain_jax(lambda: export(jax.grad(loss))):
        export(mpx.grad(mpx.autocast(loss, "bf16")))


# ---- where the sums are ---------------------------------------------------------------------------------------------


SUMMED = [(name, "f32") for name in PROGRAMS]
SUMMED += [
    pytest.param(name, "bf16", marks=pytest.mark.slow)
    for name in some(every=16, first=2)
]


@pytest.mark.parametrize(("name", "reduce_dtype"), SUMMED)
def test_gradients_are_sums_in_float32(name, reduce_dtype):
    """No sum is in 16 bits; of parameters that go into contractions as they are, none
    is of rounded terms either.

    Also if other functions call the loss. Negative control: rounded gradients if they
    are summed in the compute dtype.
    """
    loss, (p, batch) = PROGRAMS[name].loss, PROGRAMS[name].make(0)
    direct, p = np.array(_traced.contracted_directly(loss, p, batch)), cast(p, BF16)
    fun = mpx.autocast(loss, "bf16", reduce_dtype=reduce_dtype)
    program = jax.make_jaxpr(mpx.grad(jax.jit(lambda p, batch: fun(p, batch))))(
        p, batch
    )
    rounded = np.array(_traced.rounded_after_contraction(program))
    assert not _traced.sums_in_16_bits(program)
    names = np.array(paths(p))
    assert bool(names[direct & rounded].tolist()) == (
        reduce_dtype == "bf16" and direct.any()
    ), names[direct & rounded]


# ---- how wrong it is ------------------------------------------------------------------------------------------------

# Compilation takes long, not a run; in some of them a rounding moves a number over a
# kink.
SEEDS = range(9)
# One dtype after the other.
NARROW = {
    "bf16": (BF16,),
    "f16": (F16,),
    "fp8": (np.dtype(jnp.float8_e4m3fn), BF16),
}
# What one rounding to the format loses at most, relative to a number: half of the
# distance to the next. The error of each leaf may be as large, because that by hand may
# happen to be zero. Gradients in 8 bits have two bits of mantissa.
FLOOR = {"bf16": 2.0**-8, "f16": 2.0**-11, "fp8": 2.0**-3}
# How many times the error by hand, and that of rounding alone. In 8 bits a few times
# either would let 0 pass.
TIMES = {"bf16": (3, 8), "f16": (3, 8), "fp8": (1.5, 1.5)}


def scaled_loss(loss):
    return lambda p, batch: loss(p, batch).astype(np.float32) * SCALE.loss_scale


@functools.cache
def gradient(name):
    return jax.value_and_grad(scaled_loss(PROGRAMS[name].loss))


def run(function, name, dtypes=()):
    """Return a row of the value and of the leaves of the gradient for each seed, by a
    function that gives both.

    What it takes is cast first, to one dtype after the other.
    """
    compiled = jax.jit(function)
    rows = [
        compiled(*functools.reduce(cast, dtypes, PROGRAMS[name].make(seed)))
        for seed in SEEDS
    ]
    return [
        [np.asarray(leaf).astype(np.complex128) for leaf in jax.tree.leaves(row)]
        for row in rows
    ]


@functools.cache
def plain(name):
    return run(gradient(name), name)


def autocast(name, how, **options):
    rows = run(
        mpx.value_and_grad(mpx.autocast(PROGRAMS[name].loss, how, **options), SCALE),
        name,
    )
    return [[row[0] * SCALE.loss_scale, *row[1:]] for row in rows]


def norms(table):
    return np.array([[np.linalg.norm(leaf) for leaf in row] for row in table])


def errors(table, name):
    """Return how far the value and each gradient are from plain float32: the median
    over seeds.
    """
    return np.median(
        norms(
            [
                [x - y for x, y in zip(*rows, strict=True)]
                for rows in zip(table, plain(name), strict=True)
            ]
        ),
        0,
    )


@functools.cache
def allowed(name, how):
    """Return the largest error of the value and of each gradient: some times that by
    hand, and one rounding of it.

    By hand all is cast; or all is rounded, and computed in float32, which what adds up
    and counts needs. The smaller error counts. Of a gradient whose terms cancel the
    latter says nothing: there what is cast does.
    """
    dtypes, size = NARROW[how], sizes(name)
    in_float32 = TIMES[how][1] * errors(run(gradient(name), name, (*dtypes, F32)), name)
    try:
        hand = TIMES[how][0] * errors(run(gradient(name), name, dtypes), name)
    except Exception:  # a Cholesky factor in bfloat16, a carry of two dtypes
        hand = np.full_like(size, np.nan)
    cancels = (in_float32 > TIMES[how][1] * size / 2) & np.isfinite(hand)
    return np.where(cancels, hand, np.fmin(hand, in_float32)) + FLOOR[how] * size


def sizes(name):
    return np.median(norms(plain(name)), 0)


VALUES = [
    pytest.param(name, how, marks=[] if i % every == first else pytest.mark.slow)
    for how, every, first in (("bf16", 4, 1), ("f16", 16, 2), ("fp8", 16, 4))
    for i, name in enumerate(PROGRAMS)
]
# Biases of keys, whose gradients are 0 but for roundings: nobody can judge them.
# Of signs of products: the order of a compiler's sums decides which ones cross zero.
JUMPS = ("binary_network",)
UNTOLD = {
    "attention_in_linen": {"['params']['key']['bias']"},
    "decoding_in_linen": {"['key']['bias']"},
}


@pytest.mark.parametrize(("name", "how"), VALUES)
def test_errors_of_each_leaf_are_near_those_by_hand(name, how):
    """Negative controls: of each leaf, a gradient of the other sign, one of 0, and half
    of it (in 16 bits) are refused.

    Where float32 and casting by hand give 0, nothing but 0 is allowed.
    """
    ours = autocast(name, FP8 if how == "fp8" else how, **WIDE)
    found, most, size = errors(ours, name), allowed(name, how), sizes(name)
    most = np.maximum(most, 0.9 * size) if name in JUMPS else most
    leaves = ["value", *paths(PROGRAMS[name].make(0)[0])]
    named = lambda are: {leaf for leaf, is_it in zip(leaves, are, strict=True) if is_it}
    assert not named(~(found <= most)), (leaves, found / most)
    factors = (-1,) if name in JUMPS else (-1, 0) if how == "fp8" else (-1, 0, 0.5)
    wrong = [
        errors([[x * factor for x in row] for row in ours], name) for factor in factors
    ]
    told = np.where(size > 0, np.min(wrong, 0) > most, most == 0)
    assert named(~told) <= UNTOLD.get(name, set()), (leaves, np.min(wrong, 0) / most)


# JAX drops custom derivatives in loops on the way to the second derivative.
IN_LOOPS = ("scanned_layers_with_a_checkpoint_policy", "selective_state_space")
SECOND = [
    *IN_LOOPS,
    *[
        pytest.param(name, marks=pytest.mark.slow)
        for name in some(24, 2)
        if name not in IN_LOOPS
    ],
]


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_near_those_in_float32(name):
    """Of bfloat16 parameters with float32 sums, times the parameters: a fifth of it may
    be lost, or what is by hand.

    A derivative that got lost on its way would have an error of 1. The median over
    seeds, since a rounding may move a number over a kink.
    """
    args = [PROGRAMS[name].make(seed) for seed in range(3)]

    def products(loss, dtype):
        of_p = jax.jit(
            lambda p, batch: product_with_the_hessian(loss, None)(p, batch)[1]
        )
        trees = [of_p(cast(cast(p, BF16), dtype), batch) for p, batch in args]
        return [
            np.concatenate(
                [np.asarray(x).ravel() for x in jax.tree.leaves(cast(tree, F32))]
            )
            for tree in trees
        ]

    loss = PROGRAMS[name].loss
    with as_plain_jax(lambda: [products(loss, dtype) for dtype in (F32, BF16)]):
        exact, by_hand = products(loss, F32), products(loss, BF16)
        ours = products(mpx.autocast(loss, "bf16", **WIDE), BF16)
    error = lambda found: np.median(
        [
            np.linalg.norm(x - y) / np.linalg.norm(y)
            for x, y in zip(found, exact, strict=True)
        ]
    )
    assert error(ours) <= 3 * error(by_hand) + 0.2


# ---- without jit, bit by bit ----------------------------------------------------------------------------------------


@slow_test(every=16, first=0)
def test_recomputation_checkpoints_and_callers_change_no_bit(name, monkeypatch):
    """Operation by operation, so that no compiler chooses: of parameters in bfloat16."""
    loss, (p, batch) = PROGRAMS[name].loss, PROGRAMS[name].make(0)
    p = cast(p, BF16)
    around = lambda fun, **options: mpx.value_and_grad(
        fun(mpx.autocast(loss, "bf16", **options))
    )(p, batch)
    itself = lambda f: f
    with (
        jax.disable_jit(),
        as_plain_jax(lambda: jax.value_and_grad(jax.checkpoint(loss))(p, batch)),
    ):
        for wide in ({}, WIDE):
            expected = around(itself, **wide)
            for checkpoint in (DOTS, NOTHING, EVERYTHING) if wide else ():
                assert_same_bits(around(itself, **checkpoint, **wide), expected)
            for caller in (
                jax.jit,
                functools.partial,
                lambda f: lambda p, batch: f(p, batch),
            ):
                assert_same_bits(around(caller, **wide), expected)
            with monkeypatch.context() as patch:
                patch.setattr(
                    recompute, "with_activations", lambda plan, settings: plan
                )
                assert_same_bits(around(itself, **wide), expected)


# ---- eight devices --------------------------------------------------------------------------------------------------


@slow_test(every=16, first=1)
@pytest.mark.many_devices
def test_eight_devices_agree_with_one(name):
    """A divided batch, and float32 sums: results differ by less than errors may be,
    which some programs enlarge.
    """
    mesh, (p, batch) = eight_cpu_devices(), PROGRAMS[name].make(0)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    args = (
        place(p, WHOLE),
        jax.tree.map(
            lambda x: place(x, SPLIT if x.shape[:1] == (ROWS,) else WHOLE), batch
        ),
    )
    function = jax.jit(mpx.value_and_grad(mpx.autocast(PROGRAMS[name].loss, "bf16")))
    with as_plain_jax(lambda: jax.jit(jax.value_and_grad(PROGRAMS[name].loss))(*args)):
        several = jax.tree.leaves(function(*args))
    one = jax.tree.leaves(function(p, batch))
    differences = np.array(
        [
            np.linalg.norm(np.asarray(a) - np.asarray(b))
            for a, b in zip(several, one, strict=True)
        ]
    )
    assert (differences * SCALE.loss_scale <= allowed(name, "bf16")).all(), differences
