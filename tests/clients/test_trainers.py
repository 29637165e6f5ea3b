"""Libraries that own the training loop: they differentiate, update and apply; a user
hands them a rule and a loss.
"""

import os

os.environ["NETKET_ENABLE_X64"] = (
    "0"  # or NetKet switches 64-bit types on, in this process too
)

import dataclasses

import blackjax
import equinox as eqx
import flowjax.distributions
import flowjax.flows
import flowjax.train.losses
import gpjax
import jax
import jax.numpy as jnp
import jaxopt
import netket as nk
import numpy as np
import numpyro
import optax
import optimistix as optx
import paramax
import pytest
import trainax
from brax.training.gradients import gradient_update_fn
from dynamax.linear_gaussian_ssm import LinearGaussianSSM
from dynamax.parameters import from_unconstrained, to_unconstrained
from dynamax.utils.optimize import run_sgd
from flax import nnx
from jax.experimental import io_callback
from numpyro import distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from penzai import pz
from penzai.toolshed.basic_training import StatefulTrainer
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

import mpx
from tests.clients import judge
from tests.helpers import assert_same_bits
from tests.pages import clients

# Dynamax asks for float32 products in the whole process, in other people's functions
# too, and `autocast` obeys.
jax.config.update("jax_default_matmul_precision", None)

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (64, 8))
Y = jnp.sin(X[:, :1]) + X[:, 1:2] * X[:, 2:3]
PARAMS = {
    "w": 0.3 * jax.random.normal(KEY, (8, 32)),
    "b": jnp.zeros(32),
    "v": 0.2 * jax.random.normal(KEY, (32, 1)),
}


def predict(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def squares(params, x, y):
    return ((predict(params, x) - y) ** 2).mean()


# --- libraries that pass parameters to the rule and keep their dtypes -------------------------------------------------


def jaxopt_solver(way):
    """`OptaxSolver`: `init_state` and `update`, as in its documentation."""
    params, losses, loss = way.cast(PARAMS), [], way.autocast(squares)
    solver = jaxopt.OptaxSolver(opt=way.tx, fun=loss)
    state = solver.init_state(params, X, Y)
    for _ in range(judge.STEPS):
        params, state = solver.update(params, state, X, Y)
        losses.append(state.value)
    return judge.Run(
        way.cast(PARAMS), params, state.internal_state, losses, (loss, params, X, Y)
    )


def jaxopt_value_and_grad(way):
    """`OptaxSolver` with gradients of one's own, and so with a loss scale."""
    params, losses, loss = way.cast(PARAMS), [], way.autocast(squares)
    fun = lambda params, opt_state, x, y: way.grad_of(loss, opt_state)(params, x, y)
    solver = jaxopt.OptaxSolver(opt=way.tx, fun=fun, value_and_grad=True)
    state = solver.init_state(params, way.tx.init(params), X, Y)
    for _ in range(judge.STEPS):
        params, state = solver.update(params, state, state.internal_state, X, Y)
        losses.append(state.value)
    return judge.Run(
        way.cast(PARAMS), params, state.internal_state, losses, (loss, params, X, Y)
    )


def numpyro_svi(way):
    """`SVI` with `optax_to_numpyro`: the network inside the model is cast, and its
    weights are `numpyro.param`s.
    """
    network, weights = way.autocast(predict), way.cast(PARAMS)

    def model(x, y):
        params = {name: numpyro.param(name, value) for name, value in weights.items()}
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(network(params, x), scale).to_event(1), obs=y)

    svi = SVI(
        model, AutoNormal(model), numpyro.optim.optax_to_numpyro(way.tx), Trace_ELBO()
    )
    state = svi.init(KEY, X, Y)
    (start, _), losses, update = state.optim_state[1], [], jax.jit(svi.update)
    for _ in range(judge.STEPS):
        state, loss = update(state, X, Y)
        losses.append(loss)
    params, opt_state = state.optim_state[1]
    return judge.Run(start, params, opt_state, losses, (network, weights, X))


def penzai_trainer(way):
    """`StatefulTrainer`, which finds the parameters in the model and differentiates the
    loss by `jax.grad`.
    """
    layers = [
        pz.nn.Affine.from_config("1", KEY, {"x": 8}, {"h": 32}),
        pz.nn.Elementwise(jnp.tanh),
    ]
    model = pz.nn.Sequential(
        [*layers, pz.nn.Affine.from_config("2", KEY, {"h": 32}, {"y": 1})]
    )
    stateless, params = pz.unbind_params(model, freeze=True)
    start, losses = way.cast(tuple(params)), []
    model = pz.bind_variables(stateless, [p.unfreeze_as_copy() for p in start])

    @way.autocast
    def loss(*, model, state, rng, x, y):
        squared = (model(pz.nx.wrap(x).tag("n", "x")).unwrap("n", "y") - y) ** 2
        return squared.mean(), state, squared.mean()

    trainer = StatefulTrainer.build(KEY, model, way.tx, loss)
    for _ in range(judge.STEPS):
        losses.append(trainer.step(x=X, y=Y))
    _, params = pz.unbind_params(model, freeze=True)
    call = lambda params: loss(
        model=pz.bind_variables(stateless, params), state=None, rng=KEY, x=X, y=Y
    )[0]
    return judge.Run(
        start, tuple(params), trainer.state.value.opt_state, losses, (call, start)
    )


class Adapted(nnx.Module):
    """A perceptron whose first layer has low-rank factors to train."""

    def __init__(self, rngs):
        self.inside = nnx.LoRALinear(8, 32, lora_rank=4, rngs=rngs)
        self.outside = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.outside(jnp.tanh(self.inside(x)))


def tunix_peft(way):
    """`PeftTrainer`, which trains the low-rank factors of a Flax NNX model and leaves
    the rest.
    """
    model = Adapted(nnx.Rngs(0))
    nnx.update(model, way.cast(nnx.state(model)))
    start, base = jax.tree.map(
        jnp.copy, (nnx.state(model, nnx.LoRAParam), nnx.state(model.outside))
    )
    loss = way.autocast(lambda model, x, y: ((model(x) - y) ** 2).mean())
    config = TrainingConfig(eval_every_n_steps=1000, max_steps=judge.STEPS)
    trainer = PeftTrainer(model, way.tx, config).with_loss_fn(loss)
    trainer.train([{"x": X, "y": Y}] * judge.STEPS)
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    assert_same_bits(nnx.state(model.outside), base)
    params = nnx.state(model, nnx.LoRAParam)
    return judge.Run(
        start, params, trainer.optimizer.opt_state, losses, (loss, model, X, Y)
    )


def netket_vmc(way, dtype="float32"):
    """The ground state of an Ising chain, whose variational state takes a network as
    two functions: one is cast.
    """
    hilbert, network = (
        nk.hilbert.Spin(0.5, 8),
        nk.models.RBM(alpha=2, param_dtype=dtype),
    )
    apply = way.autocast(network.apply)
    # All states, not a sample.
    state = nk.vqs.FullSumState(hilbert, apply_fun=apply, init_fun=network.init, seed=0)
    state.parameters = start = way.cast(state.parameters)
    hamiltonian, log = (
        nk.operator.IsingJax(hilbert, nk.graph.Chain(8), h=1.0),
        nk.logging.RuntimeLog(),
    )
    driver = nk.VMC(hamiltonian, way.tx, variational_state=state)
    driver.run(judge.STEPS, out=log, show_progress=False)
    losses = np.real(log.data["Energy"]["Mean"])
    return judge.Run(
        start,
        state.parameters,
        driver._optimizer_state,
        losses,
        (apply, {"params": start}, X),
    )


# --- libraries that add updates by `p + u`, which makes bfloat16 parameters float32 -----------------------------------


def blackjax_meanfield(way):
    """Mean-field variational inference: the log density is cast; locations and scales
    are the library's parameters.
    """
    w = jax.random.normal(KEY, (8, 4))
    density = way.autocast(
        lambda position, w: -0.5 * ((jnp.tanh(position["x"] @ w) - 0.5) ** 2).sum()
    )
    vi = blackjax.meanfield_vi(
        lambda position: density(position, w), way.tx, num_samples=50
    )
    state, losses, step = vi.init(way.cast({"x": jnp.ones(8)})), [], jax.jit(vi.step)
    start = (state.mu, state.rho)
    for key in jax.random.split(KEY, judge.STEPS):
        state, info = step(key, state)
        losses.append(info.elbo)
    return judge.Run(
        start, (state.mu, state.rho), state.opt_state, losses, (density, {"x": X}, w)
    )


def keeping_states(tx, states):
    """Return a transformation whose states are kept, for a library that hands none
    back.
    """

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        io_callback(states.append, None, state, ordered=True)
        return updates, state

    return optax.GradientTransformation(tx.init, update)


def flowjax_fit(way):
    """`fit_to_data` of a masked autoregressive flow, with its likelihood cast."""
    states = []
    base = flowjax.distributions.Normal(jnp.zeros(8))
    flow = way.cast(
        flowjax.flows.masked_autoregressive_flow(
            KEY, base_dist=base, flow_layers=1, nn_width=16
        )
    )
    loss = way.autocast(flowjax.train.losses.MaximumLikelihoodLoss())
    data = jnp.tanh(X @ jax.random.normal(KEY, (8, 8)))
    fitted, losses = flowjax.train.fit_to_data(
        KEY, flow, data, loss_fn=loss, optimizer=keeping_states(way.tx, states), max_epochs=judge.STEPS,
        max_patience=judge.STEPS, return_best=False, show_progress=False,
    )  # fmt: skip
    jax.effects_barrier()
    is_fixed = lambda leaf: isinstance(leaf, paramax.NonTrainable)
    start, params = (
        eqx.partition(model, eqx.is_inexact_array, is_leaf=is_fixed)
        for model in (flow, fitted)
    )
    return judge.Run(
        start[0],
        params[0],
        states[-1],
        losses["train"],
        (lambda x: loss(*start, x), data),
    )


def optimistix_minimise(way):
    """`OptaxMinimiser`, whose steps are those of a `while_loop`."""
    loss, params = (
        way.autocast(lambda params, batch: squares(params, *batch)),
        way.cast(PARAMS),
    )
    solver = optx.OptaxMinimiser(way.tx, rtol=0.0, atol=0.0)
    found = optx.minimise(
        loss, solver, params, (X, Y), max_steps=judge.STEPS, throw=False
    )
    losses = [loss(params, (X, Y)), loss(found.value, (X, Y))]
    return judge.Run(
        params, found.value, found.state.opt_state, losses, (loss, params, (X, Y))
    )


def trainax_trainer(way):
    """`GeneralTrainer` of an emulator of one step, to whose optimizer it gives the
    whole module.
    """
    states = []
    layers = [
        eqx.nn.Conv1d(1, 16, 3, padding="SAME", key=KEY),
        eqx.nn.Conv1d(16, 1, 3, padding="SAME", key=KEY),
    ]
    stepper = way.cast(eqx.nn.Sequential(layers))
    # Samples, times, channels, points.
    data = jnp.stack([X[:, None], jnp.roll(X, 1, -1)[:, None]], axis=1)
    loss = way.autocast(trainax.configuration.Supervised())
    trainer = trainax.GeneralTrainer(
        trainax.TrajectorySubStacker(data, sub_trajectory_len=2), loss, ref_stepper=None, residuum_fn=None,
        optimizer=keeping_states(way.tx, states), num_minibatches=judge.STEPS, batch_size=len(X), callback_fn=None,
    )  # fmt: skip
    fitted, losses = trainer(stepper, KEY, spawn_tqdm=False)
    jax.effects_barrier()
    start, params = (
        eqx.filter(model, eqx.is_inexact_array) for model in (stepper, fitted)
    )
    return judge.Run(
        start,
        params,
        states[-1],
        losses,
        (lambda x: loss(stepper, x, ref_stepper=None, residuum_fn=None), data),
    )


def gpjax_fit(way):
    """`fit` of a Gaussian process with a linear kernel, whose Gram matrix is a product."""
    states = []
    data = gpjax.Dataset(X, X[:, :1])  # what a linear kernel learns
    prior = gpjax.gps.Prior(
        kernel=gpjax.kernels.Linear(), mean_function=gpjax.mean_functions.Zero()
    )
    model = way.cast(prior * gpjax.likelihoods.Gaussian())
    loss = way.autocast(
        lambda model, data: -gpjax.objectives.conjugate_mll(model, data) / len(X)
    )
    fitted, losses = gpjax.fit(
        model=model, objective=loss, train_data=data, optim=keeping_states(way.tx, states), num_iters=judge.STEPS,
        verbose=False, safe=False,
    )  # fmt: skip
    jax.effects_barrier()
    start, params = (eqx.filter(m, eqx.is_inexact_array) for m in (model, fitted))
    return judge.Run(start, params, states[-1], losses, (loss, model, data))


# --- libraries that call `update(grads, state)`, without parameters ---------------------------------------------------


def brax_gradient_update(way):
    """`gradient_update_fn`, which PPO and SAC are made of."""
    params, losses, loss = way.cast(PARAMS), [], way.autocast(squares)
    update, opt_state = (
        jax.jit(gradient_update_fn(loss, way.tx, pmap_axis_name=None)),
        way.tx.init(params),
    )
    for _ in range(judge.STEPS):
        value, params, opt_state = update(params, X, Y, optimizer_state=opt_state)
        losses.append(value)
    return judge.Run(way.cast(PARAMS), params, opt_state, losses, (loss, params, X, Y))


def dynamax_sgd(way):
    """`run_sgd`, which `fit_sgd` of all models is, on the likelihood of a state space
    model by Kalman's filter.
    """
    model = LinearGaussianSSM(4, 8)
    params, props = model.initialize(KEY)
    start = way.cast(to_unconstrained(params, props))
    prob = lambda params, x: (
        -model.marginal_log_prob(from_unconstrained(params, props), x[0]) / x.size
    )
    loss, emissions = way.autocast(prob), X[None] + 1
    params, losses = run_sgd(
        loss, start, emissions, optimizer=way.tx, num_epochs=judge.STEPS
    )
    return judge.Run(start, params, (), losses, (loss, start, emissions))


# --- what each must do ------------------------------------------------------------------------------------------------

RATES = {
    jaxopt_solver: 2.0**-4, numpyro_svi: 2.0**-8, penzai_trainer: 2.0**-4, tunix_peft: 2.0**-4, netket_vmc: 2.0**-5,
    blackjax_meanfield: 2.0**-5, flowjax_fit: 2.0**-3, optimistix_minimise: 2.0**-4,
    trainax_trainer: 2.0**-3, gpjax_fit: 2.0**-5,
    brax_gradient_update: 2.0**-4, dynamax_sgd: 2.0**-4,
}  # fmt: skip
ADD_WITHOUT_A_CAST = (
    blackjax_meanfield,
    flowjax_fit,
    optimistix_minimise,
    trainax_trainer,
    gpjax_fit,
)
HIDE_PARAMETERS = (brax_gradient_update, dynamax_sgd)
OPTION = r"`equinox\.apply_updates` does not: see `updates_in_param_dtype`"
REFUSALS = {
    blackjax_meanfield: OPTION,
    flowjax_fit: OPTION,
    trainax_trainer: OPTION,
    gpjax_fit: "scan body function carry input and carry output must have equal types",
    # JAX's: the loop ends first.
    optimistix_minimise: ("`body_fun` must have the same input and output structure"),
    brax_gradient_update: "`master_weights` needs the parameters",
    dynamax_sgd: "`master_weights` needs the parameters",
}
named = lambda libraries: pytest.mark.parametrize(
    "library", libraries, ids=lambda library: library.__name__
)


def test_the_table_says_of_each_trainer_what_the_tests_find():
    # Gradients by.
    rows = {loop: row for loop, row in clients().items() if row[1] == "it"}
    names = lambda libraries: {library.__name__ for library in libraries}
    assert rows.keys() == names(RATES)
    assert {loop for loop, row in rows.items() if row[2] == "it, p + u"} == names(
        ADD_WITHOUT_A_CAST
    )
    assert {
        loop for loop, row in rows.items() if "without parameters" in row[2]
    } == names(HIDE_PARAMETERS)


@named([library for library in RATES if library not in REFUSALS])
def test_a_trainer_trains_as_in_float32_with_the_masters_of_float32(library):
    judge.judge(library, "bf16-split", RATES[library])


@named(ADD_WITHOUT_A_CAST)
def test_a_trainer_that_adds_updates_without_a_cast_keeps_masters_with_narrow_ones(
    library,
):
    judge.judge(library, "bf16-masters", RATES[library], updates_in_param_dtype=True)


@named(REFUSALS)
def test_masters_that_a_trainer_cannot_keep_are_refused_and_float32_parameters_train_as_in_float32(
    library,
):
    with pytest.raises((TypeError, ValueError), match=REFUSALS[library]):
        library(judge.under("bf16-masters", RATES[library]))
    judge.judge(library, "bf16-autocast", RATES[library])


@named(RATES)
def test_a_trainer_that_differentiates_trains_in_float16_with_a_static_scale_inside_of_autocast(
    library,
):
    # Their losses are sums over examples.
    scale = 2.0**6 if library in (numpyro_svi, dynamax_sgd) else 2.0**12
    judge.judge(
        library, "f16-scaled", RATES[library], scale_inside=mpx.StaticLossScale(scale)
    )


def test_a_static_scale_that_is_too_large_skips_every_step_which_is_counted():
    way = judge.under(
        "f16-scaled", RATES[numpyro_svi], scale_inside=mpx.StaticLossScale(2.0**20)
    )
    assert mpx.skipped_steps(numpyro_svi(way).opt_state) == judge.STEPS


@named(REFUSALS)
def test_state_in_8_bits_needs_no_hook(library):
    """The momentum of arrays of any size is kept in 8 bits."""
    way = judge.float32(RATES[library])
    tx = mpx.low_precision_state(
        judge.sgd(RATES[library]), {"trace": mpx.Blockwise8bit()}, min_size=0
    )
    assert any(leaf.dtype.itemsize == 1 for leaf in jax.tree.leaves(tx.init(PARAMS)))
    judge.require_losses_of_float32(
        library(dataclasses.replace(way, tx=tx)), library(way)
    )


def test_a_trainer_that_takes_gradients_trains_in_float16_with_a_loss_scale():
    judge.judge(jaxopt_value_and_grad, "params=f16,compute=f16,output=f32", 2.0**-4)


def test_complex_parameters_are_their_own_masters():
    train = lambda way: netket_vmc(way, dtype=complex)
    ways = judge.under("bf16-split", 2.0**-5), judge.float32(2.0**-5)
    ours, theirs = map(train, ways)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-3)
    judge.require_masters_of_float32(ours, ways[0].memory, 2.0**-5)


@named(RATES)
def test_float16_in_a_trainer_that_differentiates_warns_that_nothing_scales_the_loss(
    library,
):
    with pytest.raises(
        UserWarning,
        match="computes in float16 and is differentiated without a loss scale",
    ):
        library(judge.under("f16-scaled", RATES[library]))


def test_float32_products_that_dynamax_asks_of_the_whole_process_are_asked_of_autocast_too():
    with (
        jax.default_matmul_precision("float32"),
        pytest.warns(UserWarning, match="`jax_default_matmul_precision` is"),
    ):
        # As after `import dynamax`.
        jax.eval_shape(mpx.autocast(squares, "bf16"), PARAMS, X, Y)
