"""Check `zero1` on eight devices: what lies where, what is sent, and the bits of one
device.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from tests.helpers import (
    QUICKLY,
    assert_same_bits,
    cases,
    eight_cpu_devices,
    stepper,
    unfused,
)

pytestmark = pytest.mark.optax_promotion

ADAMW = optax.adamw(optax.linear_schedule(1e-2, 0.0, 100), weight_decay=0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), ADAMW)
BLOCKS = mpx.Blockwise8bit(16)


def in_8_bits(rule, names, **options):
    return mpx.low_precision_state(rule, {names: BLOCKS}, min_size=64, **options)


RULES = {
    "masters": lambda rule: mpx.master_weights(rule),
    "split": lambda rule: mpx.master_weights(rule, storage="split"),
    "8 bits": lambda rule: mpx.master_weights(in_8_bits(rule, "mu"), storage="split"),
    "8 bits stochastic": lambda rule: mpx.master_weights(
        in_8_bits(rule, "[mn]u", rounding="stochastic", key=jax.random.key(1)),
        storage="split",
    ),
    "24 and 4 bits": lambda rule: mpx.master_weights(
        mpx.low_precision_state(
            rule, {"mu": mpx.Blockwise4bit(16)}, min_size=64, key=jax.random.key(1)
        ),
        storage="split24",
        key=jax.random.key(2),
    ),
    "kahan": lambda rule: optax.chain(mpx.upcast(rule), mpx.kahan_summation()),
    "stochastic": lambda rule: optax.chain(
        mpx.upcast(rule), mpx.stochastic_rounding(jax.random.key(0))
    ),
    "scaled": lambda rule: mpx.loss_scaling(mpx.master_weights(rule)),
}
every_rule = pytest.mark.parametrize(
    "name", cases(RULES, ["8 bits stochastic", "scaled", "kahan"])
)


def params():
    """Return leaves that are sharded along the first axis, along the second, and not at
    all.
    """
    return {
        "first": jnp.linspace(-1, 1, 16 * 48, dtype=jnp.bfloat16).reshape(16, 48),
        "second": jnp.linspace(1, 2, 5 * 128, dtype=jnp.float16).reshape(5, 128),
        "whole": jnp.ones((3, 5), jnp.bfloat16),
        "bias": jnp.linspace(-1, 1, 24, dtype=jnp.float32),
        "scalar": jnp.ones((), jnp.float32),
        "none": None,
    }


def gradients(step):
    """Return gradients that are the same on one device as on eight."""
    at = lambda p: np.sin(
        np.arange(p.size, dtype=np.float32) + np.float32(step)
    ).reshape(p.shape)
    return jax.tree.map(at, jax.eval_shape(params))


def stepped(tx, options):
    return jax.jit(stepper(tx), compiler_options=options)


def trained(tx, steps, start, options, place=lambda tree: tree):
    step = stepped(tx, options)
    now, state = start, tx.init(start)
    for i in range(steps):
        now, state = step(now, state, place(gradients(i)))
    return now, state


def replicated(mesh):
    return lambda tree: jax.device_put(tree, NamedSharding(mesh, P()))


in_float32 = pytest.mark.skipif(
    jax.config.jax_enable_x64,
    reason=(
        "Optax's adamw computes in float64 then; two programs differ in its last bits"
    ),
)


@in_float32
@pytest.mark.slow
@pytest.mark.parametrize("name", ["kahan", "8 bits stochastic", "scaled"])
def test_twenty_steps_on_eight_devices_have_the_bits_of_one(name):
    mesh = eight_cpu_devices()
    tx = RULES[name](ADAMW)
    expected = trained(tx, 20, params(), unfused())
    actual = trained(
        mpx.zero1(tx, mesh), 20, replicated(mesh)(params()), unfused(), replicated(mesh)
    )
    assert_same_bits(actual, expected)


@every_rule
def test_the_state_is_that_of_the_rule_without_it_and_each_device_holds_an_eighth(name):
    """Compare structure, shapes and dtypes: checkpoints fit with and without, on any
    number of devices.
    """
    mesh = eight_cpu_devices()
    start = {
        "w": jnp.ones((64, 256), jnp.bfloat16),
        "v": jnp.ones((3, 1024), jnp.bfloat16),
    }
    tx = RULES[name](ADAMW)
    types = lambda tree: jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree
    )
    state = mpx.zero1(tx, mesh).init(replicated(mesh)(start))
    assert types(state) == types(jax.eval_shape(tx.init, start))
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    on_first = sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays)
    # Scales of 3 x 64 blocks are sharded too; raw keys of 8 bytes are not: a state of
    # 24 and 4 bits has two.
    assert 0 < on_first <= sum(leaf.nbytes for leaf in arrays) / 8 + 16


@pytest.mark.parametrize(
    "name", cases(["8 bits", "scaled", "stochastic"], ["8 bits", "scaled"])
)
def test_a_step_compiles_once_and_keeps_every_sharding(name):
    mesh = eight_cpu_devices()
    tx = mpx.zero1(RULES[name](CLIPPED), mesh)
    now = replicated(mesh)(params())
    state = tx.init(now)
    step = stepped(tx, QUICKLY)
    before = jax.tree.map(lambda x: x.sharding.spec, (now, state))
    for i in range(3):
        now, state = step(now, state, replicated(mesh)(gradients(i)))
    assert jax.tree.map(lambda x: x.sharding.spec, (now, state)) == before
    assert step._cache_size() == 1


def test_an_abstract_state_gets_the_shardings_of_a_real_one():
    mesh = eight_cpu_devices()
    tx = RULES["8 bits"](CLIPPED)
    shapes = jax.eval_shape(params)
    shardings = mpx.zero1_shardings(shapes, jax.eval_shape(tx.init, shapes), mesh)
    state = mpx.zero1(tx, mesh).init(params())
    for leaf, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True
    ):
        # One of the same meaning but another name would compile a step again.
        assert leaf.sharding == sharding
    specs = {
        name: leaf.sharding.spec
        for name, leaf in state.master.items()
        if isinstance(leaf, jax.Array)
    }
    # No axis of `whole` can be divided.
    assert specs == {
        "first": P("data"),
        "second": P(None, "data"),
        "whole": P(),
    }


def test_no_device_ever_holds_a_whole_state():
    mesh = eight_cpu_devices()
    tx = mpx.zero1(mpx.master_weights(ADAMW), mesh)
    start = {"w": replicated(mesh)(jnp.ones((1024, 256), jnp.bfloat16))}
    memory = jax.jit(tx.init).lower(start).compile().memory_analysis()
    a_moment = 4 * 1024 * 256
    assert memory.output_size_in_bytes < 3 * a_moment / 8 + 1024
    assert memory.temp_size_in_bytes < a_moment / 8 + 1024


def two_axes():
    return jax.make_mesh(
        (4, 2),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices("cpu"),
    )


SPECS = {
    "first": P("model"),
    "second": P(None, "model"),
    "whole": P(),
    "bias": P(),
    "scalar": P(),
    "none": None,
}


@in_float32
def test_tensor_parallel_parameters_keep_their_sharding():
    mesh = two_axes()
    tx = mpx.master_weights(ADAMW)
    start = jax.tree.map(
        lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), params(), SPECS
    )
    now, state = trained(mpx.zero1(tx, mesh, param_specs=SPECS), 3, start, unfused())
    assert {name: p.sharding.spec for name, p in now.items() if p is not None} == {
        name: spec for name, spec in SPECS.items() if spec is not None
    }
    assert state.master["first"].sharding.spec == P(("model", "data"))
    # 5 rows cannot be divided by 4.
    assert state.master["second"].sharding.spec == P(None, ("model", "data"))
    assert state.master["whole"].sharding.spec == P()
    assert_same_bits((now, state), trained(tx, 3, params(), unfused()))


def test_an_axis_is_divided_only_if_what_a_device_has_of_it_is_a_multiple():
    """Of 12 rows over 2 devices each has 6, which 4 others cannot share: they share the
    columns.
    """
    mesh, params = (
        jax.sharding.AbstractMesh((4, 2), ("data", "model")),
        {"w": jax.ShapeDtypeStruct((12, 8), np.float32)},
    )
    shardings = mpx.zero1_shardings(
        params, optax.TraceState(params), mesh, param_specs=P("model")
    )
    assert shardings.trace["w"].spec == P("model", "data")


def test_one_spec_serves_all_parameters_below_it_and_those_that_are_sharded_otherwise_are_refused():
    mesh = two_axes()
    start = {"w": jnp.ones((8, 8), jnp.float32), "v": jnp.ones((8, 4), jnp.float32)}
    start = jax.device_put({"layer": start}, NamedSharding(mesh, P(None, "model")))
    state = mpx.zero1(ADAMW, mesh, param_specs={"layer": P(None, "model")}).init(start)
    assert optax.tree.get(state, "mu")["layer"]["v"].sharding.spec == P("data", "model")
    with pytest.raises(
        ValueError,
        match=r"'layer/v' is sharded as .*'model'.*but `param_specs` says P.*Give its",
    ):
        mpx.zero1(ADAMW, mesh).init(start)


ARRAYS = {"w": np.ones((8, 6), np.float32)}
STATE = optax.TraceState(ARRAYS)
OF_ALL = "but parameters are equal along 'data', which shards their optimizer state"
SPECS_OF_PARAMETERS = {
    "the axis": (P("data"), OF_ALL),
    "the axis, too": (P(("model", "data")), OF_ALL),
    "an axis that the mesh has not": (
        P("expert"),
        r"but the mesh has the axes \('data', 'model'\)",
    ),
    "too long": (P(None, None, "model"), r"which does not divide \[8, 6\] evenly"),
    "not evenly": (
        P(None, ("model", "other")),
        r"which does not divide \[8, 6\] evenly",
    ),
    "a sharding": (
        jax.sharding.SingleDeviceSharding,
        "is no `jax.sharding.PartitionSpec`",
    ),
    "a name": ("model", "'w': str is no `jax.sharding.PartitionSpec`"),
    "another tree": (
        {"v": P("model")},
        "is no prefix of the parameters. Give one `jax.sharding.PartitionSpec` for",
    ),
}


@pytest.mark.parametrize("case", SPECS_OF_PARAMETERS)
def test_specs_that_parameters_cannot_have_are_refused_by_all_that_take_them(case):
    specs, message = SPECS_OF_PARAMETERS[case]
    axes = {"data": 2, "model": 2} | ({"other": 2} if case == "not evenly" else {})
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    for call in (
        lambda: mpx.zero1_shardings(ARRAYS, STATE, mesh, param_specs=specs),
        lambda: mpx.zero1(optax.sgd(0.1), mesh, param_specs=specs).init(ARRAYS),
        lambda: mpx.memory_plan(ARRAYS, optax.sgd(0.1), mesh=mesh, param_specs=specs),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((STATE, ARRAYS, "mesh"), "takes the parameters first"),
        (
            (ADAMW, STATE, "mesh"),
            "needs the parameters, or their shapes, but got a tree of function",
        ),
        (
            (ARRAYS, STATE, P("data")),
            f"must be a jax.sharding.Mesh, but got {P.__name__}",
        ),
        (("mesh", ARRAYS, STATE), "must be a jax.sharding.Mesh, but got TraceState"),
    ],
)
def test_arguments_in_another_order_are_refused(arguments, message):
    mesh = eight_cpu_devices()
    with pytest.raises(TypeError, match=f"`zero1_shardings`.* {message}"):
        mpx.zero1_shardings(*(mesh if x == "mesh" else x for x in arguments))


def test_parameters_that_are_divided_along_the_axis_already_are_refused():
    """On explicit axes their types say so; on automatic ones nothing does."""
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices("cpu"))
    w = jax.device_put(ARRAYS["w"], NamedSharding(mesh, P("data")))
    with pytest.raises(
        ValueError, match=f"cannot be sharded as their types say.*\n  .*{OF_ALL}"
    ):
        mpx.zero1_shardings(w, optax.TraceState(w), mesh)


def model_loss(params, x):
    return jnp.mean((x @ params["w"]) @ params["v"])


def model_params():
    return {
        "w": jnp.full((64, 32), 0.5, jnp.bfloat16),
        "v": jnp.full((32, 16), 0.25, jnp.bfloat16),
    }


def transfers(text):
    """Return the collective operations of a compiled program, with the types of what
    they send.
    """
    found = re.findall(
        r"= \(?(.*?)\)?"
        r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(",
        text,
    )
    # No scalars.
    return sorted(
        (name, kind)
        for types, name in found
        for kind in re.findall(r"(\w+)\[\d", types)
    )


def program():
    mesh = eight_cpu_devices()
    tx = mpx.zero1(mpx.master_weights(ADAMW, storage="split"), mesh)
    loss_and_grads = mpx.value_and_grad(mpx.autocast(model_loss, "bf16"))

    def step(params, state, x):
        value, grads = loss_and_grads(params, x)
        return *stepper(tx)(params, state, grads), value

    start = replicated(mesh)(model_params())
    x = jax.device_put(jnp.ones((16, 64), jnp.float32), NamedSharding(mesh, P("data")))
    return jax.jit(step), (start, tx.init(start), x)


@pytest.mark.many_devices
def test_gradients_are_added_up_in_f32_and_parameters_are_gathered_in_16_bits():
    """A CPU's compiler adds up by all-reduces; on a GPU they are reduce-scatters
    (`tests/gpu_program`).
    """
    step, inputs = program()
    sent = set(transfers(step.lower(*inputs).compile().as_text()))
    assert sent == {("all-gather", "u16"), ("all-reduce", "f32")}


@pytest.mark.many_devices
def test_nan_on_one_device_skips_the_step_on_all():
    mesh = eight_cpu_devices()
    tx = mpx.zero1(RULES["scaled"](CLIPPED), mesh)
    start = replicated(mesh)(model_params())
    state = tx.init(start)
    gradients = mpx.value_and_grad(model_loss)

    step = jax.jit(
        lambda params, state, x: stepper(tx)(params, state, gradients(params, x)[1])
    )
    x = jnp.ones((16, 64), jnp.float32).at[7, 3].set(jnp.nan)
    now, new_state = step(
        start, state, jax.device_put(x, NamedSharding(mesh, P("data")))
    )
    assert_same_bits(now, start)
    assert_same_bits(new_state.inner_state, state.inner_state)
    assert int(new_state.skipped_steps) == 1


def test_inside_shard_map_it_is_refused():
    mesh = eight_cpu_devices()
    tx, shapes = mpx.zero1(ADAMW, mesh), {"w": jnp.ones(16, jnp.float32)}
    step = lambda params: tx.update(params, tx.init(params), params)[0]
    with pytest.raises(
        ValueError,
        match=r"`zero1`: this is inside `jax.shard_map` over 'data'.* under `jax.jit`",
    ):
        jax.eval_shape(
            jax.shard_map(
                step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
            ),
            shapes,
        )
    both = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(
        ValueError, match=r"`zero1`: this is inside `jax.shard_map` over 'model'"
    ):
        jax.eval_shape(
            jax.shard_map(
                step, mesh=both, in_specs=P(), out_specs=P(), axis_names={"model"}
            ),
            shapes,
        )


def test_what_is_no_mesh_an_axis_that_it_has_not_and_an_update_without_parameters_are_refused():
    with pytest.raises(
        ValueError,
        match=r"the mesh has the axes \('data',\), and none is called 'batch'",
    ):
        mpx.zero1(ADAMW, eight_cpu_devices(), "batch")
    with pytest.raises(
        TypeError, match=r"`mesh` must be a jax.sharding.Mesh, but got str"
    ):
        mpx.zero1(ADAMW, "data")
    tx = mpx.zero1(optax.sgd(1.0), eight_cpu_devices())
    with pytest.raises(ValueError, match="`zero1`"):
        tx.update(
            {"w": jnp.ones(8, jnp.float32)}, tx.init({"w": jnp.ones(8, jnp.float32)})
        )


def test_check_chain_finds_what_changes_updates_after_or_inside_it_and_nothing_wrong_with_it():
    halve, divided = optax.scale(0.5), lambda tx: mpx.zero1(tx, eight_cpu_devices())
    masters = mpx.master_weights(ADAMW)
    for rule in ("split", "kahan", "scaled"):
        mpx.check_chain(divided(RULES[rule](CLIPPED)))
    for tx, author in [
        (optax.chain(divided(masters), halve), "zero1"),
        (divided(optax.chain(masters, halve)), "master"),
        (optax.chain(divided(mpx.upcast(ADAMW)), halve), "zero1"),
    ]:
        with pytest.raises(
            ValueError,
            match=rf"was final when `{author}.* had rounded it, but `mul` changes it",
        ):
            mpx.check_chain(tx)
