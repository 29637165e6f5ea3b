"""Blocks of an array: its elements in the order of memory, cut into runs of equal size that share a scale."""

import math

import jax
import jax.numpy as jnp

SMALLEST = 16  # numbers in a block
_SUBLANES, _LANES = 8, 128  # of a tile in a TPU's memory


def scales_shape(shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """Return `[..., columns / block_size]` if rows are whole blocks, else `[blocks]`."""
    size = math.prod(shape)
    if shape and size and shape[-1] % block_size == 0:
        return (*shape[:-1], shape[-1] // block_size)
    return (-(-size // block_size),)


def block_within(columns: int, block_size: int) -> int:
    """Return the largest power of two up to `block_size` that divides the columns of a shard.

    If that is less than 16, return `block_size`: its blocks then reach over devices.
    """
    largest = math.gcd(columns, block_size)
    return largest if largest >= SMALLEST else block_size


def largest_of_blocks(keys: jax.Array, block_size: int) -> jax.Array:
    """Return the largest key (uint32) of each block."""
    of_blocks = scales_shape(keys.shape, block_size)
    if tiles := _in_tiles(keys.shape, block_size):
        keys = jnp.max(keys.reshape(tiles), axis=-1)
        return jnp.max(keys.reshape(*of_blocks, block_size // _LANES), axis=-1)
    missing = math.prod(of_blocks) * block_size - keys.size
    keys = jnp.pad(keys.reshape(-1), (0, missing)) if missing else keys
    return jnp.max(keys.reshape(*of_blocks, block_size), axis=-1)


def spread(scales: jax.Array, shape: tuple[int, ...], block_size: int) -> jax.Array:
    """Return the scale of each element of an array of this shape."""
    repeat = lambda x, times: jnp.broadcast_to(x[..., None], (*x.shape, times))
    if tiles := _in_tiles(shape, block_size):
        return repeat(repeat(scales, block_size // _LANES).reshape(tiles[:-1]), _LANES).reshape(shape)
    return repeat(scales, block_size).reshape(-1)[: math.prod(shape)].reshape(shape)


def _in_tiles(shape: tuple[int, ...], block_size: int) -> tuple[int, ...] | None:
    """Return the shape that views an array as tiles of 8 rows, 128 columns; None if blocks are not made of tile rows.

    A TPU keeps arrays in such tiles: this view is free there, while a view of blocks copies the array. Elsewhere both
    views keep the elements in their order in memory.
    """
    if not (shape and math.prod(shape)) or block_size % _LANES:
        return None
    if len(shape) == 1:
        return (-1, _SUBLANES, _LANES) if shape[0] % max(block_size, _SUBLANES * _LANES) == 0 else None
    *leading, rows, columns = shape
    if rows % _SUBLANES or columns % block_size:
        return None
    return (*leading, rows // _SUBLANES, _SUBLANES, columns // _LANES, _LANES)
