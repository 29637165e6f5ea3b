"""Check that a function has one value, wherever it is called: what autocast rounds
stays rounded in every program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet
from jax.scipy.sparse.linalg import gmres
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpx
from mpx._autocast import rounding
from mpx._autocast.precision import precision_of_dtype
from tests.autocast.helpers import half_dtypes, normal
from tests.helpers import BF16, F16, all_eqns

WEIGHT = normal(1, 128, 128) / 11

# What reads a product, and what it reads: functions of the product of x and a weight.
READERS = {
    "a sum with its input": lambda multiply, x: x + multiply(x),
    "an activation": lambda multiply, x: jax.nn.silu(multiply(x)) * multiply(x + 1),
    "a sum of its own": lambda multiply, x: multiply(x).sum(-1),
    "a softmax": lambda multiply, x: jax.nn.softmax(multiply(x)),
    "a loss": lambda multiply, x: jax.nn.log_softmax(multiply(x))[..., 0],
    "another product": lambda multiply, x: multiply(multiply(x)),
    "a product of an activation": lambda multiply, x: multiply(jnp.tanh(multiply(x))),
    "a scan": lambda multiply, x: lax.scan(
        lambda x, _: (x + multiply(jnp.tanh(x)), None), x, None, length=2
    )[0],
}


def rounded(x, dtype):
    return x.astype(dtype).astype(np.float32)  # eagerly: each operation is a program


def by_hand(dtype, rounds=rounded):
    weight = rounded(WEIGHT, dtype)
    return lambda x: rounds(
        jnp.matmul(rounded(x, dtype), weight, precision="highest"), dtype
    )


@half_dtypes
@pytest.mark.parametrize(
    "shape", [(64, 128), (4, 64, 128), (4, 1, 128), (300, 17, 128)], ids=str
)
@pytest.mark.parametrize("reader", READERS)
def test_a_product_is_rounded_whatever_reads_it_and_however_many_rows_it_has(
    reader, shape, dtype
):
    """In a program by hand XLA for a CPU rounds some of these: the control is a result
    that is not rounded.
    """
    read, x = READERS[reader], normal(0, *shape)
    found = jax.jit(mpx.autocast(lambda x: read(lambda x: x @ WEIGHT, x), dtype))(x)
    with jax.disable_jit():
        expected, unrounded = (
            read(by_hand(dtype), x),
            read(by_hand(dtype, lambda x, _: x), x),
        )
    error = lambda other: float(jnp.abs(found - other).mean() / jnp.abs(other).mean())
    # The order of sums may turn one rounding in thousands.
    assert error(expected) < 0.1 * error(unrounded)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_kept_rounding_is_exact_and_has_the_derivative_of_its_operand(dtype):
    """Subnormal numbers of float16 are kept too."""
    kept = lambda x: rounding.kept(x, precision_of_dtype(dtype), on_gpu=True)
    every = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    every = every[
        np.isfinite(every) & (np.abs(every) >= np.finfo(np.float32).tiny) | (every == 0)
    ]
    np.testing.assert_array_equal(jax.jit(kept)(every), every)
    x, t = normal(0, 64), normal(1, 64)
    assert (kept(x) != x).mean() > 0.9
    assert kept(narrow := x.astype(dtype)) is narrow
    np.testing.assert_array_equal(jax.jvp(kept, (x,), (t,))[1], t)
    np.testing.assert_array_equal(jax.vjp(kept, x)[1](t)[0], t)
    np.testing.assert_array_equal(
        jax.vmap(kept)(x.reshape(8, 8)), kept(x).reshape(8, 8)
    )
    np.testing.assert_array_equal(jax.linear_transpose(kept, x)(t)[0], t)


@pytest.mark.slow
def test_a_linear_function_under_autocast_can_be_transposed_as_solvers_do():
    matrix, b = (
        4 * np.eye(32, dtype=np.float32) + normal(0, 32, 32) / 8,
        normal(1, 16, 32),
    )
    multiply = mpx.autocast(lambda a, v: v @ a, "bf16")
    np.testing.assert_array_equal(
        jax.linear_transpose(lambda v: multiply(matrix, v), b)(b)[0],
        jax.vjp(lambda v: multiply(matrix, v), b)[1](b)[0],
    )
    solved = lambda multiply: jax.grad(
        lambda a: gmres(lambda v: multiply(a, v), b)[0].sum()
    )(matrix)
    exact = solved(lambda a, v: jnp.matmul(v, a, precision="highest"))
    np.testing.assert_allclose(
        solved(multiply), exact, atol=0.05 * float(jnp.abs(exact).max())
    )


# Functions of products, rows, and how many results are rounded again.
READ_ON_A_GPU = {
    # Of two: the next product rounds the first.
    "small": (
        lambda x, w: jnp.tanh(x @ w @ w),
        512,
        1,
    ),
    "large": (lambda x, w: jnp.tanh(x @ w @ w), 2**19, 0),
    "moved on its way": (lambda x, w: jnp.tanh(w @ (x @ w).T), 512, 1),
    "cast by the program": (lambda x, w: (x @ w).astype(BF16), 512, 0),
}


@pytest.mark.parametrize("name", READ_ON_A_GPU)
def test_on_a_gpu_only_a_small_result_that_float32_reads_is_rounded_again(name):
    """XLA adds up a small result from parts. A larger one is in 16 bits in memory."""
    fun, rows, count = READ_ON_A_GPU[name]
    shapes = [
        jax.ShapeDtypeStruct(shape, np.float32) for shape in ((rows, 128), (128, 128))
    ]
    eqns = all_eqns(jax.make_jaxpr(mpx.autocast(fun, "bf16"))(*shapes).jaxpr)
    of_results = [
        eqn.params["on_gpu"] for eqn in eqns if eqn.primitive.name == "rounding_kept"
    ]
    assert of_results.count(True) == count


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_program_for_a_gpu_keeps_what_it_is_told_and_one_for_a_cpu_all(on_gpu):
    traced = jax.jit(
        lambda x: rounding.kept(x, precision_of_dtype(BF16), on_gpu=on_gpu)
    ).trace(WEIGHT)
    is_in = {
        name: "reduce_precision" in traced.lower(lowering_platforms=(name,)).as_text()
        for name in ("cuda", "cpu")
    }
    assert is_in == {"cuda": on_gpu, "cpu": True}


def test_a_result_is_small_by_a_devices_part_of_it():
    """Without a mesh it may be divided over all devices; inside of `shard_map` it is a
    part.
    """

    def is_kept(x, w):
        eqns = all_eqns(
            jax.make_jaxpr(mpx.autocast(lambda x, w: jnp.sum(x @ w), "bf16"))(
                x, w
            ).jaxpr
        )
        return any(eqn.params.get("on_gpu") for eqn in eqns)

    seen, w = [], jax.ShapeDtypeStruct((128, 128), np.float32)
    rows = lambda n: jax.ShapeDtypeStruct((n, 128), np.float32)
    inside = lambda x, w: seen.append(is_kept(x, w)) or x
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,), devices=jax.devices("cpu"))
    mapped = jax.shard_map(
        inside, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    for n in (2**14, 2**16):
        jax.eval_shape(mapped, rows(8 * n), w)
        seen.append(is_kept(rows(jax.device_count() * n), w))
    assert seen == [True, True, False, False]


def test_taylor_series_pass_through():
    x, terms = normal(0, 16, 128), [normal(1, 16, 128), jnp.zeros((16, 128))]
    series = lambda fun: jet.jet(fun, (x,), (terms,))
    fun = lambda x: jnp.tanh(x @ WEIGHT)
    for found, expected in zip(
        jax.tree.leaves(series(mpx.autocast(fun, "bf16"))),
        jax.tree.leaves(series(fun)),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, atol=0.1)
