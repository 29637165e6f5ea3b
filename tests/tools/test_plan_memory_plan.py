"""Plans against the bytes of real arrays, and against the formulas of the literature."""

import gc

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx import _recipes
from mpx.tools.plan import memory_plan
from tests.helpers import eight_cpu_devices

pytestmark = pytest.mark.optax_promotion

ADAMW = optax.adamw(optax.linear_schedule(1e-2, 0.0, 100))
BF16 = "params=bf16,compute=bf16,output=f32"
BLOCKS = mpx.Blockwise8bit(16)


SHAPES = {
    "kernel": (65, 67),
    "first": (16, 48),
    "second": (5, 128),
    "bias": (24,),
    "scalar": (),
    "empty": (0, 3),
}


def trained_model():
    """Return leaves of odd shapes, large enough for 8 bits and not."""
    return {name: jnp.ones(shape, jnp.float32) for name, shape in SHAPES.items()} | {
        "none": None
    }


def model():
    """Return the same and leaves that are not trained."""
    return trained_model() | {
        "steps": jnp.arange(7, dtype=jnp.int32),
        "key": jax.random.key(0),
    }


def labelled(leaf_rule, other_rule):
    labels = lambda params: jax.tree.map_with_path(
        lambda path, _: "a" if path[0].key < "g" else "b", params
    )
    return optax.partition({"a": leaf_rule, "b": other_rule}, labels)


def in_8_bits(rule):
    return mpx.low_precision_state(rule, {"mu|nu": BLOCKS}, min_size=64)


TRANSFORMATIONS = {
    "multi steps": optax.MultiSteps(mpx.master_weights(ADAMW), 4),
    "8 bits": mpx.master_weights(in_8_bits(ADAMW), storage="split"),
    "partition": labelled(mpx.master_weights(ADAMW), optax.sgd(0.1, momentum=0.9)),
    "adafactor": mpx.upcast(optax.adafactor(1e-2, min_dim_size_to_factor=4)),
}
RECIPES = {
    name: (mpx.mixed_precision(ADAMW, name, key=jax.random.key(0)), name)
    for name in _recipes.RECIPES
}
F16 = "params=f16,compute=f16,output=f32"
RECIPES |= {"float16 parameters": (mpx.mixed_precision(ADAMW, F16), F16)}
CASES = RECIPES | {name: (tx, BF16) for name, tx in TRANSFORMATIONS.items()}


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def abstract(**axes):
    return AbstractMesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )


# Bytes of real arrays.


@pytest.mark.parametrize("name", CASES)
def test_the_state_has_the_bytes_of_the_real_arrays(name):
    tx, policy = CASES[name]
    plan = memory_plan(model, tx, policy)
    params = mpx.get_policy(policy).cast_to_param(model())
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    assert plan.state_bytes == nbytes(tx.init(params))
    assert plan.bytes_of("parameters") + plan.bytes_of("not trained") == nbytes(params)


@pytest.mark.parametrize("name", ["bf16-split", "8 bits", "partition", "adafactor"])
def test_a_device_has_the_bytes_of_its_part_of_the_real_arrays(name):
    mesh = eight_cpu_devices()
    tx, policy = CASES[name]
    plan = memory_plan(trained_model, tx, policy, mesh=mesh)
    params = mpx.get_policy(policy).cast_to_param(trained_model())
    state = mpx.zero1(tx, mesh).init(jax.device_put(params, NamedSharding(mesh, P())))
    assert plan.state_bytes_a_device == sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)
    )
    assert plan.state_bytes == nbytes(state)
    # What is counted is not the whole.
    assert plan.state_bytes_a_device < plan.state_bytes
    assert plan == memory_plan(trained_model, mpx.zero1(tx, mesh), policy, mesh=mesh)


@pytest.mark.parametrize(
    ("axis", "spec", "weights", "moments"),
    [
        ("data", P(None, "model"), 16 * 12, 16 * 12 / 2),
        (None, P("data", "model"), 8 * 12, 8 * 12),
    ],
    ids=["divided again", "as the parameters"],
)
def test_parameters_gradients_and_moments_are_divided_as_the_specs_say(
    axis, spec, weights, moments
):
    """A device has a part of 16 x 48 elements."""
    mesh = abstract(data=2, model=4)
    shapes = {"w": jax.ShapeDtypeStruct((16, 48), jnp.float32)}
    plan = memory_plan(shapes, optax.adam(0.1), mesh=mesh, axis=axis, param_specs=spec)
    assert plan.bytes_of("parameters") == plan.bytes_of("gradients") == 4 * weights
    assert (
        plan.bytes_of("first moment") == plan.bytes_of("second moment") == 4 * moments
    )
    assert plan.devices == 8


ROWS = {"axis": None, "param_specs": P("data")}  # FSDP


@pytest.mark.parametrize(
    ("policy", "options", "size"),
    [
        ("bf16", {}, 4),
        ("bf16", {"gradient_dtype": "bf16"}, 2),
        ("p=bf16,c=bf16,r=bf16", {}, 2),
        ("bf16", {"mesh": abstract(data=1)}, 2),
        (None, {}, 4),
    ],
)
def test_on_several_devices_gradients_have_the_dtype_of_their_sum(
    policy, options, size
):
    plan = memory_plan(
        4096, optax.sgd(0.1), policy, **({"mesh": abstract(data=8)} | options)
    )
    assert plan.bytes_of("gradients") == size * 4096


# Formulas.


@given(st.integers(1, 10**12), st.integers(1, 64))
def test_a_number_is_rounded_up_to_blocks_on_each_device(n, d):
    """Otherwise neither a moment nor its scales could be divided, and would be whole on
    every device.
    """
    tx = mpx.low_precision_state(
        optax.sgd(0.1, momentum=0.9), {"trace": mpx.Blockwise8bit()}, min_size=0
    )
    plan = memory_plan(n, tx, mesh=abstract(data=d))
    held = {row.kind: row.bytes for row in plan.rows}
    elements = held["first moment"]
    assert held["parameters"] == held["gradients"] == 4 * elements
    assert n <= elements < n + 256 * d
    assert plan.bytes_of("first moment") * d == elements
    assert plan.bytes_of("scales of blocks") * d == 4 * elements // 256
    assert plan.parameters == n  # what was asked for


# Models.


@pytest.mark.parametrize(
    "given_model",
    [
        nnx.state(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), nnx.Param),
        lambda: nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 5))),
        eqx.nn.MLP(5, 3, 0, 0, key=jax.random.key(0)),
        {
            "w": np.ones((5, 3), np.float32),
            "b": jax.ShapeDtypeStruct((3,), np.float32),
            "activation": jnp.tanh,
        },
        18,
    ],
    ids=["nnx", "linen function", "equinox", "tree", "number"],
)
def test_a_model_may_come_from_any_library(given_model):
    plan = memory_plan(given_model, mpx.master_weights(optax.sgd(0.1)), "bf16")
    assert plan.parameters == 18
    assert plan.state_bytes == 18 * 4


def test_nothing_is_run_and_nothing_allocated():
    ran = []

    def init():
        ran.append(1)
        jax.debug.callback(lambda: ran.append("at run time"))
        return {"w": jnp.ones((81920, 854492))}  # 70 billion elements

    gc.collect()  # of arrays that other tests have left
    before = len(jax.live_arrays())
    plan = memory_plan(init, in_8_bits(ADAMW), BF16, mesh=abstract(data=1024))
    assert ran == [1]  # traced
    assert len(jax.live_arrays()) == before
    assert plan.parameters == 81920 * 854492


def test_the_plan_of_one_device_does_not_see_how_explicit_axes_divide_a_model():
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices("cpu"))
    w = jax.device_put(jnp.ones((16, 48)), NamedSharding(mesh, P("data")))
    assert memory_plan(w, ADAMW) == memory_plan(
        jax.ShapeDtypeStruct((16, 48), jnp.float32), ADAMW
    )


# Parts and tables.


def parts(plan):
    return {row.name: (row.kind, " ".join(row.dtypes)) for row in plan.rows}


def test_the_parts_of_a_state_are_named_as_its_fields():
    tx = mpx.loss_scaling(mpx.master_weights(in_8_bits(ADAMW), storage="split"))
    found = parts(memory_plan(model, tx, BF16, gradient_dtype=None))
    assert found.pop("counts and scalars")[0] == "other state"
    assert found == {
        "parameters": ("parameters", "bfloat16"),
        "not trained": ("not trained", "key<fry> int32"),
        "gradients": ("gradients", "bfloat16"),
        "low bits": ("low bits", "uint16"),
        "mu": ("first moment", "float32 int8 key<fry> int32"),
        "nu": ("second moment", "float32 uint8 key<fry> int32"),
        "scales": ("scales of blocks", "float32"),
        "key": ("other state", "uint32"),
    }


@pytest.mark.parametrize(
    ("tx", "name", "part"),
    [
        (
            optax.MultiSteps(optax.sgd(0.1), 2),
            "acc_grads",
            ("sum of gradients", "float32"),
        ),
        (optax.sgd(0.1, momentum=0.9), "trace", ("first moment", "bfloat16")),
        (mpx.master_weights(optax.sgd(0.1)), "master", ("masters", "float32")),
        (mpx.kahan_summation(), "compensation", ("compensation", "bfloat16")),
        (mpx.stochastic_rounding(jax.random.key(0)), "key", ("other state", "uint32")),
        (optax.sm3(0.1), "mu", ("second moment", "bfloat16")),
        (optax.contrib.schedule_free_sgd(0.1), "z", ("other state", "bfloat16")),
    ],
)
def test_a_part_is_known_by_the_state_it_stands_in(tx, name, part):
    assert parts(memory_plan({"mu": jnp.ones((4, 4))}, tx, BF16))[name] == part
