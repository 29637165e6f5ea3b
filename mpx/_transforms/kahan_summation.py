"""`kahan_summation`: add to a 16-bit parameter next time what its rounding cut off."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._chain import Last
from mpx._dtypes import UP_TO_FLOAT32
from mpx._stored.roles import register_state
from mpx._writeback import applied_value, landing_update, round_saturating


@register_state(writes_back="kahan_summation", compensation="compensation")
class KahanSummationState(NamedTuple):
    """State of `kahan_summation`.

    Attributes:
        compensation: a tree like the parameters. For each bfloat16 or float16 leaf, what its updates should have added
            so far but did not; `optax.MaskedNode` for all other leaves.
    """

    compensation: Any


def kahan_summation(dtype: DTypeLike | None = None) -> optax.GradientTransformationExtraArgs:
    """Apply updates to 16-bit parameters without losing the part that their rounding cuts off.

    Put it last in a chain. With `p` the parameter, `c` the compensation and `u` the update, in float32:

        y = u + c
        p_new = round(p + y)
        c_new = y - (p_new - p)

    `p + c` follows the sum of all updates to about the precision of both formats together. `c` takes 2 bytes a
    parameter, where float32 masters take 4.

    Args:
        dtype: the dtype of the compensation: bfloat16, float16 or float32. None: bfloat16, for float16 parameters too,
            since a float16 compensation loses everything below 2**-24.

    Returns:
        A transformation with state `KahanSummationState`. Its updates are float32 for 16-bit parameters. Updates of
        wider parameters pass through.

    Raises:
        ValueError: if `dtype` is another dtype; at `update`, without parameters, or with parameters of another tree,
            shape or dtype than at `init`.

    Example:
        >>> tx = optax.chain(upcast(optax.sgd(1e-3)), kahan_summation())
        >>> params = jnp.ones((), jnp.bfloat16)
        >>> state = tx.init(params)
        >>> for _ in range(8):
        ...     updates, state = tx.update(jnp.float32(1), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(params)  # 1 - 8e-3, to bfloat16; without compensation it would still be 1
        0.9921875

    References:
        Kahan 1965, "Further remarks on reducing truncation errors"; for training, Zamirai et al. 2020, "Revisiting
        BFloat16 Training" (arXiv 2010.06192).
    """
    given = jnp.bfloat16 if dtype is None else dtype
    compensation_dtype = _errors.require_one_of(UP_TO_FLOAT32, given, "`kahan_summation`: `dtype`")
    kept_dtype = lambda p: compensation_dtype if _trees.is_narrower(p) else None

    def init_fn(params):
        zeros = lambda p: optax.MaskedNode() if kept_dtype(p) is None else jnp.zeros_like(p, kept_dtype(p))
        return KahanSummationState(jax.tree.map(zeros, params))

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        _errors.require_step("kahan_summation", KahanSummationState, state, params, updates)
        _errors.require_differentiable(updates, "kahan_summation")
        _errors.require_same_leaves(state.compensation, params, kept_dtype, "kahan_summation")
        updates, compensation = _trees.map_unzip(_step, params, state.compensation, updates)
        return updates, KahanSummationState(compensation)

    return Last(init_fn, update_fn)


@functools.partial(jax.jit, inline=True)
def _step(p: jax.Array, compensation: Any, update: jax.Array) -> tuple[jax.Array, Any]:
    """Return the update of one parameter, and its new compensation."""
    if _trees.is_masked(compensation):
        return update, compensation
    wide = p.astype(np.float32)
    y = update.astype(np.float32) + compensation.astype(np.float32)
    new = round_saturating(wide + y, p.dtype)
    update = landing_update(p, new, "kahan_summation")
    # The same number as `new`; the compensation of bfloat16 must follow from the stored parameter, see `applied_value`.
    landed = applied_value(p, update) if p.dtype == jnp.bfloat16 else new
    moved = jnp.where(landed == wide, np.float32(0), landed - wide)  # an infinite parameter stays: inf - inf is NaN
    # The update has all of the derivative: the sum of parameter and compensation shall have it once.
    rest = round_saturating(lax.stop_gradient(y - moved), compensation.dtype)
    return update, rest.astype(compensation.dtype)
