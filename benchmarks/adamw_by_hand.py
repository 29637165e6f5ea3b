"""One AdamW step by hand in plain `jax.numpy`, tensor by tensor, for
`benchmarks.optimizer_step` to compare with.

What is kept beside a parameter is its master, its master's low bits, its compensation,
or nothing. Moments are float32, bfloat16, or in the 8-bit codec of mpx, which alone is
shared. There are no guards against NaN, overflow and weights edited from outside, which
mpx has.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mpx._stored.blockwise import Blockwise8bit

# As in `optax.adamw`.
LEARNING_RATE, B1, B2, EPS, WEIGHT_DECAY = (
    1e-3,
    0.9,
    0.999,
    1e-8,
    1e-4,
)
BLOCK_SIZE = 256  # as in `Blockwise8bit`
MIN_SIZE = 4096  # as in `low_precision_state`


class BlockwiseArray(NamedTuple):
    """A moment in 8 bits: its codes, and the scale of each block."""

    codes: jax.Array
    scale: jax.Array


class ByHand(NamedTuple):
    """What a training loop written by hand keeps: four dictionaries of tensors by name,
    and the number of steps.
    """

    params: dict[str, jax.Array]
    beside: dict[str, jax.Array | None]
    mu: dict[str, Any]
    nu: dict[str, Any]
    count: jax.Array


def adamw(
    g: jax.Array, weight: jax.Array, mu: Any, nu: Any, corrections: tuple
) -> tuple[jax.Array, Any, Any]:
    """Return the update of a float32 weight, and the new moments in the format of the
    old ones.
    """
    g = g.astype(jnp.float32)
    m = (1 - B1) * g + B1 * loaded(mu, signed=True)
    v = (1 - B2) * (g * g) + B2 * loaded(nu, signed=False)
    # With 64-bit types they are float64, as in Optax.
    first, second = (x.astype(jnp.float32) for x in corrections)
    direction = (m / first) / (jnp.sqrt(v / second) + EPS)
    update = -LEARNING_RATE * (direction + WEIGHT_DECAY * weight)
    return update, stored(m, mu, signed=True), stored(v, nu, signed=False)


def coded_zeros(p: jax.Array, signed: bool) -> Any:
    """Return a moment to start with, in 8 bits; small tensors stay float32."""
    zeros = jnp.zeros_like(p, jnp.float32)
    return (
        zeros
        if p.size < MIN_SIZE
        else BlockwiseArray(*Blockwise8bit(BLOCK_SIZE, signed).encode(zeros))
    )


def loaded(moment: Any, signed: bool) -> jax.Array:
    """Return a moment in float32."""
    if isinstance(moment, BlockwiseArray):
        return Blockwise8bit(BLOCK_SIZE, signed).decode(*moment)
    return moment.astype(jnp.float32)


def stored(moment: jax.Array, old: Any, signed: bool) -> Any:
    """Return a moment in the format of the old one."""
    if isinstance(old, BlockwiseArray):
        return BlockwiseArray(*Blockwise8bit(BLOCK_SIZE, signed).encode(moment))
    return moment.astype(old.dtype)


def plain_step(
    g: jax.Array, p: jax.Array, beside: None, mu: Any, nu: Any, corrections: tuple
) -> tuple:
    """Step a float32 parameter."""
    update, mu, nu = adamw(g, p, mu, nu, corrections)
    return p + update, beside, mu, nu


def full_step(
    g: jax.Array, p: jax.Array, master: jax.Array, mu: Any, nu: Any, corrections: tuple
) -> tuple:
    """Step a parameter with a float32 master."""
    update, mu, nu = adamw(g, master, mu, nu, corrections)
    master = master + update
    return master.astype(p.dtype), master, mu, nu


def split_step(
    g: jax.Array, p: jax.Array, low: jax.Array, mu: Any, nu: Any, corrections: tuple
) -> tuple:
    """Step a bfloat16 parameter with the 16 low bits of its master."""
    master = joined(p, low)
    update, mu, nu = adamw(g, master, mu, nu, corrections)
    bits = lax.bitcast_convert_type(master + update, jnp.uint32)
    # Rounded to nearest, ties away from zero.
    high = ((bits + 0x8000) >> 16).astype(jnp.uint16)
    # Chosen, so that they are integers: the assembler of CUDA 13.0 stores low bits of a
    # float32 register as a number.
    low = jnp.where(jnp.isnan(master), jnp.uint32(0), bits).astype(jnp.uint16)
    return lax.bitcast_convert_type(high, jnp.bfloat16), low, mu, nu


def joined(p: jax.Array, low: jax.Array) -> jax.Array:
    """Return the float32 master of a bfloat16 parameter; where it was rounded up, one
    is taken back.
    """
    high = lax.bitcast_convert_type(p, jnp.uint16) - (low >> 15)
    return lax.bitcast_convert_type(
        high.astype(jnp.uint32) << 16 | low.astype(jnp.uint32), jnp.float32
    )


def kahan_step(
    g: jax.Array,
    p: jax.Array,
    compensation: jax.Array,
    mu: Any,
    nu: Any,
    corrections: tuple,
) -> tuple:
    """Step a bfloat16 parameter with a bfloat16 compensation."""
    wide = p.astype(jnp.float32)
    update, mu, nu = adamw(g, wide, mu, nu, corrections)
    y = update + compensation.astype(jnp.float32)
    # A cast to bfloat16 and back is removed by XLA on a GPU.
    new = lax.reduce_precision(wide + y, 8, 7)
    return new.astype(p.dtype), (y - (new - wide)).astype(compensation.dtype), mu, nu


def step_by_hand(
    tensor_step: Callable, state: ByHand, grads: dict[str, jax.Array]
) -> ByHand:
    """Step all tensors."""
    count = state.count + 1
    corrections = (1 - B1**count, 1 - B2**count)
    new = [
        tensor_step(grads[name], *(tree[name] for tree in state[:4]), corrections)
        for name in grads
    ]
    columns = [
        dict(zip(grads, column, strict=True)) for column in zip(*new, strict=True)
    ]
    return ByHand._make([*columns, count])
