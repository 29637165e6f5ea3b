"""`upcast`: a float32 world for any rule; the base of the other wrappers."""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike

from mpx import _errors, _trees

T = TypeVar("T")

_KINDS = (jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_)


class UpcastState(NamedTuple):
    """State of `upcast`.

    Attributes:
        inner_state: state of the wrapped rule, as it is for parameters of the wide dtype.
    """

    inner_state: optax.OptState


def upcast(
    inner: optax.GradientTransformation, dtype: DTypeLike = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Gives a rule float32 parameters and gradients, whatever the model's dtype; its updates are float32.

    A rule on bfloat16 parameters keeps bfloat16 moments, rounds its hyper-parameters to bfloat16 (0.999 becomes
    1) and divides by an epsilon that float16 does not have. Inside `upcast` it does what it does in float32,
    to the bit. The parameters themselves stay as they are: to keep what their dtype cannot hold of an update,
    use `master_weights`, or `kahan_summation` or `stochastic_rounding` *after* this, in a chain: inside, they would
    see float32 parameters, of which nothing is lost, and do nothing.

    Args:
        inner: any Optax transformation or chain.
        dtype: float32 or float64. Narrower floating leaves of parameters, gradients and extra arguments become
            `dtype`; wider ones and all others stay.

    Returns:
        A transformation with state `UpcastState`, whose structure and dtypes no update changes.

    Raises:
        TypeError: if `inner` is not a transformation; at `update`, if a gradient is not of a floating or complex
            dtype.
        ValueError: if `dtype` is neither float32 nor float64.

    Example:
        >>> params = {"w": jnp.ones(4, jnp.bfloat16)}
        >>> tx = upcast(optax.adam(1e-3))
        >>> state = tx.init(params)
        >>> optax.tree.get(state, "nu")["w"].dtype
        dtype('float32')
        >>> tx.update({"w": jnp.ones(4, jnp.bfloat16)}, state, params)[0]["w"].dtype
        dtype('float32')
    """
    inner = _errors.as_transformation(inner, "upcast")
    dtype = _errors.wide_dtype(dtype, "upcast")

    def init_fn(params):
        params = widen(params, dtype)
        return UpcastState(settled(inner.init(params), params))

    def update_fn(updates, state, params=None, **extra_args):
        _errors.require_state(state, UpcastState, "upcast")
        _errors.require_differentiable(updates, "upcast")
        updates, params, extra_args = widen((updates, params, extra_args), dtype)
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        return widen(updates, dtype), UpcastState(with_types_of(state.inner_state, inner_state))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def widen(tree: T, dtype: np.dtype) -> T:
    """Casts narrower floating leaves up to `dtype`, and gives weakly typed ones and Python floats a firm type."""

    def firm(leaf):
        if isinstance(leaf, float):
            return jnp.asarray(leaf, dtype)
        if _trees.is_floating(leaf) and getattr(leaf, "weak_type", False):
            return lax.convert_element_type(leaf, _trees.promoted(leaf.dtype, dtype))
        return leaf

    return jax.tree.map(firm, _trees.cast_tree(tree, dtype, which=lambda leaf: leaf.dtype.itemsize < dtype.itemsize))


def settled(state: T, params: Any) -> T:
    """A new state as it will be after its first update: firm dtypes, and no buffer that is also a parameter.

    Rules that keep a copy of the parameters keep the very array, and so does a count that stands in a state twice;
    donating parameters and state would give such a buffer away twice, which the runtime refuses.
    """
    taken = {id(leaf) for leaf in jax.tree.leaves(params)}

    def settle(leaf):
        if isinstance(leaf, (bool, int, float)) or getattr(leaf, "weak_type", False):
            return lax.convert_element_type(leaf, jnp.asarray(leaf).dtype)
        if id(leaf) in taken and isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            return jnp.array(leaf, copy=True)
        taken.add(id(leaf))
        return leaf

    return jax.tree.map(settle, state)


def with_types_of(old: T, new: T) -> T:
    """Gives a new state the dtypes of the old one, so that it can be a scan carry.

    Only between dtypes of one kind: a rule that turns a count into a float is not mended in silence.
    """

    def same_type(path, before, after):
        wanted, got = jax.typeof(before), jax.typeof(after)
        if got.dtype == wanted.dtype and not got.weak_type:
            return after
        if not any(jnp.issubdtype(wanted.dtype, kind) and jnp.issubdtype(got.dtype, kind) for kind in _KINDS):
            raise TypeError(
                f"The wrapped rule changed the dtype of its state at {_trees.path_string(path)!r} from "
                f"{wanted.dtype} to {got.dtype}."
            )
        return lax.convert_element_type(after, wanted.dtype)

    return jax.tree.map_with_path(same_type, old, new)
