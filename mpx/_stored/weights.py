"""Restore a weight from its parameter and its stored leaf, and store it again.

A state keeps of a parameter, by its role, a master (or the low bits of one, uint16), a compensation, or nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx import _trees, formats
from mpx._stored.roles import Role
from mpx._writeback import round_saturating

_F32 = np.dtype(np.float32)


def restore_weight(p: jax.Array, role: Role | None, kept: Any) -> jax.Array:
    """Return the best value of a weight, in float32 or wider; the role is None if nothing is kept of it."""
    wide = p.astype(_trees.promoted(p.dtype, np.float32))
    if role is None:
        return wide
    if role == "compensation":
        return wide + kept.astype(wide.dtype)
    return formats.join_f32(p, kept) if kept.dtype == np.uint16 else kept


def store_weight(
    weight: jax.Array, dtype: np.dtype, role: Role | None, kept_dtype: np.dtype | None
) -> tuple[jax.Array, Any]:
    """Return a float32 or float64 weight as a parameter of a dtype, and what is kept of it."""
    if role == "compensation" or kept_dtype == np.uint16:
        weight = cast_nearest(weight, _F32)
    if kept_dtype == np.uint16:
        return formats.split_f32(weight, overflow="largest")
    if role == "master":
        master = cast_nearest(weight, kept_dtype)
        return cast_nearest(master, dtype), master
    nearest = _nearest(weight, dtype)
    if role is None:
        return nearest.astype(dtype), None
    rest = jnp.where(jnp.isfinite(weight), weight - nearest, jnp.zeros_like(weight))
    return nearest.astype(dtype), cast_nearest(rest, kept_dtype)


def kept_of_parameter(p: jax.Array, role: Role, kept: Any) -> jax.Array:
    """Return what is to be kept if the weight is exactly its parameter."""
    is_master = role == "master" and kept.dtype != np.uint16
    fresh = p.astype(kept.dtype) if is_master else jnp.zeros(kept.shape, kept.dtype)
    return _trees.placed_like(fresh, kept)


def belongs(p: jax.Array, role: Role, kept: Any) -> Any:
    """Return for each element whether what is kept can belong to this parameter."""
    if kept.dtype == np.uint16:
        return True
    if role == "compensation":
        # Half a compensation never reaches the next number, unless it is that of another parameter.
        wide = p.astype(np.float32)
        return (round_saturating(wide + 0.5 * kept.astype(np.float32), p.dtype) == wide) | ~jnp.isfinite(wide)
    wide = p.astype(kept.dtype)
    return (round_saturating(kept, p.dtype) == wide) | (jnp.isnan(kept) & jnp.isnan(wide))


def cast_nearest(x: jax.Array, dtype: Any) -> jax.Array:
    """Widen exactly, or round to nearest; no finite number becomes infinite."""
    return _nearest(x.astype(_trees.promoted(x.dtype, np.float32)), dtype).astype(dtype)


def _nearest(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the nearest numbers that `dtype` holds, in the dtype of `x`, float32 or float64."""
    if dtype.itemsize >= x.dtype.itemsize:
        return x
    if x.dtype == np.float64 and dtype.itemsize == 2:
        return round_saturating(round_saturating(x, _F32).astype(np.float32), dtype).astype(np.float64)
    return round_saturating(x, dtype)
