"""Check that each of several devices runs kernels on what it has of the arrays, with the bits of one device."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from tests.fused.helpers import plain_step
from tests.helpers import assert_same_bits, eight_cpu_devices, unfused

pytestmark = pytest.mark.optax_promotion


@pytest.fixture(scope="module")
def mesh():
    return eight_cpu_devices()


def with_8_bit_moments(mesh=None):
    moments = dict.fromkeys(["mu", "nu"], mpx.Blockwise8bit())
    tx = mpx.mixed_precision(mpx.low_precision_state(optax.adamw(1e-2), moments), "params=bf16,compute=bf16")
    return mpx.zero1(tx, mesh) if mesh else tx


def placed(tree, mesh, spec):
    """Return a tree whose matrices are divided among devices."""
    put = lambda x: jax.device_put(x, NamedSharding(mesh, spec if jnp.ndim(x) == 2 else P()))
    return jax.tree.map(put, tree)


def parameters(shapes):
    key = jax.random.key(0)
    params = {name: jax.random.normal(key, shape).astype(jnp.bfloat16) for name, shape in shapes.items()}
    return params, jax.tree.map(lambda p: p * jnp.bfloat16(0.1), params)


def compiled(step, *args):
    return jax.jit(step).lower(*args).compile(unfused())


def assert_same_steps(tx, grads, state, params):
    """Raise unless kernels give the bits of a plain step, both in one program; return a program of each alone."""
    steps = plain_step(tx), mpx.fused_update(tx, interpret=True)
    expected, actual = compiled(lambda *args: [step(*args) for step in steps], grads, state, params)(
        grads, state, params
    )
    assert_same_bits(actual, expected)
    return [compiled(step, grads, state, params) for step in steps]


def sent(program):
    names = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    return sorted(re.findall(rf"= (.*) ({names})(?:-start)?\(", program.as_text()))


def specs(program):
    return [sharding.spec for sharding in jax.tree.leaves(program.output_shardings)]


SPECS = {"replicated": P(), "rows": P("data"), "columns": P(None, "data")}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_device_runs_a_kernel_on_its_part_and_sends_nothing(mesh, spec):
    tx, (params, grads) = with_8_bit_moments(), placed(parameters({"w": (16, 2048)}), mesh, spec)
    plain, fused = assert_same_steps(tx, grads, placed(tx.init(params), mesh, spec), params)
    assert sent(fused) == sent(plain) == []
    assert specs(fused) == specs(plain)
    rows = 16 * 2048 // 256 // (1 if spec == P() else 8)
    assert f"u8[{rows},256]" in fused.as_text()  # what the kernel writes on each device


def test_with_zero1_kernels_run_between_the_placements(mesh):
    tx, (params, grads) = with_8_bit_moments(mesh), placed(parameters({"w": (16, 2048)}), mesh, P())
    plain, fused = assert_same_steps(tx, grads, tx.init(params), params)
    assert sent(fused) == sent(plain)
    assert [operation for _, operation in sent(fused)] == ["all-gather"]
    assert specs(fused) == specs(plain)
    assert "u8[16,256]" in fused.as_text()


def test_blocks_that_reach_over_devices_are_gathered_and_computed_rightly(mesh):
    """Rows of 256 elements are a block each, and a device has 32 elements of them."""
    tx, (params, grads) = with_8_bit_moments(), placed(parameters({"w": (16, 256)}), mesh, P(None, "data"))
    assert_same_steps(tx, grads, placed(tx.init(params), mesh, P()), params)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_small_leaves_need_no_kernel_where_they_are_divided(mesh, spec):
    tx = optax.adam(1e-2)
    params, grads = placed(parameters({"a": (8, 128), "b": (16, 256)}), mesh, spec)
    plain, fused = assert_same_steps(tx, grads, placed(tx.init(params), mesh, spec), params)
    assert sent(fused) == sent(plain) == []
    assert specs(fused) == specs(plain)


def test_two_axes_of_a_mesh_divide_a_matrix():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu"))
    spec = P("data", "model")
    tx, (params, grads) = with_8_bit_moments(), placed(parameters({"w": (16, 512)}), mesh, spec)
    plain, fused = assert_same_steps(tx, grads, placed(tx.init(params), mesh, spec), params)
    assert sent(fused) == sent(plain) == []
    assert "u8[4,256]" in fused.as_text()


def test_a_step_may_be_mapped_over_models():
    tx, (params, grads) = with_8_bit_moments(), parameters({"w": (3, 16, 256)})
    state = jax.vmap(tx.init)(params)
    steps = [jax.vmap(step) for step in (plain_step(tx), mpx.fused_update(tx, interpret=True))]
    expected, actual = compiled(lambda *args: [step(*args) for step in steps], grads, state, params)(
        grads, state, params
    )
    assert_same_bits(actual, expected)
