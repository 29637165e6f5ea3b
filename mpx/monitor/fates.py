"""Count what becomes of numbers: each has a kind, and `count` and `share_of` say how
many there are of each.

The kind is 0 for zeros, 1 and up for a fate or a power of two, and the last one for
what is infinite or NaN. Kinds are found from bits: arithmetic and comparisons on a CPU
take float32 subnormals for zero, and a gradient is subnormal before it vanishes.
"""

import bisect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from mpx import _trees
from mpx._errors import require_one_of
from mpx._shardings import explicit_sharding, in_auto

# floor(log2(|x|)) of float32 numbers: from the smallest subnormal to the largest
# number.
EXPONENTS = range(-149, 128)

# Of numbers that are rounded to a format.
FATES = ("zero", "subnormal", "normal", "infinite")
_FORMATS = (
    np.float16,
    ml_dtypes.bfloat16,
    np.float32,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
)
_INFINITE = 0x7F80_0000  # the bits of float32 infinity; those of NaN are above
_COUNTED = 2**32  # the smallest number that a uint32 cannot count to
# kinds: each is counted by a pass over the array, which a GPU does faster than a
# scatter into few places
_FEW = 10
Counts = jax.Array | np.ndarray


class ExponentHistogram(NamedTuple):
    """Counts of numbers by power of two, from float32's smallest subnormal to its
    largest number.
    """

    # `counts[i]` of 277 numbers have a magnitude of at least `2**(i - 149)`, and below
    # twice that
    counts: Counts
    zeros: Counts  # count of zeros
    nonfinite: Counts  # count of infinities and NaN


def format_of(dtype: DTypeLike, caller: str) -> np.dtype:
    """Return float16, bfloat16, float32, float8_e4m3fn or float8_e5m2; raise for
    anything else.
    """
    return require_one_of(_FORMATS, dtype, f"`{caller}`: `dtype`")


def floating_leaves(*trees: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the floating leaves of a tree by their names, each with the leaves that
    stand there in the other trees.
    """
    leaves = [_trees.leaves_by_path(tree) for tree in trees]
    columns = (
        (name, tuple(tree.get(path) for tree in leaves))
        for path, name in _trees.path_names(trees[0]).items()
    )
    return [
        (name, column)
        for name, column in columns
        if all(map(_trees.is_floating, column))
    ]


def edges_of(dtype: np.dtype, scale: float = 1.0) -> np.ndarray:
    """Return the smallest float32 magnitudes that meet each of `FATES`, then infinity,
    as bits.

    They are for numbers that are multiplied by `scale`, a power of two, before they are
    rounded to the format. The cast of the host decides, which rounds to nearest, ties
    to even.
    """
    smallest_normal = float(ml_dtypes.finfo(dtype).smallest_normal)

    def fate_of(bits: int) -> int:
        magnitude = float(np.uint32(bits).view(np.float32)) * scale
        rounded = float(np.float64(magnitude).astype(dtype))
        if not math.isfinite(rounded):
            return 3
        return (rounded > 0) + (rounded >= smallest_normal)

    with np.errstate(over="ignore", under="ignore"):
        begins = [
            bisect.bisect_left(range(_INFINITE), fate, lo=1, key=fate_of)
            for fate in range(len(FATES))
        ]
    return np.array([*begins, _INFINITE], np.uint32)


def magnitudes_of(x: ArrayLike) -> jax.Array:
    """Return the bits of |x| in float32 as uint32, which are ordered as |x| is."""
    x = jnp.asarray(x)
    # Shifted, since a conversion may flush its subnormals.
    if x.dtype == ml_dtypes.bfloat16:
        bits = x.view(np.uint16).astype(np.uint32) << 16
    else:
        bits = x.astype(np.float32).view(np.uint32)
    return bits & np.uint32(0x7FFF_FFFF)


def is_number(magnitudes: jax.Array) -> jax.Array:
    """Return a mask of the numbers that are neither zero nor infinite nor NaN."""
    return (magnitudes > np.uint32(0)) & (magnitudes < np.uint32(_INFINITE))


def fates_of(x: ArrayLike, edges: jax.Array | np.ndarray) -> jax.Array:
    """Return the kind of each number: the place of its fate in `FATES`, from 1, by the
    edges of a format.
    """
    return jnp.searchsorted(edges, magnitudes_of(x), "right", method="compare_all")


def exponents_of(x: ArrayLike) -> jax.Array:
    """Return the kind of each number: the place of floor(log2(|x|)) in `EXPONENTS`,
    from 1.
    """
    magnitudes = magnitudes_of(x)
    is_normal = magnitudes >= np.uint32(1 << 23)
    return jnp.where(
        is_normal,
        (magnitudes >> 23) + np.uint32(23),
        np.uint32(32) - lax.clz(magnitudes),
    )


def count(kinds: jax.Array, how_many: int) -> jax.Array:
    """Count the numbers of each kind: uint32[parts, how_many].

    There is one part, but where a count may not fit in a uint32, each row or block of
    the array is a part.
    """

    def counted(part):
        if how_many < _FEW:
            return jnp.stack(
                [jnp.sum(part == kind, dtype=np.uint32) for kind in range(how_many)]
            )
        # A scatter of integers: their sums are the same in any order.
        return jnp.zeros(how_many, np.uint32).at[part].add(np.uint32(1))

    kept = next(
        kept
        for kept in range(kinds.ndim + 1)
        if math.prod(kinds.shape[kept:]) < _COUNTED
    )
    for _ in range(kept):
        counted = jax.vmap(counted)
    if sharding := explicit_sharding(kinds):
        everywhere = NamedSharding(sharding.mesh, PartitionSpec())
        counted = in_auto(counted, sharding.mesh, everywhere)
    return counted(kinds).reshape(-1, how_many)


def share_of(counts: Counts, fate: str) -> Counts:
    """Return the share of the nonzero finite numbers that meets a fate; 0 where there
    are none.
    """
    return counts[..., 1 + FATES.index(fate)] / counts[..., 1:-1].sum(axis=-1).clip(1)
