"""Products of 8-bit floats under autocast: where they run, their values and their
gradients.

Oracle of values: the same rounding and the same scales in NumPy, with sums in float64.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpx
from tests.autocast.helpers import BF16, F32, conv, eqns_of, normal
from tests.helpers import assert_same_bits, eight_cpu_devices

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
SMALL = mpx.Fp8(min_extent=0)  # as by default, for products of the size of tests
E4M3_ONLY = mpx.Fp8(min_extent=0, backward="e4m3")
by_way = pytest.mark.parametrize(
    "fp8", [SMALL, E4M3_ONLY], ids=["e5m2 cotangents", "e4m3 cotangents"]
)

multiply = lambda x, w: x @ w


def in_8_bits(x, dtype):
    """Return the numbers that are left of an operand, in NumPy."""
    x = np.asarray(x, np.float64)
    scale = 2.0 ** np.floor(
        np.log2(float(ml_dtypes.finfo(dtype).max) / np.abs(x).max())
    )
    return (x * scale).astype(np.float32).astype(dtype).astype(np.float64) / scale


def error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


# ---- values ---------------------------------------------------------------------------------------------------------


@by_way
def test_the_product_is_that_of_operands_in_8_bits(fp8):
    """Negative control: products of bfloat16 operands are others."""
    x, w = normal(0, 16, 64), normal(1, 64, 32)
    expected = in_8_bits(x, E4M3) @ in_8_bits(w, E4M3)
    assert error(jax.jit(mpx.autocast(multiply, fp8))(x, w), expected) < 2.0**-8
    assert error(jax.jit(mpx.autocast(multiply, "bf16"))(x, w), expected) > 2.0**-6


@by_way
def test_gradients_are_those_of_cotangents_in_8_bits(fp8):
    x, w, g = normal(0, 16, 64), normal(1, 64, 32), normal(2, 16, 32)
    backward = {"e4m3": E4M3, "e5m2": E5M2}[fp8.backward]
    _, pull = jax.vjp(mpx.autocast(multiply, fp8), x, w)
    of_x, of_w = jax.jit(pull)(g.astype(BF16).astype(F32))
    g = g.astype(BF16)
    assert error(of_x, in_8_bits(g, backward) @ in_8_bits(w, E4M3).T) < 2.0**-8
    assert error(of_w, in_8_bits(x, E4M3).T @ in_8_bits(g, backward)) < 2.0**-8


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@by_way
def test_what_is_not_finite_stays_visible_and_other_rows_keep_their_numbers(fp8, value):
    """As in bfloat16, so that a mask over bad rows works."""
    x, w = normal(0, 16, 64), normal(1, 64, 32)
    bad = x.at[3, 5].set(value)
    fun = jax.jit(mpx.autocast(multiply, fp8))
    good, found = fun(x.at[3, 5].set(0), w), fun(bad, w)
    assert not np.isfinite(found[3]).any()
    np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(good, 3, 0))
    assert np.isfinite(good).all()
    assert not np.isfinite(
        jax.grad(lambda w: mpx.autocast(multiply, fp8)(bad, w).sum())(w)
    ).all()


@pytest.mark.parametrize("largest", [0.0, 2.0**-149, 2.0**-126, 449.0, 3e38])
@by_way
def test_the_largest_magnitude_is_never_out_of_range(fp8, largest):
    x = jnp.full((16, 16), largest, jnp.float32)
    product = jax.jit(mpx.autocast(multiply, fp8))(x, jnp.eye(16))
    assert np.isfinite(product).all()
    if largest >= 2.0**-126:  # below that a CPU takes numbers for zero
        assert error(product, x) < 0.07


# ---- programs -------------------------------------------------------------------------------------------------------


def formats_of_products(fun, *args):
    """Return the 8-bit dtypes that operands are rounded to, in a function's program."""
    converted = [
        eqn.params["new_dtype"]
        for eqn in eqns_of(fun, *args, primitive="convert_element_type")
    ]
    return sorted(str(dtype) for dtype in converted if "float8" in str(dtype))


def test_operands_are_rounded_once_and_cotangents_to_the_format_of_the_backward_pass():
    x, w = normal(0, 16, 64), normal(1, 64, 32)
    loss = lambda fp8: lambda x, w: mpx.autocast(multiply, fp8)(x, w).sum()
    found = formats_of_products(jax.grad(loss(SMALL), argnums=(0, 1)), x, w)
    assert found == ["float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"]
    assert set(
        formats_of_products(jax.grad(loss(E4M3_ONLY), argnums=(0, 1)), x, w)
    ) == {"float8_e4m3fn"}


def test_an_operand_divided_over_devices_has_one_scale_in_a_shard_map():
    """Rows without the large number are rounded as on one device. Negative control:
    with a scale of their own.
    """
    mesh = eight_cpu_devices()
    x, w = normal(0, 128, 64).at[0, 0].set(1e5), normal(1, 64, 32)
    fun = mpx.autocast(multiply, SMALL)
    split = jax.shard_map(
        fun,
        mesh=mesh,
        in_specs=(PartitionSpec("data"), PartitionSpec()),
        out_specs=PartitionSpec("data"),
    )
    assert error(jax.jit(split)(x, w)[16:], jax.jit(fun)(x, w)[16:]) < 2.0**-8
    assert error(jax.jit(fun)(x[16:], w), jax.jit(fun)(x, w)[16:]) > 2.0**-6


# ---- what runs in 16 bits -------------------------------------------------------------------------------------------

BATCH = "a product with a batch, such as logits of attention"
HEAD = mpx.Policy("f32", "bf16", "f32", overrides=(("1", "bf16"),), fp8=SMALL)
# A function of two arrays, their shapes, what is asked for, and why it does not run in
# FP8. Too small is a product of 512 x 2048 by 2048 x 2048, with 1 / (1/512 + 2/2048) =
# 341; 4096 rows have 819.
WHY = {
    "a product": (multiply, (16, 64), (64, 32), SMALL, ""),
    "odd sizes": (
        multiply,
        (16, 60),
        (60, 32),
        SMALL,
        "16 x 60 by 60 x 32: not all sizes are multiples of 16",
    ),
    "no rows": (
        multiply,
        (0, 64),
        (64, 32),
        SMALL,
        "0 x 64 by 64 x 32: not all sizes are multiples of 16",
    ),
    "a batch": (
        lambda q, k: jnp.einsum("bik,bjk->bij", q, k),
        (2, 16, 32),
        (2, 16, 32),
        SMALL,
        BATCH,
    ),
    "a convolution": (
        conv,
        (2, 16, 16, 16),
        (3, 3, 16, 16),
        SMALL,
        "there is no conv_general_dilated of 8-bit floats",
    ),
    "small": (
        multiply,
        (512, 2048),
        (2048, 2048),
        "fp8",
        "512 x 2048 by 2048 x 2048: too small to gain",
    ),
    "large": (multiply, (4096, 2048), (2048, 2048), "fp8", ""),
    "an override": (
        multiply,
        (16, 32),
        (32, 32),
        HEAD,
        "an override of the policy asks for bf16",
    ),
}


@pytest.mark.parametrize("name", WHY)
def test_what_does_not_run_in_fp8_runs_in_bfloat16_and_says_why(name):
    fun, *shapes, fp8, reason = WHY[name]
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    (row,) = mpx.explain(lambda pair: fun(*pair), fp8)((x, w)).contractions
    assert (row.runs_in, row.reason) == ("bf16" if reason else "fp8", reason)


def test_one_warning_says_that_nothing_runs_in_fp8_and_why():
    fun = jax.jit(mpx.autocast(multiply, "fp8"))
    x, w = normal(0, 16, 64), normal(1, 64, 32)
    with pytest.warns(
        UserWarning,
        match="no matrix product of `.*` runs in fp8.*: 16 x 64 .*too small.*`mpx.expl",
    ) as seen:
        fun(x, w), fun(x, w)
    assert len(seen) == 1


def test_nothing_is_said_where_one_product_runs_in_fp8_or_where_there_is_none():
    """Also where it runs in an autocast inside, or in a loop. (Warnings are errors in
    tests.)
    """
    x, w = normal(0, 16, 64), normal(1, 64, 64)
    inside = mpx.autocast(multiply, SMALL)
    for fun in (
        lambda x, w: multiply(x, w)[:3] @ w,
        lambda x, w: inside(x, w),
        lambda x, w: lax.scan(lambda c, _: (multiply(c, w), None), x, length=2)[0],
        lambda x, w: x + w[:16],
    ):
        mpx.autocast(fun, SMALL)(x, w)


def test_gradients_in_float32_are_sums_of_8_bit_products_that_nothing_rounds():
    x, w = normal(0, 16, 64), normal(1, 64, 32)
    loss = lambda options: (
        lambda x, w: mpx.autocast(multiply, SMALL, **options)(x, w).sum()
    )
    gradient = lambda **options: np.asarray(jax.grad(loss(options), argnums=1)(x, w))
    wide, narrow = gradient(reduce_dtype="f32"), gradient()
    np.testing.assert_array_equal(wide.astype(BF16), narrow.astype(BF16))
    assert (wide != narrow).any()


def test_a_product_that_says_where_its_result_lies_runs_in_8_bits():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    fun = lambda x, w: jnp.einsum("ij,jk->ik", x, w, out_sharding=by_rows)
    with jax.set_mesh(mesh):
        (row,) = mpx.explain(fun, SMALL)(
            jax.device_put(jnp.ones((16, 32)), by_rows), jnp.ones((32, 16))
        ).contractions
    assert (row.runs_in, row.reason) == ("fp8", "")


@pytest.mark.parametrize(
    "policy",
    [
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.save_anything_except_these_names("another"),
    ],
    ids=["everything", "anything but names"],
)
def test_a_checkpoint_that_saves_what_it_is_given_saves_codes_as_bits(policy):
    """JAX rounds saved floats by `reduce_precision`, which makes NaN of codes above
    256 in e4m3, the negative control.
    """
    w, x = (jax.random.normal(jax.random.key(i), (32, 32)) for i in (0, 1))

    def loss(policy):
        def layer(w, x):
            return jnp.tanh(x @ w) @ w

        return mpx.autocast(
            lambda w, x: jax.checkpoint(layer, policy=policy)(w, x).sum(),
            SMALL,
        )

    found = jax.jit(jax.value_and_grad(loss(policy)))(w, x)
    expected = jax.jit(jax.value_and_grad(loss(None)))(w, x)
    assert_same_bits(found, expected)
    codes = jnp.full((8,), 400, jnp.float8_e4m3fn)
    assert jnp.isnan(jax.lax.reduce_precision(codes, 4, 3).astype(jnp.float32)).all()
