"""Check that each of several devices runs kernels on what it has of the arrays, with
the bits of one device.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx._fused import fused_update
from tests.fused.helpers import plain_step
from tests.helpers import (
    all_eqns,
    assert_same_bits,
    cases,
    eight_cpu_devices,
    on_an_absent_gpu,
    unfused,
)

pytestmark = pytest.mark.optax_promotion


@pytest.fixture(scope="module")
def mesh():
    return eight_cpu_devices()


def with_8_bit_moments(mesh=None):
    """Return a rule with one moment, whose programs compile in half the time of Adam's."""
    momentum = mpx.low_precision_state(
        optax.sgd(1e-2, momentum=0.9), {"trace": mpx.Blockwise8bit()}
    )
    tx = mpx.mixed_precision(momentum, "params=bf16,compute=bf16")
    return mpx.zero1(tx, mesh) if mesh else tx


def placed(tree, mesh, spec):
    """Return a tree whose matrices are divided among devices."""
    put = lambda x: jax.device_put(
        x, NamedSharding(mesh, spec if jnp.ndim(x) == 2 else P())
    )
    return jax.tree.map(put, tree)


def parameters(shapes):
    key = jax.random.key(0)
    params = {
        name: jax.random.normal(key, shape).astype(jnp.bfloat16)
        for name, shape in shapes.items()
    }
    return params, jax.tree.map(lambda p: p * jnp.bfloat16(0.1), params)


def compiled(step, *args):
    return jax.jit(step).lower(*args).compile(unfused())


def both_steps(tx):
    """Return a function that takes a plain step and one of kernels, and gives the
    results of both.
    """
    steps = plain_step(tx), mpx.fused_update(tx, interpret=True)
    return lambda *args: [step(*args) for step in steps]


def assert_same_steps(tx, grads, state, params):
    """Raise unless kernels give the bits of a plain step; return the program of both."""
    program = compiled(both_steps(tx), grads, state, params)
    expected, actual = program(grads, state, params)
    assert_same_bits(actual, expected)
    return program


def results_are_divided_alike(program):
    expected, actual = jax.tree.map(
        lambda sharding: sharding.spec, program.output_shardings
    )
    return actual == expected


def sent(program):
    """Return what devices send each other in a plain step and in one of kernels,
    together.
    """
    return re.findall(
        r" (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(",
        program.as_text(),
    )


SPECS = {"replicated": P(), "rows": P("data"), "columns": P(None, "data")}
every_spec = pytest.mark.parametrize("name", cases(SPECS, {"rows"}))


@every_spec
def test_each_device_runs_a_kernel_on_its_part_and_sends_nothing(mesh, name):
    spec = SPECS[name]
    tx, (params, grads) = (
        with_8_bit_moments(),
        placed(parameters({"w": (16, 2048)}), mesh, spec),
    )
    program = assert_same_steps(tx, grads, placed(tx.init(params), mesh, spec), params)
    assert sent(program) == []
    assert results_are_divided_alike(program)
    rows = 16 * 2048 // 256 // (1 if spec == P() else 8)
    # What the kernel writes on each device.
    assert f"s8[{rows},256]" in program.as_text()


def test_with_zero1_kernels_run_between_the_placements(mesh):
    tx, (params, grads) = (
        with_8_bit_moments(mesh),
        placed(parameters({"w": (16, 2048)}), mesh, P()),
    )
    program = assert_same_steps(tx, grads, tx.init(params), params)
    assert sent(program) == ["all-gather"] * 2  # one of each step
    assert results_are_divided_alike(program)
    assert "s8[16,256]" in program.as_text()


def test_blocks_that_reach_over_devices_are_gathered_and_computed_rightly(mesh):
    """Rows of 256 elements are a block each, and a device has 32 elements of them."""
    tx, (params, grads) = (
        with_8_bit_moments(),
        placed(parameters({"w": (16, 256)}), mesh, P(None, "data")),
    )
    assert_same_steps(tx, grads, placed(tx.init(params), mesh, P()), params)


# Inside of `jax.shard_map`.


def on_shards(step, mesh, state, spec, check_vma=False, copies=None):
    """Return a step in `jax.shard_map`, or a list of steps, with gradients of all
    devices side by side.
    """
    specs = jax.tree.map(lambda x: x.sharding.spec, state)
    own = lambda grads, state, params: step(
        jax.tree.map(lambda g: g[0], grads), state, params
    )
    in_specs, out_specs = (
        (P("data"), specs, spec),
        ((spec, specs) if copies is None else [(spec, specs)] * copies),
    )
    return jax.shard_map(
        own, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


def shards(tx, mesh, spec, shapes):
    """Return gradients of all devices, a state and parameters."""
    params, _ = placed(parameters(shapes), mesh, spec)
    _, grads = parameters(
        {name: (8, *p.sharding.shard_shape(p.shape)) for name, p in params.items()}
    )
    return grads, tx.init(params), params


def test_kernels_run_inside_of_shard_map(mesh):
    tx, spec = with_8_bit_moments(), P("data")
    grads, state, params = shards(tx, mesh, spec, {"w": (16, 2048)})
    state = placed(state, mesh, spec)
    both = on_shards(both_steps(tx), mesh, state, spec, copies=2)
    assert "pallas_call" in {
        eqn.primitive.name
        for eqn in all_eqns(jax.make_jaxpr(both)(grads, state, params))
    }
    expected, actual = compiled(both, grads, state, params)(grads, state, params)
    assert_same_bits(actual, expected)


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11),
    reason=(
        "a mesh of CPUs names no GPU to lower for; an abstract mesh with an"
        " `AbstractDevice` would lift it"
    ),
)
@pytest.mark.parametrize("check_vma", [False, True])
def test_kernels_for_a_gpu_have_types_that_shard_map_can_check(
    mesh, check_vma, monkeypatch
):
    """JAX itself interprets kernels in `jax.shard_map` only without this check."""
    monkeypatch.setattr(fused_update, "may_run_kernels", lambda interpret: True)
    tx, spec = with_8_bit_moments(), P("data")
    grads, state, params = shards(tx, mesh, spec, {"w": (16, 2048)})
    step = on_shards(
        mpx.fused_update(tx), mesh, placed(state, mesh, spec), spec, check_vma
    )
    with on_an_absent_gpu():
        traced = jax.jit(step).trace(grads, state, params)
    assert "mpx_fused_update" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_mesh_that_is_manual_in_part_is_left_to_xla():
    mesh = jax.make_mesh(
        (4, 2),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices("cpu"),
    )
    found = []

    @jax.shard_map(
        mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    def step(x):
        found.append(fused_update.may_run_kernels(interpret=True))
        return x

    jax.eval_shape(jax.jit(step), jnp.zeros(8))
    assert found[-1] is False
