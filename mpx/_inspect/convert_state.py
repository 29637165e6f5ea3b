"""`convert_state`: a training goes on under another recipe.

Three kinds of leaves stand in an optimizer state. What mpx keeps of the weights (masters, low bits, compensations) is
made anew from their best float32 values. What mpx keeps besides (the loss scale and its counters, PRNG keys) is taken
from the old state if that has the like. All others belong to the rule. They are paired in their order: without mpx's
wrappers and the nesting of chains both states must have the same leaves, in states of the same types.
"""

import functools
import warnings
from collections import defaultdict
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

from mpx import _errors, _trees, formats
from mpx._inspect.masters import master_params
from mpx._inspect.parts import KEEPERS, MEASURES, Part, of_the_rule, parts_of
from mpx._policy import Policy, as_policy
from mpx._stored.blockwise import BlockwiseArray, decode, encode
from mpx._transforms.kahan_summation import KahanSummationState
from mpx._transforms.loss_scaling import LossScalingState
from mpx._transforms.low_precision_state import LowPrecisionState
from mpx._transforms.master_weights import MasterWeightsState
from mpx._transforms.upcast import settled
from mpx._transforms.writeback import on_grid

T = TypeVar("T")


def convert_state(
    params: T,
    opt_state: optax.OptState,
    tx: optax.GradientTransformation,
    new_tx: optax.GradientTransformation,
    *,
    policy: Policy | str | None = None,
) -> tuple[T, optax.OptState]:
    """Moves a training to another recipe: the same weights and moments, stored in another way.

    Both transformations must contain the same rule. What mpx puts around it may differ: `upcast`, `master_weights`
    (full or split), `loss_scaling`, `low_precision_state`, `kahan_summation`, `stochastic_rounding`, in any nesting and
    inside of Optax's wrappers too. So may what measures (`mpx.monitor`, `optax.snapshot`): it begins anew.

    - The weights that are moved are those of `master_params`. float32 parameters, full and split masters hold them
      exactly; a parameter with a bfloat16 Kahan compensation does to about 2**-17 of the weight. If the new recipe
      keeps nothing of what its parameters cannot hold, that is lost, and a warning says how much.
    - The state of the rule is carried over leaf by leaf, in float32 between, and rounded to nearest where the new
      recipe stores it in fewer bits. What is stored in the same way on both sides keeps its bits.
    - PRNG keys are carried over if both recipes have them, and so is the loss scale with its counters if both recipes
      begin with the same scale; else they start fresh, and only the count of skipped steps goes on.

    Call it between two steps, outside of `jax.jit`. Every leaf keeps the sharding of the old one of its shape; what is
    new lies where its parameter does (under `zero1`: `jax.device_put(new_opt_state, zero1_shardings(...))`). Arrays
    that need no change are those that were given, so donate the old ones or the new ones, not both.

    (Of `flax.nnx`: pass `nnx.as_pure(nnx.state(model, nnx.Param))` and `nnx.as_pure(optimizer.opt_state)`.)

    Args:
        params: the parameters, any pytree.
        opt_state: the state of `tx` for them.
        tx: what has trained the parameters.
        new_tx: what shall train them from here on.
        policy: how the new parameters are stored, a `Policy` or the string of one. None: each keeps its dtype.

    Returns:
        `(new_params, new_opt_state)`, whose trees, shapes and dtypes are those of `policy.cast_to_param(params)` and
        `new_tx.init(new_params)`.

    Raises:
        TypeError: if `tx` or `new_tx` is not a transformation or `policy` not a policy; inside of `jax.jit`.
        ValueError: if `opt_state` is not a state of `tx` for these parameters; if the rules differ; if a parameter
            cannot be told from what the new state keeps of it (`optax.flatten`); whatever `new_tx.init` raises.

    Warns:
        UserWarning: if weights change because the new recipe keeps nothing of what their dtype cannot hold.

    Example:
        >>> tx = optax.adam(1e-3)
        >>> params = {"w": jnp.full(2, 1.001)}
        >>> policy = get_policy("params=bf16,compute=bf16,output=f32")
        >>> new_tx = mixed_precision(tx, policy, storage="split")
        >>> new_params, new_state = convert_state(params, tx.init(params), tx, new_tx, policy=policy)
        >>> new_params["w"], new_state.master["w"].dtype, master_params(new_params, new_state)["w"]
        (Array([1, 1], dtype=bfloat16), dtype('uint16'), Array([1.001, 1.001], dtype=float32))
    """
    tx = _errors.as_transformation(tx, "convert_state")
    new_tx = _errors.as_transformation(new_tx, "convert_state")
    policy = None if policy is None else as_policy(policy, "convert_state")
    params, opt_state = _as_arrays(params), _as_arrays(opt_state)
    _require_state_of(tx, params, opt_state)
    wanted = _trees.shapes_of(params) if policy is None else policy.cast_to_param(_trees.shapes_of(params))
    template = jax.eval_shape(new_tx.init, wanted)
    old, new = parts_of(opt_state), parts_of(template)
    _require_same_rule(old, new)
    weights = _moved_weights(params, opt_state, wanted, old, new)
    filled = {part.path: weights[part.below].kept for part in new if part.keeper in KEEPERS}
    for before, after in zip(of_the_rule(old), of_the_rule(new), strict=True):
        filled |= _moved(before, after)
    begins = [_first_loss_scale(*recipe) for recipe in ((tx, _trees.shapes_of(params), old), (new_tx, wanted, new))]
    filled |= _carried(old, new, is_scaled_alike=begins[0] == begins[1])
    new_params = jax.tree.map_with_path(lambda path, p: weights[path].p if path in weights else p, params)
    filled |= _fresh(new_tx, wanted, [part.path for part in new if part.path not in filled])
    new_state = jax.tree.map_with_path(lambda path, _: filled[path], template)
    _warn_of_losses(weights)
    return new_params, settled(new_state, new_params)


# The weights.


class _Weight(NamedTuple):
    """A parameter, and what the state keeps of it."""

    p: jax.Array
    kept: Any
    dtypes: str  # before and after
    loss: tuple[jax.Array, jax.Array] | None  # how many elements changed, and by how much at most


def _moved_weights(
    params: Any, opt_state: Any, wanted: Any, old: list[Part], new: list[Part]
) -> dict[_trees.Path, _Weight]:
    """The floating parameters as the new recipe has them."""
    best, wanted = _trees.leaves_by_path(master_params(params, opt_state)), _trees.leaves_by_path(wanted)
    before, after = ({part.below: part for part in parts if part.keeper in KEEPERS} for parts in (old, new))
    _require_fit(best, after)
    return {
        path: _moved_weight(p, best[path], wanted[path].dtype, before.get(path), after.get(path))
        for path, p in _trees.leaves_by_path(params).items()
        if _trees.is_floating(p)
    }


def _moved_weight(p: jax.Array, best: jax.Array, dtype: np.dtype, old: Part | None, new: Part | None) -> _Weight:
    """A parameter as the new recipe has it.

    Args:
        p: the parameter.
        best: its float32 value.
        dtype: of the new parameter.
        old: what the old state keeps of it.
        new: the shape of what the new state keeps of it.
    """
    had, has = ((None, None) if part is None else (part.keeper, part.leaf.dtype) for part in (old, new))
    old_kept = None if old is None else old.leaf
    if had == has and p.dtype == dtype:
        return _Weight(p, old_kept, "", None)
    new_p, kept = _stored(best, dtype, *has)
    loss = _loss(best, new_p) if new is None and _trees.is_narrower(new_p, best.dtype) else None
    if kept is not None:
        kept = _placed_like(kept, p if old_kept is None else old_kept)
    return _Weight(_placed_like(new_p, p), kept, f"{best.dtype} to {dtype}", loss)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _stored(best: jax.Array, dtype: np.dtype, keeper: type | None, kept_dtype: Any) -> tuple[jax.Array, Any]:
    """A weight as a parameter and what is kept of it."""
    if keeper is KahanSummationState or kept_dtype == np.uint16:
        best = _cast(best, np.dtype(np.float32))
    if kept_dtype == np.uint16:
        return formats.split_f32(best, overflow="largest")
    if keeper is MasterWeightsState:
        master = _cast(best, kept_dtype)
        return _cast(master, dtype), master
    nearest = _nearest(best, dtype)
    if keeper is None:
        return nearest.astype(dtype), None
    rest = jnp.where(jnp.isfinite(best), best - nearest, jnp.zeros_like(best))
    return nearest.astype(dtype), _cast(rest, kept_dtype)


@functools.partial(jax.jit, static_argnums=1)
def _cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Widens exactly, or rounds to nearest; no finite number becomes infinite."""
    return _nearest(x.astype(_trees.promoted(x.dtype, np.float32)), dtype).astype(dtype)


def _nearest(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """The nearest numbers that `dtype` holds, in the dtype of `x`, float32 or float64."""
    if dtype.itemsize >= x.dtype.itemsize:
        return x
    if x.dtype == np.float64 and dtype.itemsize == 2:
        return on_grid(on_grid(x, np.dtype(np.float32)).astype(np.float32), dtype).astype(np.float64)
    return on_grid(x, dtype)


@jax.jit
def _loss(best: jax.Array, p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many weights changed, and the largest change in units of the weight."""
    now, bits = p.astype(best.dtype), f"u{best.dtype.itemsize}"
    same = lax.bitcast_convert_type(now, bits) == lax.bitcast_convert_type(best, bits)
    changed = ~(same | (jnp.isnan(best) & jnp.isnan(now)))
    smallest = np.asarray(jnp.finfo(best.dtype).tiny, best.dtype)  # subnormals count as zero in a division
    change = jnp.abs(now - best) / jnp.maximum(jnp.abs(best), smallest)
    return jnp.sum(changed, dtype=np.int32), jnp.max(jnp.where(changed, change, jnp.zeros_like(change)), initial=0)


def _warn_of_losses(weights: dict[_trees.Path, _Weight]) -> None:
    paths = [path for path, weight in weights.items() if weight.loss is not None]
    losses = dict(zip(paths, jax.device_get([weights[path].loss for path in paths]), strict=True))
    changed = sum(int(count) for count, _ in losses.values())
    if changed:
        worst = max(losses, key=lambda path: losses[path][1])
        total = sum(weight.p.size for weight in weights.values())
        warnings.warn(
            f"`convert_state`: {changed:,} of {total:,} weights changed, by up to {100 * losses[worst][1]:.3g}% in "
            f"{_trees.path_string(worst)!r} ({weights[worst].dtypes}), because `new_tx` keeps nothing of what their "
            "dtype cannot hold. To keep that, add `master_weights` or `kahan_summation`, or store them in float32.",
            stacklevel=3,
        )


# The rest of the state.


def _moved(old: Part, new: Part) -> dict[_trees.Path, Any]:
    """A leaf of the rule as the new state stores it, and its scales if it is coded."""
    if old.code and new.code and old.code[2:] == new.code[2:]:
        return {new.path: old.leaf, new.code.scale_path: old.code.scale}
    wide = _decoded(old.leaf, old.code.scale, *old.code[2:]) if old.code else old.leaf
    if new.code:
        codes, scale = _encoded(wide, *new.code[2:])
        return {new.path: _placed_like(codes, old.leaf), new.code.scale_path: scale}
    if wide.dtype == new.leaf.dtype:
        return {new.path: _placed_like(wide, old.leaf)}
    cast = _cast(wide, new.leaf.dtype) if _trees.is_floating(wide) else lax.convert_element_type(wide, new.leaf.dtype)
    return {new.path: _placed_like(cast, old.leaf)}


@functools.partial(jax.jit, static_argnums=(2, 3))
def _decoded(codes: jax.Array, scale: jax.Array, block_size: int, signed: bool) -> jax.Array:
    return decode(BlockwiseArray(codes, scale), block_size, signed)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _encoded(x: jax.Array, block_size: int, signed: bool) -> BlockwiseArray:
    return encode(_cast(x, np.dtype(np.float32)), block_size, signed)


def _first_loss_scale(tx: optax.GradientTransformation, params: Any, parts: list[Part]) -> list[float]:
    """With what loss scale a recipe begins, which is all that tells of its settings."""
    paths = [part.path for part in parts if part.place == (f"{LossScalingState.__name__}.loss_scale",)]
    return [float(scale) for scale in _fresh(tx, params, paths).values()]


def _carried(old: list[Part], new: list[Part], is_scaled_alike: bool) -> dict[_trees.Path, Any]:
    """Loss scales with their counters, and keys: what both states have, in its order.

    Of a loss scale of other settings only the count of skipped steps: a static one would never leave a scale that it
    was given, and a dynamic one would take long to come back from that of no scaling.
    """
    others: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    for part in old:
        if part.keeper is not None and part.keeper not in (*KEEPERS, *MEASURES):
            others[part.place].append(part.leaf)
    carried = {}
    for part in new:
        if part.keeper is None or part.keeper in KEEPERS or not others[part.place]:
            continue
        leaf = others[part.place].pop(0)
        is_setting = part.keeper is LossScalingState and part.place[0].rpartition(".")[2] != "skipped_steps"
        if is_setting and not is_scaled_alike:
            continue
        if (leaf.shape, leaf.dtype) == (part.leaf.shape, part.leaf.dtype) and not _is_of_blocks(part):
            carried[part.path] = leaf
    return carried


def _is_of_blocks(part: Part) -> bool:
    """Whether it is the scales of a coded leaf, which come with that."""
    return part.place[0] == f"{LowPrecisionState.__name__}.block_scales"


def _fresh(new_tx: optax.GradientTransformation, wanted: Any, paths: list[_trees.Path]) -> dict[_trees.Path, Any]:
    """Leaves of a new state that nothing in the old one corresponds to, none of which depends on the weights."""
    if not paths:
        return {}

    @jax.jit
    def init():  # all other leaves are never computed
        zeros = lambda p: jnp.zeros(p.shape, p.dtype) if isinstance(p, jax.ShapeDtypeStruct) else p
        leaves = _trees.leaves_by_path(new_tx.init(jax.tree.map(zeros, wanted)))
        return [leaves[path] for path in paths]

    return dict(zip(paths, init(), strict=True))


def _placed_like(x: jax.Array, old: Any) -> jax.Array:
    """The array where the old one of its shape is, if the user has placed that."""
    if x is old or x.shape != old.shape or not old.committed or x.sharding.is_equivalent_to(old.sharding, x.ndim):
        return x
    return jax.device_put(x, old.sharding)


# Checks.


def _as_arrays(tree: T) -> T:
    """The tree with arrays of JAX for NumPy's and for Python's numbers; raises for what is no array yet."""

    def as_array(leaf):
        if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
            raise TypeError(
                f"`convert_state` needs arrays, but got {type(leaf).__name__}. Call it outside of `jax.jit`, between "
                "two steps; the shapes of the new state alone are `jax.eval_shape(new_tx.init, new_params)`."
            )
        is_number = _trees.is_array(leaf) or isinstance(leaf, (bool, int, float, complex))
        return jnp.asarray(leaf) if is_number and not isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(as_array, tree)


def _require_state_of(tx: optax.GradientTransformation, params: Any, opt_state: Any) -> None:
    """Raises, naming every such leaf, if a state is not one of this transformation for these parameters."""
    if callable(getattr(opt_state, "init", None)):
        raise TypeError(
            "`convert_state` needs an optimizer state, but got a transformation; `init` makes its state. The order is "
            "`convert_state(params, opt_state, tx, new_tx)`."
        )
    made = jax.eval_shape(tx.init, params)
    expected, leaves = {part.path: part for part in parts_of(made)}, _trees.leaves_by_path(opt_state)
    name = lambda path: repr(_trees.path_string(path))
    wrong = [f"  {name(path)} is in the state only" for path in leaves if path not in expected]
    wrong += [f"  {name(path)} is missing" for path in expected if path not in leaves]
    wrong += [
        f"  {name(path)}: {_trees.dtype_and_shape(leaves[path])}, not {_trees.dtype_and_shape(part.leaf)}"
        for path, part in expected.items()
        if path in leaves and not _is_made_as(part, leaves[path])
    ]
    if not wrong and jax.tree.structure(opt_state) != jax.tree.structure(made):
        wrong = [f"  its tree is\n{jax.tree.structure(opt_state)}\n  not\n{jax.tree.structure(made)}"]
    if wrong:
        listed = "\n".join(wrong)
        raise ValueError(
            f"`convert_state`: `opt_state` is not a state of `tx` for these parameters:\n{listed}\n"
            "Pass the transformation that made it, and the parameters that it trains. If it was restored from a "
            "checkpoint without its types, restore it into `jax.eval_shape(tx.init, params)`; if it is that of a "
            "`flax.nnx.Optimizer`, pass `nnx.as_pure` of it and of the parameters."
        )


def _is_made_as(part: Part, leaf: Any) -> bool:
    """Whether a leaf is as `init` makes it. A bare rule may change its floating dtypes with its first update."""
    if not isinstance(leaf, jax.Array) or leaf.shape != part.leaf.shape:
        return False
    both_floating = _trees.is_floating(leaf) and _trees.is_floating(part.leaf)
    return leaf.dtype == part.leaf.dtype or (both_floating and not part.wrapped)


def _require_same_rule(old: list[Part], new: list[Part]) -> None:
    """Raises, naming the first difference, if two states are not of the same rule."""
    pairs = [[(part.place, part.leaf.shape, _kind(part)) for part in of_the_rule(parts)] for parts in (old, new)]
    if pairs[0] == pairs[1]:
        return
    same = next((i for i, (a, b) in enumerate(zip(*pairs, strict=False)) if a != b), min(map(len, pairs)))
    was, becomes = (_described(of_the_rule(parts)[same:]) for parts in (old, new))
    raise ValueError(
        f"`convert_state`: the rule in `new_tx` is not that in `tx`. Where the state of `tx` has\n  {was}\nthat of "
        f"`new_tx` has\n  {becomes}\nThe rules must be the same, with the same options; only what mpx puts around them "
        "may differ. To change the rule, start with new moments: `new_tx.init(params)`, with `master_params` as "
        "the parameters."
    )


def _kind(part: Part) -> str:
    """What can be converted into each other."""
    if part.code or _trees.is_floating(part.leaf):
        return "floating"
    return "integer" if jnp.issubdtype(part.leaf.dtype, jnp.integer) else str(part.leaf.dtype)


def _described(rest: list[Part]) -> str:
    if not rest:
        return "nothing more"
    shown = "8 bits of " if rest[0].code else ""
    return f"{'/'.join(rest[0].place)!r}: {shown}{_trees.dtype_and_shape(rest[0].leaf)}"


def _require_fit(weights: dict[_trees.Path, Any], kept: dict[_trees.Path, Part]) -> None:
    """Raises if a new state keeps something of what is no parameter by its path and shape."""
    for path, part in kept.items():
        if path not in weights or weights[path].shape != part.leaf.shape:
            raise ValueError(
                f"`convert_state`: the state of `new_tx` keeps {_trees.dtype_and_shape(part.leaf)} for "
                f"{_trees.path_string(path)!r}, and no parameter has this path and shape. Masters and compensations "
                "cannot stand inside what gives its rule other parameters (`optax.flatten`): put them around it."
            )
