"""Look into optimizer states: the masters, and whether parameters belong to them."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from mpx import _errors, _trees
from mpx._stored.leaves import StateLeaf, leaves_of, require_types, weights_kept
from mpx._stored.state_format import shown
from mpx._stored.weights import KeptWeight, WholeMaster

T = TypeVar("T")


def master_params(params: T, opt_state: optax.OptState) -> T:
    """Return the best float32 values of the parameters: for evaluation, export, or a
    change of recipe.

    `opt_state` is the state of the transformation that trains them, of any nesting.
    Where it keeps nothing of a leaf, the leaf becomes the parameter in float32. Leaves
    that are wider or not floating are copied, so that no array is lost when parameters
    or state are donated.

    Example:
        >>> tx = master_weights(optax.sgd(1e-3))
        >>> params = jnp.ones((), jnp.bfloat16)
        >>> updates, state = tx.update(jnp.float32(1), tx.init(params), params)
        >>> print(optax.apply_updates(params, updates), master_params(params, state))
        1 0.999
    """
    stored = _kept_by_path(params, opt_state, "master_params")

    def restore(path, p):
        if kept := stored.get(path):
            best = kept.storage.restore(p, kept.leaf)
        else:
            best = _trees.at_least_float32(p) if _trees.is_floating(p) else p
        if isinstance(best, jax.Array) and not isinstance(best, Tracer):
            return jax.device_put(best, best.sharding, may_alias=False)
        return best

    return jax.tree.map_with_path(restore, params, is_leaf=_trees.is_masked)


def is_synced(params: Any, opt_state: optax.OptState) -> jax.Array:
    """Return whether parameters and optimizer state belong together: a boolean scalar.

    It is False after parameters were changed from outside (fine-tuning, pruning, a
    checkpoint of the weights alone): the next update would bring the old weights back.
    Then call `resync`. (A weight that has just fallen almost to zero may be out of sync
    until the next step, see `master_weights`.) It raises a ValueError for low bits and
    Kahan compensations, which fit other parameters too.

    Example:
        >>> tx = master_weights(optax.sgd(1e-3))
        >>> params = jnp.ones(2, jnp.bfloat16)
        >>> state = tx.init(params)
        >>> print(is_synced(params, state), is_synced(params.at[0].set(0), state))
        True False
    """
    leaves = _trees.leaves_by_path(params)
    kept = _kept_by_path(params, opt_state, "is_synced")
    belongs = {
        path: found.storage.belongs(leaves[path], found.leaf)
        for path, found in kept.items()
    }
    untold = {
        path: f"{shown(kept[path].leaf)} fits other parameters of"
        f" {shown(leaves[path])} too"
        for path, x in belongs.items()
        if x is None
    }
    what = (
        "`is_synced` cannot tell: low bits and compensations belong to other"
        " parameters too"
    )
    remedy = (
        "Save and restore parameters and state together, in one checkpoint of one step."
        " If parameters were changed from outside, call `resync`. Whole masters can be"
        ' compared: `master_weights(rule, storage="full")`.'
    )
    _errors.refuse(untold, what, remedy, params)
    return functools.reduce(
        jnp.logical_and, map(jnp.all, belongs.values()), jnp.asarray(True)
    )


def resync(params: Any, opt_state: T, before: Any = None) -> T:
    """Make parameters that were changed from outside the masters of the optimizer
    state.

    Where a parameter changed, its master becomes the parameter; low bits and Kahan
    compensations become zero. Every other element keeps what it has, and so do moments
    and counts. Without this the old weights come back from full masters, and a changed
    weight goes on with the low bits of another, up to 2**-8 of it.

    Give float32 weights, such as an average, before they are cast: the state keeps all
    of their bits that it can. Train on with `Policy.cast_to_param` of them. (Where a
    weight lies in the middle between two bfloat16 numbers, split masters keep the
    float32 number next to it.)

    `before` are the parameters before the change (full of NaN, if they are gone: all
    count as changed then). What is wider than they are counts as changed too. Without
    it a parameter has changed if it is not its master, rounded. Low bits and
    compensations fit other parameters too: they raise a ValueError without it.

    Example:
        >>> tx = master_weights(optax.sgd(1e-3))
        >>> params = jnp.ones(2, jnp.bfloat16)
        >>> updates, state = tx.update(jnp.ones(2), tx.init(params), params)
        >>> print(state.master, resync(params.at[0].set(0), state).master)
        [0.999 0.999] [0.    0.999]
    """
    kept, old = _kept_by_path(params, opt_state, "resync"), {}
    now = _trees.leaves_by_path(params)
    if before is None:
        untold = {
            path: shown(x.leaf)
            for path, x in kept.items()
            if not isinstance(x.storage, WholeMaster)
        }
        what = (
            "`resync` cannot tell which weights were changed: what is kept of them fits"
            " other parameters too"
        )
        remedy = (
            "Give the parameters from before the change: `resync(params, opt_state,"
            " before=old_params)`."
        )
        _errors.refuse(untold, what, remedy, params)
    else:
        _kept_by_path(before, opt_state, "resync")
        old = _trees.leaves_by_path(before)
    new = {}
    for path, x in kept.items():
        p = _trees.placed_like(now[path], x.leaf)
        dtype = p.dtype
        if path not in old:
            stays = x.storage.belongs(p, x.leaf)
        elif dtype.itemsize > old[path].dtype.itemsize:
            stays, dtype = False, old[path].dtype
        else:
            stays = p == _trees.placed_like(old[path], x.leaf)
        new[x.path] = jnp.where(stays, x.leaf, _kept_beside(dtype, p, x.storage))
    return jax.tree.map_with_path(lambda path, leaf: new.get(path, leaf), opt_state)


def _kept_beside(dtype: np.dtype, weight: jax.Array, storage: KeptWeight) -> Any:
    """Return what is kept of a weight whose parameter is the weight, cast."""
    p = weight.astype(dtype)
    # A cast rounds ties to even and overflows, which a storage need not do. The weight
    # that is nearer to the parameter by the last bit kept is no tie.
    weight = _trees.at_least_float32(weight)
    wide = p.astype(weight.dtype)
    nearer = wide + (weight - wide) * (1 - 2.0 ** (1 - 8 * storage.dtype.itemsize))
    kept = storage.fresh(weight)
    for near in (nearer, weight):
        stored, of_near = storage.store(near, dtype)
        kept = jnp.where(stored == p, of_near, kept)
    return kept


def _kept_by_path(
    params: Any, opt_state: Any, caller: str
) -> dict[_trees.Path, StateLeaf]:
    """Return what a state keeps of each parameter; raise if it does not fit them."""
    require_types(opt_state, caller)
    kept = weights_kept(leaves_of(opt_state))
    require_fit(
        _trees.leaves_by_path(params),
        kept,
        caller,
        "Pass the parameters that this state belongs to.",
    )
    return kept


def require_fit(
    params: dict[_trees.Path, Any],
    kept: dict[_trees.Path, StateLeaf],
    caller: str,
    remedy: str,
) -> None:
    """Raise if a leaf that a state keeps of a parameter matches none in path and
    shape.
    """
    arrays = {path: leaf.leaf for path, leaf in kept.items()}
    found = {path: p for path, p in params.items() if path in kept}
    wrong = _errors.mismatches(
        arrays, found, lambda x, p: np.shape(p) == x.shape, "the optimizer state keeps"
    )
    _errors.refuse(wrong, f"`{caller}`: the state does not fit the parameters", remedy)
