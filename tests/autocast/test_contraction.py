"""Contractions under autocast: which are narrowed, what they compute, and in what their
gradients are summed.

Oracles: the same contraction with its casts written by hand; sums in float64; small
integers, whose sums are exact.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import mpx
from tests.autocast.helpers import (
    BF16,
    F16,
    F32,
    all_in,
    autocast_loss,
    contractions,
    conv,
    eqns_of,
    exact_jit,
    half_dtypes,
    integers,
    narrow_dot,
    normal,
)
from tests.helpers import assert_same_bits

MATRIX = (((1,), (0,)), ((), ()))


def dot(x, w, **options):
    return lax.dot_general(x, w, MATRIX, **options)


# ---- which are narrowed ---------------------------------------------------------------------------------------------

RAGGED = lambda x, w, **options: lax.ragged_dot(x, w, jnp.array([2, 1, 3]), **options)
IMAGES, KERNEL = (1, 5, 5, 2), (3, 3, 2, 4)
NARROWED = {
    "matrix product": (lambda x, w: x @ w, (3, 8), (8, 2)),
    "einsum with batch dimensions": (
        lambda x, w: jnp.einsum("bhqd,bhkd->bhqk", x, w),
        (2, 2, 3, 8),
        (2, 2, 3, 8),
    ),
    "product mapped over rows": (
        lambda x, w: jax.vmap(lambda v: w.T @ v)(x),
        (3, 8),
        (8, 2),
    ),
    "with a float32 result asked for": (
        lambda x, w: dot(x, w, preferred_element_type=F32),
        (3, 8),
        (8, 2),
    ),
    "strided convolution": (lambda x, w: conv(x, w, stride=2), IMAGES, KERNEL),
    "grouped convolution": (
        lambda x, w: conv(x, w, groups=2),
        (1, 5, 5, 4),
        (3, 3, 2, 4),
    ),
    "transposed convolution": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        (1, 3, 3, 2),
        (3, 3, 2, 2),
    ),
    "ragged product": (RAGGED, (6, 8), (3, 8, 2)),
    "product of no rows": (lambda x, w: x @ w, (0, 8), (8, 2)),
    "convolution with groups of the batch": (
        lambda x, w: conv(x, w, batch_group_count=2),
        (2, 5, 5, 2),
        KERNEL,
    ),
    "convolution padded on one side": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (2,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC")
        ),
        *((1, 6, 4), (3, 4, 1)),
    ),
}


class Kept(NamedTuple):
    fun: Callable[..., Any]
    reason: str
    runs_in: str = "f32"
    asked_for: Any = "bf16"
    shapes: tuple[tuple[int, ...], ...] = ((8, 8), (8, 8))


PRECISE = "precision .* is asked for"
OUTER = "nothing is summed: an outer product"
VECTOR = "an operand is a vector, or one for each channel"
MAPPED = f"{VECTOR}; narrowed where a `jax.vmap` around makes a matrix of it"
AUTHOR = "a custom derivative belongs to the function that its author wrote"
DECIDED = "decided by an autocast or full_precision inside"
HEAD = mpx.Policy("float32", "bfloat16", "float32", overrides=(("head", "float32"),))


def cast_to(dtype):
    return lambda x, w: x.astype(dtype) @ w.astype(dtype)


# Wrong derivatives on purpose: that of `x @ w` is said to be three times its own.
with_vjp = jax.custom_vjp(jnp.matmul)
with_vjp.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda res, g: (3 * (g @ res[1].T), res[0].T @ g)
)
KEPT = {
    "outer product": Kept(
        lambda x, w: jnp.einsum("i,j->ij", x, w), OUTER, shapes=((3,), (4,))
    ),
    "ragged outer product": Kept(RAGGED, OUTER, shapes=((6, 1), (3, 1, 2))),
    "vector times vector": Kept(jnp.vdot, VECTOR, asked_for="f16", shapes=((9,), (9,))),
    "a dot of each row": Kept(lambda x, w: jnp.einsum("td,td->t", x, w), VECTOR),
    "a dot of each row, by matrices": Kept(
        lambda x, w: x[:, None] @ w[:, :, None], VECTOR
    ),
    "matrix times vector": Kept(
        lambda x, w: x @ w, VECTOR, asked_for="bf16x3", shapes=((8, 9), (9,))
    ),
    "a head of one output": Kept(lambda x, w: x @ w, MAPPED, shapes=((8, 9), (9, 1))),
    "a row times what is computed": Kept(
        lambda x, w: x @ jnp.sin(w), VECTOR, shapes=((1, 9), (9, 8))
    ),
    "many matrices, each times a vector": Kept(
        jax.vmap(jnp.matmul), MAPPED, shapes=((3, 8, 9), (3, 9))
    ),
    "sums of seven numbers": Kept(
        jnp.matmul, "only 7 numbers are summed", shapes=((8, 7), (7, 8))
    ),
    "sums of the signals of one channel": Kept(
        jnp.convolve, VECTOR, shapes=((20,), (9,))
    ),
    "sums of each channel by a filter that is computed": Kept(
        lambda x, w: conv(x, jnp.sin(w), groups=3),
        VECTOR,
        shapes=((1, 5, 5, 3), (3, 3, 1, 3)),
    ),
    "precision 'highest'": Kept(
        lambda x, w: dot(x, w, precision="highest"), PRECISE, asked_for="f16"
    ),
    "an algorithm written out": Kept(
        lambda x, w: dot(
            x, w, precision=lax.DotAlgorithm(F32, F32, F32), preferred_element_type=F32
        ),
        PRECISE,
    ),
    "full precision": Kept(mpx.full_precision(jnp.matmul), DECIDED),
    "autocast inside": Kept(jax.jit(mpx.autocast(jnp.matmul, "f16")), DECIDED, "f16"),
    "custom_vjp": Kept(with_vjp, AUTHOR),
    "16-bit operands, a float32 result": Kept(
        lambda x, w: dot(x.astype(F16), w.astype(F16), preferred_element_type=F32),
        "operands are float16",
        "f16",
    ),
    "integer operands": Kept(cast_to(np.int32), "operands are int32", "-"),
    "complex operands": Kept(
        cast_to(np.complex64), "operands are complex64", "complex64"
    ),
    "one complex operand": Kept(
        lambda x, w: dot(
            x, w.astype(np.complex64), preferred_element_type=np.complex64
        ),
        "operands are complex64 and float32",
        "complex64 f32",
    ),
    "float64 operands": Kept(cast_to(np.float64), "operands are float64", "f64"),
    "one float64 operand": Kept(
        lambda x, w: dot(x, w.astype(np.float64), preferred_element_type=F32),
        "operands are float32 and float64",
        "f32 f64",
    ),
    "a float64 result": Kept(
        lambda x, w: dot(x, w, preferred_element_type=np.float64),
        "its result is to be float64",
    ),
    "convolution by an algorithm": Kept(
        conv,
        "there is no bf16x3 algorithm for it",
        asked_for="bf16x3",
        shapes=(IMAGES, KERNEL),
    ),
    "override": Kept(
        jnp.matmul, "an override of the policy asks for f32", asked_for=HEAD
    ),
    "f32": Kept(jnp.matmul, "f32 is asked for", asked_for="f32"),
    # Not kept: a gradient that is written out is a program like any other.
    "gradient of custom_vjp": Kept(
        jax.grad(lambda x, w: with_vjp(x, w).sum(), argnums=(0, 1)), "", "bf16"
    ),
    "bf16x3": Kept(jnp.matmul, "", "bf16x3", "bf16x3"),
}


def arguments(case):
    fun, *shapes = NARROWED[case]
    return fun, [normal(i, *shape) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("case", NARROWED)
def test_a_contraction_of_float32_values_is_narrowed_forward_and_backward(case):
    """Operands and results in the compute dtype, viewed as float32; with a
    `reduce_dtype` gradients are float32.
    """
    fun, args = arguments(case)
    assert contractions(fun, *args) == [all_in(F32)]
    for dtype in (BF16, F16):
        autocast = mpx.autocast(fun, dtype)
        assert contractions(autocast, *args) == [all_in(dtype)]
        assert [row.reason for row in mpx.explain(fun, dtype)(*args).contractions] == [
            ""
        ]
        assert jax.eval_shape(autocast, *args) == jax.eval_shape(fun, *args)
        loss = lambda d=dtype, **options: autocast_loss(
            lambda *a: jnp.sin(fun(*a)), d, **options
        )
        assert set(contractions(jax.grad(loss(), argnums=(0, 1)), *args)) == {
            all_in(dtype)
        }
        first, *wide = contractions(
            jax.grad(loss(reduce_dtype=F32), argnums=(0, 1)), *args
        )
        assert first == all_in(dtype)
        assert set(wide) <= {(dtype, dtype, F32)}


@pytest.mark.parametrize("case", NARROWED)
def test_flops_are_two_for_each_product_that_is_added_up_forward_and_backward(case):
    """A sum of ones counts them: not the padding, nor the zeros between strided pixels."""
    fun, args = arguments(case)
    flops = 2 * float(fun(*map(jnp.ones_like, args)).sum())
    backward = jax.grad(lambda *args: fun(*args).sum(), argnums=(0, 1))
    for explained in (fun, backward):
        rows = mpx.explain(explained, BF16)(*args).contractions
        assert all(row.flops == row.count * flops for row in rows)


@pytest.mark.eager
@pytest.mark.parametrize("case", NARROWED)
def test_values_and_gradients_are_those_of_casts_written_by_hand(case):
    """Float32 gradients are those before they are rounded. Negative control: the
    float32 value is another one.
    """
    fun, args = arguments(case)
    with_value = lambda f: lambda *args: (jnp.sin(y := f(*args)).sum(), y)
    differentiated = lambda f: exact_jit(
        jax.value_and_grad(with_value(f), argnums=(0, 1), has_aux=True)
    )(*args)
    expected = differentiated(
        lambda *args: fun(*[x.astype(BF16) for x in args]).astype(F32)
    )
    if case != "with a float32 result asked for":  # by 16-bit operands too
        assert_same_bits(differentiated(mpx.autocast(fun, BF16)), expected)
    if case in ("matrix product", "strided convolution", "ragged product"):
        _, wide = differentiated(mpx.autocast(fun, BF16, reduce_dtype=F32))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2.0**-8),
            wide,
            expected[1],
        )
    assert np.any(expected[0][1] != fun(*args)) or not expected[0][1].size


@pytest.mark.filterwarnings("ignore:.* no matrix product of")
@pytest.mark.parametrize("case", KEPT)
def test_each_contraction_that_is_kept_has_the_bits_of_the_plain_program_and_says_why(
    case,
):
    """Its gradients too."""
    fun, reason, runs_in, asked_for, shapes = KEPT[case]
    of_tree, tree = (
        lambda tree: fun(tree["x"], tree["head"]),
        {"x": normal(0, *shapes[0]), "head": normal(1, *shapes[1])},
    )
    loss = lambda of_tree: (
        lambda tree: (abs(of_tree(tree).astype(np.complex64)) ** 2).sum()
    )
    with jax.enable_x64(True):
        rows = mpx.explain(of_tree, asked_for)(tree).contractions
        assert {row.runs_in for row in rows} == {runs_in}
        assert all(re.fullmatch(reason, row.reason) for row in rows)
        if reason and case != "an algorithm written out":  # CPUs have not this one
            run = lambda f: (f(tree), exact_jit(jax.value_and_grad(loss(f)))(tree))
            assert_same_bits(run(mpx.autocast(of_tree, asked_for)), run(of_tree))


def adds_up(p):
    """Return 1 or 0 for each of 771 tokens and three experts: which one it goes to."""
    return (p[:, None] % 3 == jnp.arange(3, dtype=F32)[None]).astype(F32)


N = 771  # three times 257, which bfloat16 has not
# what people add up, count and look up by products, of an argument 0, 1, ... 770: the
# right values
COUNTS = {
    "a count": (
        lambda p: (
            jnp.ones(N, F32) @ jax.nn.one_hot(p.astype(np.int32) // 257, 3, dtype=F32)
        ),
        np.full(3, 257),
    ),
    "a count in a row": (
        lambda p: jnp.ones((1, N), F32) @ adds_up(p),
        np.full((1, 3), 257),
    ),
    "a look-up": (
        lambda p: (
            jax.nn.one_hot(p.astype(np.int32), N, dtype=F32) @ jnp.arange(N, dtype=F32)
        ),
        np.arange(N),
    ),
    "a look-up in a column": (
        lambda p: (
            jax.nn.one_hot(p.astype(np.int32), N, dtype=F32)
            @ jnp.arange(N, dtype=F32)[:, None]
        )[:, 0],
        np.arange(N),
    ),
    "a sum by a convolution": (
        lambda p: jnp.convolve(p, jnp.ones(9, F32), mode="valid"),
        9 * np.arange(4, N - 4),
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_people_count_by_products_is_exact(name):
    """Negative control: some of the right values are none of bfloat16."""
    fun, right = COUNTS[name]
    for dtype in (BF16, F16):
        assert_same_bits(
            np.asarray(mpx.autocast(fun, dtype)(jnp.arange(N, dtype=F32))),
            right.astype(F32),
        )
    assert (right.astype(BF16) != right).any()


def test_a_norm_by_a_product_of_vectors_trains_in_float16():
    """70,000 is infinity in float16, and the gradient of its root 0: the step would be
    none, without a word.
    """
    tx = mpx.mixed_precision(optax.sgd(1.0), "f16-scaled")
    loss = mpx.autocast(lambda w: jnp.sqrt(jnp.vdot(w, w)), "f16-scaled")
    w = jnp.ones(70_000, F32)
    state = tx.init(w)
    for _ in range(4):
        updates, state = tx.update(
            mpx.grad(loss, mpx.get_loss_scale(state))(w), state, w
        )
        w = optax.apply_updates(w, updates)
    np.testing.assert_allclose(w, 1 - 4 / np.sqrt(70_000), rtol=1e-6)


LAYERS = {
    "a depthwise convolution": (
        lambda w, x: conv(x, w, groups=3),
        (3, 3, 1, 3),
        (1, 5, 5, 3),
    ),
    "a convolution of few": (
        lambda w, x: conv(jnp.sin(x), w),
        (1, 1, 3, 4),
        (1, 5, 5, 3),
    ),
}


ROWS = {
    "a row": (lambda w, x: x @ w, (8, 2), (1, 8)),
    "a computed column": (lambda w, x: w @ jnp.sin(x), (2, 8), (8, 1)),
    "a vector": (lambda w, x: x @ w.T, (2, 8), (8,)),
    "a slice of a stack": (
        lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, w)[0],
        (3, 8, 8),
        (8,),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_times_a_weight_is_narrowed_if_the_weight_is_stored_in_16_bits(name):
    """In float32 XLA would write such a weight in float32 first. A float32 array may be
    data.
    """
    fun, *shapes = ROWS[name]
    w, x = (normal(i, *shape) for i, shape in enumerate(shapes))
    assert contractions(mpx.autocast(fun, BF16), w.astype(BF16), x) == [all_in(BF16)]
    assert contractions(mpx.autocast(fun, BF16), w, x) == [all_in(F32)]


def read_by_a_token(query, cache):
    """Write a token's keys, and multiply its query with all: one row a head."""
    cache = lax.dynamic_update_slice_in_dim(
        cache, jnp.tanh(query).astype(cache.dtype), 0, 1
    )
    return jnp.einsum("bqhd,bkhd->bhqk", jnp.sin(query), cache.astype(query.dtype))


def read_in_a_branch(query, cache):
    cache = cache.at[:, 0].set(jnp.tanh(query[:, 0]).astype(cache.dtype))
    keys = lax.cond(
        query.sum() > 0, lambda: cache.astype(F32), lambda: -cache.astype(F32)
    )
    return jnp.einsum("bqhd,bkhd->bhqk", jnp.sin(query), keys)


CACHES = {
    "an argument": lambda query, cache: mpx.autocast(
        read_by_a_token, BF16, as_they_are=1
    )(query, cache),
    "made inside": lambda query, cache: mpx.autocast(
        lambda query: read_by_a_token(query, cache), BF16
    )(query),
    "made inside, of two branches": lambda q, cache: mpx.autocast(
        lambda q: read_in_a_branch(q, cache), BF16
    )(q),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_token_reads_a_cache_of_16_bits_as_whole_sequences_do(name):
    """So a sampler has the trainer's scores. Negative controls: a cache in float32, and
    one row without heads.
    """
    query, cache = normal(0, 2, 1, 4, 8), jnp.zeros((2, 9, 4, 8))
    assert contractions(CACHES[name], query, cache.astype(BF16)) == [all_in(BF16)]
    assert contractions(CACHES[name], query, cache) == [all_in(F32)]
    alone = lambda x: (
        x[0, 0, 0] @ jnp.sin(x[:, 0].reshape(8, 8)).astype(BF16).astype(F32)
    )
    assert contractions(mpx.autocast(alone, BF16), query) == [all_in(F32)]


LARGE = jnp.full((9, 8), 2.0**17, BF16)  # beyond the range of float16
large = lambda q: (q * 2.0**17).astype(BF16).astype(F32)
# Functions of keys (9, 8) in bfloat16 and of queries that multiply them, under float16.
sines = lambda q: jnp.sin(q[0]).astype(BF16)
KEPT_IN_BFLOAT16 = {
    "an array that is written to": lambda c, q: c.at[0].set(sines(q)),
    "a row of it": lambda c, q: c.at[0].set(sines(q))[:, None][:2, 0],
    "a loop that writes": (
        lambda c, q: lax.fori_loop(0, 2, lambda i, c: c.at[i].set(sines(q)), c)
    ),
    "a cast": lambda c, q: large(q).astype(BF16),
    "casts among others": lambda c, q: c.at[0].set(large(q)[0].astype(BF16)),
    "a cast in a branch": (
        lambda c, q: lax.cond(q[0, 0] > 9, lambda: c[:3], lambda: large(q).astype(BF16))
    ),
}


@pytest.mark.parametrize("name", KEPT_IN_BFLOAT16)
def test_what_a_program_keeps_in_bfloat16_is_read_in_float32_under_float16(name):
    """So neither its range nor bits are lost. A weight is another matter: the policy
    says what it is multiplied in.
    """
    autocast = functools.partial(mpx.autocast, loss_scale=mpx.NoOpLossScale())
    keys, q = KEPT_IN_BFLOAT16[name], normal(0, 3, 8)
    fun = autocast(lambda c, q: q @ keys(c, q).astype(F32).T, F16, as_they_are=0)
    assert contractions(fun, LARGE, q) == [all_in(F32)]
    assert jnp.isfinite(fun(LARGE, q)).all()
    assert contractions(autocast(lambda c, q: q @ c.T, F16), LARGE, q) == [all_in(F16)]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_for_which_float32_would_cost_bytes_is_narrowed(name):
    """Its weight is an argument. Negative control: the same with a computed one is
    kept.
    """
    fun, *shapes = LAYERS[name]
    args = [normal(i, *shape) for i, shape in enumerate(shapes)]
    assert contractions(mpx.autocast(fun, BF16), *args) == [all_in(BF16)]
    assert contractions(mpx.autocast(lambda w, x: fun(jnp.sin(w), x), BF16), *args) == [
        all_in(F32)
    ]


def test_a_default_precision_that_is_high_turns_narrowing_off_in_its_context():
    def fun(x, w):
        with jax.default_matmul_precision("highest"):
            y = x @ w
        return y @ w

    x, w = normal(0, 3, 8), normal(1, 8, 8)
    assert contractions(mpx.autocast(fun, BF16), x, w) == [all_in(F32), all_in(BF16)]
    for name in ("highest", "high", "float32", "tensorfloat32"):
        with (
            jax.default_matmul_precision(name),
            pytest.warns(UserWarning, match="`jax_default_matmul_precision` is"),
        ):
            assert contractions(mpx.autocast(jnp.matmul, BF16), x, w) == [all_in(F32)]
    assert contractions(mpx.autocast(jnp.matmul, BF16), x, w) == [all_in(BF16)]


@half_dtypes
def test_a_contraction_of_float32_with_16_bit_values_is_narrowed(dtype):
    """The user cast one operand inside of the function."""
    x, w = normal(0, 3, 8), normal(1, 8, 2)
    fun = lambda x, w: dot(x, w.astype(BF16), preferred_element_type=F32)
    assert contractions(mpx.autocast(fun, dtype), x, w) == [all_in(dtype)]
    assert_same_bits(
        mpx.autocast(fun, dtype)(x, w), narrow_dot(dtype)(x, w.astype(BF16))
    )


def test_a_16_bit_result_that_is_asked_for_has_that_dtype():
    x = integers(0, 4, 4)
    for compute in ("bf16", "f16", "bf16x3"):
        for result in (BF16, F16):
            fun = lambda x, result=result: dot(x, x, preferred_element_type=result)
            assert_same_bits(mpx.autocast(fun, compute)(x), (x @ x).astype(result))


# ---- gradients in float32 -------------------------------------------------------------------------------------------


@half_dtypes
def test_with_a_float32_reduce_dtype_cotangents_of_activations_stay_in_the_compute_dtype(
    dtype,
):
    """Layer two's input is no argument: of six contractions the gradients of `w1`, `w2`
    and `x` are float32.
    """
    net = lambda w1, w2, x: jnp.sin(x @ w1) @ w2
    loss = autocast_loss(net, dtype, reduce_dtype=F32)
    found = contractions(
        jax.grad(loss, argnums=(0, 1, 2)),
        normal(0, 8, 8),
        normal(1, 8, 2),
        normal(2, 3, 8),
    )
    assert [c[:2] for c in found] == [(dtype, dtype)] * 6
    assert sorted(str(c.result) for c in found) == sorted(
        [str(dtype)] * 3 + ["float32"] * 3
    )


EXPERTS = {
    "experts of sequences": ("ebtk,ekd->ebtd", (3, 2, 4, 8), (3, 8, 9)),
    "experts between": ("btek,ekd->bted", (2, 4, 3, 8), (3, 8, 9)),
    "experts that sum over tokens": ("ebtk,etkd->ebd", (3, 2, 4, 8), (3, 4, 8, 9)),
    "experts with heads": ("ebhtk,ehkd->ebhtd", (3, 2, 2, 4, 8), (3, 2, 8, 9)),
    "all experts": ("btk,ekd->betd", (2, 4, 8), (3, 8, 9)),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_float32_gradients_of_experts_on_tokens_of_several_axes_run_on_a_cpu(name):
    """Also their own derivatives. Sums of small integers are exact in float32; in
    bfloat16 some are not.
    """
    text, *shapes = EXPERTS[name]
    x, w = (integers(i, *shape, low=-16, high=17) for i, shape in enumerate(shapes))
    loss = lambda w, x: (jnp.einsum(text, x, w) * (1 + 2.0**-7)).sum()
    gradient = lambda w, x: mpx.grad(mpx.autocast(loss, BF16, reduce_dtype=F32))(w, x)
    expected = jax.grad(loss)
    assert_same_bits(jax.jit(gradient)(w, x), expected(w, x))
    twice = jax.jit(jax.vmap(gradient))(jnp.stack([w, -w]), jnp.stack([x, x]))
    assert_same_bits(twice, jnp.stack([expected(w, x)] * 2))
    squared = lambda w, x: jnp.square(jnp.einsum(text, x, w)).mean()
    hessian = jax.jit(
        lambda w: jax.jvp(
            lambda w: mpx.grad(mpx.autocast(squared, BF16, reduce_dtype=F32))(w, x),
            (w,),
            (w,),
        )
    )
    value, product = hessian(w)
    np.testing.assert_allclose(product, value, rtol=0.02, atol=0.02 * abs(value).max())


def test_a_second_derivative_in_forward_mode_is_near_that_in_float32():
    """Of two layers of one weight, each of whose products has two parts: without one it
    is wrong by half or more.
    """
    net = lambda w, x: jnp.sin(jnp.sin(x @ w) @ w)
    w, x = normal(0, 4, 4), normal(1, 3, 4)

    def second(fun):
        along = lambda fun: lambda w: jax.jvp(fun, (w,), (jnp.ones_like(w),))[1]
        return along(along(lambda w: fun(w, x)))(w)

    actual, expected = second(mpx.autocast(net, BF16, reduce_dtype=F32)), second(net)
    assert jnp.linalg.norm(actual - expected) < 0.02 * jnp.linalg.norm(expected)


# ---- biases ---------------------------------------------------------------------------------------------------------

_layer = lambda w, b, x: jnp.sin(x @ w + b[None])
BIASED = {
    "a product and a bias": _layer,
    "a bias for each row": lambda w, b, x: jnp.sin(x @ w + jnp.broadcast_to(b, (8, 6))),
    "a product under jit": lambda w, b, x: jnp.sin(jax.jit(jnp.matmul)(x, w) + b[None]),
    "a reshaped product": lambda w, b, x: jnp.sin(
        (x @ w).reshape(2, 4, -1) + b[None, None]
    ),
    "an activation of a part": lambda w, b, x: jnp.sin((x @ w + b[None])[:2].T),
    "an activation with a derivative of its own": lambda w, b, x: jax.nn.silu(
        x @ w + b[None]
    ),
    "a function behind one that chooses, of its author": lambda w, b, x: jnp.sin(
        jax.nn.relu(x @ w + b[None])
    ),
    "a loss": lambda w, b, x: jax.nn.log_softmax(x @ w + b[None]),
    "in a scan": lambda w, b, x: lax.scan(
        lambda c, x: (c, _layer(w, b, x)), 0.0, x.reshape(2, 4, 8)
    )[1],
    "in a checkpoint": jax.checkpoint(_layer),
}
# No bias, another use, or nothing that is computed for these cotangents.
UNBIASED = {
    "no bias": lambda w, b, x: jnp.sin(x @ w),
    "two products": lambda w, b, x: jnp.sin(x @ w + x @ jnp.cos(w)),
    "a bias of an argument": lambda w, b, x: jnp.sin(x[:, :6] + b[None]),
    "a product with another use": lambda w, b, x: (lambda y: jnp.sin(y + b[None]) * y)(
        x @ w
    ),
    "a product in float32": lambda w, b, x: jnp.sin(
        jnp.matmul(x, w, precision="highest") + b[None]
    ),
    "a product that a loop closes over": lambda w, b, x: (
        lambda y: lax.scan(lambda c, _: (c, jnp.sin(y + b[None])), 0.0, length=3)[1]
    )(x @ w),
    "a sum that goes into a residual stream": lambda w, b, x: jnp.sin(
        x[:, :6] + (x @ w + b[None])
    ),
    "a sum that is added up": lambda w, b, x: (x @ w + b[None]).sum(1),
    "a sum that goes into a product": lambda w, b, x: (x @ w + b[None]) @ w.T,
    "a product behind a choice of its author": (
        lambda w, b, x: jax.nn.relu(x @ w + b[None]) @ w.T
    ),
    "a sum that is returned": lambda w, b, x: x @ w + b[None],
    "a sum that is cast": lambda w, b, x: jnp.sin((x @ w + b[None]).astype(BF16)),
}


def bias_args(dtype=F32):
    return normal(0, 8, 6, dtype=dtype), normal(1, 6, dtype=dtype), normal(2, 8, 8)


def barriers(fun, *args):
    """Return the dtypes that are handed over behind a barrier in the gradient's
    program.
    """
    loss = lambda *args: sum(
        leaf.sum() for leaf in jax.tree.leaves(mpx.autocast(fun, BF16)(*args))
    ).astype(F32)
    found = eqns_of(
        jax.grad(loss, argnums=(0, 1)), *args, primitive="optimization_barrier"
    )
    return [eqn.invars[0].aval.dtype for eqn in found]


@pytest.mark.parametrize("name", BIASED | UNBIASED)
def test_the_cotangent_of_a_product_and_a_bias_is_narrowed_once_and_no_other(name):
    """Behind a barrier: XLA would write it in float32 for the bias, and narrow it for
    the product in another kernel.
    """
    assert barriers((BIASED | UNBIASED)[name], *bias_args()) == [BF16] * (
        name in BIASED
    )


# ---- algorithms for float32 -----------------------------------------------------------------------------------------


def test_tf32_on_a_cpu_is_float32_to_the_bit():
    """It has no such numbers; its own are better."""
    x, w = normal(0, 3, 4), normal(1, 4, 2)
    fun = lambda x, w: jnp.sin(x @ w).sum()
    with jax.default_device(jax.devices("cpu")[0]):
        actual = jax.value_and_grad(mpx.autocast(fun, "tf32"), argnums=(0, 1))(x, w)
        assert_same_bits(actual, jax.value_and_grad(fun, argnums=(0, 1))(x, w))


def test_bf16x3_is_the_algorithm_of_every_product_forward_and_backward():
    gradient = jax.grad(
        autocast_loss(lambda x, w: jnp.sin(x @ w), "bf16x3"), argnums=(0, 1)
    )
    eqns = eqns_of(gradient, normal(0, 3, 8), normal(1, 8, 2), primitive="dot_general")
    assert [set(jax.tree.leaves(eqn.params["precision"])) for eqn in eqns] == [
        {lax.DotAlgorithmPreset.BF16_BF16_F32_X3}
    ] * 3
