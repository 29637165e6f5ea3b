"""`upcast`: run any rule in float32, here and inside of other wrappers, and keep the
types of its state.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._chain import element
from mpx._stored.roles import WRITES_BACK
from mpx._stored.state_format import is_stored, shown

T = TypeVar("T")

_KINDS = (jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_)


@element
def upcast(
    inner: optax.GradientTransformation, dtype: DTypeLike = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Give a rule float32 parameters and gradients, whatever the model's dtype; its
    updates are float32.

    A rule on bfloat16 parameters keeps bfloat16 moments, rounds its hyper-parameters to
    bfloat16 (0.999 becomes 1) and divides by an epsilon that float16 does not have.
    Inside `upcast` it computes as in float32, to the bit. The parameters themselves
    keep their dtype, which cannot hold all of an update. To keep the rest, use
    `master_weights` around the rule, or `kahan_summation` or `stochastic_rounding`
    *after* this, in a chain.

    Args:
        inner: any Optax transformation or chain. Without it this is an element of
            `chain`.
        dtype: float32 or float64. Narrower floating leaves of parameters, gradients and
            extra arguments become `dtype`; all other leaves keep theirs.

    Returns:
        A transformation with the state of `inner` for float32 parameters. No update
        changes its structure or dtypes.

    Example:
        >>> params = {"w": jnp.ones(4, jnp.bfloat16)}
        >>> tx = upcast(optax.adam(1e-3))
        >>> state = tx.init(params)
        >>> optax.tree.get(state, "nu")["w"].dtype
        dtype('float32')
        >>> tx.update({"w": jnp.ones(4, jnp.bfloat16)}, state, params)[0]["w"].dtype
        dtype('float32')
    """
    return run_in_float32(inner, _errors.wide_dtype(dtype, "upcast"), "upcast")


def run_in_float32(
    inner: Any, dtype: np.dtype, caller: str
) -> optax.GradientTransformationExtraArgs:
    """Wrap a rule: it sees parameters, gradients and extra arguments in at least
    `dtype`, and returns such updates.
    """
    inner = _errors.as_transformation(inner, caller)

    def init_fn(params):
        wide = upcast_tree(params, dtype)
        state = inner.init(wide)
        _require_no_rounding_inside(state, params, dtype, caller)
        return stable_state(state, wide)

    def update_fn(updates, state, params=None, **extra_args):
        _errors.require_differentiable(updates, caller)
        # Extra arguments too: a line search gets its gradients and values there.
        updates, params, extra_args = upcast_tree((updates, params, extra_args), dtype)
        if any(_trees.is_narrower(leaf, dtype) for leaf in jax.tree.leaves(state)):
            # Of a bare rule, perhaps: its moments would stay bfloat16, and where dtypes
            # promote nothing would raise.
            _require_state_of(inner, state, params, caller)
        try:
            updates, new_state = inner.update(updates, state, params, **extra_args)
        # if the state is another rule's, or a gradient is None, its error says little
        except Exception:
            _require_state_of(inner, state, params, caller)
            _errors.require_gradients(updates, params, caller)
            raise
        return upcast_tree(updates, dtype), keep_types(state, new_state)

    return _errors.with_checked_shapes(
        optax.GradientTransformationExtraArgs(init_fn, update_fn), caller
    )


def _require_no_rounding_inside(
    state: Any, params: Any, dtype: np.dtype, caller: str
) -> None:
    """Raise if what rounds for 16-bit parameters stands inside a wrapper that hides
    them, where it does nothing.
    """
    if not any(_trees.is_narrower(p, dtype) for p in jax.tree.leaves(params)):
        return
    for found in _trees.find_states(state, tuple(WRITES_BACK)):
        raise ValueError(
            f"`{caller}`: `{WRITES_BACK[type(found)]}` stands inside `{caller}`, sees"
            f" parameters in {dtype} there and does nothing. Put it after or around:"
            " `optax.chain(upcast(rule), kahan_summation())`, `master_weights(rule)`."
        )


def _require_state_of(inner: Any, state: Any, params: Any, caller: str) -> None:
    """Raise if a state has other leaves or dtypes than the rule makes for these
    parameters.
    """
    if params is None:
        return
    made = _trees.leaves_by_path(jax.eval_shape(inner.init, params), is_stored)
    got = _trees.leaves_by_path(state, is_stored)

    def fits(x, y):
        if is_stored(x) or is_stored(y):
            return is_stored(x) and is_stored(y) and x.format == y.format
        return x.dtype == getattr(y, "dtype", x.dtype)

    wrong = _errors.mismatches(made, got, fits, "`init` makes", shown)
    what = (
        f"`{caller}`: the state is not one that its `init` makes for these parameters"
    )
    remedy = (
        "If it is the state of another recipe, `convert_state` makes one of this"
        " recipe."
    )
    _errors.refuse(wrong, what, remedy)


def upcast_tree(tree: T, dtype: np.dtype) -> T:
    """Cast narrower floating leaves up to `dtype`, and give weakly typed leaves and
    Python floats a strong type.
    """

    def strong(leaf):
        if isinstance(leaf, float):
            return jnp.asarray(leaf, dtype)
        if _trees.is_floating(leaf) and getattr(leaf, "weak_type", False):
            return lax.convert_element_type(leaf, _trees.promoted(leaf.dtype, dtype))
        return leaf

    return jax.tree.map(
        strong,
        _trees.cast_tree(
            tree, dtype, which=lambda leaf: leaf.dtype.itemsize < dtype.itemsize
        ),
    )


def stable_state(state: T, params: Any) -> T:
    """Give a new state strong dtypes, as updates return them, and buffers of its own.

    Some rules keep the very array of a parameter, or one count in two places. Donating
    parameters and state would give such a buffer away twice, which the runtime refuses.
    """
    taken = {id(leaf) for leaf in jax.tree.leaves(params)}

    def stable(leaf):
        if isinstance(leaf, (bool, int, float)) or getattr(leaf, "weak_type", False):
            return lax.convert_element_type(leaf, jnp.asarray(leaf).dtype)
        if id(leaf) in taken and isinstance(leaf, jax.Array):
            return jnp.array(leaf, copy=True)
        taken.add(id(leaf))
        return leaf

    return jax.tree.map(stable, state)


def keep_types(old: T, new: T) -> T:
    """Give a new state the dtypes of the old one, so that it can be the carry of a
    scan.
    """
    old = with_measurements_of(new, old)

    def same_type(path, before, after):
        wanted, got = jax.typeof(before), jax.typeof(after)
        if (
            got.shape == wanted.shape
            and got.dtype == wanted.dtype
            and not got.weak_type
        ):
            return after
        is_of_kind = any(
            jnp.issubdtype(wanted.dtype, kind) and jnp.issubdtype(got.dtype, kind)
            for kind in _KINDS
        )
        if got.shape != wanted.shape or not is_of_kind:
            hint = " Is a mean of gradients over examples missing?"
            raise TypeError(
                "The wrapped rule changed its state at"
                f" {_trees.path_string(path)!r} from"
                f" {_trees.dtype_and_shape(wanted)} to {_trees.dtype_and_shape(got)}."
                f"{hint if got.shape != wanted.shape else ''}"
            )
        return lax.convert_element_type(after, wanted.dtype)

    return jax.tree.map_with_path(same_type, old, new)


def with_measurements_of(new: Any, old: T) -> T:
    """Return an old state with the measurements of the new one where it has none:
    `optax.monitor` begins without, so that its state has another structure.
    """
    kind = optax.MonitorState
    if all(node.measurements for node in _trees.find_states(old, kind)):
        return old
    measured = iter(_trees.find_states(new, kind))

    def filled(node):
        if not isinstance(node, kind):
            return node
        measurements = next(measured).measurements
        return node._replace(measurements=node.measurements or measurements)

    return jax.tree.map(filled, old, is_leaf=lambda x: isinstance(x, kind))
