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
    comparison = compare_plans(2**16, optax.lion(1e-3), mesh=MESH, batch=0)
    assert list(comparison.plans) == list(RECIPES)
    tx = mpx.mixed_precision(optax.lion(1e-3), "bf16-split-8bit")
    assert comparison.plans["bf16-split-8bit"] == memory_plan(
        2**16, tx, "bf16-split-8bit", mesh=MESH, batch=0
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
            " held  a param  fits  largest",
            ["16.00", "16.00", "yes", "0.001B"],
        ),
        (
            16_000_003,
            " held  a param  fits  largest",
            ["16.00", "16.00", "no", "0.001B"],
        ),
    ],
)
def test_the_table_adds_up_and_says_what_fits(memory, header, cells):
    table = compare_plans(10**6, recipes=["bf16-masters"], usable_bytes=memory, batch=0)
    title, *lines = str(table).splitlines()
    assert title == "Memory to train 1,000,000 parameters, in MB"
    assert lines[0] == f"recipe        {header}"
    assert lines[1].split() == ["bf16-masters", *cells]


def test_a_recipe_whose_peak_is_that_of_another_program_is_named_with_it():
    plans = compare_plans(7 * 10**9, recipes=["bf16-split", "f16-scaled", "f32"])
    least, f32 = str(plans).split("\n\n")[1:]
    assert least.endswith(f" tokens a device:\n{plans.plans['bf16-split'].ends()}.")
    assert f32 == f"With f32 it is:\n{plans.plans['f32'].ends()}."
    assert "it is:" not in str(
        compare_plans(7 * 10**9, recipes=["bf16-split", "f16-scaled"])
    )


def test_what_fits_is_decided_by_the_peak():
    plan = compare_plans(10**9, recipes=["bf16-split"]).plans["bf16-split"]
    fits = lambda limit: compare_plans(
        10**9, recipes=["bf16-split"], usable_bytes=limit
    )
    least, most = plan.least_peak_bytes_a_device, plan.peak_bytes_a_device
    assert plan.total_bytes_a_device < most
    assert [fits(limit).fits["bf16-split"] for limit in (most, least, least - 1)] == [
        "yes",
        "perhaps",
        "no",
    ]
    assert fits(least).largest_models == {"bf16-split": 10**9}
    assert "peak  up to  fits  largest\n" in str(fits(1))


def test_the_table_names_what_each_recipe_fits_with():
    text = str(
        compare_plans(
            7 * 10**9, recipes=["bf16-split-8bit", "f32"], usable_bytes=64e9, scan=True
        )
    )
    assert [line.split()[5:-1] for line in text.splitlines()[2:4]] == [
        ["only", "with"],
        ["no"],
    ]
    assert (
        "\n\nbf16-split-8bit: only with attention in a kernel and a checkpoint a"
        " layer.\n\n" in text
    )
