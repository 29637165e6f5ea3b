"""Check `as_they_are`: what it names keeps its dtype, all else is viewed as float32."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpx

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
ROWS, WIDTH = 4, 8
CACHE = jnp.zeros((ROWS, WIDTH), BF16)


def step(params, cache, x, i):
    """Write a row to a cache, and read all of it."""
    row = (x @ params["w"]).astype(BF16)
    cache = lax.dynamic_update_slice(cache, row[None], (i, 0))
    return cache.astype(F32).sum(), cache


PARAMS, X = {"w": jnp.eye(WIDTH, dtype=BF16)}, jnp.ones(WIDTH)


@pytest.mark.parametrize("named", [1, (1,), [1, 2]], ids=str)
def test_numbers_name_arguments(named):
    total, cache = mpx.autocast(step, "bf16", as_they_are=named)(PARAMS, CACHE, X, 2)
    assert (total.dtype, cache.dtype) == (F32, BF16)
    assert total == WIDTH
    assert cache[2, 0] == 1


def test_a_pattern_names_leaves_as_an_override_of_a_policy_does():
    seen = {}

    def fun(tree, *, more):
        seen.update({name: x.dtype for name, x in (tree | more).items()})
        return tree["cached_key"]

    tree = {"cached_key": CACHE, "w": CACHE}
    found = mpx.autocast(fun, "bf16", as_they_are="cached_key|^state$")(
        tree, more={"state": CACHE, "statement": CACHE}
    )
    assert found.dtype == BF16
    assert seen == {"cached_key": BF16, "w": F32, "state": BF16, "statement": F32}


def test_a_loop_carries_a_named_cache():
    in_bf16 = mpx.autocast(step, "bf16", as_they_are=1)

    @jax.jit
    def run(cache):
        def body(cache, i):
            return in_bf16(PARAMS, cache, X, i)[::-1]

        return lax.scan(body, cache, jnp.arange(ROWS))

    cache, totals = run(CACHE)
    assert cache.dtype == BF16
    assert totals.tolist() == [WIDTH, 2 * WIDTH, 3 * WIDTH, 4 * WIDTH]


def test_another_parameter_in_16_bits_has_a_float32_gradient_beside_a_cache():
    """257 uses of a scale: added up in bfloat16 they are 256, the negative control."""

    def loss(params, cache):
        rows = jnp.ones((257, 1)) * params["scale"][None]
        cache = lax.dynamic_update_slice(cache, rows[:1].astype(BF16), (0, 0))
        return rows.sum() + 0 * cache.astype(F32).sum()

    params, cache = {"scale": jnp.ones(1, BF16)}, jnp.zeros((1, 1), BF16)
    grads = mpx.grad(mpx.autocast(loss, "bf16", as_they_are=1))(params, cache)
    assert grads["scale"] == 257

    def by_hand(params):
        return lax.fori_loop(
            0, 257, lambda _, total: total + params["scale"][0], jnp.bfloat16(0)
        )

    assert by_hand(params) == 256


def test_a_parameter_that_a_function_returns_is_float32():
    params, cache = mpx.autocast(lambda p, c: (p, c), "bf16", as_they_are=1)(
        PARAMS, CACHE
    )
    assert (params["w"].dtype, cache.dtype) == (F32, BF16)


def test_a_scalar_in_16_bits_does_not_round_a_loss():
    bounded = mpx.autocast(lambda x, bound: jnp.minimum(x.sum(), bound), "bf16")
    loss = bounded(jnp.ones(257), jnp.bfloat16(1000))
    assert (loss.dtype, loss) == (F32, 257)


def test_a_function_is_traced_once(capsys):
    def fun(cache):
        print("traced")
        return jnp.roll(cache, 1, 0)

    mpx.autocast(fun, "bf16")(CACHE)
    assert capsys.readouterr().out == "traced\n"


def carries(dtype):
    def fun(x):
        start = jnp.zeros(x.shape, dtype or x.dtype)
        return lax.fori_loop(0, 3, lambda _, total: total + x, start)

    return mpx.autocast(fun, "bf16")


@pytest.mark.optax_promotion
def test_an_error_about_dtypes_names_the_line_and_both_remedies():
    with pytest.raises(TypeError, match="carry") as raised:
        carries(BF16)(jnp.ones(2, BF16))
    note = raised.value.__notes__[-1]
    assert f"at {__file__}:" in note
    assert 'autocast(..., as_they_are="cache")' in note
    assert "make it in the dtype of what is added to it" in note
    assert carries(None)(jnp.ones(2, BF16)).dtype == F32


def test_an_error_of_a_function_is_its_own():
    def fun(x):
        raise TypeError("my own")

    with pytest.raises(TypeError, match="my own") as raised:
        mpx.autocast(fun, "bf16")(CACHE)
    assert not any(
        "as_they_are" in note for note in getattr(raised.value, "__notes__", ())
    )


@pytest.mark.parametrize("named", [7, "cash"])
def test_a_name_of_nothing_is_refused(named):
    with pytest.raises(ValueError, match="names no argument of `step`, and no leaf"):
        mpx.autocast(step, "bf16", as_they_are=named)(PARAMS, CACHE, X, 0)


@pytest.mark.parametrize(
    ("named", "kind", "text"),
    [
        (1.5, TypeError, "must be numbers of arguments, or a pattern"),
        (("cache",), TypeError, "must be numbers of arguments, or a pattern"),
        ("(", ValueError, "`as_they_are` is not a regular expression"),
    ],
)
def test_what_is_neither_numbers_nor_a_pattern_is_refused(named, kind, text):
    with pytest.raises(kind, match=text):
        mpx.autocast(step, "bf16", as_they_are=named)
