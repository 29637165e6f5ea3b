"""Tell whether numbers are finite, and choose between two trees by that."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

T = TypeVar("T")


def all_finite(tree: Any) -> jax.Array:
    """Return whether all floating and complex numbers in a pytree of arrays are finite:
    a boolean scalar.

    Example:
        >>> print(all_finite({"a": jnp.ones(3), "b": jnp.array([1.0, jnp.inf])}))
        False
    """
    return finite_flags(tree).all()


def finite_flags(tree: Any) -> jax.Array:
    """Return, for each leaf of a tree, whether all its numbers are finite: a boolean
    vector.
    """
    flags = [_is_finite(leaf) for leaf in jax.tree.leaves(tree)]
    places = {
        frozenset(flag.devices())
        for flag in flags
        if not isinstance(flag, Tracer) and flag.committed
    }
    if len(places) > 1:
        # Layers that the user has placed on several devices. No operation takes arrays
        # of two devices; from the host the flags may go to any.
        flags = jax.device_get(flags)
    return jnp.stack(flags) if flags else jnp.ones(0, bool)


def _is_finite(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    return (
        jnp.isfinite(leaf).all()
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
        else jnp.asarray(True)
    )


def select_tree(pred: ArrayLike, a: T, b: T) -> T:
    """Take all leaves from `a` if `pred` is true, else from `b`: bits, signs of zeros
    and NaN payloads included.

    `pred` is a boolean scalar; `b` has the structure, shapes and dtypes of `a`.
    (Payloads of bfloat16 may change: it goes through float32, and a compiler may make a
    NaN quiet there.)

    Raises:
        TypeError: if `pred` is not a boolean scalar. (Also an `AssertionError`, as in
            jmp.)

    Example:
        >>> select_tree(jnp.bool_(False), {"w": jnp.float32(1)}, {"w": jnp.float32(2)})
        {'w': Array(2., dtype=float32)}
    """
    pred = jnp.asarray(pred)
    if pred.ndim != 0 or pred.dtype != np.bool_:
        raise _NotABooleanScalarError(
            "`select_tree`: expected boolean scalar `pred`, but got"
            f" {pred.dtype}{list(pred.shape)}."
        )
    return jax.tree.map(functools.partial(select, pred), a, b)


def select(pred: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Take `x` where `pred` is true, else `y`, two arrays of one shape and dtype; see
    `select_tree`.
    """
    if x.dtype not in (jnp.bfloat16, np.uint16):
        return lax.select(pred, x, y)
    # Choose in float32, which holds both exactly. XLA for a TPU writes results of 16
    # and of 32 bits in one pass over memory if all of them are float32 before a last
    # conversion; else it runs the step once for each width.
    return lax.select(pred, x.astype(np.float32), y.astype(np.float32)).astype(x.dtype)


class _NotABooleanScalarError(TypeError, AssertionError):
    """The error of `select_tree`: a TypeError, and what users of jmp catch."""
