"""Recipes side by side."""

import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import mpx
from mpx.tools.plan.compare_plans import STANDARD_RECIPES, Recipe, compare_plans
from mpx.tools.plan.memory_plan import memory_plan

pytestmark = pytest.mark.optax_promotion

MOMENTS = ("bf16, split masters, 8-bit moments", "bf16, Kahan, bf16 moments")


def test_each_plan_is_that_of_its_recipe():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    comparison = compare_plans(2**16, optax.lion(1e-3), mesh=mesh)
    assert list(comparison.plans) == list(STANDARD_RECIPES)
    for name, plan in comparison.plans.items():
        recipe = STANDARD_RECIPES[name]
        assert plan == memory_plan(2**16, recipe.wrap(optax.lion(1e-3)), recipe.policy, mesh=mesh)


def test_kahan_with_bf16_moments_holds_what_any_precision_adamw_does():
    given = mpx.any_precision_adamw(use_kahan_summation=True, momentum_dtype="bf16", variance_dtype="bf16")
    plan = compare_plans({"w": jnp.ones((65, 67))}).plans["bf16, Kahan, bf16 moments"]
    assert plan == memory_plan({"w": jnp.ones((65, 67))}, given, "bf16")


@pytest.mark.parametrize("name", STANDARD_RECIPES)
def test_a_standard_recipe_trains(name):
    recipe = STANDARD_RECIPES[name]
    params = mpx.get_policy(recipe.policy).cast_to_param({"w": jnp.ones((64, 64))})
    tx = recipe.wrap(optax.adamw(1e-2))

    def step(params, state):
        updates, state = tx.update(jax.tree.map(lambda p: jnp.ones(p.shape), params), state, params)
        return optax.apply_updates(params, updates)

    new = jax.eval_shape(step, params, jax.eval_shape(tx.init, params))
    assert new["w"].dtype == params["w"].dtype
    mpx.check_chain(tx)


def test_a_rule_without_moments_has_no_recipe_for_them():
    assert set(STANDARD_RECIPES) - set(compare_plans(1000, optax.sgd(0.1)).plans) == set(MOMENTS)
    assert set(compare_plans(1000, optax.sgd(0.1, momentum=0.9)).plans) == set(STANDARD_RECIPES)


def test_a_function_is_traced_once():
    traces = []

    def init():
        traces.append(1)
        return {"w": jnp.ones((8, 8))}

    compare_plans(init)
    assert traces == [1]


def test_the_table_adds_up():
    comparison = compare_plans(2**16, recipes={"masters": STANDARD_RECIPES["bf16, f32 masters"]}, gradient_dtype=None)
    title, header, line = str(comparison).splitlines()
    assert title == "Bytes of a training of 65,536 parameters"
    assert re.split(r"\s{2,}", header) == ["recipe", "parameters", "gradients", "optimizer", "all", "a parameter"]
    assert re.split(r"\s{2,}", line) == ["masters", "131,072", "131,072", "786,436", "1,048,580", "16"]


def test_on_a_mesh_the_title_says_how_many_devices():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    assert str(compare_plans(1024, mesh=mesh)).startswith(
        "Bytes of a training of 1,024 parameters, each of 4 devices\n"
    )


def test_it_goes_through_json():
    comparison = compare_plans(1000)
    assert json.loads(json.dumps(comparison.as_dict()))["f32"] == comparison.plans["f32"].as_dict()


@pytest.mark.parametrize(
    "recipes", ["f32", {"f32": optax.sgd(0.1)}, [Recipe("f32", lambda rule: rule)]], ids=["a name", "a rule", "a list"]
)
def test_what_are_no_recipes_is_refused(recipes):
    with pytest.raises(TypeError, match=r"`compare_plans`: `recipes` must map names to `Recipe`s, but got "):
        compare_plans(1000, recipes=recipes)


def test_no_recipes_are_refused():
    with pytest.raises(ValueError, match=r"`compare_plans`: `recipes` is empty"):
        compare_plans(1000, recipes={})


def test_what_is_no_rule_is_refused():
    with pytest.raises(TypeError, match=r"`compare_plans` needs an Optax gradient transformation"):
        compare_plans(1000, optax.adam)
