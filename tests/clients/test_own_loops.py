"""Libraries whose users write the training loop: models, layers and distributions of
others, under mpx.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import dataclasses
import functools

import diffrax
import distrax
import e3nn_jax as e3nn
import equinox as eqx
import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import keras
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import mpx
from tests.autocast.helpers import contractions
from tests.clients import judge

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (64, 8))
Y = jnp.sin(X[:, :1]) + X[:, 1:2] * X[:, 2:3]


def loop(way, loss, params, *batch):
    """Train as the first page of most libraries does."""
    params = start = way.cast(params)
    opt_state, losses = way.tx.init(params), []

    @jax.jit
    def step(params, opt_state, *batch):
        value, grads = way.grad_of(loss, opt_state)(params, *batch)
        updates, opt_state = way.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for _ in range(judge.STEPS):
        params, opt_state, value = step(params, opt_state, *batch)
        losses.append(value)
    return judge.Run(start, params, opt_state, losses, (loss, params, *batch))


def haiku(way):
    """A perceptron, as in Haiku's first example."""
    net = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP([32, 32, 1], activation=jax.nn.tanh)(x))
    )
    loss = lambda params, x, y: ((net.apply(params, x) - y) ** 2).mean()
    return loop(way, way.autocast(loss), net.init(KEY, X), X, Y)


def fedjax_optimizer(way):
    """The optimizer of a server or a client, which adds updates itself."""
    optimizer = fedjax.optimizers.create_optimizer_from_optax(way.tx)
    start = params = way.cast(
        {
            "w": jax.random.normal(KEY, (8, 32)) / 3,
            "v": jax.random.normal(KEY, (32, 1)) / 6,
        }
    )
    loss = way.autocast(
        lambda params, x, y: ((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2).mean()
    )
    opt_state, losses = optimizer.init(params), []
    for _ in range(judge.STEPS):
        value, grads = jax.jit(way.grad_of(loss, opt_state))(params, X, Y)
        opt_state, params = optimizer.apply(grads, opt_state, params)
        losses.append(value)
    return judge.Run(start, params, opt_state, losses, (loss, params, X, Y))


def flax_dynamic_scale(way):
    """Flax's own loss scale, which differentiates; nothing else scales then."""
    start = params = way.cast(
        {
            "w": jax.random.normal(KEY, (8, 32)) / 3,
            "v": jax.random.normal(KEY, (32, 1)) / 6,
        }
    )
    loss = way.autocast(
        lambda params, x, y: ((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2).mean()
    )
    scale, opt_state, losses = (
        DynamicScale(scale=jnp.float32(2.0**10)),
        way.tx.init(params),
        [],
    )

    @jax.jit
    def step(scale, params, opt_state):
        scale, _, value, grads = scale.value_and_grad(loss)(params, X, Y)
        updates, opt_state = way.tx.update(grads, opt_state, params)
        return scale, optax.apply_updates(params, updates), opt_state, value

    for _ in range(judge.STEPS):
        scale, params, opt_state, value = step(scale, params, opt_state)
        losses.append(value)
    return judge.Run(start, params, opt_state, losses, (loss, params, X, Y))


def haiku_with_state(way):
    """Batch norm, whose statistics are an auxiliary result of the loss, as in Haiku's
    ImageNet example.
    """

    def forward(x, is_training):
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Linear(32)(x), is_training))
        return hk.Linear(1)(x)

    net = hk.transform_with_state(forward)
    params, state = net.init(KEY, X, is_training=True)

    def loss(params, state, x, y):
        out, state = net.apply(params, state, None, x, is_training=True)
        return ((out - y) ** 2).mean(), state

    params = start = way.cast(params)
    opt_state, losses, loss = way.tx.init(params), [], way.autocast(loss)

    @jax.jit
    def step(params, state, opt_state):
        (value, state), grads = way.grad_of(loss, opt_state, has_aux=True)(
            params, state, X, Y
        )
        updates, opt_state = way.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, value

    for _ in range(judge.STEPS):
        params, state, opt_state, value = step(params, state, opt_state)
        losses.append(value)
    # Averages, counters.
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {
        np.dtype("f4"),
        np.dtype("i4"),
    }
    return judge.Run(start, params, opt_state, losses, (loss, params, state, X, Y))


def jraph_network(way):
    """A graph network with updates of edges and nodes by perceptrons, as in Jraph's
    examples.
    """
    graph = jraph.GraphsTuple(
        nodes=X, edges=X[:, :4], senders=jnp.arange(64), receivers=jnp.arange(64) * 7 % 64, globals=jnp.ones((2, 3)),
        n_node=jnp.array([40, 24]), n_edge=jnp.array([40, 24]),
    )  # fmt: skip

    def forward(graph):
        edges = jraph.concatenated_args(lambda x: hk.nets.MLP([16, 8])(x))
        nodes = jraph.concatenated_args(
            lambda x: hk.nets.MLP([16, 1], activation=jnp.tanh)(x)
        )
        return jraph.GraphNetwork(update_edge_fn=edges, update_node_fn=nodes)(graph)

    net = hk.without_apply_rng(hk.transform(forward))
    loss = lambda params, graph, y: ((net.apply(params, graph).nodes - y) ** 2).mean()
    return loop(way, way.autocast(loss), net.init(KEY, graph), graph, Y)


def e3nn_forces(way):
    """Energies of a point cloud whose forces are fitted: an equivariant layer,
    differentiated twice.
    """
    positions = X[:16, :3]

    def energy(positions):
        vectors = positions[:, None] - positions[None] + 1e-3 * jnp.eye(16)[..., None]
        sh = e3nn.spherical_harmonics(
            "0e + 1o + 2e", e3nn.IrrepsArray("1o", vectors), normalize=False
        )
        x = e3nn.haiku.Linear("8x0e + 8x1o")(
            sh * jnp.exp(-(e3nn.norm(e3nn.IrrepsArray("1o", vectors)).array ** 2))
        )
        x = e3nn.haiku.Linear("8x0e + 1x0e")(e3nn.tensor_square(e3nn.sum(x, axis=1)))
        return jnp.tanh(x.array).sum()

    net = hk.without_apply_rng(hk.transform(energy))
    forces = lambda params, positions: (
        -jax.grad(net.apply, argnums=1)(params, positions)
    )
    loss = lambda params, positions, wanted: (
        (forces(params, positions) - wanted) ** 2
    ).mean()
    return loop(
        way, way.autocast(loss), net.init(KEY, positions), positions, 0.1 * X[:16, 3:6]
    )


def distrax_flow(way):
    """The likelihood of a masked coupling flow, conditioned by a perceptron, as in
    Distrax's example.
    """
    mask = jnp.arange(8) % 2 == 0

    def log_prob(x):
        layers = []
        for inverted in (False, True):
            conditioner = hk.Sequential([hk.nets.MLP([32, 16]), hk.Reshape((8, 2))])
            affine = lambda p: distrax.ScalarAffine(
                shift=p[..., 0], log_scale=jnp.tanh(p[..., 1])
            )
            layers.append(distrax.MaskedCoupling(mask ^ inverted, conditioner, affine))
        base = distrax.Independent(distrax.Normal(jnp.zeros(8), jnp.ones(8)), 1)
        return distrax.Transformed(
            base, distrax.Inverse(distrax.Chain(layers))
        ).log_prob(x)

    net = hk.without_apply_rng(hk.transform(log_prob))
    loss = way.autocast(lambda params, x: -net.apply(params, x).mean())
    return loop(way, loss, net.init(KEY, X), 3 * X + 1)


FIELD, STATIC = eqx.partition(
    eqx.nn.MLP(8, 8, 32, 1, jax.nn.tanh, key=KEY), eqx.is_array
)


def field(params, y):
    return eqx.combine(params, STATIC)(y)


def solved(field, params, x, **options):
    """Return the solution of an ODE at time 1, as in Diffrax's example of a neural ODE."""
    term, controller = (
        diffrax.ODETerm(lambda t, y, params: field(params, y)),
        diffrax.PIDController(1e-3, 1e-5),
    )
    options |= {"stepsize_controller": controller, "saveat": diffrax.SaveAt(t1=True)}
    solve = lambda x: diffrax.diffeqsolve(
        term, diffrax.Heun(), 0.0, 1.0, 0.1, x, params, **options
    ).ys[0]
    return jax.vmap(solve)(x)


def diffrax_neural_ode(way):
    """A neural ODE. The solver has a derivative of its own, whose body stays as it is:
    its field is cast too.
    """
    cast = way.autocast(field)
    loss = way.autocast(
        lambda params, x, wanted: ((solved(cast, params, x) - wanted) ** 2).mean()
    )
    return loop(way, loss, FIELD, X, jnp.roll(X, 1, axis=1))


def keras_stateless(way):
    """Keras's stateless loop: variables are lists of arrays, and the loss hands back
    what is not trained.
    """
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(32),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])

    def loss(trained, others, x, y):
        out, others = model.stateless_call(trained, others, x, training=True)
        return ((out - y) ** 2).mean(), others

    params = start = way.cast([v.value for v in model.trainable_variables])
    others = [v.value for v in model.non_trainable_variables]
    opt_state, losses, loss = way.tx.init(params), [], way.autocast(loss)

    @jax.jit
    def step(params, others, opt_state):
        (value, others), grads = way.grad_of(loss, opt_state, has_aux=True)(
            params, others, X, Y
        )
        updates, opt_state = way.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), others, opt_state, value

    for _ in range(judge.STEPS):
        params, others, opt_state, value = step(params, others, opt_state)
        losses.append(value)
    return judge.Run(start, params, opt_state, losses, (loss, params, others, X, Y))


def flax_train_state(way):
    """A Linen model whose parameters and optimizer are a `TrainState`."""
    net = linen.Sequential([linen.Dense(32), jnp.tanh, linen.Dense(1)])
    params = start = way.cast(net.init(KEY, X))
    state, losses = TrainState.create(apply_fn=net.apply, params=params, tx=way.tx), []
    loss = way.autocast(
        lambda params, x, y: ((state.apply_fn(params, x) - y) ** 2).mean()
    )

    @jax.jit
    def step(state):
        value, grads = way.grad_of(loss, state.opt_state)(state.params, X, Y)
        return state.apply_gradients(grads=grads), value

    for _ in range(judge.STEPS):
        state, value = step(state)
        losses.append(value)
    return judge.Run(start, state.params, state.opt_state, losses, (loss, start, X, Y))


def flax_nnx_optimizer(way):
    """An NNX model and its `nnx.Optimizer`."""
    rngs, losses = nnx.Rngs(0), []
    model = nnx.Sequential(
        nnx.Linear(8, 32, rngs=rngs), jnp.tanh, nnx.Linear(32, 1, rngs=rngs)
    )
    nnx.update(model, way.cast(nnx.state(model)))
    start, optimizer = (
        jax.tree.map(jnp.copy, nnx.state(model)),
        nnx.Optimizer(model, way.tx, wrt=nnx.Param),
    )
    loss = way.autocast(lambda model, x, y: ((model(x) - y) ** 2).mean())

    @nnx.jit
    def step(model, optimizer):
        value, grads = way.grad_of(
            loss, optimizer.opt_state, transform=nnx.value_and_grad
        )(model, X, Y)
        optimizer.update(model, grads)
        return value

    for _ in range(judge.STEPS):
        losses.append(step(model, optimizer))
    return judge.Run(
        start, nnx.state(model), optimizer.opt_state, losses, (loss, model, X, Y)
    )


def equinox_apply_updates(way):
    """The loop of Equinox's examples, and of Levanter's `take_train_step`:
    `eqx.apply_updates` adds without a cast.
    """
    model, losses = eqx.nn.MLP(8, 1, 32, 1, jax.nn.tanh, key=KEY), []
    params, static = eqx.partition(way.cast(model), eqx.is_inexact_array)
    loss = way.autocast(
        lambda params, x, y: (
            (jax.vmap(eqx.combine(params, static))(x) - y) ** 2
        ).mean()
    )
    start, opt_state = params, way.tx.init(params)

    @eqx.filter_jit
    def step(params, opt_state):
        value, grads = way.grad_of(
            loss, opt_state, transform=eqx.filter_value_and_grad
        )(params, X, Y)
        updates, opt_state = way.tx.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, value

    for _ in range(judge.STEPS):
        params, opt_state, value = step(params, opt_state)
        losses.append(value)
    return judge.Run(start, params, opt_state, losses, (loss, params, X, Y))


LIBRARIES = {
    haiku: 2.0**-4, haiku_with_state: 2.0**-4, jraph_network: 2.0**-4, e3nn_forces: 2.0**-6, distrax_flow: 2.0**-5,
    diffrax_neural_ode: 2.0**-3, keras_stateless: 2.0**-4, flax_train_state: 2.0**-4, flax_nnx_optimizer: 2.0**-4,
    fedjax_optimizer: 2.0**-4,
}  # fmt: skip


@pytest.mark.parametrize("compute", ["bf16", "f16"])
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.__name__)
def test_a_loop_of_ones_own_trains_as_in_float32_with_the_masters_of_float32(
    library, compute
):
    judge.judge(
        library, f"params={compute},compute={compute},output=f32", LIBRARIES[library]
    )


def test_flaxs_dynamic_scale_trains_where_autocast_and_the_optimizer_leave_scaling_to_it():
    judge.judge(
        flax_dynamic_scale, "f16-scaled", 2.0**-4, scale_inside=mpx.NoOpLossScale()
    )


@pytest.mark.parametrize("compute", ["bf16", "f16"])
def test_a_loop_that_adds_updates_without_a_cast_keeps_masters_with_narrow_ones(
    compute,
):
    policy = f"params={compute},compute={compute},output=f32"
    judge.judge(
        equinox_apply_updates,
        policy,
        2.0**-4,
        storage="full",
        updates_in_param_dtype=True,
    )


def test_a_loop_that_adds_updates_without_a_cast_is_told_of_narrow_ones():
    with pytest.raises(
        ValueError,
        match=r"`equinox\.apply_updates` does not: see `updates_in_param_dtype`",
    ):
        equinox_apply_updates(judge.under("bf16-split", 2.0**-4))


@pytest.mark.parametrize(
    "adjoint", [diffrax.RecursiveCheckpointAdjoint(), diffrax.BacksolveAdjoint()]
)
def test_autocast_around_a_solver_alone_warns_that_it_narrows_nothing(adjoint):
    with pytest.warns(UserWarning, match="custom derivative.*around the vector field"):
        jax.eval_shape(
            mpx.autocast(functools.partial(solved, field, adjoint=adjoint), "bf16"),
            FIELD,
            X,
        )


def test_autocast_sees_the_inside_of_a_solver_whose_steps_jax_differentiates():
    """`DirectAdjoint` has no derivative of its own."""
    solve = functools.partial(
        solved, field, adjoint=diffrax.DirectAdjoint(), max_steps=256
    )
    loss = lambda params, x: (solve(params, x) ** 2).mean()
    cast, params = mpx.autocast(loss, "bf16"), mpx.cast(FIELD, "bf16")
    assert jnp.bfloat16 in [c.lhs for c in contractions(cast, params, X)]
    exact, grads = (
        eqx.filter_grad(loss)(mpx.cast(params, "f32"), X),
        mpx.grad(cast)(params, X),
    )
    for ours, theirs in zip(*map(jax.tree.leaves, (grads, exact)), strict=True):
        np.testing.assert_allclose(
            ours, theirs, rtol=0, atol=0.02 * jnp.abs(theirs).max()
        )


def test_autocast_of_a_field_alone_warns_that_the_solver_adds_up_gradients_in_bfloat16():
    loss = lambda params, x: solved(mpx.autocast(field, "bf16"), params, x).sum()
    with pytest.warns(UserWarning, match="gradients are rounded to bfloat16"):
        jax.eval_shape(mpx.grad(loss), mpx.cast(FIELD, "bf16"), X)


def test_the_judge_tells_weights_that_are_rounded_at_each_step():
    way = judge.float32(2.0**-4)
    rounded = dataclasses.replace(way, cast=lambda params: mpx.cast(params, "bf16"))
    with pytest.raises(AssertionError, match="not equal"):
        judge.require_masters_of_float32(haiku(rounded), way.memory, 2.0**-4)


def test_the_judge_tells_another_learning_rate():
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        judge.require_losses_of_float32(
            haiku(judge.float32(2.0**-5)), haiku(judge.float32(2.0**-4))
        )
