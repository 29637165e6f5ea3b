"""Run the part of a step that belongs to one leaf, on rows of it.

A row is as wide as the largest block. A value with a number for each element is `[rows,
width]` here, whatever its shape in the program, and one with a number for each block
`[rows, width / block]`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from mpx._fused.partition import Part, places_in_rows, size_of
from mpx._jaxprs import dtype_of, is_literal
from mpx._primitives import facts_of, of_matrices

_REDUCERS = {
    "reduce_max": lax.reduce_max,
    "reduce_min": lax.reduce_min,
    "reduce_sum": lax.reduce_sum,
    # Triton does not reduce booleans.
    "reduce_and": (
        lambda x, axes: lax.reduce_min(x.astype(np.int32), axes).astype(x.dtype)
    ),
    "reduce_or": (
        lambda x, axes: lax.reduce_max(x.astype(np.int32), axes).astype(x.dtype)
    ),
}


def run_part(
    part: Part,
    arrays: Sequence[Any],
    scalars: Sequence[Any],
    cheaper: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> list[Any]:
    """Return the outputs of a part on some rows, from the rows of its arrays and its
    scalars.

    `cheaper` has what a compiler computes with fewer instructions than a primitive.
    """
    known = dict(zip((*part.arrays, *part.scalars), (*arrays, *scalars), strict=True))

    def read(v):
        return np.asarray(v.val, v.aval.dtype) if is_literal(v) else known[v]

    for eqn in part.equations:
        if size := places_in_rows(eqn):
            places = lax.broadcasted_iota(
                np.int32, (len(arrays[0]), columns(eqn.outvars[0], part)), 1
            )
            known[eqn.outvars[0]] = (places & (size - 1)).astype(
                dtype_of(eqn.outvars[0])
            )
        else:
            operands = [read(v) for v in eqn.invars]
            known[eqn.outvars[0]] = _run(eqn, operands, part, cheaper)
    return [read(v) for v in part.outputs]


def columns(v: Any, part: Part) -> int:
    """Return how many numbers of a value stand in a row."""
    return size_of(v) * part.width // part.size


def _run(
    eqn: JaxprEqn,
    operands: list[Any],
    part: Part,
    cheaper: Mapping[str, Callable[..., Any]],
) -> Any:
    name, facts, width = (
        eqn.primitive.name,
        facts_of(eqn),
        columns(eqn.outvars[0], part),
    )
    # Elements of a scalar are equal.
    if facts.moves == "same" or (facts.blocks and not np.ndim(operands[0])):
        return operands[0]
    if matrices := of_matrices(eqn):
        result: Any = eqn.outvars[0].aval
        stack = operands[1].reshape(-1, *result.shape[-2:])
        return matrices.whole(stack).reshape(operands[1].shape)
    if facts.blocks == "view":
        return _repeated(operands[0], width)
    if facts.blocks == "reduce":
        return _REDUCERS[name](operands[0].reshape(len(operands[0]), width, -1), (2,))
    if name == "round":
        return _rounded(operands[0], eqn.params["rounding_method"])
    is_ordinary = eqn.outvars[0] in part.ordinary
    if name in cheaper and (x := cheaper[name](is_ordinary, *operands)) is not None:
        return x
    rows = next((x.shape[0] for x in operands if np.ndim(x)), 0)

    def even(x, v):
        if np.ndim(x):
            return _repeated(x, width)
        # What all elements share is a scalar here, and a literal may stay one beside an
        # array.
        return jnp.broadcast_to(x, (rows, width)) if rows and not is_literal(v) else x

    evened = map(even, operands, eqn.invars)
    return eqn.primitive.bind(*_varying_alike(list(evened)), **eqn.params)


def _varying_alike(operands: list[Any]) -> list[Any]:
    """Let arrays differ among the same devices, inside of `jax.shard_map`: `pvary`,
    which says so of an array, is looked through.
    """
    axes = [
        jax.typeof(x).manual_axis_type.varying if isinstance(x, jax.Array) else None
        for x in operands
    ]
    every = frozenset().union(*filter(None, axes))
    return [
        x
        if own is None or own == every
        else lax.pcast(x, tuple(every - own), to="varying")
        for x, own in zip(operands, axes, strict=True)
    ]


def _repeated(x: jax.Array, width: int) -> jax.Array:
    """Repeat the numbers of each row until there are `width`."""
    rows, count = x.shape
    if count == width:
        return x
    return jnp.broadcast_to(x[:, :, None], (rows, count, width // count)).reshape(
        rows, width
    )


def _rounded(x: jax.Array, method: lax.RoundingMethod) -> jax.Array:
    """Round to integers, as `lax.round` does: Triton has only `floor`."""
    # Its fraction is exact: `-0.49999997 - floor(-0.49999997)` would round to a half.
    size = lax.abs(x)
    below = lax.floor(size)
    rest = size - below
    up = (rest > 0.5) | (
        (rest == 0.5) & (below != 2 * lax.floor(below * np.asarray(0.5, x.dtype)))
    )
    if method == lax.RoundingMethod.AWAY_FROM_ZERO:
        up = rest >= 0.5
    rounded = below + up.astype(x.dtype)
    # With the sign of `x`.
    return jnp.where(rounded == 0, x * 0, jnp.where(x < 0, -rounded, rounded))
