"""Check which leaves are floating, paths, and casts of whole trees: what changes, what
stays, how often XLA runs.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import mpx
from mpx import _trees
from tests.helpers import BF16, F16, F32, assert_same_bits

FLOATING = {
    "bfloat16": jnp.ones(2, jnp.bfloat16),
    "float16": jnp.ones(2, jnp.float16),
    "float32": jnp.ones(2, F32),
    "scalar": jnp.float32(1),
    "empty": jnp.ones((0, 2), F32),
    "numpy float16": np.ones(2, np.float16),
    "numpy float64": np.ones(2),
    "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
}
NOT_FLOATING = {
    "int32": jnp.arange(2),
    "uint8": jnp.ones(2, jnp.uint8),
    "int4": jnp.ones(2, jnp.int4),
    "bool": jnp.array([True, False]),
    "complex64": jnp.ones(2, jnp.complex64),
    "float8": jnp.ones(2, jnp.float8_e4m3fn),
    "float8 e5m2": jnp.ones(2, jnp.float8_e5m2),
    "typed key": jax.random.key(0),
    "legacy key": jax.random.PRNGKey(0),
    "numpy int64": np.arange(2),
    "numpy scalar": np.float32(1),
    "Python float": 1.5,
    "Python int": 3,
    "string": "bfloat16",
    "function": jnp.tanh,
    "shape of ints": jax.ShapeDtypeStruct((2,), jnp.int32),
    "shape of a key": jax.eval_shape(lambda: jax.random.key(0)),
    "float0": np.zeros(2, jax.dtypes.float0),
}


def test_real_floating_arrays_of_16_bits_and_more_are_floating_and_nothing_else_is():
    for name, leaf in (FLOATING | NOT_FLOATING).items():
        assert _trees.is_floating(leaf) == (name in FLOATING), name


def test_the_value_of_an_nnx_variable_goes_by_the_name_of_the_variable():
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert set(_trees.path_names(state).values()) == {"bias", "kernel"}
    assert {
        _trees.path_string(path, state) for path in _trees.leaves_by_path(state)
    } == {"bias", "kernel"}
    policy = mpx.get_policy("bf16", overrides=(("bias$", jnp.float32),))
    cast = policy.cast_to_param(state)
    assert (cast["bias"].get_value().dtype, cast["kernel"].get_value().dtype) == (
        np.float32,
        BF16,
    )


class Attention(eqx.Module):
    query: jax.Array
    value: jax.Array


def test_a_field_called_value_keeps_its_name():
    """It is the natural name in attention; only the variable of Flax is dropped."""
    model = {"attention": Attention(jnp.ones((8, 2), F32), jnp.ones((8, 2), F32))}
    assert set(_trees.path_names(model).values()) == {
        "attention/query",
        "attention/value",
    }
    policy = mpx.get_policy(
        "params=bf16,compute=bf16,output=f32", overrides=(("value$", jnp.float32),)
    )
    cast = policy.cast_to_param(model)["attention"]
    assert (cast.query.dtype, cast.value.dtype) == (BF16, np.float32)
    assert "attention/value" in policy.describe(model)
    inexact = jnp.full((2, 8), 1.001, F32)
    product = mpx.autocast(
        lambda m, x: (x @ m["attention"].query, x @ m["attention"].value), policy
    )(model, inexact)
    assert (
        product[0] != product[1]
    ).all()  # the first one in bfloat16, the second one in float32


def test_leaves_that_are_not_floating_come_back_as_the_same_object():
    cast = mpx.cast(NOT_FLOATING | {"w": jnp.ones(2)}, BF16)
    assert cast.pop("w").dtype == BF16
    assert all(cast[name] is leaf for name, leaf in NOT_FLOATING.items())


def test_a_leaf_of_the_right_dtype_comes_back_as_the_same_object():
    for name, leaf in FLOATING.items():
        assert (
            mpx.cast([leaf, np.ones(3, F16), np.ones(3, F32)], leaf.dtype)[0] is leaf
        ), name


def test_entries_that_are_one_array_stay_one_array():
    """Tie embeddings: arrays, NumPy arrays, shapes and tracers. Equal arrays that are
    two objects stay two.
    """
    for leaf in (
        jnp.ones((2, 2)),
        np.ones((2, 2), np.float32),
        jax.ShapeDtypeStruct((2, 2), F32),
    ):
        cast = mpx.cast({"embed": leaf, "other": jnp.ones(1), "head": leaf}, BF16)
        assert cast["embed"] is cast["head"]
        assert cast["embed"].dtype == BF16

    tied = []
    jax.jit(lambda x: tied.append(len({id(leaf) for leaf in mpx.cast([x, x], BF16)})))(
        jnp.ones(2)
    )
    assert tied == [1]
    assert len({id(leaf) for leaf in mpx.cast([jnp.ones(2), jnp.ones(2)], BF16)}) == 2


def test_one_array_that_two_overrides_send_to_two_dtypes_becomes_two():
    w = jnp.ones(2)
    cast = mpx.get_policy("bf16", overrides=(("^head", "float16"),)).cast_to_param(
        {"embed": w, "head": w}
    )
    assert (cast["embed"].dtype, cast["head"].dtype) == (BF16, F16)
    assert_same_bits(w, jnp.ones(2))  # and is not donated


def test_numpy_arrays_stay_numpy_arrays_and_shapes_keep_their_sharding():
    cast = mpx.cast({"w": np.full((2, 1), 1 / 3, np.float32)}, BF16)
    assert type(cast["w"]) is np.ndarray
    assert_same_bits(cast, {"w": np.full((2, 1), 1 / 3, np.float32).astype(BF16)})
    sharding = NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec("x"))
    cast = mpx.cast(jax.ShapeDtypeStruct((8, 2), F32, sharding=sharding), BF16)
    assert (cast.shape, cast.dtype, cast.sharding) == ((8, 2), BF16, sharding)


@pytest.fixture
def compiled_calls(monkeypatch):
    """Return a list that gets the number of arrays of each compiled call."""
    calls, original = [], _trees._converter

    def counting(*arguments):
        convert = original(*arguments)

        def counted(arrays):
            calls.append(len(arrays))
            return convert(arrays)

        return counted

    monkeypatch.setattr(_trees, "_converter", counting)
    return calls


def test_a_concrete_tree_is_cast_in_one_compiled_call(compiled_calls):
    """A call with its number of arrays: also to several dtypes, and a tied array once;
    none where nothing changes.
    """
    w = jnp.ones(4)
    plain, other = (
        mpx.get_policy("bf16"),
        mpx.get_policy("bf16", overrides=(("norm", "float16"),)),
    )
    layers = {
        f"layer{i}": {
            "w": jnp.ones((i + 1, 2)),
            "h": jnp.ones(2, F16),
            "n": jnp.arange(3),
        }
        for i in range(5)
    }
    for policy, tree, expected in [
        (plain, layers, [10]),
        (other, {"norm": jnp.ones(3), "dense": jnp.ones((3, 3))}, [2]),
        (plain, {"embed": w, "head": w}, [1]),
        (plain, {"w": jnp.ones(2, BF16), "n": jnp.arange(2)}, []),
        (plain, {"w": np.ones(2, np.float32)}, []),
        (plain, jax.ShapeDtypeStruct((2,), F32), []),
    ]:
        compiled_calls.clear()
        policy.cast_to_param(tree)
        assert compiled_calls == expected


def mesh(devices=slice(None), shape=(-1,), names=("x",)):
    return Mesh(np.array(jax.devices()[devices]).reshape(shape), names)


def placed(*shardings):
    return [
        jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding)
        for sharding in shardings
    ]


GRID, AXIS, DEVICE = (
    mesh(shape=(4, 2), names=("data", "model")),
    PartitionSpec("x"),
    jax.devices()[3],
)
KINDS = [memory.kind for memory in DEVICE.addressable_memories()]
# Arrays, and how many of them each compiled call casts: one program cannot take arrays
# of different devices.
PLACED = {
    "on one mesh": (
        [
            NamedSharding(GRID, PartitionSpec(*spec))
            for spec in (("data", "model"), (None, "data"), ())
        ],
        [3],
    ),
    "on two sets of devices": (
        [NamedSharding(mesh(slice(*part)), AXIS) for part in ((4,), (4, 8), (4,))],
        [1, 2],
    ),
    "in two orders": (
        [NamedSharding(grid, AXIS) for grid in (mesh(), mesh(slice(None, None, -1)))],
        [1, 1],
    ),
    "free and on a device": ([None, SingleDeviceSharding(DEVICE)], [1, 1]),
    # XLA on a CPU by itself moves results from unpinned host memory to the default one.
    "in two kinds of memory": (
        [NamedSharding(mesh(), AXIS, memory_kind=kind) for kind in KINDS],
        [1] * len(KINDS),
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_arrays_stay_where_they_are_and_one_compiled_call_casts_those_of_one_set_of_devices(
    name, compiled_calls
):
    shardings, calls = PLACED[name]
    tree = placed(*shardings)
    cast = mpx.cast(tree, BF16)
    assert sorted(compiled_calls) == calls
    for old, new in zip(tree, cast, strict=True):
        assert (new.sharding, new.committed) == (old.sharding, old.committed)
        assert_same_bits(np.asarray(new), np.asarray(old).astype(BF16))
