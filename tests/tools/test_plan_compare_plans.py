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
        (None, "", []),
        (16_000_004, "   left", ["0.000"]),
        (20_000_004, "   left", ["4.000"]),
        (15_000_004, "    left", ["-1.000"]),
        (14_000_004, "    left", ["-2.000"]),
        (14_000_003, "    left", ["no", "fit"]),
    ],
)
def test_the_table_adds_up_and_says_what_is_left_of_a_memory(memory, header, cells):
    table = compare_plans(10**6, recipes=["bf16-masters"], usable_bytes=memory)
    title, *lines = str(table).splitlines()
    assert title == "Memory to train 1,000,000 parameters, in MB"
    assert lines[0] == f"recipe        params  grads  optimizer   held  a param{header}"
    held = ["2.000", "2.000", "12.00", "16.00", "16.00"]
    assert lines[1].split() == ["bf16-masters", *held, *cells]


def test_only_weights_and_state_beyond_the_memory_do_not_fit():
    """What is left is exact. XLA may free a gradient before it makes the next one."""
    plan = compare_plans(10**9, recipes=["bf16-split"]).plans["bf16-split"]
    held = plan.total_bytes_a_device
    assert [plan.left(held + more) for more in (5, 0, -1)] == [5, 0, -1]
    alone = held - plan.bytes_of("gradients")
    assert [plan.is_too_large(alone + more) for more in (0, -1)] == [False, True]
    compared = compare_plans(10**9, recipes=["bf16-split"], usable_bytes=held - 1)
    assert compared.left == {"bf16-split": -1}
