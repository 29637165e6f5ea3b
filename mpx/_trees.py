"""Find, name and cast the leaves of pytrees."""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import DTypeLike

from mpx import _flax

T = TypeVar("T")
Path = tuple[Any, ...]

_VALUE = jax.tree_util.GetAttrKey("value")


def is_floating(leaf: Any) -> bool:
    """Return whether a leaf is an array (or shape) of real floating numbers of 16 bits
    or more.

    Other leaves, and scalars of Python or NumPy, hold no parameters: a change of their
    dtype would be a surprise.
    """
    if not _is_concrete(type(leaf)) and not isinstance(
        leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    ):
        return False
    return _is_floating_dtype(leaf.dtype)


# Remembering the answers for a few types and dtypes saves a good part of what the cast
# of a small leaf costs.
@functools.cache
def _is_concrete(kind: type) -> bool:
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


@functools.cache
def _is_floating_dtype(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize >= 2


def is_inexact(leaf: Any) -> bool:
    """Return whether a leaf is floating (see `is_floating`) or complex."""
    return is_floating(leaf) or (
        is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    )


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array, of NumPy too, or a shape that stands for
    one.
    """
    if isinstance(leaf, (np.ndarray, np.generic)):
        # Objects, strings and dates are not for jax.
        return leaf.dtype.kind not in "OSUMm"
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def is_narrower(leaf: Any, dtype: DTypeLike = np.float32) -> bool:
    """Return whether a leaf is a floating array (or shape) of fewer bits than
    `dtype`.
    """
    return is_floating(leaf) and leaf.dtype.itemsize < np.dtype(dtype).itemsize


def promoted(dtype: DTypeLike, other: DTypeLike) -> np.dtype:
    """Return `jnp.promote_types(dtype, other)`, under strict promotion too: the
    widening is meant.
    """
    if jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize == 1:
        # JAX promotes no 8-bit float; this one holds the values of all of them.
        dtype = jnp.bfloat16
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other)


def at_least_float32(x: jax.Array) -> jax.Array:
    """Cast an array to float32 if it is narrower."""
    return x.astype(promoted(x.dtype, np.float32))


def is_masked(leaf: Any) -> bool:
    """Return whether this is Optax's placeholder of a leaf that a transformation leaves
    alone.
    """
    return isinstance(leaf, optax.MaskedNode)


def path_string(path: Path, tree: Any = None) -> str:
    """Return the key path of a leaf in the form `layers/0/kernel`.

    Given the tree too, drop the `.value` of a Flax variable, so that its array has the
    variable's name. A user's own field called `value` stays.
    """
    names = {} if tree is None or not path or path[-1] != _VALUE else path_names(tree)
    return names.get(path) or jax.tree_util.keystr(path, simple=True, separator="/")


def path_names(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> dict[Path, str]:
    """Return the names of all leaves of a tree by their key paths, as `path_string`
    gives them.
    """
    names, boxes = {}, _flax.boxes_of(tree)
    for path, _ in jax.tree.leaves_with_path(tree, is_leaf=is_leaf):
        is_variable = path in boxes and path[-1] == _VALUE and len(path) > 1
        named = path[:-1] if is_variable else path
        names[path] = jax.tree_util.keystr(named, simple=True, separator="/")
    return names


def leaves_by_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> dict[Path, Any]:
    """Return the leaves of a tree by key path; path strings are not unique: `{"a/b": x,
    "a": {"b": y}}`.
    """
    return dict(jax.tree.leaves_with_path(tree, is_leaf))


def partition_leaves(
    tree: T, which: Callable[[Any], bool]
) -> tuple[list[Any], Callable[[Sequence[Any]], T]]:
    """Return the leaves that `which` accepts, and a function that puts others into
    their places.
    """
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if which(leaf)]

    def put(others):
        given = dict(zip(places, others, strict=True))
        return treedef.unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in places], put


def map_unzip(
    function: Callable[..., tuple[Any, Any]], tree: Any, *rest: Any
) -> tuple[Any, Any]:
    """Map a function that returns a pair over trees, and return two trees like the
    first one.
    """
    leaves, treedef = jax.tree.flatten(tree)
    columns = [treedef.flatten_up_to(other) for other in rest]
    pairs = [function(*column) for column in zip(leaves, *columns, strict=True)]
    return treedef.unflatten([first for first, _ in pairs]), treedef.unflatten(
        [second for _, second in pairs]
    )


def find_states(tree: Any, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Return all parts of a pytree that are of a NamedTuple type, each before the ones
    nested inside it.
    """
    found = []
    for part in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)):
        if isinstance(part, kind):
            found += [part, *find_states(tuple(part), kind)]  # type: ignore[arg-type]
    return found


def shapes_of(tree: T) -> T:
    """Replace the floating arrays of a tree by their shapes."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_floating(x) else x, tree
    )


def placed_like(x: jax.Array, old: Any) -> jax.Array:
    """Give `x` the sharding of `old` if they have one shape and the user has placed
    `old`.
    """
    are_concrete = _is_concrete(type(x)) and _is_concrete(type(old))
    if not are_concrete or x is old or x.shape != old.shape or not old.committed:
        return x
    return (
        x
        if x.sharding.is_equivalent_to(old.sharding, x.ndim)
        else jax.device_put(x, old.sharding)
    )


def dtype_and_shape(leaf: Any) -> str:
    """Return how messages show an array: `bfloat16[768, 3072]`."""
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return type(leaf).__name__


def cast_tree(
    tree: T, dtype: DTypeLike, which: Callable[[Any], bool] = lambda leaf: True
) -> T:
    """Cast the floating leaves that `which` accepts to one dtype; see
    `cast_by_path`.
    """
    dtype = np.dtype(dtype)
    leaves, treedef = jax.tree.flatten(tree)
    dtypes = [dtype if is_floating(leaf) and which(leaf) else None for leaf in leaves]
    return treedef.unflatten(_cast_leaves(leaves, dtypes))


def cast_by_path(
    tree: T, dtype_at: Callable[[str], np.dtype], but: Collection[Path] = ()
) -> T:
    """Cast each floating leaf to the dtype that `dtype_at` returns for its
    `path_string`, except at the paths in `but`.

    A leaf of the right dtype is returned as the same object, tied leaves stay tied, and
    each array keeps its sharding. One compiled call casts all concrete arrays on one
    set of devices, because a call for each leaf costs a dispatch for each leaf.
    """
    leaves, treedef = jax.tree.flatten_with_path(tree)
    names = path_names(tree)
    dtypes = [
        dtype_at(names[path]) if is_floating(leaf) and path not in but else None
        for path, leaf in leaves
    ]
    return treedef.unflatten(_cast_leaves([leaf for _, leaf in leaves], dtypes))


def _cast_leaves(leaves: list[Any], dtypes: list[np.dtype | None]) -> list[Any]:
    """Cast each leaf to its dtype; None keeps a leaf."""
    cast = list(leaves)
    # the first position of each array, by its identity
    firsts: dict[tuple[np.dtype, int], int] = {}
    repeated: list[tuple[int, int]] = []
    # Which concrete arrays one program can take.
    together: dict[Any, list[int]] = defaultdict(list)
    for i, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True)):
        if dtype is None or leaf.dtype == dtype:
            continue
        first = firsts.setdefault((dtype, id(leaf)), i)
        if first != i:
            repeated.append((i, first))
        elif _is_concrete(type(leaf)):
            together[_residence(leaf.sharding) if leaf.committed else None].append(i)
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            cast[i] = leaf.update(dtype=dtype)
        else:
            cast[i] = leaf.astype(dtype)
    for residence, indices in together.items():
        arrays = [leaves[i] for i in indices]
        # An array that the user has placed is kept where it is; one that JAX placed
        # stays free to move.
        shardings = None if residence is None else tuple([x.sharding for x in arrays])
        convert = _converter(tuple([dtypes[i] for i in indices]), shardings)
        for i, new in zip(indices, convert(arrays), strict=True):
            cast[i] = new
    for i, first in repeated:
        cast[i] = cast[first]
    return cast


def _residence(sharding: jax.sharding.Sharding) -> Any:
    """Return a key that is equal for shardings on the same devices in the same order:
    one program can take them.
    """
    devices = (
        sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else sharding
    )
    return devices, sharding.memory_kind


@functools.lru_cache(maxsize=256)
def _converter(
    dtypes: tuple[np.dtype | None, ...], shardings: tuple[Any, ...] | None
) -> Any:
    def convert(arrays):
        return [x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]

    return (
        jax.jit(convert)
        if shardings is None
        else jax.jit(convert, out_shardings=list(shardings))
    )
