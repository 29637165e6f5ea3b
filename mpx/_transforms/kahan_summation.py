"""`kahan_summation`: add to a 16-bit parameter next time what its rounding cut off."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._chain import FinalUpdates
from mpx._dtypes import UP_TO_FLOAT32
from mpx._stored.roles import register_state
from mpx._stored.weights import Compensation, fresh_tree, land_tree, require_kept


@register_state(writes_back="kahan_summation", compensation="compensation")
class KahanSummationState(NamedTuple):
    """State of `kahan_summation`.

    Attributes:
        compensation: a tree like the parameters. For each bfloat16 or float16 leaf,
            what its updates should have added so far but did not; `optax.MaskedNode`
            for all other leaves.
    """

    compensation: Any


def kahan_summation(
    dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Apply updates to 16-bit parameters without losing the part that their rounding
    cuts off.

    Put it last in a chain. With `p` the parameter, `c` the compensation and `u` the
    update, in float32:

        y = u + c
        p_new = round(p + y)
        c_new = y - (p_new - p)

    `p + c` follows the sum of all updates to about the precision of both formats
    together. `c` takes 2 bytes a parameter, where float32 masters take 4. Updates of
    wider parameters pass through.

    Args:
        dtype: the dtype of the compensation: bfloat16, float16 or float32. None:
            bfloat16, for float16 parameters too, since a float16 compensation loses
            everything below 2**-24.

    Returns:
        A transformation with state `KahanSummationState`. Its updates of 16-bit
        parameters are float32.

    Example:
        >>> tx = optax.chain(upcast(optax.sgd(1e-3)), kahan_summation())
        >>> params = jnp.ones((), jnp.bfloat16)
        >>> state = tx.init(params)
        >>> for _ in range(8):
        ...     updates, state = tx.update(jnp.float32(1), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(
        ...     params
        ... )  # 1 - 8e-3, to bfloat16; without compensation it would still be 1
        0.9921875

    References:
        Kahan 1965, "Further remarks on reducing truncation errors"; Zamirai et al. 2020
        (arXiv 2010.06192).
    """
    given = jnp.bfloat16 if dtype is None else dtype
    compensation_dtype = _errors.require_one_of(
        UP_TO_FLOAT32, given, "`kahan_summation`: `dtype`"
    )

    def storage_for(p):
        return Compensation(compensation_dtype) if _trees.is_narrower(p) else None

    def init_fn(params):
        return KahanSummationState(fresh_tree(params, storage_for))

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        _errors.require_step(
            "kahan_summation", KahanSummationState, state, params, updates
        )
        _errors.require_differentiable(updates, "kahan_summation")
        params = _errors.trained(params, updates)
        require_kept(state.compensation, params, storage_for, "kahan_summation")
        updates, compensation = land_tree(
            params, state.compensation, updates, storage_for, "kahan_summation"
        )
        return updates, KahanSummationState(compensation)

    return FinalUpdates.of((init_fn, update_fn), "kahan_summation")
