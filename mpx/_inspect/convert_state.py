"""`convert_state`: continue a training run under another recipe.

The role of a leaf says what it is. Leaves of the rule are paired in their order:
without mpx's wrappers and the nesting of chains both states must have the same leaves,
in states of the same types.
"""

import functools
import itertools
from collections import defaultdict
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from mpx import _errors, _flax, _trees
from mpx._inspect.masters import master_params, require_fit
from mpx._policy import Policy, as_policy, policy_of
from mpx._stored.leaves import StateLeaf, leaves_of, require_types, weights_kept
from mpx._stored.roles import KEPT_OF_WEIGHTS, Role
from mpx._stored.state_format import StateFormat, StoredLeaf, is_stored, shown, store
from mpx._stored.weights import cast_nearest
from mpx._transforms.upcast import stable_state

T = TypeVar("T")


def convert_state(
    params: T,
    opt_state: optax.OptState,
    tx: optax.GradientTransformation,
    new_tx: optax.GradientTransformation,
    *,
    policy: Policy | str | None = None,
) -> tuple[T, optax.OptState]:
    """Move a training run to another recipe: the same weights and moments, stored in
    another way.

    Both transformations must contain the same rule (the same optimizer, with the same
    options). What mpx puts around it may differ, in any nesting and inside of Optax's
    wrappers too. So may what measures (`mpx.monitor`, `optax.snapshot`): it begins
    anew.

    - It moves the weights that `master_params` returns. If the new recipe does not keep
      what its parameters cannot hold, that is lost, and a `UserWarning` says how much.
    - The state of the rule is carried over and rounded to nearest where the new recipe
      stores it in fewer bits. What is stored in the same way on both sides keeps its
      bits.
    - Blocks of another size than `tx` makes here, because the run was saved on another
      number of devices, are decoded, and encoded in those of `new_tx`, which may be
      `tx` again: they are rounded once more.
    - PRNG keys are carried over. The loss scale begins anew, but its count of skipped
      steps goes on: where `new_tx` has a dynamic one, let it begin with
      `float(get_loss_scale(opt_state).loss_scale)`.

    Call it between two steps, outside of `jax.jit`. Every leaf keeps the sharding of
    the old one of its shape; what is new lies where its parameter does (under `zero1`:
    `jax.device_put(new_opt_state, zero1_shardings(...))`). An array that needs no
    change is returned as the same object, so donate the old arrays or the new ones, not
    both. For Flax NNX pass `nnx.state(model, nnx.Param)` and `optimizer.opt_state`;
    batch statistics stay in the model.

    Args:
        params: the parameters, any pytree.
        opt_state: the state of `tx` for them.
        tx: what has trained the parameters.
        new_tx: what shall train them from here on.
        policy: how the new parameters are stored, a `Policy` or the string of one.
            None: as the policy of `new_tx` says, if `mixed_precision` made it (perhaps
            inside `zero1`); else each keeps its dtype.

    Returns:
        The new parameters and their state, as `policy.cast_to_param(params)` and
        `new_tx.init` of these make them.

    Raises:
        TypeError: inside of `jax.jit`.
        ValueError: if `opt_state` is not a state of `tx` for these parameters; if the
            rules differ; if what the new state keeps of a weight matches no parameter
            (`optax.flatten`); whatever `new_tx.init` raises.

    Example:
        >>> tx = optax.adam(1e-3)
        >>> params = {"w": jnp.full(2, 1.001)}
        >>> new_tx = mixed_precision(
        ...     tx, "params=bf16,compute=bf16,output=f32", storage="split"
        ... )
        >>> new_params, new_state = convert_state(params, tx.init(params), tx, new_tx)
        >>> (
        ...     new_params["w"].dtype,
        ...     new_state.master["w"].dtype,
        ...     master_params(new_params, new_state)["w"],
        ... )
        (dtype(bfloat16), dtype('uint16'), Array([1.001, 1.001], dtype=float32))
    """
    tx, new_tx = (
        _errors.as_transformation(given, "convert_state") for given in (tx, new_tx)
    )
    policy = policy_of(new_tx) if policy is None else as_policy(policy, "convert_state")
    params = _as_arrays(params)
    opt_state = _state_of(tx, params, _as_arrays(opt_state))
    cast = (lambda tree: tree) if policy is None else policy.cast_to_param
    wanted = cast(_trees.shapes_of(params))
    # Of arrays, not of shapes: on explicit axes their types say how they are sharded,
    # and so which blocks fit.
    template = jax.eval_shape(lambda params: new_tx.init(cast(params)), params)
    old, new = leaves_of(opt_state), leaves_of(template)
    _require_same_rule(old, new)
    best = _trees.leaves_by_path(master_params(params, opt_state))
    weights = _moved_weights(params, best, wanted, weights_kept(old), weights_kept(new))
    filled = {
        leaf.path: weights[leaf.path_of_parameter][1]
        for leaf in new
        if leaf.role in KEPT_OF_WEIGHTS
    }
    for before, after in zip(_of_the_rule(old), _of_the_rule(new), strict=True):
        filled[after.path] = _moved(before.leaf, after.leaf)
    filled |= _carried(old, new)
    filled |= _fresh(
        new_tx, wanted, [leaf.path for leaf in new if leaf.path not in filled]
    )
    _warn_of_losses(best, weights)
    new_params = jax.tree.map_with_path(
        lambda path, p: weights[path][0] if path in weights else p, params
    )
    new_state = jax.tree.map_with_path(
        lambda path, _: filled[path], template, is_leaf=is_stored
    )
    return new_params, stable_state(new_state, new_params)


# Roles of leaves that belong to a wrapper; every other leaf belongs to the rule.
_OF_WRAPPERS: tuple[Role, ...] = (
    *KEPT_OF_WEIGHTS,
    "loss scale",
    "key",
    "count",
    "measure",
)


def _of_the_rule(leaves: list[StateLeaf]) -> list[StateLeaf]:
    return [leaf for leaf in leaves if not (leaf.owner and leaf.role in _OF_WRAPPERS)]


_stored = jax.jit(
    lambda weight, storage, dtype: storage.store(weight, dtype), static_argnums=(1, 2)
)
_cast = jax.jit(cast_nearest, static_argnums=1)


# The weights.


def _moved_weights(
    params: Any,
    best: dict[_trees.Path, Any],
    wanted: Any,
    old: dict[Any, StateLeaf],
    new: dict[Any, StateLeaf],
) -> dict[_trees.Path, tuple[jax.Array, Any]]:
    """Return the floating parameters as the new recipe has them, each with what its
    state keeps of it.
    """
    require_fit(best, new, "convert_state", _OTHER_TREE)
    wanted, moved = _trees.leaves_by_path(wanted), {}
    for path, p in _trees.leaves_by_path(params).items():
        if not _trees.is_floating(p):
            continue
        had, has = (
            leaves[path].storage if path in leaves else None for leaves in (old, new)
        )
        new_p, kept = p, old[path].leaf if path in old else None
        if had != has or p.dtype != wanted[path].dtype:
            near = p if kept is None else kept
            if has is None:
                new_p, kept = _cast(best[path], wanted[path].dtype), None
            else:
                new_p, kept = _stored(best[path], has, wanted[path].dtype)
                kept = _trees.placed_like(kept, near)
            new_p = _trees.placed_like(new_p, p)
        moved[path] = new_p, kept
    return moved


@jax.jit
def _loss(best: jax.Array, p: jax.Array) -> jax.Array:
    """Return the largest change of a weight, in units of the weight."""
    # Subnormals count as zero in a division. An infinite weight that stays has no
    # change (inf - inf is NaN).
    change = jnp.abs(p.astype(best.dtype) - best) / jnp.maximum(
        jnp.abs(best), jnp.finfo(best.dtype).tiny
    )
    return jnp.max(jnp.nan_to_num(change), initial=0)


def _warn_of_losses(
    best: dict[_trees.Path, Any], weights: dict[_trees.Path, tuple[jax.Array, Any]]
) -> None:
    narrow = {
        path: p
        for path, (p, kept) in weights.items()
        if kept is None and p.dtype != best[path].dtype
    }
    losses = {path: float(_loss(best[path], p)) for path, p in narrow.items()}
    worst = max(losses, key=losses.__getitem__, default=())
    if losses and losses[worst]:
        _errors.warn(
            f"`convert_state`: weights changed, by up to {100 * losses[worst]:.3g}% in"
            f" {_trees.path_string(worst)!r} ({best[worst].dtype} to"
            f" {narrow[worst].dtype}), because `new_tx` does not keep what their dtype"
            " cannot hold. To keep that, add `master_weights` or `kahan_summation`, or"
            " store them in float32."
        )


# The rest of the state.


def _moved(old: Any, new: Any) -> Any:
    """Return a leaf of the rule as the new state stores it."""
    if is_stored(old) and is_stored(new) and old.format == new.format:
        return jax.tree.structure(new).unflatten(jax.tree.leaves(old))
    wide = old.decode() if is_stored(old) else old
    near = jax.tree.leaves(old)[0]
    if is_stored(new):
        codes, *scales = jax.tree.leaves(_encoded(wide, new.format))
        return jax.tree.structure(new).unflatten(
            [_trees.placed_like(codes, near), *scales]
        )
    if wide.dtype != new.dtype:
        wide = (
            _cast(wide, new.dtype)
            if _trees.is_floating(wide)
            else wide.astype(new.dtype)
        )
    return _trees.placed_like(wide, near)


@functools.partial(jax.jit, static_argnums=1)
def _encoded(x: jax.Array, format: StateFormat) -> StoredLeaf:
    return store(cast_nearest(x, np.dtype(np.float32)), format)


def _carried(old: list[StateLeaf], new: list[StateLeaf]) -> dict[_trees.Path, Any]:
    """Return the keys and counts of the new state: those of the old one, in their
    order, if it has them.
    """
    # Not the loss scale: a static one would never leave a scale that it was given.
    carries: tuple[Role, ...] = ("key", "count")
    before, after = (
        [leaf for leaf in leaves if leaf.owner and leaf.role in carries]
        for leaves in (old, new)
    )
    kept: defaultdict[Any, list[Any]] = defaultdict(list)
    for leaf in before:
        kept[leaf.role, leaf.path_in_rule, leaf.path_of_parameter].append(leaf.leaf)

    def type_of(x):
        return (x.shape, x.dtype)

    filled = {}
    for leaf in after:
        candidates = kept[leaf.role, leaf.path_in_rule, leaf.path_of_parameter]
        found = candidates.pop(0) if candidates else None
        if found is not None and type_of(found) == type_of(leaf.leaf):
            filled[leaf.path] = found
    return filled


def _fresh(
    new_tx: optax.GradientTransformation, wanted: Any, paths: list[_trees.Path]
) -> dict[_trees.Path, Any]:
    """Return the initial values of leaves without a counterpart in the old state; none
    depends on the weights.
    """

    @jax.jit
    def init():  # all other leaves are never computed
        def zeros(p):
            return (
                jnp.zeros(p.shape, p.dtype)
                if isinstance(p, jax.ShapeDtypeStruct)
                else p
            )

        leaves = _trees.leaves_by_path(new_tx.init(jax.tree.map(zeros, wanted)))
        return [leaves[path] for path in paths]

    return dict(zip(paths, init(), strict=True)) if paths else {}


# Checks.

_OTHER_TREE = (
    "Masters and compensations cannot stand inside what gives its rule other parameters"
    " (`optax.flatten`): put them around it."
)


def _as_arrays(tree: T) -> T:
    """Replace NumPy's arrays and Python's numbers by JAX arrays; raise for tracers and
    shapes.
    """

    def as_array(leaf):
        if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
            raise TypeError(
                f"`convert_state` needs arrays, but got {type(leaf).__name__}. Call it"
                " outside of `jax.jit`, between two steps; the shapes of the new state"
                " alone are `jax.eval_shape(new_tx.init, new_params)`."
            )
        is_number = _trees.is_array(leaf) or isinstance(
            leaf, (bool, int, float, complex)
        )
        return (
            jnp.asarray(leaf) if is_number and not isinstance(leaf, jax.Array) else leaf
        )

    return jax.tree.map(as_array, tree)


def _state_of(tx: optax.GradientTransformation, params: Any, opt_state: Any) -> Any:
    """Return a state as `init` makes it; raise if it is not one of this transformation
    for these parameters.
    """
    require_types(opt_state, "convert_state")
    made = jax.eval_shape(tx.init, params)
    # A `flax.nnx.Optimizer` puts each array into a variable. `init` does so only where
    # the parameters do.
    leaves, bare = jax.tree.flatten(_flax.without_boxes(opt_state), is_leaf=is_stored)
    if bare == _structure(_flax.without_boxes(made)):
        opt_state = _structure(made).unflatten(leaves)
    expected = _trees.leaves_by_path(made, is_stored)
    got = _trees.leaves_by_path(opt_state, is_stored)
    wrong = _errors.mismatches(expected, got, _is_made_as, "`tx.init` makes", shown)
    if not wrong and _structure(opt_state) != _structure(made):
        wrong = {(): "the leaves fit, but not the nodes around them"}
    what = "`convert_state`: `opt_state` is not a state of `tx` for these parameters"
    remedy = (
        "Pass the transformation that made it, and the parameters that it trains: for"
        " Flax NNX `nnx.state(model, nnx.Param)` and `optimizer.opt_state`, for Equinox"
        " `eqx.filter(model, eqx.is_inexact_array)`. If it was restored from a"
        " checkpoint without its types, restore it into `jax.eval_shape(tx.init,"
        " params)`."
    )
    _errors.refuse(wrong, what, remedy)
    return opt_state


def _structure(state: Any) -> Any:
    """Return the nodes of a state around its stored leaves."""
    return jax.tree.structure(state, is_leaf=is_stored)


def _is_made_as(made: Any, leaf: Any) -> bool:
    """Return whether a leaf is as `init` makes it. The first update of Optax's rules
    may change a floating dtype, and another mesh makes blocks of another size.
    """
    if is_stored(made):
        is_alike = is_stored(leaf) and type(leaf.format) is type(made.format)
        return is_alike and leaf.shape == made.shape
    return (
        isinstance(leaf, jax.Array)
        and leaf.shape == made.shape
        and _kind(leaf) == _kind(made)
    )


def _require_same_rule(old: list[StateLeaf], new: list[StateLeaf]) -> None:
    """Raise if two states are not of the same rule; name the first difference."""

    def compared(leaf):
        return leaf and (leaf.path_in_rule, leaf.leaf.shape, _kind(leaf.leaf))

    pairs = itertools.zip_longest(_of_the_rule(old), _of_the_rule(new))
    differing = next(
        (pair for pair in pairs if compared(pair[0]) != compared(pair[1])), None
    )
    if differing is not None:
        was, becomes = map(_described, differing)
        raise ValueError(
            "`convert_state`: the rules in `tx` and `new_tx` differ. They must be the"
            " same, with the same options. To change the rule, start with new moments:"
            " with `weights = master_params(params, opt_state)`, call"
            " `convert_state(weights, rule.init(weights), rule, new_tx)`, where `rule`"
            f" is the one inside `new_tx`. Where the state of `tx` has\n  {was}\nthe"
            f" state of `new_tx` has\n  {becomes}"
        )


def _kind(leaf: Any) -> str:
    """Return a name that is equal for leaves that can be converted into each other."""
    if is_stored(leaf) or jnp.issubdtype(leaf.dtype, jnp.floating):
        return "floating"
    return "integer" if jnp.issubdtype(leaf.dtype, jnp.integer) else str(leaf.dtype)


def _described(leaf: StateLeaf | None) -> str:
    return (
        "nothing more"
        if leaf is None
        else f"{'/'.join(leaf.path_in_rule)!r}: {shown(leaf.leaf)}"
    )
