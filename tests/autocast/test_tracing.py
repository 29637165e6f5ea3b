"""Steps of decoding that cast to a dtype by its name, which plain JAX runs: autocast
runs them too.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mpx
from tests.autocast.helpers import BF16, F32, all_in, contractions, normal
from tests.helpers import assert_same_bits

ROWS, LENGTH, D = 2, 8, 16
standard_promotion = functools.partial(
    jax.numpy_dtype_promotion, "standard"
)  # as people decode


def by_name(new, old):
    return new.astype(jnp.bfloat16)


def by_dtype(new, old):
    return jnp.asarray(new, old.dtype)


def written(old, new, at):
    return lax.dynamic_update_slice(old, new, (0, at, 0))


def here(old, at):
    return jnp.broadcast_to((jnp.arange(LENGTH) == at)[None, :, None], old.shape)


# Ways to put a row (2, 1, D) into a cache (2, 8, D) at a place.
WRITES = {
    "written": written,
    "set": lambda old, new, at: old.at[:, at % LENGTH].set(new[:, 0]),
    "selected": lambda old, new, at: lax.select(
        here(old, at), jnp.broadcast_to(new, old.shape), old
    ),
    "where": lambda old, new, at: jnp.where(here(old, at), new, old),
    "concatenated": lambda old, new, at: lax.concatenate([old[:, 1:], new], 1),
    "joined": lambda old, new, at: jnp.concatenate([old[:, 1:], new], 1),
    "rolled": lambda old, new, at: jnp.roll(old, -1, 1).at[:, -1].set(new[:, 0]),
    "mapped": lambda old, new, at: jax.vmap(
        lambda old, new: written(old[None], new[None], at)[0]
    )(old, new),
    "branches": lambda old, new, at: lax.cond(
        at < 4, lambda: written(old, new, at), lambda: old
    ),
    "jit": lambda old, new, at: jax.jit(written)(old, new, at),
    "a checkpoint": lambda old, new, at: jax.checkpoint(written)(old, new, at),
    "a scan": lambda old, new, at: lax.scan(
        lambda old, new: (written(old, new[:, None], at), 0), old, new[:, 0][None]
    )[0],
    "a while loop": lambda old, new, at: lax.while_loop(
        lambda c: c[0] < at + 1, lambda c: (at + 1, written(c[1], new, at)), (at, old)
    )[1],
}
# Of these the result has the dtype of plain JAX only by name: else inside it is
# computed in float32.
REPLACED = {
    "a branch of new ones": lambda old, new, at: lax.cond(
        at < 4, lambda: jnp.broadcast_to(new, old.shape), lambda: old
    ),
    "a carry that is replaced": lambda old, new, at: lax.fori_loop(
        0, 2, lambda i, c: jnp.broadcast_to(new, c.shape), old
    ),
}


def step(write, *casts):
    """Return a step of attention: of parameters, a cache, and a row x (2, D). `casts`
    are of keys and of values.
    """

    def run(params, cache, x):
        i, (keys, values) = cache
        query, key, value = (x[:, None] @ params[name] for name in "qkv")
        keys = write(keys, casts[0](jnp.sin(key), keys), i)
        values = write(values, casts[-1](jnp.sin(value), values), i)
        scores = jnp.einsum("bqd,bkd->bqk", query, keys.astype(query.dtype))
        mixed = jnp.einsum(
            "bqk,bkd->bqd", jax.nn.softmax(scores), values.astype(scores.dtype)
        )
        return (mixed @ params["o"])[:, 0].astype(F32), (i + 1, (keys, values))

    return run


def decoded(step):
    """Return a function of parameters, a cache and rows x (8, 2, D): a loop around a
    step.
    """
    return lambda params, cache, xs: lax.scan(
        lambda cache, x: step(params, cache, x)[::-1], cache, xs
    )[::-1]


def parameters(dtype):
    return {name: normal(i, D, D, dtype=dtype) / 4 for i, name in enumerate("qkvo")}


def empty(dtype):
    return jnp.int32(0), (jnp.zeros((ROWS, LENGTH, D), dtype),) * 2


XS = normal(9, LENGTH, ROWS, D)
AROUND = {
    "a loop around": lambda step, autocast: decoded(autocast(step)),
    "a loop inside": lambda step, autocast: autocast(decoded(step)),
    "a gradient": lambda step, autocast: jax.grad(
        lambda p, c, xs: (autocast(decoded(step))(p, c, xs)[0] ** 2).mean()
    ),
    "a batch": lambda step, autocast: jax.vmap(
        decoded(autocast(step)), (None, None, 0)
    ),
}
POLICIES = {
    "bf16": {},
    "f16": {"loss_scale": mpx.NoOpLossScale()},
    "scaled f16": {"loss_scale": mpx.StaticLossScale(2.0**10)},
    "bf16x3": {},
}
# Each way to write by name in two ways around, and by the cache's dtype, with the
# policies and parameters in turn.
CASES = [
    (write, cast, around, list(POLICIES)[(i + j) % 4], (F32, BF16)[(i + j // 2) % 2])
    for i, write in enumerate([*WRITES, *REPLACED])
    for j, (cast, around) in enumerate(
        [
            (by_name, "a loop around"),
            (by_name, list(AROUND)[1 + i % 3]),
            (by_dtype, "a loop around"),
        ]
    )
    if not (write in REPLACED and cast is by_dtype)
    and (write, around) != ("a while loop", "a gradient")
]


@pytest.mark.parametrize(("write", "cast", "around", "policy", "dtype"), CASES)
def test_a_step_of_decoding_that_plain_jax_runs_runs_and_has_its_dtypes(
    write, cast, around, policy, dtype
):
    autocast = lambda fun: mpx.autocast(fun, policy.split()[-1], **POLICIES[policy])
    args = parameters(dtype), empty(BF16), XS[None] if around == "a batch" else XS
    function = lambda autocast, cast: AROUND[around](
        step((WRITES | REPLACED)[write], cast), autocast
    )
    with standard_promotion():
        found, plain = (
            jax.jit(function(autocast, cast))(*args),
            jax.eval_shape(function(lambda fun: fun, cast), *args),
        )
        exact = jax.jit(function(lambda fun: fun, by_dtype))(*mpx.cast(args, F32))
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(
        lambda x: x.dtype, plain
    )
    most = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(exact))
    for ours, expected in zip(
        jax.tree.leaves(found), jax.tree.leaves(exact), strict=True
    ):
        np.testing.assert_allclose(ours.astype(F32), expected, rtol=0, atol=0.02 * most)


# How keys and values are cast, the dtype of parameters and inputs, and those that the
# function sees its caches in.
SEEN = {
    "by name": ((by_name,), F32, [BF16, BF16]),
    "by name, of what is in it": (
        (by_name,),
        BF16,
        [BF16, BF16],
    ),  # plain JAX casts nothing
    "by the dtype of the cache": ((by_dtype,), BF16, [F32, F32]),
    "keys by name": (
        (lambda new, old: by_name(new.astype(F32), old), lambda new, old: new),
        BF16,
        [BF16, F32],
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_all_but_a_cache_that_meets_casts_is_viewed_as_float32_and_products_are_narrowed(
    name,
):
    (casts, dtype, expected), seen = SEEN[name], []

    def fun(params, cache, x):
        seen[:] = [x.dtype for x in (params["q"], x, *cache[1])]
        return step(written, *casts)(
            {name: w.T for name, w in params.items()}, cache, x
        )

    autocast = mpx.autocast(fun, "bf16")
    with standard_promotion():
        found = contractions(
            autocast, parameters(dtype), empty(BF16), XS[0].astype(dtype)
        )
    assert seen == [F32, F32, *expected]
    assert {found[0], found[-1]} == {all_in(BF16)}


def in_linen(dtype):
    model = nn.MultiHeadAttention(num_heads=2, decode=True, dtype=BF16)
    variables = model.init(jax.random.key(0), jnp.ones((ROWS, LENGTH, D)))
    fun = lambda params, cache, x: model.apply(
        {"params": params, "cache": cache}, x, mutable=["cache"]
    )
    return fun, mpx.cast(variables["params"], dtype), mpx.cast(variables["cache"], BF16)


def in_nnx(dtype):
    model = nnx.MultiHeadAttention(2, D, dtype=BF16, decode=True, rngs=nnx.Rngs(0))
    model.init_cache((ROWS, LENGTH, D), dtype=BF16)
    graph, params, cache = nnx.split(model, nnx.Param, ...)

    def fun(params, cache, x):
        model = nnx.merge(graph, params, cache)
        return model(x), nnx.state(model, nnx.Cache)

    return fun, mpx.cast(params, dtype), cache


@pytest.mark.parametrize("policy", ["bf16", "bf16x3"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("model", [in_linen, in_nnx])
def test_attention_of_flax_that_says_its_dtype_is_the_one_of_plain_jax(
    model, dtype, policy
):
    """It casts what it multiplies: nothing is left to autocast but to run it."""
    fun, *args = model(dtype)
    with standard_promotion():
        found, plain = (
            jax.jit(f)(*args, XS[0][:, None]) for f in (mpx.autocast(fun, policy), fun)
        )
    for ours, expected in zip(
        jax.tree.leaves(found), jax.tree.leaves(plain), strict=True
    ):
        assert ours.dtype == expected.dtype
        np.testing.assert_allclose(ours.astype(F32), expected.astype(F32), atol=0.02)


def test_a_function_that_no_views_can_be_given_runs_as_by_hand_and_says_so():
    """One array meets a cast by name and a value without a cast. Control: a function
    that plain JAX refuses too.
    """
    both = lambda w, x, c: written(
        written(c, (x @ w)[:, None], 0), jnp.sin(x @ w)[:, None].astype(BF16), 1
    )
    args = parameters(BF16)["q"], XS[0].astype(BF16), empty(BF16)[1][0]
    with pytest.warns(
        UserWarning,
        match=r"as cast by hand.*requires arguments to have the same dtypes",
    ):
        found = mpx.autocast(both, "bf16")(*args)
    assert_same_bits(found, both(*args))
    with pytest.raises(TypeError, match="same dtypes"):
        mpx.autocast(both, "bf16")(args[0].astype(F32), XS[0], args[2])


def test_an_error_of_a_function_is_its_own_and_not_that_of_another_trace():
    """In plain JAX the function is refused for another reason: these tests run under
    strict promotion.
    """
    calls = []
    fun = mpx.autocast(lambda w, x: calls.append(x @ w) or calls[-1].reshape(5), "bf16")
    for dtype in (BF16, F32):
        with pytest.raises(TypeError, match="cannot reshape"):
            fun(parameters(dtype)["q"], XS[0])
    assert len(calls) == 2


def test_a_parameter_that_is_differentiated_meets_casts_as_an_argument_does():
    """A learned first state of a recurrent network, whose steps cast by name."""
    step = lambda p, h, x: jnp.tanh(h @ p["q"] + x).astype(BF16)
    loss = mpx.autocast(
        lambda p, xs: jnp.sum(
            lax.scan(lambda h, x: (step(p, h, x), 0), p["h"], xs)[0].astype(F32)
        ),
        BF16,
    )
    params = parameters(BF16) | {"h": normal(0, ROWS, D, dtype=BF16)}
    with standard_promotion():
        found, plain = mpx.grad(loss)(params, XS), jax.grad(loss)(params, XS)
    assert {x.dtype for x in found.values()} == {F32}
    for name in found:
        np.testing.assert_allclose(
            found[name], plain[name].astype(F32), rtol=0.01, atol=1e-3
        )


def test_to_ask_for_the_dtypes_of_plain_jax_warns_of_nothing():
    """There a set of float32 into bfloat16 would: this function is asked about for the
    array that it rolls.
    """
    fun = lambda old, new: (old.at[0].set(new), jnp.roll(old, 1))
    with standard_promotion():
        found = mpx.autocast(fun, "bf16")(jnp.zeros((2, 8), BF16), XS[0, 0, :8])
    assert [x.dtype for x in found] == [BF16, BF16]


def test_a_function_that_returns_something_else_in_16_bits_has_its_float32_results():
    fun = lambda x: (jnp.roll(x, 1), x) if x.dtype == F32 else x
    assert [x.dtype for x in mpx.autocast(fun, "bf16")(jnp.ones((2, 8), BF16))] == [
        F32,
        BF16,
    ]
