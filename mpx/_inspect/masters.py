"""Look into optimizer states: the masters, and whether parameters belong to them."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpx import _errors, _trees
from mpx._stored.leaves import StateLeaf, leaves_of, require_types, weights_kept
from mpx._stored.state_format import shown

T = TypeVar("T")


def master_params(params: T, opt_state: optax.OptState) -> T:
    """Return the best float32 values of the parameters: for evaluation, export, or a change of recipe.

    `opt_state` is the state of the transformation that trains them, of any nesting. Where it keeps nothing of a leaf,
    the leaf becomes the parameter in float32. Leaves that are wider or not floating are returned unchanged.

    Example:
        >>> tx = master_weights(optax.sgd(1e-3))
        >>> params = jnp.ones((), jnp.bfloat16)
        >>> updates, state = tx.update(jnp.float32(1), tx.init(params), params)
        >>> print(optax.apply_updates(params, updates), master_params(params, state))
        1 0.999
    """
    stored = _kept_by_path(params, opt_state, "master_params")

    def restore(path, p):
        if not _trees.is_floating(p):
            return p
        kept = stored.get(path)
        return _trees.at_least_float32(p) if kept is None else kept.storage.restore(p, kept.leaf)

    return jax.tree.map_with_path(restore, params, is_leaf=_trees.is_masked)


def is_synced(params: Any, opt_state: optax.OptState) -> jax.Array:
    """Return whether parameters and optimizer state belong together: a boolean scalar.

    It is False after parameters were changed from outside (fine-tuning, pruning, a checkpoint of the weights alone):
    the next update would bring the old weights back. Then call `resync`. (A weight that has just fallen almost to zero
    may be out of sync until the next step, see `master_weights`.) It raises a ValueError for low bits
    (`storage="split"` or `"split24"`), which fit any parameter.

    Example:
        >>> tx = master_weights(optax.sgd(1e-3))
        >>> params = jnp.ones(2, jnp.bfloat16)
        >>> state = tx.init(params)
        >>> print(is_synced(params, state), is_synced(params.at[0].set(0), state))
        True False
    """
    leaves = _trees.leaves_by_path(params)
    kept = _kept_by_path(params, opt_state, "is_synced")
    belongs = {path: found.storage.belongs(leaves[path], found.leaf) for path, found in kept.items()}
    untold = {
        path: f"{shown(kept[path].leaf)} fits any {shown(leaves[path])}" for path, x in belongs.items() if x is None
    }
    what = "`is_synced` cannot tell: split masters keep low bits, which belong to any parameter"
    remedy = (
        "Save and restore parameters and state together, in one checkpoint of one step. If parameters were changed "
        'from outside, call `resync`. Whole masters can be compared: `master_weights(rule, storage="full")`.'
    )
    _errors.refuse(untold, what, remedy, params)
    return functools.reduce(jnp.logical_and, map(jnp.all, belongs.values()), jnp.asarray(True))


def resync(params: Any, opt_state: T) -> T:
    """Make parameters that were changed from outside the masters of the optimizer state.

    In the state that it returns, masters are exactly the parameters; low bits and Kahan compensations are zero. Moments
    and counts stay. Call it only after such a change: the state forgets what it held beyond the precision of the
    parameters, for unchanged weights too. You must know of the change: split masters cannot tell it (see `is_synced`),
    and without this a changed weight goes on with the low bits of another, up to 2**-8 of it.

    Example:
        >>> tx = master_weights(optax.sgd(1e-3))
        >>> state = tx.init(jnp.ones(2, jnp.bfloat16))
        >>> print(resync(jnp.zeros(2, jnp.bfloat16), state).master)
        [0. 0.]
    """
    leaves = _trees.leaves_by_path(params)
    fresh = {
        kept.path: _trees.placed_like(kept.storage.fresh(leaves[path]), kept.leaf)
        for path, kept in _kept_by_path(params, opt_state, "resync").items()
    }
    return jax.tree.map_with_path(lambda path, leaf: fresh.get(path, leaf), opt_state)


def _kept_by_path(params: Any, opt_state: Any, caller: str) -> dict[_trees.Path, StateLeaf]:
    """Return what a state keeps of each parameter; raise if it does not fit them."""
    require_types(opt_state, caller)
    kept = weights_kept(leaves_of(opt_state))
    require_fit(_trees.leaves_by_path(params), kept, caller, "Pass the parameters that this state belongs to.")
    return kept


def require_fit(params: dict[_trees.Path, Any], kept: dict[_trees.Path, StateLeaf], caller: str, remedy: str) -> None:
    """Raise if a leaf that a state keeps of a parameter matches none in path and shape."""
    arrays = {path: leaf.leaf for path, leaf in kept.items()}
    found = {path: p for path, p in params.items() if path in kept}
    same_shape = lambda array, p: np.shape(p) == array.shape
    wrong = _errors.mismatches(arrays, found, same_shape, "the optimizer state keeps")
    _errors.refuse(wrong, f"`{caller}`: the state does not fit the parameters", remedy)
