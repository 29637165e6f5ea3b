"""A state format that mpx has never seen is one class: it works everywhere without another line.

The format: 16 bits an element and one exponent a row. A row is divided by a power of two above its largest magnitude,
and each quotient is kept in steps of 2**-15.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import PartitionSpec

import mpx
from tests.helpers import assert_same_bits, eight_cpu_devices

pytestmark = pytest.mark.optax_promotion

BF16 = mpx.get_policy("params=bf16,compute=bf16,output=f32")


@dataclasses.dataclass(frozen=True)
class RowExponent(mpx.StateFormat):
    steps: int = 2**15

    def scales_of(self, x):
        return jnp.frexp(jnp.max(jnp.abs(x), axis=-1, keepdims=True))[1].astype(jnp.int8)

    def encode(self, x, scales, key=None):
        scaled = jnp.ldexp(x, -scales.astype(jnp.int32)) * self.steps
        return jnp.clip(jnp.round(scaled), -self.steps, self.steps - 1).astype(jnp.int16)

    def decode(self, codes, scales):
        return jnp.ldexp(codes.astype(jnp.float32) / self.steps, scales.astype(jnp.int32))

    def refuses(self, role):
        return "are second moments, too small for steps." if role == "second moment" else None


def start():
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(16, 8)), jnp.bfloat16), "b": jnp.ones(8, jnp.bfloat16)}


def recipe(**options):
    moments = mpx.low_precision_state(optax.adam(1e-2), {"mu": RowExponent()}, min_size=64, **options)
    return mpx.master_weights(moments, storage="split")


def step(carry, grads, tx):
    params, state = carry
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def gradients(steps):
    rng = np.random.default_rng(1)
    return {"w": jnp.asarray(rng.normal(size=(steps, 16, 8)), jnp.float32), "b": jnp.ones((steps, 8), jnp.float32)}


def trained(tx, steps=4):
    carry = start(), tx.init(start())
    return jax.jit(lambda carry: jax.lax.scan(lambda c, g: (step(c, g, tx), None), carry, gradients(steps))[0])(carry)


def test_it_is_trained_in_a_scan_and_comes_near_the_float32_state():
    params, state = trained(recipe())
    plain_params, plain = trained(mpx.master_weights(optax.adam(1e-2), storage="split"))
    (codes, scales), expected = _mu(state), optax.tree.get(plain, "mu")["w"]
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (np.int16, (16, 8), np.int8, (16, 1))
    decoded = RowExponent().decode(codes, scales)
    np.testing.assert_allclose(decoded, expected, atol=4 * 2**-15 * float(jnp.abs(expected).max()))
    assert (np.asarray(decoded) != np.asarray(expected)).any()
    masters = [mpx.master_params(*training)["w"] for training in ((params, state), (plain_params, plain))]
    np.testing.assert_allclose(*masters, atol=1e-3)


def _mu(state):
    (scales,) = state.inner_state.block_scales.values()
    return optax.tree.get(state, "mu")["w"], scales


def test_leaves_that_it_refuses_are_refused_with_its_reason():
    with pytest.raises(ValueError, match=r"'0/nu/w': float32\[16, 8\](.|\n)*second moments, too small for steps"):
        mpx.low_precision_state(optax.adam(1e-2), {"nu": RowExponent()}, min_size=64).init(start())


@pytest.mark.parametrize("target", ["bf16", mpx.Blockwise8bit(16), None], ids=str)
def test_a_training_run_moves_to_another_format_and_back(target):
    params, state = trained(recipe())
    inner = optax.adam(1e-2)
    inner = inner if target is None else mpx.low_precision_state(inner, {"mu": target}, min_size=64)
    other = mpx.master_weights(inner, storage="split")
    there = mpx.convert_state(params, state, recipe(), other)
    back = mpx.convert_state(*there, other, recipe())
    assert jax.tree.structure(back) == jax.tree.structure((params, state))
    if target is None:  # float32 holds it, so that it comes back to the bit
        assert_same_bits(back, (params, state))
    assert_same_bits(mpx.convert_state(params, state, recipe(), recipe()), (params, state))


def test_its_rows_are_sharded_by_zero1():
    mesh = eight_cpu_devices()
    tx = mpx.zero1(recipe(), mesh)
    state = tx.init(start())
    codes, exponents = _mu(state)
    assert codes.sharding.spec == exponents.sharding.spec == PartitionSpec("data")
    run = jax.jit(lambda params, state, grads: step((params, state), grads, tx))
    grads = jax.tree.map(lambda g: g[0], gradients(1))
    params, state = run(start(), state, grads)
    alone = jax.jit(lambda params, state: step((params, state), grads, recipe()))(start(), recipe().init(start()))
    assert_same_bits(jax.device_get((params, _mu(state))), jax.device_get((alone[0], _mu(alone[1]))))


def test_rows_that_reach_over_devices_are_refused_inside_shard_map():
    """Each device would have another exponent for the same row."""
    mesh, params = eight_cpu_devices(), {"w": jnp.ones((3, 64), jnp.bfloat16)}
    tx = mpx.zero1(recipe(), mesh)
    state = tx.init(params)
    specs = jax.tree.map(lambda s: s.spec, mpx.zero1_shardings(params, state, mesh))
    update = jax.shard_map(
        lambda g, s, p: tx.update(g, s, p), mesh=mesh, in_specs=(PartitionSpec(), specs, PartitionSpec()),
        out_specs=(PartitionSpec(), specs), check_vma=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"its scales as .*: blocks would reach over several devices"):
        update({"w": jnp.ones((3, 64))}, state, params)


def test_a_rule_computes_in_float32_whatever_decode_returns():
    @dataclasses.dataclass(frozen=True)
    class Narrow(RowExponent):
        def decode(self, codes, scales):
            return super().decode(codes, scales).astype(jnp.bfloat16)

    tx = mpx.low_precision_state(optax.trace(0.9), {"trace": Narrow()}, min_size=64)
    _, state = tx.update(start(), tx.init(start()), start())
    assert tx.update(start(), state, start())[0]["w"].dtype == np.float32
    mpx.memory_plan(start(), tx, BF16)  # the name of a class inside of a function can be read


@pytest.mark.parametrize("scales", [None, 0])
def test_what_a_format_returns_is_checked(scales):
    @dataclasses.dataclass(frozen=True)
    class Broken(RowExponent):
        scales: int | None = None

        def scales_of(self, x):
            return None if self.scales is None else super().scales_of(x)

        def encode(self, x, scales, key=None):
            return x.astype(jnp.int16) if scales is None else super().encode(x, scales, key)[:1]

    with pytest.raises(TypeError, match=r"`Broken.encode` must return codes in the shape of its argument, and"):
        mpx.low_precision_state(optax.trace(0.9), {"trace": Broken(scales=scales)}, min_size=64).init(start())


def test_a_format_that_a_state_could_not_name_and_a_second_one_of_its_name_are_refused():
    class Nameless(RowExponent):
        def __init__(self, function):
            self.function = function

        __hash__ = None

    with pytest.raises(TypeError, match="must be a frozen dataclass whose fields are Python numbers"):
        mpx.low_precision_state(optax.trace(0.9), {"trace": Nameless(print)})
    with pytest.raises(TypeError, match="A `StateFormat` called 'Blockwise8bit' is defined in mpx"):
        type("Blockwise8bit", (mpx.StateFormat,), {})


def test_its_bytes_are_in_the_memory_plan():
    plan = mpx.memory_plan(start(), recipe(), BF16)
    state = recipe().init(start())
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert plan.state_bytes == held
    rows = {row.name: row for row in plan.rows}
    assert (rows["block_scales"].kind, rows["block_scales"].bytes) == ("scales of blocks", 16)


def test_orbax_saves_and_restores_it(tmp_path):
    _, state = trained(recipe())
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: state))
    assert_same_bits(restored, state)


def test_a_state_in_a_format_that_is_not_defined_says_so():
    _, state = trained(recipe())
    ((name, scales),) = state.inner_state.block_scales.items()
    inner = state.inner_state._replace(block_scales={name.replace("RowExponent", "Unknown"): scales})
    with pytest.raises(ValueError, match=r"format 'Unknown', which is not defined here\. Import the module"):
        mpx.master_params(start(), state._replace(inner_state=inner))
