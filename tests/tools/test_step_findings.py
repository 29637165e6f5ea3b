"""What `step_report` finds between the gradients of a training step, the chain of its
optimizer and its parameters.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpx
from mpx._recipes import RECIPES
from tests.helpers import cases, stepper

pytestmark = pytest.mark.optax_promotion

RULE, CLIP = optax.adamw(1e-2), optax.clip_by_global_norm(1.0)
QUICK = {"bf16-split", "f16-scaled", "bf16-kahan"}


def made(recipe, rule=RULE):
    return mpx.mixed_precision(rule, recipe)


def found(recipe, tx):
    """Return the findings of a step of a small model, as text."""
    loss_fn = lambda params, x: jnp.mean((x @ params["w"] + params["b"][None]) ** 2)
    params = mpx.get_policy(recipe).cast_to_param(
        {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    )

    @jax.jit(donate_argnums=(0, 1))
    def train_step(params, state, x):
        grads = mpx.grad(
            mpx.autocast(loss_fn, "bf16" if recipe == "fp8" else recipe),
            mpx.get_loss_scale(state),
        )(params, x)
        return stepper(tx)(params, state, grads)

    return [
        str(finding)
        for finding in mpx.step_report(
            train_step, params, tx.init(params), jnp.ones((16, 64))
        ).findings
    ]


@pytest.mark.parametrize("recipe", cases(RECIPES, QUICK))
def test_a_chain_inside_of_a_recipe_is_found_no_fault_with(recipe):
    assert not found(recipe, made(recipe, optax.chain(CLIP, RULE, optax.scale(0.5))))


@pytest.mark.parametrize("recipe", cases(RECIPES, QUICK))
def test_what_changes_updates_behind_a_recipe_is_found_where_it_chooses_them(recipe):
    changes = {
        "mul": optax.scale(0.5),
        "add": optax.add_decayed_weights(0.1),
        "square": CLIP,
    }
    for by, change in (
        changes.items() if recipe == "bf16-split" else [("mul", optax.scale(0.5))]
    ):
        findings = found(recipe, optax.chain(made(recipe), change))
        chooses = RECIPES[recipe].weights is not None
        assert [
            finding.startswith(f"`{by}` changes updates after") for finding in findings
        ] == [True] * chooses


def test_clipping_in_front_of_a_loss_scale_is_found():
    (finding,) = found("f16-scaled", optax.chain(CLIP, made("f16-scaled")))
    assert (
        "`square` changes gradients in front of `loss_scaling`, where they are scaled"
        " (2 arrays)" in finding
    )
    for recipe, front in (
        ("bf16-split", CLIP),
        ("f16-scaled", optax.scale(0.5)),
        ("f16-scaled", optax.zero_nans()),
    ):
        assert not found(recipe, optax.chain(front, made(recipe)))


def test_a_step_of_flax_nnx_is_looked_at_too():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, optax.chain(CLIP, made("f16-scaled")), wrt=nnx.Param
    )
    loss_fn = mpx.autocast(lambda model, x: jnp.mean(model(x) ** 2), "f16-scaled")

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, x):
        grads = mpx.grad(
            loss_fn,
            mpx.get_loss_scale(optimizer.opt_state),
            transform=nnx.value_and_grad,
        )(model, x)
        optimizer.update(model, grads)

    findings = mpx.step_report(
        train_step, model, optimizer, jnp.ones((16, 64))
    ).findings
    assert "changes gradients in front of `loss_scaling`" in str(findings[0])
