"""Loops, branches, checkpoints, calls and shard maps under autocast: values, dtypes that travel, sums of uses.

Oracle of values: the same function with each matrix product's casts written by hand (`narrow_dot`). Programs take the
product as an argument, so that the one text makes both.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

import mpx
from mpx._jaxprs import scan_counts
from tests.autocast.helpers import (
    BF16,
    F16,
    F32,
    all_in,
    autocast_loss,
    contractions,
    eqns_of,
    exact_jit,
    half_dtypes,
    integers,
    is_representable,
    narrow_dot,
    normal,
)
from tests.helpers import assert_same_bits, eight_cpu_devices

SPLIT = PartitionSpec("data")
WHOLE = PartitionSpec()

# ---- programs: from a matrix product to functions of weights (4, 4), stacked weights (3, 4, 4), and rows (16, 4) -----


def carry_scan(dot):
    return lambda w, ws, x: lax.scan(lambda c, _: (jnp.sin(dot(c, w)), None), x, length=3)[0]


def stacked_scan(dot):
    def body(c, w):
        y = dot(c, w)
        return jnp.sin(y), y

    return lambda w, ws, x: lax.scan(body, x, ws)


def reversed_scan(dot):
    def fun(w, ws, x):
        body = lambda c, w2: (jnp.sin(dot(dot(c, w2), w)), c.sum())
        return lax.scan(body, x, ws, reverse=True, unroll=2)

    return fun


def branch(dot):
    def fun(w, ws, x):
        return lax.cond(x[0, 0] > 0, lambda w: jnp.sin(dot(x, w)), lambda w: dot(jnp.cos(x), 2 * w), w)

    return fun


def switch(dot):
    def fun(w, ws, x):
        branches = [lambda w, i=i: jnp.sin(dot(x, w) * i) for i in (1.0, 2.0, 3.0)]
        return [lax.switch(index, branches, ws[0]) for index in (0, 2, 7)]

    return fun


def branch_in_scan(dot):
    def body(c, w):
        return lax.cond(c[0, 0] > 0, lambda c: (jnp.sin(dot(c, w)), c), lambda c: (c, dot(c, w)), c)

    return lambda w, ws, x: lax.scan(body, x, ws)


def checkpoint(dot):
    return lambda w, ws, x: jax.checkpoint(lambda w, x: jnp.sin(dot(jnp.sin(dot(x, w)), w)))(w, x)


def checkpoint_names(dot):
    policy = jax.checkpoint_policies.save_only_these_names("hidden")

    def fun(w, x):
        return jnp.sin(dot(checkpoint_name(jnp.sin(dot(x, w)), "hidden"), w))

    return lambda w, ws, x: jax.checkpoint(fun, policy=policy, prevent_cse=False)(w, x)


def checkpoint_in_scan(dot):
    body = jax.checkpoint(lambda c, w: (jnp.sin(dot(jnp.sin(dot(c, w)), w)), None), prevent_cse=False)
    return lambda w, ws, x: lax.scan(body, x, ws)[0]


def call_in_scan(dot):
    step = jax.jit(lambda c, w: jnp.sin(dot(c, w)))
    return lambda w, ws, x: lax.scan(lambda c, w: (step(c, w), step(c, 2 * w)), x, ws)


def vectorized_scan(dot):
    return lambda w, ws, x: jax.vmap(lambda row: lax.scan(lambda c, w: (jnp.sin(dot(c, w)), None), row, ws)[0])(x)


def shard_map(dot):
    def fun(w, ws, x):
        step = lambda w, x: jnp.sin(dot(x, lax.pcast(w, "data", to="varying")))
        return jax.shard_map(step, mesh=eight_cpu_devices(), in_specs=(WHOLE, SPLIT), out_specs=SPLIT)(w, x)

    return fun


def shard_map_that_sums(dot):
    def fun(w, ws, x):
        step = lambda w, x: lax.psum(dot(dot(x, lax.pcast(w, "data", to="varying")).T, x), "data")
        return jax.shard_map(step, mesh=eight_cpu_devices(), in_specs=(WHOLE, SPLIT), out_specs=WHOLE)(w, x)

    return fun


PROGRAMS = {
    fun.__name__.replace("_", " "): fun
    for fun in (
        *(carry_scan, stacked_scan, reversed_scan, branch, switch, branch_in_scan),
        *(checkpoint, checkpoint_names, checkpoint_in_scan, call_in_scan, vectorized_scan),
        *(shard_map, shard_map_that_sums),
    )
}


def arguments():
    return normal(0, 4, 4), normal(1, 3, 4, 4), normal(2, 16, 4)


def total(fun):
    return lambda *args: sum(leaf.sum() for leaf in jax.tree.leaves(fun(*args)))


@pytest.mark.eager
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_of_casts_written_by_hand(name):
    """Every bit; negative control: the float32 program has other values."""
    args, program = arguments(), PROGRAMS[name]
    plain = program(jnp.matmul)
    both = lambda fun: lambda *args: (fun(*args), jax.grad(total(fun), argnums=(0, 1))(*args))
    actual = exact_jit(both(mpx.autocast(plain, BF16)))(*args)
    assert_same_bits(actual, exact_jit(both(program(narrow_dot(BF16))))(*args))
    types = lambda tree: [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
    assert types(actual) == types(jax.eval_shape(both(plain), *args))
    if name in ("carry scan", "checkpoint", "branch"):
        assert (actual[0] != exact_jit(plain)(*args)).any()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_contraction_is_narrowed_forward_and_backward(name):
    args, program = arguments(), PROGRAMS[name](jnp.matmul)
    for dtype in (BF16, F16):
        autocast = mpx.autocast(program, dtype)
        assert contractions(autocast, *args) == [all_in(dtype)] * len(contractions(program, *args))
        assert set(contractions(jax.grad(total(autocast), argnums=(0, 1, 2)), *args)) == {all_in(dtype)}


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed length", "until a condition"])
def test_forward_mode_goes_through_while_loops(dynamic):
    """The condition contracts too; the loop ends in the same iteration as the one written by hand."""

    def program(dot):
        def fun(w, x):
            if not dynamic:
                return lax.fori_loop(0, jnp.int32(3), lambda i, c: jnp.sin(dot(c, w)), x)
            running = lambda c: (c[0] < 20) & (jnp.abs(dot(c[1], w)).sum() < 1000)
            return lax.while_loop(running, lambda c: (c[0] + 1, dot(c[1], w)), (0, x))

        return fun

    w, x = 2 * jnp.eye(4, dtype=F32) + normal(0, 4, 4), normal(2, 8, 4)
    tangent = lambda fun: exact_jit(lambda w, x: jax.jvp(fun, (w, x), (jnp.cos(w), jnp.cos(x))))(w, x)
    plain = program(jnp.matmul)
    assert set(contractions(lambda w, x: jax.jvp(mpx.autocast(plain, BF16), (w, x), (w, x)), w, x)) == {all_in(BF16)}
    actual, expected = tangent(mpx.autocast(plain, BF16)), tangent(program(narrow_dot(BF16)))
    if dynamic:
        assert 1 < actual[0][0] < 20
        assert actual[0][0] == expected[0][0]
        actual, expected = (actual[0][1], actual[1][1]), (expected[0][1], expected[1][1])
    for a, e in zip(actual, expected, strict=True):  # two programs of the same arithmetic may be fused in two ways
        np.testing.assert_allclose(a, e, rtol=2.0**-20, atol=2.0**-20 * max(np.abs(e).max(), 1))


def test_a_while_loop_may_be_mapped_inside_of_the_function():
    """Each row has a number of iterations of its own; jax gives such a loop one condition a row."""
    w = 2 * jnp.eye(4, dtype=F32)
    one = lambda row: lax.while_loop(lambda c: c.sum() < 100, lambda c: c @ w, row)
    x = jnp.ones((3, 4), F32) * jnp.array([[1.0], [3.0], [8.0]], F32)
    expected = np.array([[32.0], [48.0], [32.0]]) * np.ones((1, 4))
    assert_same_bits(jax.vmap(one)(x), jnp.asarray(expected, F32))
    assert_same_bits(jax.vmap(mpx.autocast(one, BF16))(x), jnp.asarray(expected, F32))
    assert_same_bits(mpx.autocast(jax.vmap(one), BF16)(x), jnp.asarray(expected, F32))


def test_only_the_branch_of_the_platform_is_compiled():
    """A kernel for TPUs stands in the program and is not compiled for a CPU."""

    def kernel(x):
        copy = lambda source, target: target.__setitem__(..., source[...])
        return pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x @ x)

    fun = lambda x: lax.platform_dependent(x, tpu=kernel, default=lambda x: x @ x)
    x = integers(0, 4, 4)
    assert_same_bits(jax.jit(fun)(x), x @ x)
    assert_same_bits(jax.jit(mpx.autocast(fun, BF16))(x), x @ x)


def test_a_branch_is_chosen_as_in_the_plain_program():
    """Indices outside of the range are clamped; a Python bool chooses at once."""
    w = integers(0, 4, 4)
    branches = [lambda w, i=i: (w @ w) * i for i in (1.0, 2.0, 3.0)]
    fun = lambda i, w: lax.switch(i, branches, w)
    autocast, plain = exact_jit(mpx.autocast(fun, BF16)), exact_jit(fun)
    for index in (-3, 0, 1, 2, 9):
        assert_same_bits(autocast(jnp.int32(index), w), plain(jnp.int32(index), w))
    for flag in (True, False, jnp.bool_(True)):
        fun = lambda w, flag=flag: lax.cond(flag, lambda w: w @ w, lambda w: w, w)
        assert_same_bits(mpx.autocast(fun, BF16)(w), fun(w))


@pytest.mark.parametrize("side", ["in_shardings", "out_shardings"])
def test_a_jit_inside_that_places_its_arrays_does_so(side):
    sharding = NamedSharding(eight_cpu_devices(), SPLIT)
    inner = jax.jit(lambda w, x: x @ w, **{side: (None, sharding) if side == "in_shardings" else sharding})
    w, x = integers(0, 4, 4), integers(1, 8, 4)
    for fun in (mpx.autocast(inner, BF16), jax.jit(mpx.autocast(inner, BF16))):
        result = fun(w, x)
        assert result.sharding.is_equivalent_to(inner(w, x).sharding, 2)
        assert_same_bits(np.asarray(result), np.asarray(x) @ np.asarray(w))


def test_a_shard_map_over_some_axes_of_a_mesh_leaves_the_others_to_the_compiler():
    mesh = jax.make_mesh((4, 2), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices("cpu"))
    step = lambda w, x: lax.psum(x @ w, "a")
    specs = dict(in_specs=(WHOLE, PartitionSpec("a")), out_specs=WHOLE, axis_names={"a"})
    fun = jax.shard_map(step, mesh=mesh, **specs)
    w, x = integers(0, 4, 2), integers(1, 8, 4)
    assert_same_bits(np.asarray(jax.jit(mpx.autocast(fun, BF16))(w, x)), np.asarray(jax.jit(fun)(w, x)))


# ---- what travels in 16 bits ----------------------------------------------------------------------------------------


def operand_dtypes(fun, *args, primitive="scan"):
    """Return dtypes of the first equation of a primitive: of its operands, split for a scan, and of its results."""
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
    ws, x = normal(0, 3, 4, 4, dtype=dtype), normal(1, 8, 4)
    _, carry, xs, _ = operand_dtypes(mpx.autocast(layers, dtype), ws, x)
    assert (carry, xs) == ([F32], [dtype])
    gradient = mpx.grad(autocast_loss(layers, dtype), argnums=(0, 1))
    scans = eqns_of(gradient, ws, x, primitive="scan")
    stacks = [v.aval for eqn in scans for v in (*eqn.invars, *eqn.outvars) if v.aval.shape == (3, 4, 4)]
    assert {aval.dtype for aval in stacks} == {dtype}
    # Those of another dtype are, and those whose gradients shall be float32.
    for weights, options in ((F32, {}), (F16 if dtype == BF16 else BF16, {}), (dtype, {"gradient_dtype": F32})):
        ws = normal(0, 3, 4, 4, dtype=weights)
        assert operand_dtypes(mpx.autocast(layers, dtype, **options), ws, x)[2] == [F32]


def travels_in(use):
    """Return the dtype in which a bfloat16 weight of a stack enters the loop that uses it."""
    fun = lambda ws, x: lax.scan(lambda c, w: (use(c, w), None), x, ws)[0]
    with jax.numpy_rank_promotion("allow"):
        (dtype,) = operand_dtypes(mpx.autocast(fun, BF16), normal(0, 3, 4, 4, dtype=BF16), normal(1, 4, 4))[2]
    return dtype


NOT_ROUNDED = {
    "not in a contraction": lambda c, w: c * w[0] + c @ jnp.ones((4, 4), F32),
    "in a broadcast": lambda c, w: c @ jnp.broadcast_to(w[:1], (4, 4)),
    "in a while loop": lambda c, w: lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, s[1] @ w), (0, c))[1],
    "in a loop": lambda c, w: lax.scan(lambda c, _: (c @ w, None), c, length=2)[0],
    "precisely": lambda c, w: jnp.matmul(c, w, precision="highest") + c @ c.T @ c,
    "twice": lambda c, w: jnp.sin(c @ w) @ w,
}
ROUNDED = {
    "transposed": lambda c, w: c @ w.T,
    "reshaped": lambda c, w: c @ w.reshape(2, 8).reshape(4, 4),
    "in a jit": lambda c, w: jax.jit(jnp.matmul)(c, w),
    "in a checkpoint": lambda c, w: jax.checkpoint(jnp.matmul)(c, w),
    "in both branches": lambda c, w: lax.cond(c[0, 0] > 0, lambda w: c @ w, lambda w: c @ (w.T), w),
    "named": lambda c, w: checkpoint_name(w, "weight").T @ c,
}


def test_a_weight_travels_in_16_bits_only_if_its_gradient_is_rounded_anyway():
    """The gradients of two uses are added up in float32, and must not be rounded after that."""
    assert {travels_in(use) for use in ROUNDED.values()} == {BF16}
    for name, use in NOT_ROUNDED.items():
        assert travels_in(use) == F32, name
    once = lambda w, x: x @ w  # in the one branch; a branch is entered in 16 bits if all branches round
    w, x = normal(0, 4, 4, dtype=BF16), normal(1, 8, 4)
    for other, dtype in ((lambda w, x: jnp.sin(x @ w.T), BF16), (lambda w, x: x, F32), (lambda w, x: x @ w @ w, F32)):
        for branches in ((once, other), (other, once)):
            fun = mpx.autocast(lambda w, x, branches=branches: lax.cond(x[0, 0] > 0, *branches, w, x), BF16)
            assert operand_dtypes(fun, w, x, primitive="cond")[0] == [np.int32, dtype, F32]


@half_dtypes
def test_activations_that_are_results_of_contractions_travel_in_16_bits(dtype):
    """Rows of a product are the inputs of a loop; products are stacked by it."""

    def fun(w, x):
        def body(c, row):
            y = row @ w
            return c + (y @ w).sum(), (
                y,
                y.reshape(2, 2).T,
                jnp.maximum(y, 0.0),
                y * 2.0,
                jnp.arange(3, dtype=jnp.int32),
            )

        return lax.scan(body, 0.0, x @ w)

    _, carry, xs, ys = operand_dtypes(mpx.autocast(fun, dtype), normal(0, 4, 4), normal(1, 8, 4))
    assert (carry, xs, ys) == ([F32], [dtype], [dtype, dtype, dtype, F32, np.int32])


COPIES = {
    "broadcast": lambda y: jnp.broadcast_to(y[:1], (8, 4)),
    "looked up": lambda y: y[jnp.zeros(8, jnp.int32)],
    "tiled": lambda y: jnp.tile(y[:1], (8, 1)),
}


@pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)
def test_copies_of_a_result_travel_in_float32(copies):
    """Their cotangents are still to be added up, and are rounded after that only."""
    body = lambda w: lambda c, row: (c + (row @ w).sum() + row.sum(), None)
    fun = lambda w, x: lax.scan(body(w), 0.0, copies(x @ w))[0]
    assert operand_dtypes(mpx.autocast(fun, BF16), normal(0, 4, 4), normal(1, 8, 4))[2] == [F32]


def test_carries_and_constants_of_a_loop_are_float32_though_representable_in_16_bits():
    """Their cotangents are added up over all iterations."""
    fun = lambda w, x: lax.scan(lambda c, _: (c @ w, None), x @ w, length=3)[0]
    consts, carry, _, _ = operand_dtypes(mpx.autocast(fun, BF16), normal(0, 4, 4, dtype=BF16), normal(1, 8, 4))
    assert (consts, carry) == ([F32], [F32])
    gradient = mpx.grad(autocast_loss(fun, BF16), argnums=(0, 1))
    for eqn in eqns_of(gradient, normal(0, 4, 4, dtype=BF16), normal(1, 8, 4), primitive="scan"):
        first, carried = scan_counts(eqn)
        carry = [v.aval.dtype for v in eqn.invars[first : first + carried]]
        assert BF16 not in carry


def test_a_weight_that_wanders_between_carries_is_known_as_one_in_each():
    """Its gradient is float32 if that is asked for, though the carry that is used starts with zeros."""
    x = normal(1, 8, 4)
    body = lambda c, _: ((c[1], c[0]), x @ c[0])
    loss = lambda w: lax.scan(body, (jnp.zeros_like(w), w), length=2)[1].sum()
    gradient = jax.grad(mpx.autocast(loss, BF16, gradient_dtype=F32))
    assert (BF16, BF16, F32) in contractions(gradient, normal(0, 4, 4))


@half_dtypes
def test_what_a_checkpoint_of_contractions_keeps_is_in_16_bits(dtype):
    """Residuals of the size of an activation: the stacked results of all layers."""
    ws, x = normal(0, 3, 4, 4, dtype=dtype), normal(1, 8, 4)
    policy = jax.checkpoint_policies.dots_saveable
    body = jax.checkpoint(lambda c, w: (jnp.sin(jnp.sin(c @ w) @ w.T), None), policy=policy)
    fun = mpx.autocast(lambda ws, x: lax.scan(body, x, ws)[0], dtype)
    saved = [leaf for leaf in jax.tree.leaves(jax.vjp(fun, ws, x)[1]) if leaf.shape == (3, 8, 4)]
    assert sorted(str(leaf.dtype) for leaf in saved) == sorted([str(dtype)] * 2 + ["float32"])  # and the carry
    # Without a policy it keeps what it is given.
    fun = mpx.autocast(lambda w, x: jax.checkpoint(lambda y: jnp.sin(y @ w))(x @ w), dtype)
    assert operand_dtypes(fun, ws[0], x, primitive="remat2")[0] == [dtype] * 2


def kept_by_a_scan(around_body=lambda body: body):
    """Return what a loop over three layers, with a gate between two products, hands to its backward pass."""

    def layer(c, w):
        c = c + jnp.tanh(c @ w) @ w
        return c, None

    ws, x = normal(0, 3, 4, 4), normal(1, 8, 4)
    fun = mpx.autocast(lambda ws, x: lax.scan(around_body(layer), x, ws)[0], BF16)
    leaves = jax.tree.leaves(jax.vjp(fun, ws, x)[1])
    return sorted(str(leaf.dtype) for leaf in leaves if leaf.shape == (3, 8, 4))


def test_a_loop_keeps_results_of_products_in_16_bits_and_computes_elementwise_operations_again():
    """Its carry is float32. Negative control: JAX keeps what its derivatives need, each in float32."""
    assert kept_by_a_scan() == ["bfloat16", "float32"]
    plain = lambda ws, x: lax.scan(lambda c, w: (c + jnp.tanh(c @ w) @ w, None), x, ws)[0]
    leaves = jax.tree.leaves(jax.vjp(plain, normal(0, 3, 4, 4), normal(1, 8, 4))[1])
    assert [leaf.dtype for leaf in leaves if leaf.shape == (3, 8, 4)].count(F32) == 3


@pytest.mark.parametrize("place", [lambda f: f, lambda f: lambda c, w: jax.jit(f)(c, w)], ids=["body", "in a jit"])
def test_a_loop_with_a_checkpoint_of_its_own_keeps_what_that_says(place):
    policies = jax.checkpoint_policies
    body_with = lambda policy: lambda body: place(jax.checkpoint(body, policy=policy))
    assert kept_by_a_scan(body_with(policies.nothing_saveable)) == ["float32"]
    assert len(kept_by_a_scan(body_with(policies.everything_saveable))) > 2


def test_a_slice_that_a_checkpoint_takes_in_16_bits_is_not_kept_beside_its_array():
    """The backward pass is handed the rows as they are; a copy of them would be one more stack."""

    def loss(w, x):
        rows = jnp.tanh(x) @ w
        step = jax.checkpoint(lambda c, row: (jnp.tanh(c + row), None))
        return lax.scan(step, jnp.zeros(4, F32), rows)[0].sum()

    fun = mpx.autocast(loss, BF16)
    (forward, *_) = eqns_of(jax.grad(fun), normal(0, 4, 4), normal(1, 8, 4), primitive="scan")
    stacked = [v.aval.dtype for v in forward.outvars if v.aval.shape == (8, 4)]
    assert stacked == [F32]  # the carry


def test_a_loop_keeps_random_bits_and_results_of_sums_and_not_their_copies():
    """What costs time to compute again, or bits that must be the same, is kept; a broadcast of it is not."""

    def layer(c, key):
        mask = jax.random.bernoulli(key, 0.5, c.shape)
        return jnp.where(mask, c * lax.rsqrt((c * c).mean(-1, keepdims=True)), 0.0) @ jnp.eye(4, dtype=F32), None

    fun = mpx.autocast(lambda x, keys: lax.scan(layer, x, keys)[0], BF16)
    keys = jax.random.split(jax.random.key(0), 3)
    leaves = jax.tree.leaves(jax.vjp(lambda x: fun(x, keys), normal(1, 8, 4))[1])
    found = sorted((str(leaf.dtype), leaf.shape[1:]) for leaf in leaves if leaf.shape[:2] == (3, 8))
    assert found == [("bool", (8, 4)), ("float32", (8,)), ("float32", (8, 4))]


def test_values_that_are_not_representable_in_16_bits_do_not_travel_in_them():
    """Values that a loop stacks and takes in have the bits of the plain program: no contraction is before them."""

    def fun(w, x):
        y = jnp.sin(x)
        carry, (a, b) = lax.scan(lambda c, row: (c + (row @ w).sum() * 0, (row, row * 0.1)), jnp.float32(0), y)
        c = jax.checkpoint(lambda y: (y @ w) * 0 + y)(y)
        d = lax.cond(x[0, 0] > 0, lambda y: (y @ w) * 0 + y, lambda y: (w @ w)[:1] * 0 + y, y)
        return carry, a, b, c, d

    w, x = normal(0, 4, 4), normal(1, 8, 4)
    with jax.numpy_rank_promotion("allow"):
        assert_same_bits(exact_jit(mpx.autocast(fun, BF16))(w, x), exact_jit(fun)(w, x))
    assert not is_representable(jnp.sin(x), BF16)


@pytest.mark.parametrize("where", ["stacked by a scan", "into a scan", "into a checkpoint", "into a cond"])
@pytest.mark.parametrize("asked", [BF16, F16], ids=str)
def test_contractions_of_a_dtype_that_was_asked_for_keep_it_on_their_way(where, asked):
    dot = lambda x, w: lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=asked)
    step = lambda y: (y.astype(F32) @ w).astype(y.dtype)
    fun = {
        "stacked by a scan": lambda w, x: lax.scan(lambda c, row: (c, dot(row, w)), 0, x)[1],
        "into a scan": lambda w, x: lax.scan(lambda c, row: (c, step(row)), 0, dot(x, w))[1],
        "into a checkpoint": lambda w, x: jax.checkpoint(step)(dot(x, w)),
        "into a cond": lambda w, x: lax.cond(x[0, 0] > 9, lambda y: y, step, dot(x, w)),
    }[where]
    w, x = integers(0, 4, 4, low=-1, high=2), integers(1, 8, 4)
    expected = (x @ w if where == "stacked by a scan" else (x @ w) @ w).astype(asked)
    for dtype in (BF16, F16):
        assert_same_bits(mpx.autocast(fun, dtype)(w, x), expected)


# ---- no hidden sums in 16 bits: a weight or a value that is used many times -----------------------------------------
#
# Gradients that are counts of uses. 257 is the smallest whole number that bfloat16 has not; 2049 in float16.


def plain_16_bit(loss, *args, dtype=BF16):
    """Negative control: parameters, values and sums in 16 bits."""
    return exact_jit(jax.grad(lambda *args: loss(*args).astype(F32)))(*[x.astype(dtype) for x in args])


def embedding_loss(tokens):
    """Each token's row once; the head's product of zeros lets autocast enter."""
    return lambda table: (table[tokens] + table[tokens] @ jnp.zeros((2, 2), table.dtype)).sum()


def test_a_token_that_is_seen_a_thousand_times_has_a_gradient_of_a_thousand():
    table, tokens = jnp.zeros((3, 2), BF16), jnp.ones(1000, jnp.int32)
    loss = embedding_loss(tokens)
    expected = jnp.zeros((3, 2), F32).at[1].set(1000.0)
    loss_in_bf16 = mpx.autocast(loss, BF16)
    wide, narrow = exact_jit(lambda table: (mpx.grad(loss_in_bf16)(table), jax.grad(loss_in_bf16)(table)))(table)
    assert_same_bits((wide, narrow), (expected, expected.astype(BF16)))
    assert plain_16_bit(loss, table)[1, 0] == 256


def test_a_weight_that_a_scan_of_4096_steps_closes_over_has_a_gradient_of_4096():
    w = jnp.zeros((2, 1), BF16)

    def loss(w):
        ones = jnp.ones((1, 2), w.dtype)
        return lax.scan(lambda c, _: (c + (ones @ w).sum(), None), jnp.zeros((), w.dtype), length=4096)[0]

    assert_same_bits(exact_jit(mpx.grad(mpx.autocast(loss, BF16)))(w), jnp.full((2, 1), 4096.0, F32))
    assert (plain_16_bit(loss, w) == 256).all()


def test_a_tied_weight_has_the_gradients_of_both_uses():
    """256 tokens, and 1 from the head: 257."""
    table, tokens = jnp.zeros((2, 2), BF16), jnp.zeros(256, jnp.int32)

    def loss(table):
        hidden = jnp.ones((1, 2), table.dtype)
        return table[tokens].sum() + (hidden @ table.T)[0, 0]

    assert (exact_jit(mpx.grad(mpx.autocast(loss, BF16)))(table)[0] == 257).all()
    assert (plain_16_bit(loss, table)[0] == 256).all()


def test_an_activation_that_is_used_300_times_has_the_gradients_of_all_uses():
    """It is a result of a contraction; then its gradient, 300, which bfloat16 has, goes through that."""

    def loss(x):
        hidden = x @ jnp.eye(2, dtype=x.dtype)
        return sum((hidden.sum() for _ in range(300)), start=jnp.zeros((), x.dtype))

    x = jnp.zeros((1, 2))
    assert_same_bits(exact_jit(jax.grad(mpx.autocast(loss, BF16)))(x), jnp.full((1, 2), 300.0))
    assert (plain_16_bit(loss, x) == 256).all()


def uses_in_scan(use, w, n):
    return lax.scan(lambda c, _: (c + use(w), None), jnp.float32(0), length=n + 1)[0]


def uses_in_checkpoints(use, w, n):
    return n * jax.checkpoint(use)(w) + jax.checkpoint(use)(w)


def uses_in_checkpoint_in_scan(use, w, n):
    body = jax.checkpoint(lambda c, _: (c + use(w), None), prevent_cse=False)
    return lax.scan(body, jnp.float32(0), length=n + 1)[0]


def uses_in_branch_in_scan(use, w, n):
    body = lambda c, i: (lax.cond(i >= 0, lambda w: c + use(w), lambda w: c, w), None)
    return lax.scan(body, jnp.float32(0), jnp.arange(n + 1))[0]


def uses_in_a_stack(use, w, n):
    """A weight of a stack, twice in each iteration: its slice must not travel in 16 bits."""
    body = lambda c, w: (c + n * use(w) + use(w), None)
    return lax.scan(body, jnp.float32(0), w[None])[0]


def uses_in_a_checkpoint_of_a_stack(use, w, n):
    body = jax.checkpoint(lambda c, w: (c + n * use(w) + use(w), None), prevent_cse=False)
    return lax.scan(body, jnp.float32(0), w[None])[0]


def uses_on_several_devices(use, w, n):
    """An eighth on each of eight devices, and one more on the first."""
    step = lambda w, count: lax.psum(count[0] * use(lax.pcast(w, "data", to="varying")), "data")
    counts = jnp.full(8, n / 8.0, F32).at[0].add(1.0)
    return jax.shard_map(step, mesh=eight_cpu_devices(), in_specs=(WHOLE, SPLIT), out_specs=WHOLE)(w, counts)


# The sum of the uses of a weight that is moved on its way is not rounded either: no contraction stands in between.


def uses_in_a_checkpoint(use, w, n):
    return jax.checkpoint(lambda w: n * use(w) + use(w))(w)


def uses_of_a_weight_beside_a_product(use, w, n):
    """Like the embedding of a first token beside those of a sequence."""
    rows = jnp.concatenate([w, jnp.ones((2, 2), F32) @ jnp.ones((2, 1), F32)]).reshape(2, 2, 1)
    return lax.scan(lambda c, row: (c + uses_in_a_checkpoint(use, row, n), None), jnp.float32(0), rows)[0]


def uses_of_a_weight_that_a_loop_carries(use, w, n):
    """Like the chunks that devices pass around in a ring."""
    step = lambda i, state: (state[0][::-1], state[1] + uses_in_a_checkpoint(use, state[0], n))
    return lax.fori_loop(0, 1, step, (w, jnp.float32(0)))[1]


def uses_of_a_weight_that_a_loop_returns(use, w, n):
    (turned,) = lax.scan(lambda c, w: (c + use(w) * 0, w[::-1]), jnp.float32(0), w[None])[1]
    return uses_in_a_checkpoint(use, turned, n)


COUNTS = [
    *(uses_in_scan, uses_in_checkpoints, uses_in_checkpoint_in_scan, uses_in_branch_in_scan, uses_in_a_stack),
    *(uses_in_a_checkpoint_of_a_stack, uses_on_several_devices, uses_of_a_weight_beside_a_product),
    *(uses_of_a_weight_that_a_loop_carries, uses_of_a_weight_that_a_loop_returns),
]


def ones_times(w):
    return (jnp.ones((1, 2), F32) @ w).sum()


@pytest.mark.parametrize(("dtype", "n"), [(BF16, 256), (F16, 2048)], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("uses", COUNTS, ids=lambda uses: uses.__name__.replace("_", " "))
def test_the_gradient_of_a_weight_is_the_number_of_its_uses(uses, dtype, n):
    """257, or 2049: one more than the last whole number of which the dtype has the next."""
    loss = mpx.autocast(lambda w: uses(ones_times, w, n), dtype)
    gradient = exact_jit(mpx.grad(loss))(jnp.zeros((2, 1), dtype))
    assert_same_bits(np.asarray(gradient), np.full((2, 1), n + 1, F32))
    assert np.asarray(n + 1).astype(dtype) == n  # negative control: the sum is no number of the dtype


def test_the_gradient_of_a_bfloat16_weight_is_rounded_once_by_jax_itself():
    """Negative control of the tests above: `jax.grad` gives it the weight's dtype, `mpx.grad` does not."""
    loss = mpx.autocast(lambda w: uses_in_scan(ones_times, w, 256), BF16)
    assert_same_bits(jax.grad(loss)(jnp.zeros((2, 1), BF16)), jnp.full((2, 1), 256, BF16))


def test_a_stack_of_weights_used_twice_loses_a_use_if_its_slices_are_cast_first():
    """Negative control: what a user would write by hand, 256 + 1 in bfloat16."""

    def loss(ws):
        use = lambda w: (jnp.ones((1, 2), BF16) @ w).astype(F32).sum()
        return lax.scan(lambda c, w: (c + 256 * use(w) + use(w), None), jnp.float32(0), ws.astype(BF16))[0]

    assert (exact_jit(jax.grad(loss))(jnp.zeros((1, 2, 1))) == 256).all()


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_stacked_weights_are_summed_over_devices_before_they_are_rounded(check_vma):
    """33 on one of eight devices and 32 on the others are 257; each device's part is a bfloat16 number."""
    mesh = eight_cpu_devices()
    specs = dict(in_specs=(SPLIT, WHOLE), out_specs=SPLIT, check_vma=check_vma)

    def loss(ws):
        x = jnp.full((8, 2), 32.0).at[0].set(33.0)
        body = lambda c, w: (c, jax.shard_map(jnp.matmul, mesh=mesh, **specs)(x, w))
        return lax.scan(body, 0, ws)[1].sum()

    gradient = exact_jit(mpx.grad(mpx.autocast(loss, BF16)))(jnp.zeros((2, 2, 1), BF16))
    assert_same_bits(np.asarray(gradient), np.full((2, 2, 1), 257, F32))


@half_dtypes
def test_gradients_of_a_weight_in_one_contraction_are_rounded_once(dtype):
    """The product's own rounding, and none after it: those of casts by hand, float32 sums included."""
    w, x = normal(0, 3, 4, 4, dtype=dtype), normal(1, 8, 4)
    by_hand = lambda ws, x: lax.scan(lambda c, w: (jnp.sin(narrow_dot(dtype)(c, w)), None), x, ws)[0].sum()
    actual = exact_jit(mpx.grad(autocast_loss(layers, dtype)))(w, x)
    assert_same_bits(actual, exact_jit(jax.grad(by_hand))(w.astype(F32), x))
    assert is_representable(actual, dtype)
