"""Check that a recipe's name stands wherever a policy does, and means what the table
says.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx._jaxprs import flatten
from mpx._recipes import RECIPES
from mpx._stored.roles import ROLES
from tests.autocast.helpers import contractions
from tests.helpers import assert_same_bits, cases, stepper, types_of

pytestmark = pytest.mark.optax_promotion

KEY = jax.random.key(3)
EIGHT = {"mu|nu": mpx.Blockwise8bit()}
FOUR = {"mu": mpx.Blockwise4bit(), "nu": mpx.Blockwise8bit()}
BY_HAND = {
    "bf16-split": lambda rule: mpx.master_weights(rule, "split"),
    "bf16-split-8bit": lambda rule: mpx.master_weights(
        mpx.low_precision_state(rule, EIGHT, key=KEY), "split"
    ),
    "bf16-split24-8bit": lambda rule: mpx.master_weights(
        mpx.low_precision_state(rule, EIGHT, key=KEY), "split24", key=KEY
    ),
    "bf16-split24-4bit": lambda rule: mpx.master_weights(
        mpx.low_precision_state(rule, FOUR, key=KEY), "split24", key=KEY
    ),
    "bf16-kahan": lambda rule: optax.chain(
        mpx.low_precision_state(rule, {"mu|nu": "bf16"}, min_size=0),
        mpx.kahan_summation(),
    ),
    "bf16-stochastic": lambda rule: optax.chain(
        mpx.upcast(rule), mpx.stochastic_rounding(KEY)
    ),
    "bf16-masters": lambda rule: mpx.master_weights(rule, "full"),
    "bf16-autocast": lambda rule: rule,
    "f16-scaled": mpx.loss_scaling,
    "fp8": lambda rule: mpx.master_weights(rule, "split"),
    "f32": lambda rule: rule,
}


def test_every_recipe_is_written_out_here():
    assert list(BY_HAND) == list(RECIPES) == list(mpx.recipes().recipes)


@pytest.mark.parametrize(
    "name",
    cases(
        RECIPES, {"bf16-split24-4bit", "bf16-kahan", "bf16-stochastic", "f16-scaled"}
    ),
)
def test_a_recipe_is_what_one_would_write_by_hand(name):
    params = mpx.get_policy(name).cast_to_param(
        {"w": jnp.ones((64, 64), jnp.float32), "b": jnp.ones(3, jnp.float32)}
    )
    runs = []
    for tx in (
        mpx.mixed_precision(optax.adamw(1e-2), name, key=KEY),
        BY_HAND[name](optax.adamw(1e-2)),
    ):
        now, state, step = params, tx.init(params), jax.jit(stepper(tx))
        for i in range(3):
            now, state = step(
                now,
                state,
                jax.tree.map(lambda p, i=i: jnp.full_like(p, 2.0**-i), params),
            )
        runs.append((now, state))
    assert_same_bits(*runs)


@pytest.mark.parametrize("name", RECIPES)
def test_the_policy_of_a_recipe_reads_back_from_its_string_and_carries_the_recipe(name):
    policy = mpx.get_policy(name)
    assert mpx.get_policy(str(policy)) == policy
    assert str(policy) == policy.recipe == name
    made = [mpx.mixed_precision(optax.adamw(1e-2), given) for given in (name, policy)]
    params = jax.eval_shape(
        policy.cast_to_param, {"w": jnp.ones((64, 64), jnp.float32)}
    )
    assert (
        len({jax.tree.structure(jax.eval_shape(tx.init, params)) for tx in made}) == 1
    )


@pytest.mark.parametrize("name", RECIPES)
def test_the_table_counts_the_bytes_of_adamw(name):
    tx = mpx.mixed_precision(optax.adamw(1e-2), name)
    plan = mpx.memory_plan(10**9, tx, name)
    assert round(plan.bytes_a_parameter, 2) == RECIPES[name].bytes


@pytest.mark.parametrize("name", RECIPES)
def test_autocast_computes_in_the_dtype_of_a_recipe(name):
    x = jnp.ones((32, 32), jnp.float32)
    of_any_size = "fp8,compute=fp8(min_extent=0)" if name == "fp8" else name
    (found,) = contractions(mpx.autocast(jnp.matmul, of_any_size), x, x)
    assert found.lhs == {
        "f16-scaled": "float16",
        "f32": "float32",
        "fp8": "float8_e4m3fn",
    }.get(name, "bfloat16")


def test_overrides_and_the_dtype_of_sums_stand_behind_the_name_of_a_recipe():
    policy = mpx.get_policy(
        "bf16-split-8bit,reduce=bf16,'norm'=f32", overrides=(("head", "f32"),)
    )
    assert (policy.recipe, policy.reduce_dtype, policy.param_dtype) == (
        "bf16-split-8bit",
        jnp.bfloat16,
        jnp.bfloat16,
    )
    assert policy.overrides == (
        ("norm", np.dtype("float32")),
        ("head", np.dtype("float32")),
    )
    assert mpx.get_policy(str(policy)) == policy
    assert mpx.get_policy("fp8,compute=bf16").fp8 is None


def test_a_recipe_within_float32_parameters_keeps_masters_of_what_an_override_stores_in_16_bits():
    tx = mpx.mixed_precision(optax.sgd(0.1), "bf16-autocast,'embed'=bf16")
    state = tx.init({"embed": jnp.ones(2, jnp.bfloat16), "w": jnp.ones(2, jnp.float32)})
    assert state.master["embed"].dtype == jnp.uint16


def test_a_layer_called_like_a_moment_makes_nothing_else_a_moment():
    params = {
        "mu": jnp.ones((64, 80), jnp.bfloat16),
        "w": jnp.ones((64, 80), jnp.bfloat16),
    }
    tx = mpx.mixed_precision(optax.MultiSteps(optax.adamw(1e-2), 4), "bf16-split-8bit")
    state = tx.init(params)
    assert {
        x.dtype.name for x in jax.tree.leaves(optax.tree.get(state, "acc_grads"))
    } == {"float32"}
    assert {x.codes.dtype.name for x in optax.tree.get(state, "nu").values()} == {
        "uint8"
    }


REFUSED = [
    (lambda: mpx.get_policy("bf16-spilt"), "Did you mean 'bf16-split'"),
    (lambda: mpx.autocast(jnp.sum, "bf16-spilt"), "Did you mean 'bf16-split'"),
    (
        lambda: mpx.mixed_precision(optax.sgd(1.0), "bf-16"),
        "Is it to be a recipe|is it to be a recipe",
    ),
    (
        lambda: mpx.compare_plans(1000, recipes=["bf16-spilt"]),
        "Did you mean 'bf16-split'",
    ),
    (
        lambda: mpx.get_policy("bf16-split,params=f32"),
        "'bf16-split' stores parameters in bfloat16, but got",
    ),
    (
        lambda: mpx.Policy("f32", "f32", "f32", recipe="mine"),
        "there is no recipe 'mine'. The recipes are bf16-split",
    ),
    (
        lambda: mpx.mixed_precision(optax.sgd(1.0), "bf16-split", storage="full"),
        "says how weights are kept",
    ),
    (
        lambda: mpx.mixed_precision(optax.sgd(1.0), "params=bf16", storage="kahan"),
        "`storage` must be 'full', 'split' or 'split24'",
    ),
    (
        lambda: mpx.mixed_precision(optax.sgd(1.0), "bf16-split-8bit").init(
            {"w": jnp.ones(2, jnp.bfloat16)}
        ),
        "keeps the rule's moments in fewer bits, but no field of its state is known",
    ),
    (
        lambda: mpx.mixed_precision(optax.adamw(1.0), "bf16-kahan").init(
            {"w": jnp.ones(2, jnp.float32)}
        ),
        "stores parameters below float32, but all of those given are float32",
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_a_recipe_cannot_do_is_refused_in_words(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize(
    "params",
    [{}, {"gain": jnp.ones((), jnp.bfloat16)}],
    ids=["no parameters", "a number"],
)
@pytest.mark.parametrize("recipe", ["bf16-kahan", "bf16-split-8bit"])
def test_a_recipe_of_low_precision_moments_takes_parameters_that_have_none_to_store(
    recipe, params
):
    """As a group of `optax.partition` may. That the rule has moments is seen where
    there is an array.
    """
    state = mpx.mixed_precision(optax.adamw(1e-3), recipe).init(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.tree.get(state, "mu"))} <= {
        jnp.dtype("float32")
    }
    with pytest.raises(ValueError, match="no field of its state is known as a moment"):
        mpx.mixed_precision(optax.sgd(1e-3), recipe).init(
            params | {"w": jnp.ones(4, jnp.bfloat16)}
        )


def equations(tx, name, leaves):
    """Return how many equations an update of so many leaves of one shape has, and how
    many with those of its calls.
    """
    dtype = mpx.get_policy(RECIPES[name].policy).param_dtype
    params = [jax.ShapeDtypeStruct((72, 64), dtype)] * leaves
    program = jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params)
    return np.array([len(program.eqns), len(flatten(program)[0].eqns)])


@pytest.mark.parametrize("name", RECIPES)
def test_one_more_leaf_of_a_shape_costs_the_trace_a_few_calls(name):
    """AdamW has 17 equations a leaf. Masters and moments would add up to 300 more, were
    they traced for each leaf.
    """
    tx = mpx.mixed_precision(optax.adamw(1e-3), name, key=KEY)
    traced, computed = equations(tx, name, 3) - equations(tx, name, 2)
    alone = equations(optax.adamw(1e-3), name, 3) - equations(
        optax.adamw(1e-3), name, 2
    )
    assert alone[0] <= traced <= alone[0] + 12
    assert computed - alone[1] > 40 or RECIPES[name].weights in (
        None,
        "full",
        "stochastic",
    )


EVERY_ROW = [
    (weights, moments)
    for weights in (None, "full", "split", "split24", "kahan", "stochastic")
    for moments in (None, "bf16", "8bit", "4bit")
]


@pytest.mark.parametrize(("weights", "moments"), EVERY_ROW)
def test_a_recipe_can_join_any_storage_with_any_format_of_moments(
    weights, moments, monkeypatch
):
    recipe = RECIPES["bf16-split"]._replace(weights=weights, moments=moments)
    if weights is None:
        recipe = recipe._replace(policy="params=f32,compute=bf16,output=f32")
    monkeypatch.setitem(RECIPES, "new", recipe)
    tx = mpx.mixed_precision(optax.adamw(1e-2), "new")
    params = mpx.get_policy("new").cast_to_param({"w": jnp.ones((64, 64), jnp.float32)})
    state = tx.init(params)
    _, after = jax.jit(stepper(tx))(params, state, params)
    assert types_of(after) == types_of(state)
    first = jax.tree.leaves(optax.tree.get(state, "mu"))[0]
    by_moments = {None: "float32", "bf16": "bfloat16", "8bit": "int8", "4bit": "uint8"}
    assert first.dtype.name == by_moments[moments]


class Drift(NamedTuple):
    averages: Any
    sums: Any
    few: Any


def drift():
    """A rule with a state of a type that mpx does not know."""

    def init(params):
        return Drift(*(jax.tree.map(jnp.zeros_like, params) for _ in range(3)))

    return optax.GradientTransformation(init, lambda u, s, params=None: (u, s))


def test_leaves_that_nothing_is_known_of_are_named_and_stay_as_they_are():
    params = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones(8, jnp.bfloat16)}
    rule = optax.chain(optax.trace(0.9), drift())
    tx = mpx.mixed_precision(rule, "bf16-split-8bit")
    expected = "stay as they are: 1/averages/w, 1/sums/w, 1/few/w. Declare .*register_s"
    with pytest.warns(UserWarning, match=expected):
        state = tx.init(params)
    assert optax.tree.get(state, "sums")["w"].dtype == jnp.float32
    with pytest.raises(ValueError, match=r"known as a moment.*1/averages/w"):
        mpx.mixed_precision(
            optax.chain(optax.identity(), drift()), "bf16-split-8bit"
        ).init(params)


def test_a_field_that_is_declared_a_moment_is_stored_in_few_bits(monkeypatch):
    declared = {"averages": "first moment", "sums": "second moment", "few": "signed"}
    monkeypatch.setitem(ROLES, Drift, declared)
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    state = mpx.mixed_precision(drift(), "bf16-split-8bit").init(params)
    kept = [optax.tree.get(state, field)["w"] for field in declared]
    assert [x.codes.dtype for x in kept[:2]] == [np.int8, np.uint8]
    assert kept[2].dtype == np.float32
