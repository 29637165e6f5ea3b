"""Loops, branches, checkpoints, calls and shard maps under autocast: values, dtypes
that travel, sums of uses.

Oracle of values: the same function with each matrix product's casts written by hand
(`narrow_dot`). Programs take the product as an argument, so that the one text makes
both.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

import mpx
from mpx._jaxprs import scan_counts
from tests.autocast.helpers import (
    BF16,
    F16,
    F32,
    SPLIT,
    WHOLE,
    autocast_loss,
    contractions,
    eqns_of,
    half_dtypes,
    integers,
    normal,
)
from tests.helpers import assert_same_bits, eight_cpu_devices

NO_SCALE = mpx.NoOpLossScale()  # of numbers that float16 holds as they are


@pytest.mark.parametrize("side", ["in_shardings", "out_shardings"])
def test_a_jit_inside_that_places_its_arrays_does_so(side):
    sharding = NamedSharding(eight_cpu_devices(), SPLIT)
    inner = jax.jit(
        lambda w, x: x @ w,
        **{side: (None, sharding) if side == "in_shardings" else sharding},
    )
    w, x = integers(0, 8, 8), integers(1, 8, 8)
    for fun in (mpx.autocast(inner, BF16), jax.jit(mpx.autocast(inner, BF16))):
        result = fun(w, x)
        assert result.sharding.is_equivalent_to(inner(w, x).sharding, 2)
        assert_same_bits(np.asarray(result), np.asarray(x) @ np.asarray(w))


def test_a_jit_inside_that_places_nothing_runs_in_line():
    assert not eqns_of(
        mpx.autocast(jax.jit(jnp.matmul), BF16),
        normal(0, 8, 8),
        normal(1, 8, 8),
        primitive="jit",
    )


@pytest.mark.parametrize("prevent_cse", [None, True, (True, False)], ids=str)
def test_a_loop_and_a_checkpoint_have_the_constants_of_a_function_that_was_compiled_before(
    prevent_cse,
):
    """Its program holds them, and runs in line. `prevent_cse` may be given for each
    operand, but not for constants.
    """
    scales, x = integers(0, 8, 8, low=1), jnp.eye(8, dtype=F32)
    inner = jax.jit(lambda x, y: x @ y * scales)
    loop = lambda x, y: lax.while_loop(
        lambda c: inner(c, y).sum() < 99, lambda c: inner(c, y), x
    )
    fun = (
        loop if prevent_cse is None else jax.checkpoint(inner, prevent_cse=prevent_cse)
    )
    assert (inner(x, x) != fun(x, x)).any() == (fun is loop)
    assert_same_bits(mpx.autocast(fun, BF16)(x, x), fun(x, x))


def test_a_checkpoint_that_is_called_twice_computes_what_is_read_of_each():
    """Both calls hold one program."""
    layer = jax.checkpoint(lambda w, x: (x @ w, x + 1.0))
    fun = lambda w, x: (layer(w, x)[0], layer(w, x))
    w, x = integers(0, 8, 8), integers(1, 8, 8)
    assert_same_bits(mpx.autocast(fun, BF16)(w, x), fun(w, x))


def test_a_shard_map_over_some_axes_of_a_mesh_leaves_the_others_to_the_compiler():
    mesh = jax.make_mesh(
        (4, 2),
        ("a", "b"),
        (jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices("cpu"),
    )
    step = lambda w, x: lax.psum(x @ w, "a")
    specs = dict(
        in_specs=(WHOLE, PartitionSpec("a")), out_specs=WHOLE, axis_names={"a"}
    )
    fun = jax.shard_map(step, mesh=mesh, **specs)
    w, x = integers(0, 16, 2), integers(1, 8, 16)
    assert_same_bits(
        np.asarray(jax.jit(mpx.autocast(fun, BF16))(w, x)),
        np.asarray(jax.jit(fun)(w, x)),
    )


# ---- what travels in 16 bits ----------------------------------------------------------------------------------------


def operand_dtypes(fun, *args, primitive="scan"):
    """Return dtypes of the first equation of a primitive: of its operands, split for a
    scan, and of its results.
    """
    eqn = eqns_of(fun, *args, primitive=primitive)[0]
    dtypes = [v.aval.dtype for v in eqn.invars]
    results = [v.aval.dtype for v in eqn.outvars]
    if primitive != "scan":
        return dtypes, results
    first, carried = scan_counts(eqn)
    last = first + carried
    return dtypes[:first], dtypes[first:last], dtypes[last:], results[last - first :]


def layers(ws, x):
    return lax.scan(lambda c, w: (jnp.sin(c @ w), None), x, ws)[0]


@half_dtypes
def test_stacked_weights_of_the_compute_dtype_are_not_copied_in_float32(dtype):
    """Like the layers of a model: forward, and in the loops of the backward pass."""
    ws, x = normal(0, 3, 8, 8, dtype=dtype), normal(1, 6, 8)
    _, carry, xs, _ = operand_dtypes(mpx.autocast(layers, dtype), ws, x)
    assert (carry, xs) == ([F32], [dtype])
    gradient = mpx.grad(autocast_loss(layers, dtype), NO_SCALE, argnums=(0, 1))
    scans = eqns_of(gradient, ws, x, primitive="scan")
    stacks = [
        v.aval
        for eqn in scans
        for v in (*eqn.invars, *eqn.outvars)
        if v.aval.shape == (3, 8, 8)
    ]
    assert {aval.dtype for aval in stacks} == {dtype}
    for weights in (F32, F16 if dtype == BF16 else BF16):  # those of another dtype are
        assert operand_dtypes(
            mpx.autocast(layers, dtype), normal(0, 3, 8, 8, dtype=weights), x
        )[2] == [F32]
    # With float32 gradients there are zeros beside the weights, which nothing reads:
    # their gradient is the weights'.
    assert operand_dtypes(mpx.autocast(layers, dtype, reduce_dtype=F32), ws, x)[2] == [
        F32,
        dtype,
    ]


def travels_in(use):
    """Return the dtype of a stacked bfloat16 weight where it enters the loop that uses
    it.
    """
    fun = lambda ws, x: lax.scan(lambda c, w: (use(c, w), None), x, ws)[0]
    with jax.numpy_rank_promotion("allow"):
        (dtype,) = operand_dtypes(
            mpx.autocast(fun, BF16), normal(0, 3, 8, 8, dtype=BF16), normal(1, 6, 8)
        )[2]
    return dtype


NOT_ROUNDED = {
    "not in a contraction": lambda c, w: c * w[0] + c @ jnp.ones((8, 8), F32),
    "in a broadcast": lambda c, w: c @ jnp.broadcast_to(w[:1], (8, 8)),
    "in a while loop": lambda c, w: lax.while_loop(
        lambda s: s[0] < 1, lambda s: (s[0] + 1, s[1] @ w), (0, c)
    )[1],
    "in a loop": lambda c, w: lax.scan(lambda c, _: (c @ w, None), c, length=2)[0],
    "precisely": lambda c, w: jnp.matmul(c, w, precision="highest") + c @ c.T @ c,
    "twice": lambda c, w: jnp.sin(c @ w) @ w,
}
ROUNDED = {
    "transposed": lambda c, w: c @ w.T,
    "reshaped": lambda c, w: c @ w.reshape(4, 16).reshape(8, 8),
    "in a jit": lambda c, w: jax.jit(jnp.matmul)(c, w),
    "in a checkpoint": lambda c, w: jax.checkpoint(jnp.matmul)(c, w),
    "in both branches": lambda c, w: lax.cond(
        c[0, 0] > 0, lambda w: c @ w, lambda w: c @ (w.T), w
    ),
    "named": lambda c, w: c @ checkpoint_name(w, "weight").T,
}


def test_a_weight_travels_in_16_bits_only_if_its_gradient_is_rounded_anyway():
    """The gradients of two uses are added up in float32, and must not be rounded after
    that.
    """
    assert {travels_in(use) for use in ROUNDED.values()} == {BF16}
    for name, use in NOT_ROUNDED.items():
        assert travels_in(use) == F32, name
    # In the one branch; a branch is entered in 16 bits if all branches round.
    once = lambda w, x: x @ w
    w, x = normal(0, 8, 8, dtype=BF16), normal(1, 6, 8)
    for other, dtype in (
        (lambda w, x: jnp.sin(x @ w.T), BF16),
        (lambda w, x: x, F32),
        (lambda w, x: x @ w @ w, F32),
    ):
        for branches in ((once, other), (other, once)):
            fun = mpx.autocast(
                lambda w, x, branches=branches: lax.cond(x[0, 0] > 0, *branches, w, x),
                BF16,
            )
            assert operand_dtypes(fun, w, x, primitive="cond")[0] == [
                np.int32,
                dtype,
                F32,
            ]


def stacking(w, x):
    """Pairs of rows of a product are the inputs of a loop; it stacks products, and what
    is computed from them.
    """

    def body(c, rows):
        y = rows @ w
        return c + (y @ w).sum(), (
            y,
            y.reshape(4, 4).T,
            jnp.maximum(y, 0.0),
            y * 2.0,
            jnp.arange(3, dtype=jnp.int32),
        )

    return lax.scan(body, 0.0, (x @ w).reshape(3, 2, 8))


def over(copies):
    body = lambda w: lambda c, rows: (c + (rows @ w).sum() + rows.sum(), None)
    return lambda w, x: lax.scan(body(w), 0.0, copies(x @ w).reshape(-1, 2, 8))[0]


# Loops of a weight of the compute dtype and of rows: dtypes of constants, carries,
# inputs and stacked results. Cotangents of constants, of carries and of copies are
# still to be added up, and are rounded after that only.
TRAVELS = {
    "results of products": (
        stacking,
        lambda half: ([F32], [F32], [half], [half, half, half, F32, np.int32]),
    ),
    "carries and constants": (
        lambda w, x: lax.scan(lambda c, _: (c @ w, None), x @ w, length=3)[0],
        lambda half: ([F32], [F32], [], []),
    ),
    "broadcasts": (
        over(lambda y: jnp.broadcast_to(y[:1], (8, 8))),
        lambda half: ([F32], [F32], [F32], []),
    ),
    "rows looked up": (
        over(lambda y: y[jnp.zeros(8, jnp.int32)]),
        lambda half: ([F32], [F32], [F32], []),
    ),
    "tiles": (
        over(lambda y: jnp.tile(y[:1], (8, 1))),
        lambda half: ([F32], [F32], [F32], []),
    ),
    "a row beside all rows": (
        over(lambda y: lax.max(y[:1], y)),
        lambda half: ([F32], [F32], [F32], []),
    ),
    "copies in one branch": (
        over(
            lambda y: lax.cond(
                y.sum() > 0, lambda y: jnp.broadcast_to(y[:1], y.shape), lambda y: y, y
            )
        ),
        lambda half: ([F32], [F32], [F32], []),
    ),
}


@half_dtypes
@pytest.mark.parametrize("name", TRAVELS)
def test_what_travels_in_16_bits_is_what_needs_no_sum_of_cotangents(name, dtype):
    fun, expected = TRAVELS[name]
    args = normal(0, 8, 8, dtype=dtype), normal(1, 6, 8)
    loss = mpx.autocast(lambda *args: jax.tree.leaves(fun(*args))[0].sum(), dtype)
    assert operand_dtypes(mpx.autocast(fun, dtype), *args) == expected(dtype)
    for eqn in eqns_of(
        mpx.grad(loss, NO_SCALE, argnums=(0, 1)), *args, primitive="scan"
    ):
        first, carried = scan_counts(eqn)
        assert dtype not in [v.aval.dtype for v in eqn.invars[first : first + carried]]


def test_a_weight_that_wanders_between_carries_is_known_as_one_in_each():
    """Its gradient is float32 if that is asked for, though the carry that is used
    starts with zeros.
    """
    x = normal(1, 6, 8)
    body = lambda c, _: ((c[1], c[0]), x @ c[0])
    loss = lambda w: lax.scan(body, (jnp.zeros_like(w), w), length=2)[1].sum()
    gradient = jax.grad(mpx.autocast(loss, BF16, reduce_dtype=F32))
    assert (BF16, BF16, F32) in contractions(gradient, normal(0, 8, 8))


def test_a_loop_over_stacked_weights_can_be_batched():
    """Over stacks of them, with float32 gradients, whose carriers are batched too."""
    stacks, x = normal(0, 3, 2, 4, 4, dtype=BF16), normal(1, 8, 4)
    gradient = mpx.grad(
        lambda ws: mpx.autocast(layers, BF16, reduce_dtype=F32)(ws, x).sum()
    )
    batched = jax.vmap(gradient, in_axes=1)(stacks)
    each = jnp.stack([gradient(stacks[:, i]) for i in range(2)])
    assert jnp.linalg.norm(batched - each) < 0.02 * jnp.linalg.norm(each)


def kept_by_a_scan(around_body=lambda body: body):
    """Return what a loop over three layers, with a gate between two products, hands to
    its backward pass.
    """

    def layer(c, w):
        c = c + jnp.tanh(c @ w) @ w
        return c, None

    ws, x = normal(0, 3, 8, 8), normal(1, 6, 8)
    fun = mpx.autocast(lambda ws, x: lax.scan(around_body(layer), x, ws)[0], BF16)
    leaves = jax.tree.leaves(jax.vjp(fun, ws, x)[1])
    return sorted(str(leaf.dtype) for leaf in leaves if leaf.shape == (3, 6, 8))


def test_a_loop_keeps_results_of_products_in_16_bits_and_computes_elementwise_operations_again():
    """Its carry is float32. Negative control: JAX keeps what its derivatives need, each
    in float32.
    """
    assert kept_by_a_scan() == ["bfloat16", "float32"]
    plain = lambda ws, x: lax.scan(lambda c, w: (c + jnp.tanh(c @ w) @ w, None), x, ws)[
        0
    ]
    leaves = jax.tree.leaves(jax.vjp(plain, normal(0, 3, 8, 8), normal(1, 6, 8))[1])
    assert [leaf.dtype for leaf in leaves if leaf.shape == (3, 6, 8)].count(F32) == 3


def test_a_loop_computes_again_without_barriers_between_the_passes():
    gradient = jax.jit(jax.grad(autocast_loss(layers, BF16)))
    assert (
        "optimization_barrier"
        not in gradient.lower(normal(0, 3, 8, 8), normal(1, 6, 8)).as_text()
    )


@pytest.mark.parametrize(
    "place",
    [lambda f: f, lambda f: lambda c, w: jax.jit(f)(c, w)],
    ids=["body", "in a jit"],
)
def test_a_loop_with_a_checkpoint_of_its_own_keeps_what_that_says(place):
    policies = jax.checkpoint_policies
    body_with = lambda policy: lambda body: place(jax.checkpoint(body, policy=policy))
    assert kept_by_a_scan(body_with(policies.nothing_saveable)) == ["float32"]
    assert len(kept_by_a_scan(body_with(policies.everything_saveable))) > 2


def test_a_loop_with_effects_can_be_differentiated():
    """JAX allows none of them in a checkpoint. Each happens once."""
    seen, number = [], jax.ShapeDtypeStruct((), F32)

    def layer(c, w):
        told = io_callback(
            lambda total: seen.append(1) or total, number, lax.stop_gradient(c.sum())
        )
        return jnp.tanh(c @ w) + told, None

    loss = autocast_loss(lambda ws, x: lax.scan(layer, x, ws)[0], BF16)
    jax.block_until_ready(jax.grad(loss)(normal(0, 3, 4, 4), normal(1, 8, 4)))
    assert len(seen) == 3


def test_a_loop_keeps_random_bits_and_results_of_sums_and_not_their_copies():
    """What costs time to compute again, or bits that must be the same, is kept; a
    broadcast of it is not.
    """

    def layer(c, key):
        mask = jax.random.bernoulli(key, 0.5, c.shape)
        return (
            jnp.where(mask, c * lax.rsqrt((c * c).mean(-1, keepdims=True)), 0.0)
            @ jnp.eye(8, dtype=F32),
            None,
        )

    fun = mpx.autocast(lambda x, keys: lax.scan(layer, x, keys)[0], BF16)
    keys = jax.random.split(jax.random.key(0), 3)
    leaves = jax.tree.leaves(jax.vjp(lambda x: fun(x, keys), normal(1, 6, 8))[1])
    found = sorted(
        (str(leaf.dtype), leaf.shape[1:]) for leaf in leaves if leaf.shape[:2] == (3, 6)
    )
    assert found == [("bool", (6, 8)), ("float32", (6,)), ("float32", (6, 8))]


@pytest.mark.parametrize(
    ("devices", "policy"),
    [(1, "bf16"), (8, "compute=bf16,reduce=bf16")],
    ids=["one", "eight"],
)
def test_weights_that_a_loop_gathers_stay_in_16_bits_unless_devices_add_up_gradients_in_float32(
    devices, policy
):
    gathered = lambda x, w: (
        x + jnp.tanh(x @ jax.sharding.reshard(w, PartitionSpec())),
        None,
    )
    loss = mpx.autocast(
        lambda ws, x: lax.scan(jax.checkpoint(gathered), x, ws)[0].sum(), policy
    )
    with jax.set_mesh(
        jax.make_mesh((devices,), ("data",), devices=jax.devices("cpu")[:devices])
    ):
        weights = jax.device_put(
            normal(0, 3, 16, 16).astype(BF16), PartitionSpec(None, "data")
        )
        x = jax.device_put(normal(1, 8, 16), PartitionSpec("data"))
        scans = eqns_of(mpx.grad(loss, grad_dtype=BF16), weights, x, primitive="scan")
    stacks = [
        v.aval
        for eqn in scans
        for v in (*eqn.invars, *eqn.outvars)
        if v.aval.shape == (3, 16, 16)
    ]
    assert [str(stack.dtype) for stack in stacks] == ["bfloat16"] * 3


def test_what_nobody_reads_of_a_checkpoint_in_a_loop_is_no_result_of_it():
    """As `nnx.scan` of `nnx.remat` returns all weights. Control: what is read."""
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), w))
    ws, x = normal(0, 3, 8, 8), normal(1, 4, 8)
    for results, shape in ((1, ()), (2, (8, 8))):
        fun = mpx.autocast(lambda x, ws, n=results: lax.scan(layer, x, ws)[:n], BF16)
        (checkpoint,) = eqns_of(fun, x, ws, primitive="remat2")
        assert [v.aval.shape for v in checkpoint.outvars] == [(4, 8), shape]
