"""`master_weights`: keep float32 weights in the state, or the bits that bfloat16
parameters lack.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._chain import FinalUpdates, element
from mpx._noise import kept_key, keys_of_step
from mpx._stored.roles import register_state
from mpx._stored.weights import (
    KeptWeight,
    LowBits,
    WholeMaster,
    fresh_tree,
    land_tree,
    require_kept,
    restore_tree,
)
from mpx._transforms.upcast import run_in_float32

Storage = Literal["full", "split", "split24"]
_LOW_BITS = {
    "split": LowBits(np.dtype(np.uint16)),
    "split24": LowBits(np.dtype(np.uint8)),
}


@register_state(
    writes_back="master_weights", master="master", inner_state="inner", master_key="key"
)
class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        master: a tree like the parameters. `storage="full"`: the float32 (or `dtype`)
            master of each narrower leaf. `storage="split"`: the uint16 low bits of the
            master of each bfloat16 leaf; uint8 under `"split24"`. A leaf that is its
            own master has an `optax.MaskedNode`.
        inner_state: state of the wrapped rule for float32 parameters.
        master_key: the raw data (uint32) of the PRNG key for the next step;
            `optax.MaskedNode` if nothing is rounded at random.
    """

    master: Any
    inner_state: optax.OptState
    master_key: Any = optax.MaskedNode()


@element
def master_weights(
    inner: optax.GradientTransformation,
    storage: Storage | KeptWeight = "full",
    *,
    dtype: DTypeLike = jnp.float32,
    key: jax.Array | None = None,
    updates_in_param_dtype: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Train float32 master weights with any rule, and emit the updates that keep the
    model's copy in step.

    The rule sees float32 parameters, gradients and state, and follows exactly the
    trajectory of a float32 training run. The wrapper emits `float32(cast(new_master)) -
    float32(parameter)`: after `optax.apply_updates` each parameter is its master, cast.
    (If a weight falls within about 2**-16 of zero in one step, its parameter can miss
    this by 2**-24 of the old value; the next step repairs it. A zero may keep its old
    sign.) Nothing may change the updates after this wrapper: clipping, schedules and
    weight decay belong inside.

    Args:
        inner: any Optax transformation or chain. Without it this is an element of
            `chain`.
        storage: `"full"` keeps masters whole, 4 bytes a parameter. `"split"` keeps, for
            each bfloat16 leaf, only the 16 low bits of its master, 2 bytes a parameter:
            parameter and low bits together are the master, the same as under `"full"`,
            except when a weight falls almost to zero (see above): then the master
            becomes the parameter. Parameters are rounded with ties away from zero;
            `"full"` rounds ties to even. A parameter changed from outside keeps the low
            bits that it had; `resync` makes them zero. `"split24"` keeps 8 low bits, 1
            byte a parameter. It is not exact: once a step the master is rounded to 24
            bits, up or down at random, an error below 2**-15 of the weight. No update
            is lost in the mean. (Equal masters of a step are rounded alike.) A
            `KeptWeight` of `mpx.states` is a way of your own. float16 leaves keep full
            masters under all of them.
        dtype: the dtype of the masters: float32, or float64 for float32 parameters. A
            leaf that is as wide is its own master and stores nothing.
        key: a PRNG key, for `"split24"`; `jax.random.key(0)` if None. The state keeps
            it, and every update changes it.
        updates_in_param_dtype: whether updates have the dtypes of the parameters, for
            libraries that add them without a cast (`equinox.apply_updates` turns
            bfloat16 parameters into float32 ones otherwise). It needs full masters. A
            parameter that shrinks below half or grows beyond twice its size in a step
            can then miss its master, by a last place of the larger of the two sizes;
            the next step repairs it. The masters stay exact.

    Returns:
        A transformation with state `MasterWeightsState`. If a finite master is beyond
        the range of its parameter, the parameter becomes the largest finite number.

    Raises:
        ValueError: if `storage`, `dtype`, `key` and `updates_in_param_dtype` do not go
            together; at `init`, if a 16-bit leaf would get a float64 master, or if
            something inside rounds for 16-bit parameters too; at `update`, without
            parameters, or with parameters of another tree, shape or dtype than at
            `init`.

    Example:
        >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
        >>> tx = master_weights(optax.sgd(1e-3), storage="split")
        >>> state = tx.init(params)
        >>> for _ in range(3):  # each update alone would round to nothing
        ...     updates, state = tx.update({"w": jnp.ones(3)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"], state.master["w"].dtype
        (Array([0.996094, 0.996094, 0.996094], dtype=bfloat16), dtype('uint16'))

    References:
        Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), for the
        masters; Transformer Engine and apex, `store_param_remainders`, for the low
        bits; FlashOptim, 2026 (arXiv 2602.23349), for 24 bits.
    """
    if not isinstance(storage, KeptWeight):
        _errors.require_choice(
            get_args(Storage), storage, "`master_weights`: `storage`"
        )
    dtype = _errors.wide_dtype(dtype, "master_weights")
    if storage != "full" and dtype != np.float32:
        raise ValueError(
            f"`master_weights`: split masters are float32, but got `dtype` {dtype}."
        )
    if key is not None and storage in ("full", "split"):
        raise ValueError(
            f"`master_weights`: a `key` was given, but under {storage!r} nothing is"
            " rounded at random."
        )
    if updates_in_param_dtype and storage != "full":
        raise ValueError(
            "`master_weights`: `updates_in_param_dtype` needs full masters, but"
            f" `storage` is {storage!r}."
        )
    inner = run_in_float32(inner, dtype, "master_weights")
    key = None if key is None else _errors.one_key(key, "master_weights")
    is_random = storage == "split24" or key is not None

    def storage_for(p) -> KeptWeight | None:  # None: the parameter is its own master
        if not _trees.is_narrower(p, dtype):
            return None
        # float16 has fewer exponents than float32, so its bits are no part of those of
        # a master.
        if storage == "full" or p.dtype != jnp.bfloat16:
            return WholeMaster(dtype, updates_in_param_dtype)
        return storage if isinstance(storage, KeptWeight) else _LOW_BITS[storage]

    def init_fn(params):
        _require_single_rounding(params, dtype)
        stored = fresh_tree(params, storage_for)
        kept = kept_key(key) if is_random else optax.MaskedNode()
        return MasterWeightsState(stored, inner.init(params), kept)

    def update_fn(updates, state, params=None, **extra_args):
        _errors.require_step("master_weights", MasterWeightsState, state, params)
        params = _errors.trained(params, updates)
        require_kept(state.master, params, storage_for, "master_weights")
        _errors.require_gradients(updates, params, "master_weights")
        masters = restore_tree(params, state.master, storage_for)
        updates, inner_state = inner.update(
            updates, state.inner_state, masters, **extra_args
        )
        this_step, next_key = None, state.master_key
        if is_random:
            (this_step,), next_key = keys_of_step(next_key, key, 1, "master_weights")
        updates, stored = land_tree(
            params, state.master, updates, storage_for, "master_weights", this_step
        )
        return updates, MasterWeightsState(stored, inner_state, next_key)

    return FinalUpdates.of((init_fn, update_fn), "master_weights")


def _require_single_rounding(params: Any, dtype: np.dtype) -> None:
    wrong = {
        path: _trees.dtype_and_shape(leaf)
        for path, leaf in _trees.leaves_by_path(params).items()
        if dtype == np.float64 and _trees.is_narrower(leaf)
    }
    what = (
        "`master_weights`: float64 masters of 16-bit parameters would be rounded twice"
    )
    remedy = "Use `dtype=jnp.float32`, or store these parameters in float32."
    _errors.refuse(wrong, what, remedy)
