"""Blocks of an array: its elements in the order of memory, cut into runs of equal size
that share a scale.
"""

import dataclasses
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._shardings import dividing_devices
from mpx._stored.roles import Role
from mpx._stored.state_format import StateFormat

T = TypeVar("T", bound="BlockFormat")

SMALLEST = 16  # numbers in a block, each with a quarter of a byte of the scale
# of a block that reaches over devices: of smaller ones too much would be sent
_SMALLEST_UNIT = 8
_SUBLANES, _LANES = 8, 128  # of a tile in a TPU's memory
# Names of calls, below: `fused_update` takes one instruction for several.
ORDINARY = ("mpx_root", "mpx_integer")


class BlockFormat(StateFormat):
    """A format with a scale for each block; a subclass has the field `block_size`, a
    power of two from 16 to 65,536.
    """

    rounds_at_random = True
    # no field yet: each subclass has it at a place and with a default of its own
    block_size: int

    def __post_init__(self) -> None:
        size: Any = self.block_size
        if type(size) is not int or not SMALLEST <= size <= 2**16 or size & (size - 1):
            name = type(self).__name__
            raise ValueError(
                f"`{name}`: `block_size` must be a power of two from 16 to 65,536, but"
                f" got {size!r}."
            )

    def for_role(self: T, role: Role) -> T:
        """Return the format with its sign decided, if it has signs to choose: only
        second moments are unsigned.
        """
        if getattr(self, "signed", True) is not None:
            return self
        return dataclasses.replace(self, signed=role != "second moment")  # type: ignore[type-var]

    def for_shards(self: T, columns: int) -> T:
        """Return the format with blocks that each lie in one shard; unchanged if they
        would be too small.
        """
        size = math.gcd(columns, self.block_size)
        return dataclasses.replace(self, block_size=size) if size >= SMALLEST else self  # type: ignore[type-var]


@jax.jit
def mpx_root(x: jax.Array) -> jax.Array:
    """Return square roots; those of subnormal numbers may be zero."""
    return lax.sqrt(x)


@jax.jit
def mpx_integer(x: jax.Array) -> jax.Array:
    """Return as int32 what is an integer below 2**22."""
    return lax.convert_element_type(x, np.int32)


def packed(codes: jax.Array, bits: int = 4, dtype: type = np.uint8) -> jax.Array:
    """Pack codes of some bits (int32 `[..., columns]`, an even number) into `[...,
    columns / 2]` of twice as many.

    A number holds two neighbours, the first in its low bits.
    """
    pairs = (codes & (2**bits - 1)).reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    # A sum, where slices would do: no kernel has slices, and `fused_update` would leave
    # the array to XLA.
    return jnp.sum(pairs << (bits * _place_in(pairs)), axis=-1, dtype=np.int32).astype(
        dtype
    )


def unpacked(codes: jax.Array, bits: int = 4) -> jax.Array:
    """Return the codes (int32, with a sign) that `packed` was given."""
    pairs = jnp.broadcast_to(codes.astype(np.int32)[..., None], (*codes.shape, 2))
    sign = 32 - bits
    # Shift out what stands to the left of a code, then repeat its sign.
    left = sign - bits * _place_in(pairs)
    return ((pairs << left) >> sign).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _place_in(rows: jax.Array) -> jax.Array:
    """Return the place of each element in its row."""
    return lax.broadcasted_iota(np.int32, rows.shape, rows.ndim - 1)


def scales_shape(shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """Return `[..., columns / block_size]` if rows are whole blocks, else
    `[blocks]`.
    """
    size = math.prod(shape)
    if shape and size and shape[-1] % block_size == 0:
        return (*shape[:-1], shape[-1] // block_size)
    return (-(-size // block_size),)


def largest_of_blocks(keys: jax.Array, block_size: int) -> jax.Array:
    """Return the largest key (uint32) of each block."""
    of_blocks = scales_shape(keys.shape, block_size)
    if unit := _unit(keys.shape, block_size):
        of_units = jnp.max(
            keys.reshape(*keys.shape[:-1], keys.shape[-1] // unit, unit), axis=-1
        )
        return largest_of_blocks(of_units, block_size // unit)
    if tiles := _in_tiles(keys.shape, block_size):
        keys = jnp.max(keys.reshape(tiles), axis=-1)
        return jnp.max(keys.reshape(*of_blocks, block_size // _LANES), axis=-1)
    missing = math.prod(of_blocks) * block_size - keys.size
    # Zero is the least key, so what fills up the last block changes no maximum.
    keys = jnp.pad(keys.reshape(-1), (0, missing)) if missing else keys
    return jnp.max(keys.reshape(*of_blocks, block_size), axis=-1)


def spread(scales: jax.Array, shape: tuple[int, ...], block_size: int) -> jax.Array:
    """Return the scale of each element of an array of this shape."""

    def repeat(x, times):
        return jnp.broadcast_to(x[..., None], (*x.shape, times))

    if unit := _unit(shape, block_size):
        of_units = (*shape[:-1], shape[-1] // unit)
        return repeat(spread(scales, of_units, block_size // unit), unit).reshape(shape)
    if tiles := _in_tiles(shape, block_size):
        return repeat(
            repeat(scales, block_size // _LANES).reshape(tiles[:-1]), _LANES
        ).reshape(shape)
    return repeat(scales, block_size).reshape(-1)[: math.prod(shape)].reshape(shape)


def _unit(shape: tuple[int, ...], block_size: int) -> int:
    """Return how many neighbours of a block lie on one device, however columns are
    divided; 0 if that is no concern.

    An array whose blocks reach over devices is not sent whole then: only the largest
    number of each unit is. TPUs would copy any array for that: 24 bytes a number.
    """
    devices = dividing_devices()
    # No symbol.
    is_divided = (
        devices > 1
        and shape
        and isinstance(shape[-1], int)
        and shape[-1] % devices == 0
    )
    if not is_divided or jax.default_backend() == "tpu":
        return 0
    unit = math.gcd(shape[-1] // devices, block_size)
    # Those of 128 lie in tiles.
    return unit if _SMALLEST_UNIT <= unit < block_size and unit % _LANES else 0


def _in_tiles(shape: tuple[int, ...], block_size: int) -> tuple[int, ...] | None:
    """Return the shape that views an array as tiles of 8 rows, 128 columns; None if
    blocks are not made of tile rows.

    A TPU keeps arrays in such tiles: this view is free there, while a view of blocks
    copies the array. Elsewhere both views keep the elements in their order in memory. A
    tile that reaches over two devices would gather the array, so the rows must be whole
    tiles on each, if they are divided.
    """
    if not (shape and math.prod(shape)) or block_size % _LANES:
        return None
    if len(shape) == 1:
        return (
            (-1, _SUBLANES, _LANES)
            if shape[0] % max(block_size, _SUBLANES * _LANES) == 0
            else None
        )
    *leading, rows, columns = shape
    if rows % (_SUBLANES * dividing_devices()) or columns % block_size:
        return None
    return (*leading, rows // _SUBLANES, _SUBLANES, columns // _LANES, _LANES)
