"""`value_and_grad` and `grad`: exact under any power-of-two scale, for any loss dtype,
in every transformation.

Gradients come back scaled; "unscaled" below means divided by the scale in NumPy, which
is exact for a power of two.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from hypothesis import given
from hypothesis import strategies as st

import mpx
from tests.helpers import BF16, F16, F32, assert_same_bits, examples

all_dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)


def unscaled(grads, scale):
    return jax.tree.map(lambda g: np.asarray(g, F32) / np.float32(scale), grads)


def network(params, x):
    """A loss of a dtype's own arithmetic, whose gradients lie well within float16
    before and after scaling by 2**15.
    """
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    return ((hidden * hidden).mean(axis=1) * params["s"]).sum()


def network_params(dtype, seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "w": rng.uniform(0.2, 0.6, (4, 3)),
        "b": rng.uniform(0.1, 0.2, 3),
        "s": rng.uniform(0.1, 0.2, 2),
    }
    return jax.tree.map(lambda p: jnp.asarray(p, dtype), params), jnp.asarray(
        rng.uniform(0.2, 0.6, (2, 4)), dtype
    )


@given(
    exponent=st.integers(0, 24),
    dtype=st.sampled_from([F32, BF16, F16]),
    seed=st.integers(0, 5),
)
@examples(20)
def test_loss_and_unscaled_gradients_are_the_same_bits_under_any_power_of_two(
    exponent, dtype, seed
):
    """Those of plain `jax.value_and_grad`, gradients widened to float32."""
    params, x = network_params(dtype, seed)
    loss, grads = mpx.value_and_grad(network, mpx.StaticLossScale(2.0**exponent))(
        params, x
    )
    expected_loss, expected = jax.value_and_grad(network)(params, x)
    assert_same_bits(loss, expected_loss)
    assert_same_bits(
        unscaled(grads, 2.0**exponent),
        jax.tree.map(lambda g: np.asarray(g, F32), expected),
    )


def test_gradients_under_a_scale_that_is_no_power_of_two_would_not_be_the_same():
    """Negative control of the test above: 65504, at which some libraries clip."""
    params, x = network_params(F32)
    naive = jax.grad(lambda *args: network(*args) * 65504.0)(params, x)
    exact = jax.grad(network)(params, x)
    assert (np.asarray(naive["w"]) / np.float32(65504.0) != exact["w"]).any()


# ---- autocast functions behind other functions ----------------------------------------------------------------------


def two_products(params, x):
    return (jnp.tanh(x @ params["w"] + params["b"][None]) @ params["v"]).mean() + (
        params["w"] ** 2
    ).mean()


def two_products_arguments(dtype):
    """Return parameters whose values bfloat16 has, and a batch."""
    normal = np.random.default_rng(0).normal
    params = {
        name: jnp.asarray(normal(size=size), BF16)
        for name, size in {"w": (8, 6), "b": 6, "v": (6, 3)}.items()
    }
    return jax.tree.map(lambda p: p.astype(dtype), params), jnp.asarray(
        normal(size=(8, 8)), F32
    )


class Model:
    loss = mpx.autocast(lambda self, params, x: two_products(params, x), "bf16")


def over_microbatches(f):
    def loss(params, x):
        return jax.lax.scan(
            lambda total, rows: (total + f(params, rows), None), 0.0, x.reshape(2, 4, 8)
        )[0]

    return loss


BEHIND = {
    "jit": jax.jit,
    "jit of a jit": lambda f: jax.jit(jax.jit(f)),
    "partial": functools.partial,
    "lambda": lambda f: lambda params, x: f(params, x),
    "jit of a lambda": lambda f: jax.jit(lambda params, x: f(params, x)),
    "method": lambda f: Model().loss,
    "another tree": lambda f: (
        lambda params, x: f({name: params[name] for name in ("v", "w", "b")}, x)
    ),
    "several calls": (
        lambda f: lambda params, x: f(params, x[:4]) + 2 * f(params, x[4:])
    ),
    "a loop": over_microbatches,
}


@pytest.mark.parametrize("name", BEHIND)
def test_gradients_of_an_autocast_function_behind_another_function_are_unrounded(name):
    """They are those of float32 parameters, to the bit. Negative control: `jax.grad`
    rounds them to bfloat16.
    """
    fun = BEHIND[name](mpx.autocast(two_products, "bf16"))
    ours = jax.jit(mpx.value_and_grad(fun))(*two_products_arguments(BF16))
    assert_same_bits(
        ours, jax.jit(jax.value_and_grad(fun))(*two_products_arguments(F32))
    )
    if name == "jit":
        _, rounded = jax.jit(jax.value_and_grad(fun))(*two_products_arguments(BF16))
        # Sums.
        assert all(
            (ours[1][name] != rounded[name].astype(F32)).any() for name in ("w", "b")
        )


@pytest.mark.parametrize(
    "hide", [jax.checkpoint, lambda f: lambda params, x: jax.jit(f)(params, x)]
)
def test_one_warning_says_that_a_transformation_hides_the_parameters_from_autocast(
    hide,
):
    gradient = functools.partial(
        jax.eval_shape, mpx.value_and_grad(hide(mpx.autocast(two_products, "bf16")))
    )
    with pytest.warns(
        UserWarning,
        match=(
            r"rounded to bfloat16, because the autocast function `two_products` does"
            r" not get .*: 0/b, 0/v, 0/w\)"
        ),
    ) as seen:
        _, grads = gradient(*two_products_arguments(BF16))
    assert [warning.filename for warning in seen] == [__file__]  # no line of JAX
    assert grads["w"].dtype == F32
    gradient(*two_products_arguments(F32))  # nothing is rounded: no warning


def test_a_plain_function_gets_its_parameters_in_their_own_dtype():
    seen = []
    fun = lambda params, x: (
        seen.append(params["w"].dtype)
        or two_products(params, x.astype(BF16)).astype(F32)
    )
    mpx.grad(fun)(*two_products_arguments(BF16))
    assert seen == [BF16]


class Counting(nnx.Linear):
    """Changes a variable, and makes one."""

    def __init__(self, dtype):
        super().__init__(8, 6, param_dtype=dtype, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.zeros((), jnp.float32))

    def __call__(self, x):
        self.calls[...] += 1
        self.seen = nnx.Intermediate(x)
        return mpx.autocast(
            lambda kernel, x: x @ kernel + jnp.sin(kernel).sum(), "bf16"
        )(self.kernel[...], x)


@pytest.mark.parametrize(
    ("dtype", "wrap"), [(F32, lambda f: f), (BF16, nnx.jit)], ids=["eager", "jit"]
)
def test_a_flax_nnx_model_behind_a_lambda_gets_unrounded_gradients_and_keeps_its_changes(
    dtype, wrap
):
    """Also a new variable, which a copy of the model would lose."""
    x, model = two_products_arguments(F32)[1], Counting(dtype)
    loss = lambda model, x: (model(x) ** 2).mean()
    gradient = lambda differentiate: wrap(lambda model, x: differentiate(model, x))
    grads = gradient(
        mpx.grad(
            loss, transform=nnx.value_and_grad, argnums=nnx.DiffState(0, nnx.Param)
        )
    )(model, x)
    assert model.calls[...] == 1
    assert (model.seen[...] == x).all()
    assert model.kernel[...].dtype == dtype
    rounded = gradient(nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Param)))(
        Counting(BF16), x
    )
    assert (grads["kernel"][...] != rounded["kernel"][...].astype(F32)).any()


summed = mpx.autocast(lambda w, x: (w * x).sum(), "bf16")
compiled = jax.jit(summed)
ONES = jnp.ones((4, 1), F32)
# Losses of a bfloat16 parameter that sum 300 times its elements, each outside of what
# autocast sees.
ADDED_UP = {
    "part": lambda w: sum(summed(w[:2], ONES[:2]) for _ in range(300)),
    "row": lambda w: sum(summed(w[0], ONES[0]) for _ in range(300)),
    "cast": lambda w: sum(summed(w.astype(F32), ONES) for _ in range(300)),
    "beside the parameter": (
        lambda w: summed(w, ONES) + sum(summed(w[:2], ONES[:2]) for _ in range(299))
    ),
    "jit": lambda w: sum(compiled(w, ONES) for _ in range(300)),
    "scan": lambda w: jax.lax.scan(
        lambda y, _: (y + summed(w[:2], ONES[:2]), None), 0.0, length=300
    )[0],
}


WRAPPED = [
    pytest.param(name, jax.jit, marks=[] if name == "row" else pytest.mark.slow)
    for name in ADDED_UP
]
WRAPPED += [pytest.param("scan", lambda f: f, marks=pytest.mark.eager)]
WRAPPED += [("scan", lambda f: lambda w: jax.vmap(f)(w[None]))]


@pytest.mark.parametrize(("name", "wrap"), WRAPPED)
def test_gradients_that_are_added_up_in_16_bits_on_their_way_from_autocast_are_told_of(
    name, wrap
):
    """They are 256 or 257 instead of 300, as those of float32 parameters are."""
    compiled.clear_cache()
    compiled(ONES.astype(BF16), ONES)  # the program for the gradient is made before it
    gradient = lambda loss, dtype: wrap(mpx.grad(loss))(ONES.astype(dtype)).max()
    with pytest.warns(
        UserWarning, match=r"rounded to bfloat16.*themselves \(of arguments: 0\)"
    ) as seen:
        assert gradient(ADDED_UP[name], BF16) < 300
    assert len(seen) == 1
    assert gradient(ADDED_UP[name], F32) == 300


def test_gradients_that_come_from_no_autocast_function_are_rounded_once_without_a_word():
    """Those of a penalty, also beside an autocast function with no other argument that
    has a gradient.
    """
    penalty = lambda w: (w.astype(F32) ** 2).sum()
    for loss in (
        penalty,
        lambda w: penalty(w) + summed(w, ONES),
        lambda w: penalty(w) + summed(ONES, ONES),
    ):
        jax.eval_shape(mpx.grad(loss), ONES.astype(BF16))


encoded = mpx.autocast(lambda p, x: jnp.tanh(x @ p["w"]), "bf16")
# each autocast function gets the parameters themselves, and some also have a use in 16
# bits outside
UNHIDDEN = {
    "a penalty beside two parts": lambda p, x: (
        (encoded(p, encoded(p, x)) ** 2).mean() + (p["w"].astype(F32) ** 2).sum()
    ),
    "a scale of the result of two parts": (
        lambda p, x: (encoded(p, encoded(p, x)) * jnp.exp(p["b"].astype(F32))).mean()
    ),
    "data with gradients": (
        lambda p, x: (
            (encoded(p, encoded(p, x)) ** 2).mean() + (x.astype(F32) ** 2).mean()
        )
    ),
    "a part in a loop": lambda p, x: (
        jax.lax.scan(lambda h, _: (encoded(p, h), None), x, length=3)[0].mean()
        + (p["w"].astype(F32) ** 2).sum()
    ),
}


@pytest.mark.parametrize("name", UNHIDDEN)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_use_of_a_parameter_beside_autocast_functions_that_get_it_needs_no_warning(
    name, wrap
):
    """Activations have gradients, and parameters rounded ones, but none of the former
    comes to the latter.
    """
    params, x = (
        {"w": jnp.ones((8, 8), BF16), "b": jnp.ones((), BF16)},
        jnp.ones((4, 8), F32),
    )
    jax.eval_shape(
        wrap(mpx.grad(UNHIDDEN[name], argnums=(0, 1))),
        params,
        x.astype(BF16) if "data" in name else x,
    )


def test_of_two_parameters_the_one_that_is_used_in_16_bits_before_autocast_is_named():
    loss = lambda params: summed(params["w"], jnp.tanh(params["h"]))
    with pytest.warns(UserWarning, match=r"\(of arguments: 0/h\)"):
        jax.eval_shape(mpx.grad(loss), {"w": ONES.astype(BF16), "h": ONES.astype(BF16)})


def test_a_compiled_loss_is_compiled_once_and_other_arguments_are_the_users_own():
    traced, log = [], []
    compiled = jax.jit(lambda w: traced.append(1) or (w.astype(F32) ** 2).sum())
    logging = lambda w, log: log.append(1) or (w.astype(F32) ** 2).sum()
    for _ in range(2):
        mpx.grad(compiled)(jnp.ones(3, BF16))
        mpx.grad(logging)(jnp.ones(3, BF16), log)
    assert (len(traced), len(log)) == (1, 2)


def test_as_computed_gradients_are_of_an_autocast_function_alone():
    """A parameter may have another use in a function around it, as in a penalty: its
    gradient stays float32.
    """
    f = mpx.autocast(lambda params, x: (x @ params["w"]).mean(), "bf16")
    gradient = lambda fun, **options: mpx.grad(fun, **options)(
        *two_products_arguments(BF16)
    )["w"]
    around = lambda params, x: f(params, x) + (params["w"].astype(F32) ** 2).sum()
    assert gradient(jax.jit(f), grad_dtype=None).dtype == BF16
    assert_same_bits(gradient(around, grad_dtype="as_computed"), gradient(around))


def test_a_float16_autocast_function_warns_when_others_differentiate_it_unless_this_is_meant():
    """`jax.jit` around it hides nothing. The forward pass needs no scale."""
    f = mpx.autocast(two_products, "f16")
    args = teacher, _ = two_products_arguments(F32)
    for fun in (f, jax.jit(f)):
        jax.eval_shape(fun, *args)
        with pytest.warns(
            UserWarning,
            match="`two_products` computes in float16 .* without a loss scale",
        ) as seen:
            jax.grad(fun)(*args)
        assert [warning.filename for warning in seen] == [__file__]
        for setting in (
            "autocast(..., loss_scale=mpx.Static",
            "mixed_precision(..., loss_scale=mpx.NoOp",
        ):
            assert setting in str(seen[0].message)
        jax.eval_shape(mpx.grad(fun, mpx.StaticLossScale(2.0**10)), *args)
    jax.eval_shape(
        mpx.grad(lambda params, x: f(teacher, x) * (params["w"] ** 2).sum()), *args
    )
    meant = mpx.autocast(two_products, "f16", loss_scale=mpx.NoOpLossScale())
    for grad in (jax.grad, mpx.grad):
        jax.eval_shape(grad(meant), *args)
    *_, of_flax = DynamicScale(scale=jnp.float32(2.0**10)).value_and_grad(meant)(*args)
    assert_same_bits(
        of_flax,
        jax.tree.map(
            jnp.asarray,
            unscaled(mpx.grad(f, mpx.StaticLossScale(2.0**10))(*args), 2.0**10),
        ),
    )


# ---- scales ---------------------------------------------------------------------------------------------------------


@pytest.mark.eager
@all_dtypes
def test_the_loss_comes_back_unscaled_as_the_function_returned_it(dtype):
    """65,536 has no float16 value; the reported loss is 1 all the same, and the
    gradient of `w * w / 4` the scale.

    The loss that is differentiated is float32 and finite: readers of it, and
    `jax_debug_infs`, see no infinity.
    """
    seen = []

    def watching(fun, **options):
        return jax.value_and_grad(
            lambda *args: (seen.append(value := fun(*args)), value)[1], **options
        )

    for exponent in (0, 1, 15, 16, 24):
        scale = mpx.StaticLossScale(2.0**exponent)
        with jax.debug_infs(True), jax.debug_nans(True):
            call = mpx.value_and_grad(lambda w: w * w / 4, scale, transform=watching)
            loss, grads = call(jnp.asarray(2.0, dtype))
        assert seen[-1][0].dtype == F32
        assert_same_bits(loss, jnp.asarray(1.0, dtype))
        assert_same_bits(grads, jnp.float32(2.0**exponent))


@pytest.mark.eager
@all_dtypes
def test_a_float16_loss_is_differentiated_from_at_most_2_to_the_15_and_others_from_the_scale_itself(
    dtype,
):
    seen = []

    @jax.custom_vjp
    def watched(x):
        return x

    def backward(_, cotangent):
        seen.append(cotangent)
        return (cotangent,)

    watched.defvjp(lambda x: (x, None), backward)
    exponents = (0, 10, 15, 16, 24)
    for exponent in exponents:
        mpx.grad(lambda w: watched(w * w), mpx.StaticLossScale(2.0**exponent))(
            jnp.asarray(1.0, dtype)
        )
    expected = [2.0 ** (min(n, 15) if dtype == F16 else n) for n in exponents]
    assert_same_bits(seen, [jnp.asarray(seed, dtype) for seed in expected])


def mixed_loss(params, x):
    """A loss whose weights are used in all ways: once, twice, moved, in a loop, in a
    look-up and beside products.
    """
    hidden = jnp.tanh(x @ params["once"] + params["bias"][None])
    hidden = hidden @ params["moved"].T @ params["twice"] @ params["twice"]
    hidden, _ = jax.lax.scan(
        lambda c, w: (jnp.tanh(c @ w), None), hidden, params["layers"]
    )
    rows = params["table"][jnp.arange(8) % 3]
    return ((hidden + rows) * params["gain"][None] @ params["table"].T).mean()


def mixed_params(dtype):
    shapes = {
        "once": (8, 9),
        "bias": 9,
        "moved": (8, 9),
        "twice": (8, 8),
        "layers": (3, 8, 8),
        "table": (5, 8),
        "gain": 8,
    }
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.uniform(-0.5, 0.5, shape), dtype)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("how", "dtype", "wrap"),
    [("bf16", F32, lambda f: f), ("bf16", BF16, jax.jit), ("f16", F32, jax.jit)],
)
def test_as_computed_gradients_are_those_in_float32_in_16_bits_where_one_product_makes_them(
    how, dtype, wrap
):
    loss, scale = mpx.autocast(mixed_loss, how), mpx.StaticLossScale(2.0**4)
    args = (
        mixed_params(dtype),
        jnp.asarray(np.random.default_rng(1).uniform(-1, 1, (8, 8)), F32),
    )
    wide = wrap(mpx.grad(loss, scale))(*args)
    narrow = wrap(mpx.grad(loss, scale, grad_dtype="as_computed"))(*args)
    in_16_bits = {name for name, g in narrow.items() if g.dtype != F32}
    assert in_16_bits == {"once", "moved", "layers"}
    assert {narrow[name].dtype for name in in_16_bits} == {
        BF16 if how == "bf16" else F16
    }
    assert_same_bits(jax.tree.map(lambda g: g.astype(F32), narrow), wide)


def test_gradients_that_are_sums_in_float32_stay_in_it_under_as_computed():
    """With `reduce_dtype`, and where a float16 loss has a scale whose rest is
    multiplied in afterwards.
    """
    args = mixed_params(F32), jnp.ones((8, 8), F32)
    sums = mpx.autocast(mixed_loss, "bf16", reduce_dtype=F32)
    in_f16 = mpx.autocast(lambda *args: mixed_loss(*args).astype(F16), "f16")
    for loss, scale in ((sums, None), (in_f16, mpx.StaticLossScale(2.0**20))):
        grads = jax.eval_shape(mpx.grad(loss, scale, grad_dtype="as_computed"), *args)
        assert {g.dtype for g in jax.tree.leaves(grads)} == {F32}


def test_two_weights_of_one_name_keep_their_gradients_wide_under_as_computed():
    """The sum of the second one's gradient is float32, whatever the first one's product
    is.
    """
    loss = mpx.autocast(
        lambda params, x: ((x @ params["a/b"]) * params["a"]["b"][None]).sum(), "bf16"
    )
    params = {"a/b": jnp.ones((8, 3), F32), "a": {"b": jnp.ones(3, F32)}}
    grads = jax.eval_shape(
        mpx.grad(loss, grad_dtype="as_computed"), params, jnp.ones((2, 8), F32)
    )
    assert {g.dtype for g in jax.tree.leaves(grads)} == {F32}


def test_as_computed_gradients_of_several_arguments_and_of_models_go_by_the_names_of_their_weights():
    fun = mpx.autocast(lambda a, x, b: ((x @ a) * b[None]).sum(), "bf16")
    given = jnp.ones((8, 3), F32), jnp.ones((2, 8), F32), jnp.ones(3, F32)
    of_b, of_a = jax.eval_shape(
        mpx.grad(fun, argnums=(2, 0), grad_dtype="as_computed"), *given
    )
    assert (of_a.dtype, of_b.dtype) == (BF16, F32)
    loss = mpx.autocast(lambda model, x: model(x).sum(), "bf16")
    of_nnx = mpx.grad(loss, grad_dtype="as_computed", transform=nnx.value_and_grad)(
        Dropping(), jnp.ones((4, 8), F32)
    )
    assert (of_nnx["linear"]["kernel"].dtype, of_nnx["linear"]["bias"].dtype) == (
        BF16,
        F32,
    )
    mlp = eqx.nn.MLP(8, 2, 4, 1, dtype=F32, key=jax.random.key(0))
    loss = mpx.autocast(lambda model, x: jax.vmap(model)(x).sum(), "bf16")
    of_eqx = mpx.grad(
        loss, grad_dtype="as_computed", transform=eqx.filter_value_and_grad
    )(mlp, jnp.ones((4, 8), F32))
    assert (of_eqx.layers[0].weight.dtype, of_eqx.layers[0].bias.dtype) == (BF16, F32)


def squares(w):
    return (w * w).sum()


HALF, FULL = jnp.ones(2, F16), jnp.ones(2, F32)
in_f16 = mpx.autocast(
    lambda w: (jnp.tile(w, (2, 4)) @ jnp.tile(w, (2, 4)).T).sum(), "f16"
)


@pytest.mark.parametrize(
    ("fun", "args", "reason"),
    [
        (in_f16, (FULL,), "the function computes in float16"),
        (jax.jit(in_f16), (FULL,), "the function computes in float16"),
        (
            mpx.autocast(squares, mpx.Policy(F32, BF16, F32, (("head", F16),))),
            (FULL,),
            "the function computes",
        ),
        (lambda w: in_f16(w), (FULL,), "a function inside computes in float16"),
        (
            functools.partial(lambda w, bias: in_f16(w) + bias, bias=1.0),
            (FULL,),
            "a function inside computes",
        ),
        (lambda w: squares(w.astype(F32)), (HALF,), "parameters are float16"),
        (lambda w: squares(w).astype(F16), (FULL,), "the loss is float16"),
    ],
    ids=[
        "autocast",
        "autocast under jit",
        "override",
        "inside",
        "inside of a partial",
        "parameters",
        "loss",
    ],
)
def test_what_computes_in_float16_is_not_differentiated_without_a_loss_scale(
    fun, args, reason
):
    """Neither with none given, nor with that of an optimizer which has none;
    `NoOpLossScale` says that it is meant.
    """
    for scale in (None, mpx.get_loss_scale(optax.sgd(0.1).init(FULL))):
        with pytest.raises(
            ValueError,
            match=(
                rf"{reason}.* there is no loss scale.*"
                r" `mpx\.get_loss_scale\(opt_state\)`"
            ),
        ):
            mpx.value_and_grad(fun, scale)(*args)
    assert jnp.isfinite(mpx.grad(fun, mpx.NoOpLossScale())(*args)).all()
    state = mpx.loss_scaling(optax.sgd(0.1), mpx.NoOpLossScale()).init(FULL)
    assert jnp.isfinite(mpx.grad(fun, mpx.get_loss_scale(state))(*args)).all()


class Dropping(nnx.Module):
    def __init__(self):
        self.linear, self.dropout = (
            nnx.Linear(8, 2, rngs=nnx.Rngs(0)),
            nnx.Dropout(0.5, rngs=nnx.Rngs(1)),
        )

    def __call__(self, x):
        return self.dropout(self.linear(x))


@pytest.mark.parametrize(
    ("model", "path", "remedy"),
    [
        (
            Dropping(),
            "'dropout/rngs/count': uint32",
            "Flax NNX model pass `transform=nnx.value_and_grad`",
        ),
        (
            eqx.nn.MLP(8, 2, 4, 1, key=jax.random.key(0)),
            "'activation': custom_jvp",
            "`transform=eqx.filter_value_and_grad`",
        ),
        (
            {"w": FULL, "step": jnp.int32(0)},
            "'step': int32",
            "pass what is to be differentiated as one argument",
        ),
    ],
    ids=["NNX", "Equinox", "dict"],
)
@pytest.mark.parametrize(
    "how", [lambda f: f, lambda f: mpx.autocast(f, "bf16")], ids=["plain", "autocast"]
)
def test_leaves_without_gradients_are_named_with_the_transform_that_takes_the_model(
    model, path, remedy, how
):
    """`jax.value_and_grad` says that it got uint32, and not where."""
    loss = how(lambda model: jnp.float32(0))
    with pytest.raises(TypeError) as raised:
        mpx.value_and_grad(loss)(model)
    assert path in str(raised.value)
    assert remedy in str(raised.value)


@pytest.mark.parametrize("how", ["bf16", "f32", "params=f16,compute=bf16,output=f32"])
def test_float16_parameters_need_no_loss_scale_where_no_gradient_is_float16(how):
    assert mpx.grad(mpx.autocast(squares, how))(HALF).dtype == F32


SCALE = mpx.StaticLossScale(2.0**16)


def test_aux_comes_back_as_it_is():
    fun = lambda w: (w * w / 4, {"w": w, "n": jnp.int32(7), "text": "kept"})
    w = jnp.asarray(3, F16)
    (loss, aux), grads = mpx.value_and_grad(fun, SCALE, has_aux=True)(w)
    assert aux.pop("text") == "kept"
    assert_same_bits((loss, aux), (w * w / 4, {"w": w, "n": jnp.int32(7)}))
    assert_same_bits(grads, jnp.float32(1.5 * 2.0**16))
    grads, aux = mpx.grad(fun, SCALE, has_aux=True)(w)
    assert_same_bits(grads, jnp.float32(1.5 * 2.0**16))
    assert aux["text"] == "kept"


def test_several_arguments_are_differentiated_in_the_order_of_argnums():
    """The gradient of `a * b**2 * c` at (2, 3, 5) is (45, 60, 18). Keyword arguments
    are passed on.
    """
    fun = lambda a, b, c, *, power: a * b**power * c
    arguments = jnp.float32(2), jnp.bfloat16(3).astype(F32), jnp.float32(5)
    for argnums, expected in [
        (1, 60.0),
        ((0, 2), (45.0, 18.0)),
        ((2, 1), (18.0, 60.0)),
        ((0,), (45.0,)),
        (-1, 18.0),
    ]:
        grads = mpx.grad(fun, SCALE, argnums=argnums)(*arguments, power=2)
        assert_same_bits(
            grads, jax.tree.map(lambda g: jnp.float32(g * 2.0**16), expected)
        )


@pytest.mark.eager
def test_gradients_have_the_dtype_asked_for():
    """None leaves those of the parameters; 0.75 * 2**4 is exact in all of them."""
    params = {"f32": jnp.float32(1), "bf16": jnp.bfloat16(1), "f16": jnp.float16(1)}
    own = {name: leaf.dtype for name, leaf in params.items()}
    fun = lambda p: sum(leaf.astype(F32) for leaf in p.values()) * 0.75
    wanted = [
        (None, own),
        *(
            (x, dict.fromkeys(own, np.dtype(x)))
            for x in (jnp.float32, jnp.bfloat16, "float16")
        ),
    ]
    for grad_dtype, expected in [*wanted, ("bf16", dict.fromkeys(own, BF16))]:
        grads = mpx.grad(fun, mpx.StaticLossScale(2.0**4), grad_dtype=grad_dtype)(
            params
        )
        assert_same_bits(
            grads, {name: jnp.asarray(12, dtype) for name, dtype in expected.items()}
        )


@pytest.mark.eager
@all_dtypes
def test_gradients_keep_the_dtypes_of_the_parameters_also_where_a_float16_loss_is_scaled_in_two_steps(
    dtype,
):
    """Half of 2**16 is still a float16 number."""
    for exponent in (10, 16):
        scale = mpx.StaticLossScale(2.0**exponent)
        grads = mpx.grad(lambda w: w.astype(F16) / 2, scale, grad_dtype=None)(
            jnp.asarray(1, dtype)
        )
        assert_same_bits(grads, jnp.asarray(2.0 ** (exponent - 1), dtype))


def test_gradients_of_8_bit_parameters_are_float32_too():
    """4 under a scale of 2 is 8, of which every 8-bit float holds the value."""
    loss = lambda w: (4 * w.astype(F32)).sum()
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        w = jnp.ones(3, dtype)
        assert_same_bits(
            mpx.grad(loss, mpx.StaticLossScale(2.0))(w), jnp.full(3, 8, F32)
        )
        assert mpx.grad(loss, grad_dtype=None)(w).dtype == dtype


def test_float64_losses_and_gradients_stay_float64():
    with jax.enable_x64(True):
        third, scale = jnp.float64(1 / 3), mpx.StaticLossScale(2.0**24)
        for grad_dtype in (None, jnp.float32):
            loss, grads = mpx.value_and_grad(
                lambda w: w * third, scale, grad_dtype=grad_dtype
            )(third)
            assert_same_bits((loss, grads), (third * third, third * 2.0**24))


def test_under_jit_the_scale_may_be_traced_and_a_new_one_does_not_compile_again():
    params, x = network_params(F16)
    traces = []

    @jax.jit
    def step(scale, params, x):
        traces.append(scale)
        loss, grads = mpx.value_and_grad(network, scale)(params, x)
        return loss, scale.unscale(grads)

    with jax.disable_jit(False):
        scales = [
            mpx.StaticLossScale(jnp.float32(s))
            for s in (1.0, 2.0**15, 2.0**16, 2.0**24)
        ]
        first, *others = (step(scale, params, x) for scale in scales)
    for other in others:
        assert_same_bits(other, first)
    assert len(traces) == 1


@pytest.mark.parametrize("derivative", [mpx.grad, mpx.value_and_grad])
@pytest.mark.parametrize(
    ("transform", "model"),
    [
        (jax.grad, jnp.ones(2)),
        (nnx.grad, nnx.Param(jnp.ones(2))),
        (eqx.filter_grad, jnp.ones(2)),
    ],
    ids=["jax", "nnx", "equinox"],
)
def test_a_transform_may_return_gradients_alone(derivative, transform, model):
    fun = lambda x: (jnp.sum(x[...] ** 2), "aux")
    result = derivative(
        lambda x: fun(x)[0], mpx.StaticLossScale(8.0), transform=transform
    )(model)
    loss, grads = result if derivative is mpx.value_and_grad else (2.0, result)
    assert loss == 2
    assert_same_bits(*jax.tree.leaves(grads), jnp.full(2, 16.0))


@pytest.mark.parametrize("grad_dtype", [jnp.float32, None, "as_computed"])
@pytest.mark.parametrize(
    "scale", [None, mpx.StaticLossScale(8.0)], ids=["no scale", "scale"]
)
def test_integers_may_be_allowed_as_in_jax(scale, grad_dtype):
    fun = mpx.autocast(
        lambda p: jnp.sum(p["w"] * p["ids"].astype(p["w"].dtype)), "bf16"
    )
    params = {"w": jnp.ones(3, F32), "ids": jnp.arange(3, dtype=jnp.int32)}
    grads = mpx.grad(fun, scale, allow_int=True, grad_dtype=grad_dtype)(params)
    assert grads["ids"].dtype == jax.dtypes.float0
    assert_same_bits(grads["w"], jnp.arange(3, dtype=F32) * (1 if scale is None else 8))
    with pytest.raises(TypeError, match="'ids': int32"):
        mpx.grad(fun, scale)(params)
