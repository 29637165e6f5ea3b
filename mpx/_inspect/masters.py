"""Looking into optimizer states: the masters, the averages, whether parameters follow them."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpx import _trees, formats
from mpx._transforms.kahan_summation import KahanSummationState
from mpx._transforms.loss_scaling import LossScalingState
from mpx._transforms.master_weights import MasterWeightsState
from mpx._transforms.params_ema import ParamsEmaState
from mpx._transforms.writeback import on_grid

T = TypeVar("T")


def master_params(params: T, opt_state: optax.OptState) -> T:
    """The best float32 values of the parameters: for evaluation, export, or a change of recipe.

    Of each leaf the master, or parameter and low bits joined, or parameter plus Kahan compensation, or, where the
    state keeps nothing of it, the parameter itself in float32. Leaves that are wider or not floating are returned
    as they are.

    Args:
        params: the parameters.
        opt_state: the state of the transformation that trains them, of any nesting.

    Raises:
        ValueError: if what the state keeps does not fit the parameters.

    Example:
        >>> tx = master_weights(optax.sgd(1e-3))
        >>> params = jnp.ones((), jnp.bfloat16)
        >>> updates, state = tx.update(jnp.float32(1), tx.init(params), params)
        >>> print(optax.apply_updates(params, updates), master_params(params, state))
        1 0.999
    """
    stored = _stored_by_path(params, opt_state, "master_params")

    def reconstruct(path, p):
        if not _trees.is_floating(p):
            return p
        kind, _, kept = stored.get(path, (None, p, None))
        wide = p.astype(_trees.promoted(p.dtype, np.float32))
        if kept is None:
            return wide
        if kind is KahanSummationState:
            return wide + kept.astype(wide.dtype)
        return formats.join_f32(p, kept) if kept.dtype == np.uint16 else kept

    return jax.tree.map_with_path(reconstruct, params, is_leaf=_trees.is_masked)


def ema_params(opt_state: optax.OptState) -> Any:
    """The average of the weights that `params_ema` keeps: a tree like the parameters, float32 or wider.

    Before the first step it is the initial parameters. Parameters that are not floating, or that `optax.masked` or
    `optax.partition` hide from every average, are an `optax.MaskedNode`. Cast it to evaluate the model in its own
    precision: `policy.cast_to_param(ema_params(opt_state))`.

    Args:
        opt_state: the state of any transformation with a `params_ema` somewhere in it, or several for different
            parameters (`optax.partition`).

    Raises:
        TypeError: if this is no state but a transformation, or a state restored without its types.
        ValueError: if nothing in the state averages weights, or there are two averages of the same ones.

    Example:
        >>> tx = master_weights(optax.chain(optax.sgd(0.1), params_ema(0.99)))
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
        >>> ema_params(state)["w"]  # not the bfloat16 0.8984
        Array([0.9, 0.9], dtype=float32)
    """
    require_types(opt_state, "ema_params")
    averages = [state.ema for state in _trees.find_states(opt_state, ParamsEmaState)]
    if not averages:
        raise ValueError(
            "`ema_params`: nothing in this optimizer state averages weights. Put `params_ema(decay)` at the end of the "
            "chain inside `master_weights`."
        )

    return functools.reduce(_joined_averages, averages)


def _joined_averages(a: Any, b: Any) -> Any:
    """Two averages of different parameters as one; a whole subtree of one may be a single placeholder of the other."""
    if _trees.is_masked(a) or _trees.is_masked(b):
        return b if _trees.is_masked(a) else a
    children, treedef = jax.tree.flatten(a, is_leaf=lambda x: x is not a)
    if jax.tree_util.treedef_is_leaf(treedef):
        raise ValueError(
            "`ema_params`: the optimizer state holds two averages of the same parameters. Take the one you want from "
            'its part of the state, with `optax.tree.get_all_with_path(state, "ema")`.'
        )
    others = treedef.flatten_up_to(b)
    return treedef.unflatten([_joined_averages(x, y) for x, y in zip(children, others, strict=True)])


def is_synced(params: Any, opt_state: optax.OptState) -> jax.Array:
    """Whether the parameters are those that the optimizer state speaks of: a boolean scalar.

    False after parameters were changed from outside (fine-tuning, pruning, a checkpoint of the weights alone): the
    next update would bring the old weights back. Then `resync`. A float32 master must round to its parameter; a
    Kahan compensation must be smaller than the spacing of its parameter. Low bits (`storage="split"`) belong to any
    parameter, so they are always in sync. (A weight that has just fallen almost to zero may be out of sync until the
    next step, see `master_weights`.)

    Args:
        params: the parameters.
        opt_state: the state of the transformation that trains them, of any nesting.

    Raises:
        ValueError: if what the state keeps does not fit the parameters.

    Example:
        >>> tx = master_weights(optax.sgd(1e-3))
        >>> params = jnp.ones(2, jnp.bfloat16)
        >>> state = tx.init(params)
        >>> print(is_synced(params, state), is_synced(params.at[0].set(0), state))
        True False
    """
    synced = jnp.asarray(True)
    for kind, p, kept in _stored_by_path(params, opt_state, "is_synced").values():
        synced &= jnp.all(_in_sync(kind, p, kept))
    return synced


def resync(params: Any, opt_state: T) -> T:
    """Makes the optimizer state follow parameters that were changed from outside.

    Where a master does not round to its parameter, the parameter becomes the master; where a Kahan compensation is
    too large for its parameter, it becomes zero. All other numbers keep their bits, so `resync` is harmless when
    nothing was changed. Moments and counts stay.

    Args:
        params: the parameters.
        opt_state: the state of the transformation that trains them, of any nesting.

    Returns:
        The state, such that `is_synced(params, state)`.

    Raises:
        ValueError: if what the state keeps does not fit the parameters.

    Example:
        >>> tx = master_weights(optax.sgd(1e-3))
        >>> state = tx.init(jnp.ones(2, jnp.bfloat16))
        >>> print(resync(jnp.zeros(2, jnp.bfloat16), state).master)
        [0. 0.]
    """
    stored = _stored_by_path(params, opt_state, "resync")

    def mend(path, kept):
        if _trees.is_masked(kept) or kept.dtype == np.uint16:
            return kept
        kind, p, _ = stored[path]
        fresh = p.astype(kept.dtype) if kind is MasterWeightsState else jnp.zeros_like(kept)
        return jnp.where(_in_sync(kind, p, kept), kept, fresh)

    def mend_state(state):
        for kind, field in _FIELDS.items():
            if isinstance(state, kind):
                mended = jax.tree.map_with_path(mend, getattr(state, field), is_leaf=_trees.is_masked)
                rest = {name: _map_states(mend_state, getattr(state, name)) for name in state._fields if name != field}
                return state._replace(**{field: mended}, **rest)
        return state

    return _map_states(mend_state, opt_state)


# Which states keep something of each parameter, and in which field.
_FIELDS: dict[type, str] = {MasterWeightsState: "master", KahanSummationState: "compensation"}


def _stored_by_path(params: Any, opt_state: Any, caller: str) -> dict[_trees.Path, tuple[type, Any, Any]]:
    """For each parameter of which a state keeps something: the state's type, the parameter, what is kept."""
    require_types(opt_state, caller)
    leaves = _trees.leaves_by_path(params)
    stored: dict[_trees.Path, tuple[type, Any, Any]] = {}
    for kind, field in _FIELDS.items():
        for state in _trees.find_states(opt_state, kind):
            for path, kept in _trees.leaves_by_path(getattr(state, field)).items():
                _require_fit(path, leaves.get(path), kept, caller)
                stored[path] = kind, leaves[path], kept
    return stored


def require_types(opt_state: Any, caller: str) -> None:
    """Raises for what is no state, and for a state whose NamedTuples a checkpoint gave back as dictionaries."""
    if callable(getattr(opt_state, "init", None)):
        raise TypeError(f"`{caller}` needs an optimizer state, but got a transformation; `init` makes its state.")
    kinds = (*_FIELDS, LossScalingState, ParamsEmaState)
    is_untyped = lambda x: isinstance(x, dict) and any(set(x) == set(kind._fields) for kind in kinds)
    # In a state that has its types, dictionaries are the user's, who may call a parameter as a field is called.
    is_known = lambda x: is_untyped(x) or hasattr(x, "_fields")
    if any(is_untyped(part) for part in jax.tree.leaves(opt_state, is_leaf=is_known)):
        raise TypeError(
            f"`{caller}`: the optimizer state was restored without its types: what was a NamedTuple is a dictionary. "
            "Restore it into `jax.eval_shape(tx.init, params)`."
        )


def _in_sync(kind: type, p: jax.Array, kept: jax.Array) -> Any:
    """Elementwise: does what is kept belong to this parameter?"""
    if kept.dtype == np.uint16:
        return True
    if kind is KahanSummationState:
        # Half a compensation never reaches the next number, unless it is that of another parameter.
        wide = p.astype(np.float32)
        return (on_grid(wide + 0.5 * kept.astype(np.float32), p.dtype) == wide) | ~jnp.isfinite(wide)
    wide = p.astype(kept.dtype)
    return (on_grid(kept, p.dtype) == wide) | (jnp.isnan(kept) & jnp.isnan(wide))


def _require_fit(path: _trees.Path, p: Any, kept: Any, caller: str) -> None:
    if p is None or p.shape != kept.shape:
        there = "no such leaf" if p is None else _trees.dtype_and_shape(p)
        raise ValueError(
            f"`{caller}`: the optimizer state keeps {_trees.dtype_and_shape(kept)} for the parameter "
            f"{_trees.path_string(path)!r}, but the parameters have {there}. Pass the parameters that this state "
            "belongs to."
        )


def _map_states(function: Callable[[Any], Any], tree: T) -> T:
    """Applies a function to the outermost states that keep something of the parameters."""
    return jax.tree.map(function, tree, is_leaf=lambda x: isinstance(x, tuple(_FIELDS)))
