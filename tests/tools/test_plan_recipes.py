"""The table of recipes: its code is what its wrappers do, and its training steps run as they are printed."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import mpx
from mpx.tools.plan import STANDARD_RECIPES, training_code
from tests.helpers import types_of

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
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    names = {"loss_fn": lambda model, batch: loss_of(model(batch), batch[:, ::-1]), "model": model}
    return names, lambda names: (names["model"], names["trainer"]), False


@pytest.mark.filterwarnings("ignore:`autocast`. FP8 was asked for:UserWarning")  # this model is small
@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize("name", STANDARD_RECIPES)
def test_the_printed_training_step_learns_and_donates_all_parameters_and_state(name, library):
    made, trained, returns = linen_step() if library == "linen" else nnx_step()
    names = NAMES | made
    exec(training_code(STANDARD_RECIPES[name], library), names)
    carry, losses = trained(names), []
    given = [leaf for leaf in jax.tree.leaves(carry) if isinstance(leaf, jax.Array) and leaf.ndim]
    for _ in range(3):
        *new, loss = names["train_step"](*carry, X) if returns else (names["train_step"](*carry, X),)
        carry = new or carry
        losses.append(float(loss))
    assert losses[2] < losses[0]
    assert all(leaf.is_deleted() for leaf in given)
    weights = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(carry[0], nnx.Param) if library == "nnx" else carry[0])}
    assert weights == {mpx.get_policy(STANDARD_RECIPES[name].policy).param_dtype}
