"""Check how `train_step` is called: what it takes and returns, under each transformation
of JAX, with models of NNX and Equinox, and on several devices.
"""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx._fused.released import READ_ELSEWHERE
from tests.fused.test_released import (
    ADAMW,
    ALL_RELEASED,
    DEPTH,
    LOSS,
    NOT_IN_A_LOOP,
    RELEASED,
    WIDTH,
    X,
    assert_same_training,
    in_blocks,
    in_order,
    layer,
    on_one_device,
    rewriting_nothing,
    stacks,
    ways,
    weights,
)
from tests.helpers import assert_same_bits, cases, types_of

pytestmark = pytest.mark.optax_promotion

SGD = optax.sgd(1e-2, momentum=0.9)


def test_a_plan_prints_as_a_table():
    params = weights()
    step = mpx.train_step(LOSS, SGD)
    expected = """\
leaf  gradient, bytes  kept
b                 192  never whole
head              128  no loop over layers makes its gradient
s                  12  never whole
w               3,072  never whole"""
    given = params, SGD.init(params), X
    assert str(step.plan(*given)) == expected
    assert str(step.plan(*jax.eval_shape(lambda: given))) == expected


# What it takes and returns.


def test_a_number_that_the_loss_does_not_read_gets_a_gradient_of_zero():
    """It is a literal in the program."""
    params = {"model": weights(), "unread": jnp.float32(2)}
    tx = optax.adamw(1e-2, weight_decay=0.1)
    step = mpx.train_step(lambda params, x: LOSS(params["model"], x), tx)
    new, _, loss = jax.jit(step)(params, tx.init(params), X)
    assert loss == jax.jit(LOSS)(params["model"], X)
    np.testing.assert_allclose(new["unread"], 2 * (1 - 1e-3), rtol=1e-6)
    assert any(
        row.path == "unread" for row in step.plan(params, tx.init(params), X).rows
    )


def test_what_the_loss_returns_beside_it_comes_last():
    def loss(params, x):
        def body(x, p):
            x, _ = layer(x, p)
            return x, x.mean()

        x, means = lax.scan(body, x, stacks(params))
        return (x**2).mean() + means.sum(), {"means": means, "count": 3, "none": None}

    reasons = assert_same_training(loss, SGD, weights(), X, has_aux=True)
    assert reasons == ALL_RELEASED


@pytest.mark.slow
def test_batch_statistics_are_results_and_arguments():
    def loss(params, averages, x):
        def body(x, now):
            p, average = now
            x, _ = layer(x, p)
            return x - average, 0.9 * average + 0.1 * x.mean(0, keepdims=True)

        x, averages = lax.scan(body, x, (stacks(params), averages))
        return (x**2).mean(), averages

    averages = jnp.zeros((DEPTH, 1, WIDTH))
    reasons = assert_same_training(loss, SGD, weights(), averages, X, has_aux=True)
    assert reasons == ALL_RELEASED


def test_parameters_may_be_another_argument():
    reasons = assert_same_training(
        lambda x, params: LOSS(params, x), SGD, weights(), X, argnums=1
    )
    assert reasons == ALL_RELEASED


def test_other_arguments_need_not_be_arrays():
    def loss(params, x, times, settings, name):
        return LOSS(params, x) * times * settings["scale"] * len(name)

    params = weights()
    step = mpx.train_step(loss, SGD)
    batch = X, 2, {"scale": 3.0, "none": None}, "ab"
    train = jax.jit(lambda params, state: step(params, state, *batch))
    expected = mpx.train_step(lambda params, x: LOSS(params, x) * 12.0, SGD)
    state = SGD.init(params)
    chex.assert_trees_all_close(
        train(params, state), jax.jit(expected)(params, state, X), rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("grad_dtype", [None, "as_computed", "float32", "bf16"])
def test_gradients_have_the_dtype_that_was_asked_for(grad_dtype):
    tx = mpx.mixed_precision(SGD, "bf16-split")
    params = mpx.get_policy("bf16-split").cast_to_param(weights())
    loss = mpx.autocast(LOSS, "bf16-split")
    reasons = assert_same_training(loss, tx, params, X, grad_dtype=grad_dtype)
    assert reasons == ALL_RELEASED


@pytest.mark.parametrize("grad_dtype", ["float32", "bf16"])
def test_a_norm_of_what_is_known_before_a_loop_releases_its_layers(grad_dtype):
    """JAX rounds the head's gradient behind the loop, where it needs not wait."""
    tx = optax.chain(mpx.clip_by_predicted_norm(0.1, by="head"), SGD)
    one, two = ways(LOSS, tx, grad_dtype=grad_dtype)
    params = weights()
    state = tx.init(params)
    plan = one.plan(params, state, X)
    assert {row.path: row.reason for row in plan.rows} == ALL_RELEASED
    # The norm that is remembered is added up layer by layer.
    chex.assert_trees_all_close(
        jax.jit(one)(params, state, X), jax.jit(two)(params, state, X), rtol=1e-6
    )


TREES = {
    "one leaf": (lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, w)[0].sum(), "w"),
    "None and empty": (lambda tree, x: LOSS(tree["a"], x), None),
    "empty": (lambda tree, x: x.sum(), {}),
}


@pytest.mark.parametrize("name", cases(TREES, {"empty"}))
def test_trees_of_each_form_are_parameters(name):
    loss, params = TREES[name]
    if name == "one leaf":
        params = weights()[params]
    elif params is None:
        params = {"a": weights(), "b": None, "c": {}, "unread": jnp.ones(3)}
    reasons = assert_same_training(loss, SGD, params, X)
    if name == "None and empty":
        assert reasons == {
            **{f"a/{leaf}": reason for leaf, reason in ALL_RELEASED.items()},
            "unread": NOT_IN_A_LOOP,
        }


def test_a_skipped_step_changes_nothing():
    tx = mpx.loss_scaling(ADAMW, mpx.DynamicLossScale())
    params = weights()
    state, (step, _) = tx.init(params), ways(LOSS, tx)
    after, new, loss = jax.jit(step)(params, state, X * np.inf)
    assert int(mpx.skipped_steps(new)) == 1
    assert not np.isfinite(loss)
    assert_same_bits((after, new.inner_state), (params, state.inner_state))


PRINTED = {
    "a norm": (optax.tree.norm, RELEASED),
    "an element": (lambda updates: updates["w"][0, 0, 0], READ_ELSEWHERE),
}


@pytest.mark.parametrize("name", PRINTED)
def test_what_the_loss_and_the_optimizer_print_is_printed_once(name, capfd):
    printed, reason = PRINTED[name]

    def loss(params, x):
        jax.debug.print("loss of {}", params["s"].sum())
        return LOSS(params, x)

    def shown(updates, params):
        jax.debug.print("update {}", printed(updates))
        return updates

    tx, params = optax.chain(optax.stateless(shown), SGD), weights()
    step, given = mpx.train_step(loss, tx), (params, tx.init(params), X)
    jax.block_until_ready(jax.jit(step)(*given))
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert [out.count("loss of"), out.count("update")] == [1, 1]
    reasons = {row.path: row.reason for row in step.plan(*given).rows}
    assert reasons["w"] == reason


def test_layers_outside_of_a_loop_are_computed_again_in_the_backward_pass():
    """XLA would else keep what `jax.checkpoint` drops: a barrier holds it back."""

    def loss(params, x):
        for i in range(DEPTH):
            p = jax.tree.map(lambda p, i=i: p[i], stacks(params))
            x = jax.checkpoint(lambda x, p: layer(x, p)[0])(x, p)
        return (x**2).mean()

    params = weights()
    barriers = [
        jax.jit(way)
        .lower(params, SGD.init(params), X)
        .as_text()
        .count("optimization_barrier")
        for way in ways(loss, SGD)
    ]
    assert barriers == [DEPTH] * 2


@pytest.mark.slow
def test_weak_types_of_the_state_stay():
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)
    params = weights(dtype=jnp.bfloat16)
    state = tx.init(params)
    state.hyperparams["learning_rate"] = jnp.asarray(0.5)
    assert jax.typeof(state.hyperparams["learning_rate"]).weak_type
    one, two = (jax.jit(way)(params, state, X) for way in ways(LOSS, tx))
    assert types_of(one) == types_of(two)


# Transformations of JAX.


def close(*trees):
    chex.assert_trees_all_close(*trees, rtol=1e-5, atol=1e-6)


@pytest.fixture
def both():
    """Return both ways, and their arguments."""
    params = weights()
    return (*ways(LOSS, SGD), (params, SGD.init(params), X))


def test_it_runs_without_jit(both):
    one, two, given = both
    close(one(*given), two(*given))


@pytest.mark.slow
def test_it_runs_where_jit_is_disabled(both):
    one, two, given = both
    with jax.disable_jit():
        close(one(*given), two(*given))


def test_it_is_traced_once_and_leaks_nothing(both):
    one, _, (params, state, x) = both
    train = jax.jit(chex.assert_max_traces(lambda *given: one(*given), n=1))
    with jax.checking_leaks():
        for _ in range(2):
            params, state, _ = train(params, state, x)


@pytest.mark.slow
def test_it_runs_in_a_scan_over_steps(both):
    one, two, (params, state, x) = both

    def trained(step):
        def body(carry, _):
            *carry, loss = step(*carry, x)
            return carry, loss

        return jax.jit(lambda *given: lax.scan(body, [*given], length=3))(params, state)

    close(trained(one), trained(two))


@pytest.mark.slow
def test_it_runs_under_vmap_over_seeds(both):
    one, two, _ = both
    params = jax.tree.map(lambda *x: jnp.stack(x), weights(0), weights(1))
    given = params, jax.vmap(SGD.init)(params), X
    close(*[jax.jit(jax.vmap(way, (0, 0, None)))(*given) for way in (one, two)])


def test_buffers_that_are_donated_are_used_as_apart(both):
    """On a CPU XLA copies the old arrays once, before the loop; the programs for a GPU
    have tests of their own.
    """
    one, two, given = both
    used = [
        mpx.step_report(jax.jit(way, donate_argnums=(0, 1)), *given).donated_bytes
        for way in (one, two)
    ]
    assert used[0] == used[1] > 0


# Errors.


def test_it_cannot_be_differentiated(both):
    one, _, (params, state, x) = both
    for loss in (
        lambda params: one(params, state, x)[2],
        lambda params: one(weights(), state, x * params["s"][0])[2],
    ):
        with pytest.raises(TypeError, match="`train_step` cannot be differentiated"):
            jax.grad(loss)(params)


@pytest.mark.parametrize("argnums", [-1, (0, 1), True])
def test_argnums_is_one_number(argnums):
    with pytest.raises(
        TypeError, match=r"`train_step`: `argnums` is .*, but it must be"
    ):
        mpx.train_step(LOSS, SGD, argnums=argnums)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match="`train_step` needs an Optax gradient transf"):
        mpx.train_step(LOSS, optax.sgd)


def integers(params, x):
    return LOSS(params, x)


WRONG = {
    "a loss of another form": (
        lambda params, x: x,
        weights,
        TypeError,
        r"returns a real floating scalar, but its loss is float32\[4, 16\]",
    ),
    "leaves of integers": (
        LOSS,
        lambda: weights() | {"count": jnp.arange(3)},
        TypeError,
        "argument 0 .* has leaves without gradients",
    ),
    "a loop without end": (
        lambda params, x: lax.while_loop(
            lambda x: x.sum() < 3, lambda x: x * params["s"][0], x
        ).sum(),
        weights,
        ValueError,
        "Reverse-mode differentiation does not work for lax.while_loop",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_of_value_and_grad_come_through(name):
    loss, make, kind, text = WRONG[name]
    params = make()
    with pytest.raises(kind, match=text):
        mpx.train_step(loss, SGD)(params, SGD.init(params), X)


def test_a_state_of_other_parameters_is_refused():
    with pytest.raises(ValueError, match="different numbers of pytree children"):
        mpx.train_step(LOSS, SGD)(weights(), SGD.init({"a": jnp.ones(3)}), X)
    with pytest.raises(TypeError, match="incompatible shapes for broadcasting"):
        mpx.train_step(LOSS, SGD)(weights(), SGD.init(weights(depth=(4,))), X)


# Models of NNX and Equinox.


@pytest.mark.slow
def test_a_model_of_nnx_has_the_same_bits():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(jnp.tanh(self.linear(x))))

    make = nnx.vmap(Block, in_axes=0, out_axes=0)
    model = nnx.split_rngs(splits=DEPTH)(make)(nnx.Rngs(0))
    definition, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        model = nnx.merge(definition, params, rest, copy=True)
        scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = scan(lambda x, block: block(x))(x, model)
        return (x**2).mean(), nnx.state(model, nnx.Not(nnx.Param))

    reasons = assert_same_training(loss, SGD, params, rest, X, has_aux=True)
    assert set(reasons.values()) == {RELEASED}


@pytest.mark.slow
def test_a_model_of_equinox_has_the_same_bits():
    keys = jax.random.split(jax.random.key(0), DEPTH)
    model = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))(keys)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x):
        def body(x, p):
            return jax.vmap(eqx.combine(p, static))(x), None

        return (lax.scan(body, x, params)[0] ** 2).mean()

    reasons = assert_same_training(loss, SGD, params, X)
    assert set(reasons.values()) == {RELEASED}


# Several devices.

FSDP = {"w": P(None, "data"), "b": P(None, "data"), "head": P("data")}
LAYOUTS = {"data": {}, "FSDP": FSDP, "columns": FSDP | {"w": P(None, None, "data")}}


def mesh_of(kind):
    return jax.make_mesh(
        (8,), ("data",), axis_types=(kind,), devices=jax.devices("cpu")
    )


def gathering(params, x):
    """Gather the weights of one layer after another."""

    def body(x, p):
        p = jax.tree.map(lambda w: jax.sharding.reshard(w, P()), p)
        return jnp.tanh(x @ p["w"] + p["b"][None]), None

    x, _ = lax.scan(body, x, {name: params[name] for name in ("w", "b")})
    return ((x @ jax.sharding.reshard(params["head"], P())) ** 2).mean()


DEVICES = [
    (layout, kind, rule)
    for layout in LAYOUTS
    for kind in (AxisType.Auto, AxisType.Explicit)
    for rule in ("f32", "8-bit")
    # Columns of a device end inside of blocks: XLA places their codes otherwise.
    if (layout, kind, rule) != ("columns", AxisType.Auto, "8-bit")
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind", "rule"), DEVICES)
def test_devices_compute_the_same_bits_and_results_lie_where_they_did(
    layout, kind, rule
):
    """A layer of 64 x 64 is 16 blocks: each device steps two."""
    mesh, tx = mesh_of(kind), ADAMW if rule == "f32" else in_blocks()
    loss = gathering if kind == AxisType.Explicit else LOSS
    with jax.set_mesh(mesh):
        params = {
            name: jax.device_put(w, NamedSharding(mesh, LAYOUTS[layout].get(name, P())))
            for name, w in weights(width=64).items()
            if name != "s" or loss is LOSS
        }
        state = jax.jit(tx.init)(params)
        rows = jax.device_put(np.tile(X, (4, 4)), NamedSharding(mesh, P("data")))
        one, two = ways(loss, tx)
        both = jax.jit(
            lambda *given: (one(*given), two(*given)),
            compiler_options=rewriting_nothing(params),
        )
        # Two programs at once would wait for each other's threads.
        actual, expected = both(*jax.block_until_ready((params, state, rows)))
        assert_same_bits(actual, expected)
        for a, e in zip(
            jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
        ):
            assert a.sharding.is_equivalent_to(e.sharding, a.ndim)
        reasons = {row.path: row.reason for row in one.plan(params, state, rows).rows}
        assert reasons["w"] == RELEASED


def mixed(params, x):
    """Apply layers of experts, of which each device has two."""

    def layer(x, w):
        divided = P("data")

        def of_experts(x, w):
            x = lax.all_gather(x, "data", tiled=True)
            y = jnp.tanh(jnp.einsum("bc,ecd->ebd", x, w)).sum(0)
            return lax.psum_scatter(y, "data", tiled=True)

        run = jax.shard_map(of_experts, in_specs=divided, out_specs=divided)
        return x + run(x, w), None

    return (lax.scan(layer, x, params["experts"])[0] ** 2).mean()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (AxisType.Explicit, RELEASED),
        (
            AxisType.Auto,
            "devices may have parts of the matrices that its step needs whole",
        ),
    ],
)
def test_matrices_that_a_device_is_known_to_have_whole_are_stepped_in_the_loop(
    kind, reason
):
    """The function rounds nothing, so that its bits are those of any program."""
    halves = mpx.each_matrix(lambda x: x.T[::-1].T / 2 + jnp.max(jnp.abs(x)))
    tx = optax.chain(optax.trace(0.9), halves, optax.scale(-0.125))
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        w = jax.random.normal(jax.random.key(0), (3, 16, 8, 8)) / 8
        params = {"experts": jax.device_put(w, NamedSharding(mesh, P(None, "data")))}
        x = jax.device_put(np.tile(X[:, :8], (4, 1)), NamedSharding(mesh, P("data")))
        one, two = ways(mixed, tx)
        both = jax.jit(
            lambda *given: (one(*given), two(*given)), compiler_options=in_order(params)
        )
        state = tx.init(params)
        for _ in range(2):
            actual, expected = both(params, state, x)
            assert_same_bits(actual, expected)
            params, state, _ = expected
        assert one.plan(params, state, x).rows[0].reason == reason


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("is_mean", [True, False])
@pytest.mark.parametrize("twice", [False, True])
def test_it_runs_inside_of_a_shard_map(check_vma, is_mean, twice):
    """With the mean of all devices, and as a model a device."""
    tx = optax.chain(optax.clip_by_global_norm(1e9), SGD) if twice else SGD

    def loss(params, x):
        value = LOSS(params, x)
        return lax.pmean(value, "data") if is_mean else value

    one = mpx.train_step(loss, tx, recompute_gradients=twice)
    _, two = ways(loss, tx)

    def both(params, state, x):
        if not is_mean and check_vma:
            params, state = jax.tree.map(
                lambda p: lax.pcast(p, "data", to="varying"), (params, state)
            )
        results = one(params, state, x), two(params, state, x)
        return results if is_mean else jax.tree.map(lambda p: p[None], results)

    mapped = jax.shard_map(
        both,
        mesh=mesh_of(AxisType.Auto),
        in_specs=(P(), P(), P("data")),
        out_specs=P() if is_mean else P("data"),
        check_vma=check_vma,
    )
    params = weights()
    run = jax.jit(mapped, compiler_options=in_order(params))
    assert_same_bits(*run(params, tx.init(params), np.tile(X, (4, 1))))


def test_a_kernel_knows_its_layer_where_integers_have_64_bits():
    with jax.enable_x64(True), on_one_device():
        params = weights(width=256)
        one, _ = ways(LOSS, ADAMW, interpret=True)
        text = str(jax.make_jaxpr(one)(params, ADAMW.init(params), np.tile(X, 16)))
    assert f"mpx_fused_update_1_of_{DEPTH}" in text
