"""`autocast` and `full_precision` as functions: their options, what they accept, return
and refuse.
"""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import mpx
from mpx._autocast.transform import autocast_of
from tests.autocast.helpers import BF16, F16, F32, all_in, contractions, exact_jit
from tests.helpers import assert_same_bits

# In bfloat16 both are 1.
X, W = (jnp.full(shape, 1.0 + 2.0**-12, jnp.float32) for shape in ((3, 8), (8, 9)))


def product(x, w):
    return x @ w


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("bf16", "bfloat16"),
        ("f16", "float16"),
        (np.float16, "float16"),
        ("f32", "float32"),
        (mpx.get_policy("params=bf16,compute=f16,output=f32"), "float16"),
        ("tf32", "float32"),
        ("bf16x3", "float32"),
    ],
)
def test_a_policy_a_dtype_or_a_name_says_in_what_products_run(given, dtype):
    assert contractions(mpx.autocast(product, given), X, W) == [all_in(dtype)]


def test_an_override_says_in_what_the_products_of_a_weight_run():
    """Also if it is moved on its way, comes from either branch, or is a stack that a
    scan slices.
    """
    policy = mpx.Policy(
        jnp.bfloat16,
        jnp.bfloat16,
        jnp.float32,
        overrides=(("^head", jnp.float32), ("mid", "f16")),
    )
    params = {
        "body": W,
        "mid": jnp.ones((9, 9), jnp.float32),
        "head": jnp.ones((9, 2), jnp.float32),
    }
    fun = lambda p, x: x @ p["body"] @ p["mid"].T @ p["head"].reshape(9, 2)
    expected = [all_in(BF16), all_in(F16), all_in(F32)]
    assert (
        contractions(mpx.autocast(fun, policy), policy.cast_to_param(params), X)
        == expected
    )
    branch = lambda p, x: (
        x @ jax.lax.cond(x[0, 0] > 0, lambda: p["head"].T, lambda: -p["head"].T)
    )
    assert contractions(
        mpx.autocast(branch, policy), {"head": jnp.ones((9, 8), jnp.float32)}, X
    ) == [all_in(F32)]
    stacks = {
        "head": jnp.ones((6, 8, 8), jnp.float32),
        "body": jnp.ones((6, 8, 8), jnp.float32),
    }
    scan = lambda stacks, x: jax.lax.scan(
        lambda x, p: (x @ p["head"] @ p["body"], None), x, stacks
    )[0]
    assert contractions(mpx.autocast(scan, policy), stacks, X) == [
        all_in(F32),
        all_in(BF16),
    ]


def test_a_function_around_an_autocast_function_is_not_one_itself():
    """`functools.wraps` copies attributes: `value_and_grad` must not reach through a
    function of the user's.
    """
    wrapped = mpx.autocast(product, "bf16")
    around = functools.wraps(wrapped)(lambda *args: wrapped(*args) * 2)
    assert autocast_of(wrapped) is not None
    assert autocast_of(around) is None
    assert autocast_of(jax.jit(wrapped)) is None


# Of another name than the function has.
in_bf16 = mpx.autocast(product, "bf16", checkpoint="dots")


def test_an_autocast_function_is_pickled_under_any_name():
    again = pickle.loads(pickle.dumps(in_bf16))
    assert_same_bits(again(X, W), in_bf16(X, W))
    assert again.__name__ == "product"


def test_a_result_that_is_no_pytree_is_refused_by_its_type():
    """JAX would not see the arrays inside. Functions, as Equinox models have them among
    their leaves, pass.
    """
    Opaque = type("Opaque", (), {"__init__": lambda self, x: setattr(self, "x", x)})
    with pytest.raises(
        TypeError,
        match=r"`autocast`: .* returns a value of type .*Opaque.*neither an array nor",
    ):
        mpx.autocast(lambda x, w: {"out": Opaque(x @ w)}, "bf16")(X, W)
    assert mpx.autocast(lambda x, w: (jnp.tanh, "name", 1, None), "bf16")(X, W) == (
        jnp.tanh,
        "name",
        1,
        None,
    )


def attention_of(derivative):
    attention = jax.custom_vjp(product)
    attention.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda res, g: (derivative(g @ res[1].T), res[0].T @ g),
    )
    return attention


@pytest.mark.parametrize("how", ["bf16", "f16", "fp8"])
def test_one_warning_names_the_custom_derivative_in_which_all_products_stand(how):
    """One narrowed product beside it is enough to say nothing; so is a product that
    asks for its precision.
    """
    fun = attention_of(jnp.sin)
    with pytest.warns(
        UserWarning,
        match=f"no matrix product of `.*` runs in {how}: .* derivative, `product`",
    ) as seen:
        mpx.autocast(lambda x, w: fun(x, w).sum(), how)(X, W)
    assert len(seen) == 1
    mpx.autocast(lambda x, w: fun(x, w) + x @ w, "bf16")(X, W)
    mpx.autocast(lambda x, w: jnp.matmul(x, w, precision="highest"), how)(X, W)


NOTHING_TO_NARROW = {
    "complex": (
        lambda x, w: x.astype(np.complex64) @ w.astype(np.complex64),
        "operands are complex64",
    ),
    "a complex weight": (
        lambda x, w: jax.lax.dot(
            x, w.astype(np.complex64), preferred_element_type=np.complex64
        ),
        "operands are complex64 and float32",
    ),
}


@pytest.mark.parametrize("name", NOTHING_TO_NARROW)
def test_one_warning_says_why_no_product_can_be_narrowed(name):
    """One narrowed product beside it is enough to say nothing."""
    fun, why = NOTHING_TO_NARROW[name]
    with pytest.warns(
        UserWarning, match=f"no matrix product of `.*` runs in bf16: {why}"
    ) as seen:
        mpx.autocast(fun, "bf16")(X, W)
    assert len(seen) == 1
    mpx.autocast(lambda x, w: (fun(x, w), x @ w), "bf16")(X, W)


def test_a_function_that_only_counts_hears_nothing():
    for fun in (
        jnp.vdot,
        lambda x, y: jnp.einsum("td,td->t", x, y),
        lambda x, _: x.astype(int) @ x.T.astype(int),
    ):
        args = (X[0], X[0]) if fun is jnp.vdot else (X, X)
        mpx.autocast(fun, "bf16")(*args)


def residual_bytes(fun, *args):
    """Count bytes that are kept for the backward pass of a function, without its
    arguments.
    """

    def residuals(*args):
        arguments = {id(leaf) for leaf in jax.tree.leaves(args)}
        return [
            leaf
            for leaf in jax.tree.leaves(jax.vjp(fun, *args)[1])
            if id(leaf) not in arguments
        ]

    return sum(s.size * s.dtype.itemsize for s in jax.eval_shape(residuals, *args))


def layers(params, x):
    for w in params:
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ w)
    return x.sum()


STACK = [jnp.ones((8, 8), jnp.float32) for _ in range(2)]
INPUT = jnp.ones((32, 8), jnp.float32)


def test_checkpoint_keeps_results_of_products_in_the_compute_dtype_and_changes_no_gradient():
    """Two results of 32 x 8 in 16 bits; without a policy there are more of them, and in
    float32.
    """
    saved = residual_bytes(
        mpx.autocast(layers, "bf16", checkpoint="dots"), STACK, INPUT
    )
    assert saved <= 2 * 32 * 8 * 2 + 64
    assert residual_bytes(mpx.autocast(layers, "bf16"), STACK, INPUT) > 4 * saved
    gradient = lambda **options: exact_jit(
        jax.grad(mpx.autocast(layers, "bf16", **options))
    )(STACK, INPUT)
    for checkpoint in ("dots", "nothing", jax.checkpoint_policies.everything_saveable):
        assert_same_bits(gradient(checkpoint=checkpoint), gradient())


def test_full_precision_casts_back_to_what_the_arguments_promote_to():
    island = mpx.full_precision(
        lambda *arrays: {"sum": sum(a.sum() for a in arrays), "ids": jnp.int32(2)}
    )
    half, full = jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.float32)
    assert island(half)["sum"].dtype == jnp.bfloat16
    assert island(half)["ids"].dtype == jnp.int32
    assert island(half, full)["sum"].dtype == jnp.float32
    assert island(half, jnp.ones(3, jnp.float16))["sum"].dtype == jnp.float32
    assert island(jnp.ones(3, jnp.float16))["sum"].dtype == jnp.float16


def test_full_precision_widens_what_is_given_by_position_and_by_name():
    half, seen = jnp.ones(3, jnp.bfloat16), []
    mpx.full_precision(lambda a, *, b: seen.extend([a.dtype, b.dtype]))(half, b=half)
    assert seen == [jnp.float32] * 2


def test_full_precision_changes_a_module_whatever_the_dtype_of_the_arguments():
    """The same dropout mask in each step would be the price of a lost change. Products
    have the highest precision.
    """
    island, module = (
        mpx.full_precision(lambda module, x: module(x)),
        nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
    )
    island(module, jnp.ones(6))
    island(module, jnp.ones(6, jnp.bfloat16))
    assert module.rngs.count[...] == 2
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in str(
        jax.make_jaxpr(mpx.full_precision(product))(X, W)
    )


# What one example of the batch adds to a gradient; float16 has no number below 2**-24.
SMALL = 2.0**-20


def tiny_loss(params, x):
    return SMALL * SMALL * (jnp.tanh(x @ params["w"]) @ params["v"]).sum()


TINY = {
    "w": jnp.full((16, 16), 0.1, jnp.float32),
    "v": jnp.full((16, 8), 0.1, jnp.float32),
}
BATCH = jnp.linspace(-1, 2, 4 * 16, dtype=jnp.float32).reshape(4, 16)


def largest_error(grads):
    wanted = jax.grad(tiny_loss)(TINY, BATCH)
    errors = jax.tree.map(
        lambda g, e: jnp.abs(g - e).max() / jnp.abs(e).max(), grads, wanted
    )
    return max(jax.tree.leaves(errors))


def test_a_static_scale_inside_of_a_float16_function_gives_every_gradient_of_jax_true_numbers():
    fun = mpx.autocast(tiny_loss, "f16", loss_scale=mpx.StaticLossScale(2.0**40))
    ways = {
        "grad": jax.grad(fun),
        "jit": jax.jit(jax.grad(fun)),
        "scan": lambda p, x: jax.lax.scan(
            lambda grads, _: (jax.grad(fun)(p, x), None), p, length=1
        )[0],
        "checkpoint": jax.grad(jax.checkpoint(fun)),
        "mpx": mpx.grad(fun),
    }
    assert {
        name for name, way in ways.items() if largest_error(way(TINY, BATCH)) > 0.01
    } == set()
    per_example = jax.vmap(jax.grad(fun), in_axes=(None, 0))(TINY, BATCH[:, None])
    assert largest_error(jax.tree.map(lambda g: g.sum(0), per_example)) < 0.01
    assert_same_bits(fun(TINY, BATCH), mpx.autocast(tiny_loss, "f16")(TINY, BATCH))


def test_a_static_scale_is_taken_out_of_the_gradients_of_values_that_a_function_closes_over():
    def closing_over(loss, **options):
        fun = lambda params, x: mpx.autocast(
            lambda x: loss(params, x), "f16", **options
        )(x)
        return fun(TINY, BATCH), jax.grad(fun)(TINY, BATCH)

    for options in ({}, {"checkpoint": "dots"}):
        value, grads = closing_over(
            tiny_loss, loss_scale=mpx.StaticLossScale(2.0**40), **options
        )
        assert largest_error(grads) < 0.01
        assert_same_bits(
            value, closing_over(tiny_loss, loss_scale=mpx.NoOpLossScale(), **options)[0]
        )
    inner_jit = jax.jit(tiny_loss)
    assert (
        largest_error(
            closing_over(inner_jit, loss_scale=mpx.StaticLossScale(2.0**40))[1]
        )
        < 0.01
    )


def test_a_static_scale_leaves_a_mutable_array_that_a_function_closes_over_alone():
    calls = jax.new_ref(jnp.zeros(()))

    def counting(params, x):
        calls[...] += 1.0
        return tiny_loss(params, x)

    grads = jax.grad(
        mpx.autocast(counting, "f16", loss_scale=mpx.StaticLossScale(2.0**40))
    )(TINY, BATCH)
    assert (calls[...], largest_error(grads) < 0.01) == (1.0, True)


def test_without_a_scale_these_gradients_are_lost():
    fun = mpx.autocast(tiny_loss, "f16", loss_scale=mpx.NoOpLossScale())
    assert largest_error(jax.grad(fun)(TINY, BATCH)) == 1.0


def test_a_static_scale_that_is_too_large_gives_infinities_which_the_optimizer_skips():
    fun = mpx.autocast(
        lambda p, x: tiny_loss(p, x) / SMALL**2,
        "f16",
        loss_scale=mpx.StaticLossScale(2.0**40),
    )
    grads = jax.grad(fun)(TINY, BATCH)
    tx = mpx.loss_scaling(optax.sgd(1.0), mpx.NoOpLossScale())
    _, state = tx.update(grads, tx.init(TINY), TINY)
    assert mpx.skipped_steps(state) == 1


def test_a_static_scale_refuses_forward_mode_and_dtypes_that_need_none():
    fun = mpx.autocast(tiny_loss, "f16", loss_scale=mpx.StaticLossScale(2.0**10))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(fun, (TINY, BATCH), (TINY, BATCH))
    assert jax.tree.structure(
        jax.jvp(jax.grad(fun), (TINY, BATCH), (TINY, BATCH))[1]
    ) == jax.tree.structure(TINY)
    with pytest.raises(ValueError, match="bf16 needs none"):
        mpx.autocast(tiny_loss, "bf16", loss_scale=mpx.StaticLossScale(2.0**10))
    with pytest.raises(
        TypeError, match="A dynamic scale lives in the optimizer's state"
    ):
        mpx.autocast(tiny_loss, "f16", loss_scale=mpx.DynamicLossScale())


# ---- caches ---------------------------------------------------------------------------------------------------------

D, LENGTH = 16, 8


def by_hand(dtype):
    """Return a step of attention, its parameters and its cache in a dtype."""

    def step(params, cache, x):
        i, q, (k, v) = (
            cache["i"],
            x @ params["q"],
            jnp.split(x @ params["kv"], 2, axis=-1),
        )
        cache = {"i": i + 1} | {
            name: cache[name].at[:, i].set(new.astype(cache[name].dtype))
            for name, new in (("k", k), ("v", v))
        }
        scores = jnp.where(
            jnp.arange(LENGTH)[None] <= i,
            jnp.einsum("bd,btd->bt", q, cache["k"].astype(F32)),
            -1e9,
        )
        weights = jax.nn.softmax(scores)
        return jnp.einsum("bt,btd->bd", weights, cache["v"].astype(F32)), cache

    params = {"q": jnp.eye(D, dtype=dtype) / 4, "kv": jnp.ones((D, 2 * D), dtype) / 8}
    return (
        step,
        params,
        {
            "k": jnp.zeros((2, LENGTH, D), dtype),
            "v": jnp.zeros((2, LENGTH, D), dtype),
            "i": 0,
        },
    )


def in_linen(dtype):
    model = nn.MultiHeadDotProductAttention(num_heads=2, decode=True, dtype=dtype)
    variables = mpx.cast(
        model.init(jax.random.key(0), jnp.ones((2, LENGTH, D), F32)), dtype
    )

    def step(params, cache, x):
        y, changed = model.apply(
            {"params": params, "cache": cache}, x[:, None], mutable=["cache"]
        )
        return y[:, 0].astype(F32), changed["cache"]

    return step, variables["params"], variables["cache"]


def in_nnx(dtype):
    model = nnx.MultiHeadAttention(2, D, D, decode=True, dtype=dtype, rngs=nnx.Rngs(0))
    model.init_cache((2, LENGTH, D), dtype)
    graph, params, cache = nnx.split(model, nnx.Param, ...)

    def step(params, cache, x):
        model = nnx.merge(graph, params, cache)
        return model(x[:, None])[:, 0].astype(F32), nnx.split(model, nnx.Param, ...)[2]

    return step, mpx.cast(params, dtype), cache


@pytest.mark.optax_promotion  # NNX adds arrays of two dtypes
@pytest.mark.parametrize("model", [by_hand, in_linen, in_nnx])
def test_a_loop_around_a_step_of_decoding_carries_a_cache_of_16_bits_as_it_is_written(
    model,
):
    """It has the rounded numbers of a cache in float32. The step's result is float32."""

    def decoded(dtype):
        step, params, cache = model(dtype)
        in_bf16 = mpx.autocast(step, "bf16", as_they_are=1)
        xs = jax.random.normal(jax.random.key(1), (LENGTH, 2, D), F32)
        return jax.lax.scan(lambda cache, x: in_bf16(params, cache, x)[::-1], cache, xs)

    (narrow, ys), (wide, expected) = decoded(BF16), decoded(F32)
    assert ys.dtype == F32
    np.testing.assert_allclose(ys, expected, atol=2.0**-6)
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {BF16, np.dtype(np.int32)}
    for ours, exact in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        np.testing.assert_allclose(ours.astype(F32), exact, rtol=2.0**-7)


def test_a_carry_that_is_computed_anew_is_cast_by_the_name_of_its_dtype():
    """Inside, the argument's own dtype is float32."""
    step = lambda dtype: mpx.autocast(
        lambda h, w: jnp.tanh(h @ w).astype(dtype or h.dtype), "bf16"
    )
    loop = lambda dtype: jax.lax.fori_loop(
        0, 3, lambda _, h: step(dtype)(h, W[:, :8]), jnp.ones((2, 8), BF16)
    )
    assert loop(BF16).dtype == BF16
    with pytest.raises(TypeError, match=r"carry.*bfloat16"):
        loop(None)


def test_a_custom_derivative_that_clips_its_cotangent_sees_the_scale_of_its_autocast():
    """As the pages say: with the bound times the scale, or outside of the function, it
    clips what it shall.
    """

    def clipping(bound):
        clip = jax.custom_vjp(lambda x: x)
        clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -bound, bound),))
        return clip

    def gradient(clip_inside, clip_outside=lambda y: y):
        inner = lambda w, x: clip_inside(x @ w).sum()
        fun = mpx.autocast(inner, "f16", loss_scale=mpx.StaticLossScale(2.0**12))
        return jax.grad(lambda w: clip_outside(fun(w, jnp.eye(16)) * 0.5))(
            jnp.ones((16, 16))
        )[0, 0]

    assert gradient(lambda y: y) == 0.5
    assert gradient(clipping(0.25)) == 0.25 / 2**12
    assert gradient(clipping(0.25 * 2.0**12)) == 0.25
