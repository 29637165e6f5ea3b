"""A state format that mpx has never seen is one class: it works everywhere without
another line.

The format: two codes of 4 bits a byte, and one scale a row. A code is a number from -7
to 7, in sevenths of the largest magnitude of its row. So codes have another shape than
the array.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import mpx
from mpx.states import StoredLeaf
from tests.helpers import assert_same_bits, eight_cpu_devices, stepper

pytestmark = pytest.mark.optax_promotion

BF16 = mpx.get_policy("params=bf16,compute=bf16,output=f32")


@dataclasses.dataclass(frozen=True)
class Packed4bit(mpx.StateFormat):
    top: int = 7

    def encode(self, x, key=None):
        scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / self.top
        places = jnp.where(scales > 0, x / jnp.where(scales > 0, scales, 1), 0)
        pairs = (jnp.round(places) + 8).astype(jnp.uint8).reshape(*x.shape[:-1], -1, 2)
        return jnp.sum(pairs << place_in_byte(pairs), axis=-1, dtype=jnp.uint8), scales

    def decode(self, codes, scales):
        pairs = jnp.broadcast_to(codes[..., None], (*codes.shape, 2))
        codes = (pairs >> place_in_byte(pairs) & 15).reshape(*codes.shape[:-1], -1)
        return (codes.astype(jnp.float32) - 8) * scales

    def why_unsuitable(self, role, shape):
        if role == "second moment":
            return "are second moments, too small for steps."
        return "have rows of odd length." if shape[-1] % 2 else None


class Sliced4bit(Packed4bit):
    """The same codes, by slices, which no kernel has."""

    def encode(self, x, key=None):
        codes, scales = super().encode(x)
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1)
        return codes[..., 0] | (codes[..., 1] << 4), scales


def place_in_byte(pairs):
    return 4 * jax.lax.broadcasted_iota(jnp.uint8, pairs.shape, pairs.ndim - 1)


def start():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(16, 256)), jnp.bfloat16),
        "b": jnp.ones(8, jnp.bfloat16),
    }


def recipe(format=None):
    moments = mpx.low_precision_state(
        optax.adam(1e-2), {"mu": format or Packed4bit()}, min_size=64
    )
    return mpx.master_weights(moments, storage="split")


def gradients(steps):
    rng = np.random.default_rng(1)
    return {
        "w": jnp.asarray(rng.normal(size=(steps, 16, 256)), jnp.float32),
        "b": jnp.ones((steps, 8), jnp.float32),
    }


def trained(tx, steps=4):
    step = lambda carry, grads: (stepper(tx)(*carry, grads), None)
    return jax.jit(lambda carry: jax.lax.scan(step, carry, gradients(steps))[0])(
        (start(), tx.init(start()))
    )


def first_moment(state):
    return optax.tree.get(state, "mu")["w"]


def test_it_is_trained_in_a_scan_and_stays_near_the_float32_state():
    _, state = trained(recipe(), steps=1)
    _, plain = trained(mpx.master_weights(optax.adam(1e-2), storage="split"), steps=1)
    kept, expected = first_moment(state), optax.tree.get(plain, "mu")["w"]
    assert isinstance(kept, StoredLeaf)
    assert (kept.codes.dtype, kept.codes.shape, kept.scales.shape) == (
        np.uint8,
        (16, 128),
        (16, 1),
    )
    assert kept.shape == (16, 256)
    half_a_step = np.abs(expected).max(axis=1, keepdims=True) / 14
    assert (np.abs(kept.decode() - expected) <= 1.001 * half_a_step).all()
    # Negative control: it is rounded.
    assert np.abs(kept.decode() - expected).max() > 0.5 * half_a_step.min()


def test_leaves_that_it_refuses_are_refused_with_its_reason():
    with pytest.raises(
        ValueError,
        match=r"second moments, too small for steps(.|\n)*'0/nu/w': float32\[16, 256\]",
    ):
        mpx.low_precision_state(
            optax.adam(1e-2), {"nu": Packed4bit()}, min_size=64
        ).init(start())
    with pytest.raises(
        ValueError,
        match=r"These leaves have rows of odd length.\n *'0/mu/w': float32\[8, 25\]",
    ):
        # But the bias is small, and is not kept so.
        recipe().init({"w": jnp.ones((8, 25)), "b": jnp.ones(25)})


def test_a_leaf_that_it_cannot_hold_and_does_not_refuse_is_named():
    class Thirds(Packed4bit):
        def encode(self, x, key=None):
            return super().encode(x.reshape(-1, 3))

    with pytest.raises(
        TypeError,
        match=(
            r"cannot reshape (.|\n)*does not hold the leaf '0/mu/w', float32\[16, 256\]"
        ),
    ):
        recipe(Thirds()).init(start())


@pytest.mark.parametrize("target", ["bf16", mpx.Blockwise8bit(16), None], ids=str)
def test_a_training_run_moves_to_another_format_and_back(target):
    params, state = trained(recipe())
    inner = optax.adam(1e-2)
    inner = (
        inner
        if target is None
        else mpx.low_precision_state(inner, {"mu": target}, min_size=64)
    )
    other = mpx.master_weights(inner, storage="split")
    there = mpx.convert_state(params, state, recipe(), other)
    back = mpx.convert_state(*there, other, recipe())
    assert jax.tree.structure(back) == jax.tree.structure((params, state))
    if target is None:  # float32 holds it, so that its codes come back to the bit
        assert_same_bits(first_moment(back[1]).codes, first_moment(state).codes)
    assert_same_bits(
        mpx.convert_state(params, state, recipe(), recipe()), (params, state)
    )


def test_a_fused_update_gives_the_same_bits_in_a_kernel():
    where = lambda format: {
        row.path: row.runs
        for row in mpx.fused_update(recipe(format)).plan(start()).rows
    }
    assert where(Packed4bit()) == {"b": "XLA", "w": "a kernel"}
    assert where(Sliced4bit()) == {"b": "XLA", "w": "XLA"}  # negative control
    params, state, grads = (
        start(),
        recipe().init(start()),
        jax.tree.map(lambda g: g[0], gradients(1)),
    )
    fused = jax.jit(
        lambda g, s, p: mpx.fused_update(recipe(), interpret=True)(g, s, p)
    )(grads, state, params)
    assert_same_bits(fused, jax.jit(stepper(recipe()))(params, state, grads))


def test_its_rows_are_sharded_by_zero1_over_8_devices():
    mesh = eight_cpu_devices()
    tx = mpx.zero1(recipe(), mesh)
    state = tx.init(start())
    codes, scales = jax.tree.leaves(first_moment(state))
    assert codes.sharding.spec == scales.sharding.spec == PartitionSpec("data")
    grads = jax.tree.map(lambda g: g[0], gradients(1))
    params, state = jax.jit(stepper(tx))(start(), state, grads)
    alone = jax.jit(stepper(recipe()))(start(), recipe().init(start()), grads)
    assert_same_bits(
        jax.device_get((params, first_moment(state))),
        jax.device_get((alone[0], first_moment(alone[1]))),
    )


def test_a_rule_computes_in_float32_whatever_decode_returns():
    @dataclasses.dataclass(frozen=True)
    class Narrow(Packed4bit):
        def decode(self, codes, scales):
            return super().decode(codes, scales).astype(jnp.bfloat16)

    tx = mpx.low_precision_state(optax.trace(0.9), {"trace": Narrow()}, min_size=64)
    _, state = tx.update(start(), tx.init(start()), start())
    assert tx.update(start(), state, start())[0]["w"].dtype == np.float32


def test_a_decode_that_returns_another_shape_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Broken(Packed4bit):
        def decode(self, codes, scales):
            return super().decode(codes, scales)[..., :-1]

    with pytest.raises(
        TypeError,
        match=(
            r"`Broken.decode` must return the shape .*float32\[16, 256\].*\[16, 255\]"
        ),
    ):
        mpx.low_precision_state(
            optax.trace(0.9), {"trace": Broken()}, min_size=64
        ).init(start())


def test_a_format_that_cannot_be_hashed_is_refused():
    class Mutable(Packed4bit):
        __hash__ = None

    with pytest.raises(
        TypeError, match="must be a frozen dataclass whose fields can be hashed"
    ):
        mpx.low_precision_state(optax.trace(0.9), {"trace": Mutable()})


def test_its_half_byte_an_element_is_in_the_memory_plan():
    plan = mpx.memory_plan(start(), recipe(), BF16)
    assert plan.state_bytes == sum(
        leaf.nbytes for leaf in jax.tree.leaves(recipe().init(start()))
    )
    rows = {row.name: row for row in plan.rows}
    assert rows["mu"].bytes == 16 * 256 // 2 + 8 * 4  # the bias stays in float32
    assert (rows["scales"].kind, rows["scales"].bytes) == ("scales of blocks", 16 * 4)


def test_codes_that_are_floats_in_the_shape_of_the_array_are_decoded():
    @dataclasses.dataclass(frozen=True)
    class Roots(mpx.StateFormat):
        def encode(self, x, key=None):
            return (jnp.sign(x) * jnp.sqrt(jnp.abs(x))).astype(jnp.bfloat16), None

        def decode(self, codes, scales):
            wide = codes.astype(jnp.float32)
            return wide * jnp.abs(wide)

    tx = mpx.low_precision_state(optax.trace(0.9), {"trace": Roots()}, min_size=64)
    grads = {"w": jnp.full((16, 16), 0.01)}
    _, state = tx.update(grads, tx.init(grads), grads)
    updates, _ = tx.update(grads, state, grads)
    np.testing.assert_allclose(updates["w"], 0.019, rtol=2e-2)
