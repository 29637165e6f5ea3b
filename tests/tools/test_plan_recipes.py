"""The table of recipes: its code is what its wrappers do, and its training steps run as they are printed."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import mpx
from mpx.tools.plan import STANDARD_RECIPES, training_code
from tests.helpers import eight_cpu_devices, types_of

pytestmark = pytest.mark.optax_promotion

NAMES = {"mpx": mpx, "jax": jax, "optax": optax, "nnx": nnx}
X = jnp.linspace(-1, 1, 32 * 64, dtype=jnp.float32).reshape(32, 64)


def loss_of(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


@pytest.mark.parametrize("name", STANDARD_RECIPES)
def test_the_code_of_a_recipe_makes_its_state(name):
    recipe, adamw = STANDARD_RECIPES[name], optax.adamw(1e-3)
    policy = mpx.get_policy(recipe.policy)
    written = eval(recipe.code, NAMES | {"optimizer": adamw, "policy": policy})
    params = policy.cast_to_param({"w": jnp.ones((64, 64)), "b": jnp.ones(64)})
    states = [jax.eval_shape(tx.init, params) for tx in (written, recipe.wrap(adamw))]
    assert types_of(states[0]) == types_of(states[1])
    assert recipe.purpose
    mpx.check_chain(written)


def linen_step():
    model = linen.Dense(64)
    params = model.init(jax.random.key(0), X)
    names = {"loss_fn": lambda params, batch: loss_of(model.apply(params, batch), batch[:, ::-1]), "params": params}
    return names, lambda names: (names["params"], names["opt_state"]), True


def nnx_step():
    """Train a model with batch statistics, and a bias that 8 devices do not divide."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs), nnx.Linear(64, 30, rngs=rngs))
    names = {"loss_fn": lambda model, batch: loss_of(model(batch), batch[:, 29::-1]), "model": model}
    return names, lambda names: (names["model"], names["trainer"]), False


@pytest.mark.many_devices
@pytest.mark.filterwarnings("ignore:`autocast`. no matrix product:UserWarning")  # this model is small
@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("name", "sharding"),
    [(name, "none") for name in STANDARD_RECIPES]
    + [("bf16-split-8bit", "zero1"), ("bf16-split-8bit", "fsdp")]
    + [
        pytest.param(name, sharding, marks=pytest.mark.slow)
        for name, sharding in itertools.product(["f32", "bf16-stochastic", "f16-scaled"], ["zero1", "fsdp"])
    ],
)
def test_the_printed_training_step_learns_donates_all_and_divides_what_it_says(name, library, sharding):
    made, trained, returns = linen_step() if library == "linen" else nnx_step()
    names, losses = NAMES | made, []
    no_mesh_after = contextlib.nullcontext() if sharding == "none" else jax.set_mesh(eight_cpu_devices())
    with no_mesh_after:
        exec(training_code(STANDARD_RECIPES[name], library, sharding), names)
        batch = X if sharding == "none" else jax.device_put(X, P("data"))
        carry = trained(names)
        arrays = [leaf for leaf in jax.tree.leaves(carry) if isinstance(leaf, jax.Array) and leaf.ndim]
        given = [leaf for leaf in arrays if leaf.devices() == jnp.asarray(batch).devices()]  # no batch statistics
        for _ in range(3):
            *new, loss = names["train_step"](*carry, batch) if returns else (names["train_step"](*carry, batch),)
            carry = new or carry
            losses.append(float(loss))
    assert losses[2] < losses[0]
    assert [leaf.shape for leaf in given if not leaf.is_deleted()] == []
    params, state = carry if returns else (nnx.state(carry[0], nnx.Param), carry[1].opt_state)
    assert {p.dtype for p in jax.tree.leaves(params)} == {mpx.get_policy(STANDARD_RECIPES[name].policy).param_dtype}
    parts = lambda tree: max(x.size // x.addressable_shards[0].data.size for x in jax.tree.leaves(tree))
    assert (parts(params), parts(state)) == {"none": (1, 1), "zero1": (1, 8), "fsdp": (8, 8)}[sharding]
    assert library == "linen" or jnp.any(carry[0].layers[1].mean[...])
