"""Recipes side by side."""

import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import mpx
from mpx._recipes import RECIPES
from mpx.tools.plan import compare_plans, memory_plan

pytestmark = pytest.mark.optax_promotion

MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))


def test_each_plan_is_that_of_its_recipe():
    comparison = compare_plans(2**16, optax.lion(1e-3), mesh=MESH)
    assert list(comparison.plans) == list(RECIPES)
    tx = mpx.mixed_precision(optax.lion(1e-3), "bf16-split-8bit")
    assert comparison.plans["bf16-split-8bit"] == memory_plan(
        2**16, tx, "bf16-split-8bit", mesh=MESH
    )
    assert str(comparison).startswith("Memory to train 65,536 parameters, in MB")
    assert comparison.as_dict()["plans"] == {
        name: plan.as_dict() for name, plan in comparison.plans.items()
    }


def test_a_rule_without_moments_has_no_recipe_for_them():
    without = set(RECIPES) - {
        "bf16-split-8bit",
        "bf16-split24-8bit",
        "bf16-split24-4bit",
        "bf16-kahan",
    }
    assert set(compare_plans(1000, optax.sgd(0.1)).plans) == without
    assert set(compare_plans(1000, optax.sgd(0.1, momentum=0.9)).plans) == set(RECIPES)


def test_a_function_is_traced_once():
    traces = []
    compare_plans(lambda: traces.append(1) or {"w": jnp.ones((8, 8))})
    assert traces == [1]


@pytest.mark.parametrize(
    ("memory", "header", "cells"),
    [
        (
            None,
            "params  grads  optimizer   held  a param",
            ["2.000", "2.000", "12.00", "16.00", "16.00"],
        ),
        (
            16_000_004,
            " held  a param   left  largest",
            ["16.00", "16.00", "0.000", "0.001B"],
        ),
        (
            15_000_004,
            " held  a param    left  largest",
            ["16.00", "16.00", "-1.000", "0.001B"],
        ),
    ],
)
def test_the_table_adds_up_and_says_what_is_left(memory, header, cells):
    table = compare_plans(10**6, recipes=["bf16-masters"], usable_bytes=memory)
    title, *lines = str(table).splitlines()
    assert title == "Memory to train 1,000,000 parameters, in MB"
    assert lines[0] == f"recipe        {header}"
    assert lines[1].split() == ["bf16-masters", *cells]


def test_what_is_left_is_the_memory_less_what_is_held():
    plans = compare_plans(10**9, recipes=["bf16-split"], usable_bytes=14 * 10**9 + 4)
    plan = plans.plans["bf16-split"]
    assert plans.left_bytes == {"bf16-split": 0}
    assert plan.left_bytes(plan.total_bytes_a_device - 1) == -1
    assert plans.largest_models == {"bf16-split": 10**9}
