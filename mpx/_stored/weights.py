"""Keep something of a weight in an optimizer's state, beside its parameter: one class
for each way.

A weight is a float32 (or float64) number. Its parameter holds it rounded to the
parameter's dtype. The state keeps an array of the parameter's shape; both together
restore the weight. Where nothing is kept, the weight is its parameter.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from mpx import _errors, _trees, formats
from mpx._noise import noise_for
from mpx._stored.roles import Role
from mpx._straight_through import straight_through
from mpx._writeback import (
    applied_bits,
    landing_update,
    mpx_where_it_lands,
    round_saturating,
)

# A parameter or its update, and what is kept of the weight.
Pair = tuple[jax.Array, jax.Array]

_F32 = np.dtype(np.float32)
_LARGEST_OF_24_BITS = np.uint32(0x7F7F_FF00)


# the class that keeps masters in arrays of a dtype
_KEEPERS: dict[np.dtype, type["KeptWeight"]] = {}


@dataclasses.dataclass(frozen=True)
class KeptWeight(abc.ABC):
    """A way to keep a weight: `restore(p, fresh(p))` equals the parameter `p`.

    Subclass it with `restore` and `store`, and give an instance to `master_weights`. A
    state has plain arrays, whose dtype says which class keeps masters there. So each
    class `keeps` dtypes that no other has, as in `class Mine(KeptWeight,
    keeps=[jnp.int8])`; a second one raises a TypeError.
    """

    dtype: np.dtype  # of the kept array

    def __init_subclass__(cls, keeps: Sequence[DTypeLike] = ()) -> None:
        for dtype in (np.dtype(given) for given in keeps):
            other = _KEEPERS.get(dtype, cls)
            # A cell of a notebook may run again.
            if other.__qualname__ != cls.__qualname__:
                raise TypeError(
                    f"`{cls.__name__}`: `{other.__name__}` keeps {dtype} already; take"
                    " another dtype."
                )
            _KEEPERS[dtype] = cls

    @abc.abstractmethod
    def restore(self, p: jax.Array, kept: jax.Array) -> jax.Array:
        """Return the best value of a weight, in float32 or wider."""

    @abc.abstractmethod
    def store(self, weight: jax.Array, dtype: np.dtype, key: Any = None) -> Pair:
        """Return the parameter of `dtype` for a weight, and what is kept of the weight,
        at random with a key.
        """

    def fresh(self, p: jax.Array) -> jax.Array:
        """Return what is kept of a weight that is exactly its parameter."""
        return jnp.zeros_like(p, self.dtype)

    def belongs(self, p: jax.Array, kept: jax.Array) -> Any:
        """Return for each element whether what is kept can belong to this parameter;
        None if nothing tells.
        """
        return None

    def land(
        self, p: jax.Array, kept: jax.Array, update: jax.Array, author: str, key: Any
    ) -> Pair:
        """Add an update to a weight: return the update that its parameter needs, and
        what is kept from here on.

        `author` is the transformation that asks.
        """
        new, kept = self.store(_restore(self, p, kept) + update, p.dtype, key)
        update = landing_update(p, new.astype(np.float32), author)
        # Where the addition cannot reach `new`, what is kept would belong to another
        # weight.
        return update, mpx_where_it_lands(p, update, new, kept, self.fresh(p))


@dataclasses.dataclass(frozen=True)
class WholeMaster(KeptWeight):
    """The weight itself, in float32 or float64."""

    # whether updates have the dtype of their parameters
    has_updates_in_param_dtype: bool = False

    def restore(self, p: jax.Array, kept: jax.Array) -> jax.Array:
        return kept

    def store(self, weight: jax.Array, dtype: np.dtype, key: Any = None) -> Pair:
        master = cast_nearest(weight, self.dtype)
        return cast_nearest(master, dtype), master

    def fresh(self, p: jax.Array) -> jax.Array:
        return jnp.asarray(p, self.dtype)

    def belongs(self, p: jax.Array, kept: jax.Array) -> Any:
        # Saturating: the float16 parameter of the master 160,000 is 65,504, and belongs
        # to it.
        wide = p.astype(kept.dtype)
        return (round_saturating(kept, p.dtype) == wide) | (
            jnp.isnan(kept) & jnp.isnan(wide)
        )

    def land(
        self, p: jax.Array, kept: jax.Array, update: jax.Array, author: str, key: Any
    ) -> Pair:
        new = (kept + update).astype(kept.dtype)
        update = landing_update(
            p,
            round_saturating(new, p.dtype),
            author,
            p.dtype if self.has_updates_in_param_dtype else None,
        )
        return update, new


class LowBits(KeptWeight, keeps=(np.uint16, np.uint8)):
    """The bits of a weight that its bfloat16 parameter lacks; they belong to any
    parameter.

    uint16 holds all of them, and the weight is a float32 number. uint8 holds the first
    8. Then the weight is rounded to 24 bits *before* it is split: rounded afterwards,
    low bits could reach 0x80, which stands for another parameter.
    """

    def restore(self, p: jax.Array, kept: jax.Array) -> jax.Array:
        return formats.join_f32(p, kept.astype(np.uint16) << self._left_out)

    def store(self, weight: jax.Array, dtype: np.dtype, key: Any = None) -> Pair:
        weight = cast_nearest(weight, _F32)
        if self._left_out:
            weight = _rounded_to_24_bits(weight, key)
        # No update brings an infinite parameter back, however finite its master.
        high, low_bits = formats.split_f32(weight, overflow="largest")
        return high, (low_bits >> self._left_out).astype(self.dtype)

    @property
    def _left_out(self) -> np.uint16:
        return np.uint16(16 - 8 * self.dtype.itemsize)


class Compensation(KeptWeight):
    """Keeps what rounding has cut off so far, to be added to the next update."""

    def restore(self, p: jax.Array, kept: jax.Array) -> jax.Array:
        wide = _trees.at_least_float32(p)
        return wide + kept.astype(wide.dtype)

    def store(self, weight: jax.Array, dtype: np.dtype, key: Any = None) -> Pair:
        weight = cast_nearest(weight, _F32)
        near = _nearest(weight, dtype)
        # An infinite weight leaves no rest: inf - inf would be a NaN in the state.
        rest = jnp.where(jnp.isfinite(weight), weight - near, jnp.zeros_like(weight))
        return near.astype(dtype), cast_nearest(rest, self.dtype)

    def land(
        self, p: jax.Array, kept: jax.Array, update: jax.Array, author: str, key: Any
    ) -> Pair:
        wide = p.astype(np.float32)
        y = update.astype(np.float32) + kept.astype(np.float32)
        new = round_saturating(wide + y, p.dtype)
        update = landing_update(p, new, author)
        # The same number as `new`; the compensation of bfloat16 must follow from the
        # stored parameter, see `applied_bits`. A compiler may drop a cast to 16 bits
        # and back, but not integers.
        landed = new
        if p.dtype == jnp.bfloat16:
            landed = (applied_bits(p, update).astype(np.uint32) << 16).view(np.float32)
        # An infinite parameter stays: inf - inf is NaN.
        moved = jnp.where(landed == wide, np.float32(0), landed - wide)
        # The update carries the whole derivative: with that of the rest the sum of both
        # would have it twice.
        rest = round_saturating(lax.stop_gradient(y - moved), self.dtype)
        return update, rest.astype(self.dtype)


def _rounded_to_24_bits(x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Round float32 numbers to the nearest whose 8 low bits are zero, or up or down at
    random with a key.

    No finite number becomes infinite.
    """
    bits = x.view(np.uint32)
    magnitude, sign = bits & np.uint32(0x7FFF_FFFF), bits & np.uint32(0x8000_0000)
    # Half of the 8 bits that go, and ties to even; or as many random bits.
    increment = (
        0x7F + ((magnitude >> 8) & 1) if key is None else noise_for(key, x) >> 24
    )
    rounded = jnp.minimum(
        (magnitude + increment) & np.uint32(0xFFFF_FF00), _LARGEST_OF_24_BITS
    )
    is_finite = magnitude < np.uint32(0x7F80_0000)
    return straight_through(
        jnp.where(is_finite, rounded | sign, bits).view(np.float32), x
    )


def storage_of(role: Role, dtype: np.dtype) -> KeptWeight:
    """Return how a weight is kept, from the role of the field and the dtype of the
    array there.
    """
    keeper = (
        Compensation if role == "compensation" else _KEEPERS.get(dtype, WholeMaster)
    )
    return keeper(np.dtype(dtype))


def cast_nearest(x: jax.Array, dtype: Any) -> jax.Array:
    """Widen exactly, or round to nearest; no finite number becomes infinite."""
    return _nearest(_trees.at_least_float32(x), dtype).astype(dtype)


def _nearest(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the nearest numbers that `dtype` holds, in the dtype of `x`, float32 or
    float64.
    """
    if dtype.itemsize >= x.dtype.itemsize:
        return x
    if x.dtype == np.float64 and dtype.itemsize == 2:
        # By way of float32, so that ties can differ: 1 + 2**-8 + 2**-40 becomes 1,
        # where 1 + 2**-7 is nearer.
        return round_saturating(
            round_saturating(x, _F32).astype(np.float32), dtype
        ).astype(np.float64)
    return round_saturating(x, dtype)


# Trees. `storage_for(parameter)` says how its weight is kept; None if the parameter
# itself is the weight.

StorageFor = Callable[[Any], KeptWeight | None]


def fresh_tree(params: Any, storage_for: StorageFor) -> Any:
    """Return what is kept of weights that are exactly their parameters."""

    def fresh(p):
        storage = storage_for(p)
        # A placeholder for what is its own weight, so that the tree has the structure
        # of the parameters.
        return optax.MaskedNode() if storage is None else storage.fresh(p)

    return jax.tree.map(fresh, params)


def restore_tree(params: Any, kept: Any, storage_for: StorageFor) -> Any:
    """Return the weights of parameters."""

    def restore(p, kept):
        storage = storage_for(p)
        return p if storage is None else _restore(storage, p, kept)

    return jax.tree.map(restore, params, kept)


# Traced once for all parameters of a shape: a step of 100 takes 0.12 s, and else 1.1.
# Each parameter is one call in the program; XLA inlines it.


@functools.partial(jax.jit, static_argnums=0)
def _restore(storage: KeptWeight, p: Any, kept: Any) -> Any:
    return storage.restore(p, kept)


def land_tree(
    params: Any,
    kept: Any,
    updates: Any,
    storage_for: StorageFor,
    author: str,
    key: jax.Array | None = None,
) -> tuple[Any, Any]:
    """Add updates to weights: return the updates that parameters need, and what is kept
    from here on.
    """

    def land(p, kept, update):
        return _land(storage_for(p), p, kept, update, author, key)

    return _trees.map_unzip(land, params, kept, updates)


@functools.partial(jax.jit, static_argnums=(0, 4))  # as `_restore`
def _land(
    storage: KeptWeight | None, p: Any, kept: Any, update: Any, author: str, key: Any
) -> tuple[Any, Any]:
    return (
        (update, kept)
        if storage is None
        else storage.land(p, kept, update, author, key)
    )


def require_kept(kept: Any, params: Any, storage_for: StorageFor, caller: str) -> None:
    """Raise if `params` do not match what the state keeps for them."""
    # Asked at every update: it reads shapes and dtypes only, which costs a compiled
    # step nothing.
    stored, leaves = (
        _trees.leaves_by_path(tree, _trees.is_masked) for tree in (kept, params)
    )

    def fit(x, p):
        storage = storage_for(p)
        if storage is None or _trees.is_masked(x):
            return storage is None and _trees.is_masked(x)
        return (x.dtype, x.shape) == (storage.dtype, p.shape)

    wrong = _errors.mismatches(stored, leaves, fit, "the state keeps")
    what = f"`{caller}`: the state was made for other parameters"
    remedy = (
        "Call `init` with the new parameters, or pass the parameters of this state. If"
        " `storage` or `dtype` of the wrapper changed, use `convert_state`. If a dtype"
        " of the parameters changed: `optax.apply_updates` keeps dtypes"
        " (`equinox.apply_updates` does not: see `updates_in_param_dtype`), and"
        " `Policy.cast_to_param` restores them."
    )
    _errors.refuse(wrong, what, remedy, params)
