"""Find, name and cast the leaves of pytrees."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import DTypeLike

T = TypeVar("T")
Path = tuple[Any, ...]

_VALUE = jax.tree_util.GetAttrKey("value")


def is_floating(leaf: Any) -> bool:
    """Return whether a leaf is an array (or shape) of real floating numbers of 16 bits or more.

    Nobody stores parameters in others, or in Python or NumPy scalars: a change of their dtype would be a surprise.
    """
    if not _is_concrete(type(leaf)) and not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return False
    return _is_floating_dtype(leaf.dtype)


# Remembering the answers for a few types and dtypes saves a good part of what the cast of a small leaf costs.
@functools.cache
def _is_concrete(kind: type) -> bool:
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


@functools.cache
def _is_floating_dtype(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize >= 2


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array, of NumPy too, or a shape that stands for one."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OSUMm"  # objects, strings and dates are not for jax
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def is_narrower(leaf: Any, dtype: np.dtype) -> bool:
    """Return whether a leaf is a floating array (or shape) of fewer bits than `dtype`."""
    return is_floating(leaf) and leaf.dtype.itemsize < dtype.itemsize


def promoted(dtype: DTypeLike, other: DTypeLike) -> np.dtype:
    """`jnp.promote_types`, which refuses two dtypes under strict promotion, for a widening that is meant."""
    if jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize == 1:
        dtype = jnp.bfloat16  # JAX promotes no 8-bit float; this one holds the values of all of them
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other)


def is_masked(leaf: Any) -> bool:
    """Return whether this is Optax's placeholder of a leaf that a transformation leaves alone."""
    return isinstance(leaf, optax.MaskedNode)


def path_string(path: Path, tree: Any = None) -> str:
    """Return the key path of a leaf in the form `layers/0/kernel`.

    Given the tree too, the array of a Flax variable goes by the variable's name: its `.value` is dropped. A field that
    a user has called `value` never is.
    """
    names = {} if tree is None or not path or path[-1] != _VALUE else path_names(tree)
    return names.get(path) or jax.tree_util.keystr(path, simple=True, separator="/")


def path_names(tree: Any) -> dict[Path, str]:
    """Return the names of all leaves of a tree by their key paths, as `path_string` gives them."""
    names = {}
    for path, node in jax.tree.leaves_with_path(tree, is_leaf=_is_variable):
        inside = jax.tree.leaves_with_path(node) if _is_variable(node) else [((), node)]
        for rest, _ in inside:
            named = path if path and rest == (_VALUE,) else path + rest
            names[path + rest] = jax.tree_util.keystr(named, simple=True, separator="/")
    return names


def _is_variable(node: Any) -> bool:
    """Return whether this is a box in which Flax keeps one array: a variable of NNX, or a box of Linen."""
    kinds = ((kind.__module__, kind.__name__) for kind in type(node).__mro__)
    return any(module.startswith("flax.") and name in ("Variable", "AxisMetadata") for module, name in kinds)


def unboxed(tree: Any) -> Any:
    """Return a tree with a list in place of each leaf and of each box of Flax, so that boxes make no difference."""
    return jax.tree.map(jax.tree.leaves, tree, is_leaf=_is_variable)


def leaves_by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[Path, Any]:
    """Return the leaves of a tree by their key paths; strings of `{"a/b": x, "a": {"b": y}}` would be equal."""
    return dict(jax.tree.leaves_with_path(tree, is_leaf))


def map_unzip(function: Callable[..., tuple[Any, Any]], tree: Any, *rest: Any) -> tuple[Any, Any]:
    """Map a function that returns a pair over trees, and return two trees like the first one."""
    leaves, treedef = jax.tree.flatten(tree)
    columns = [treedef.flatten_up_to(other) for other in rest]
    pairs = [function(*column) for column in zip(leaves, *columns, strict=True)]
    return treedef.unflatten([first for first, _ in pairs]), treedef.unflatten([second for _, second in pairs])


def find_states(tree: Any, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Return all parts of a pytree that are of a NamedTuple type, each before the ones nested inside it."""
    found = []
    for part in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)):
        if isinstance(part, kind):
            found += [part, *find_states(tuple(part), kind)]  # type: ignore[arg-type]
    return found


def shapes_of(tree: T) -> T:
    """Return the tree with shapes for its floating arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_floating(x) else x, tree)


def placed_like(x: jax.Array, old: Any) -> jax.Array:
    """Return an array with the sharding of an old one of its shape, if the user has placed that."""
    if isinstance(x, Tracer) or isinstance(old, Tracer) or x is old or x.shape != old.shape or not old.committed:
        return x
    return x if x.sharding.is_equivalent_to(old.sharding, x.ndim) else jax.device_put(x, old.sharding)


def dtype_and_shape(leaf: Any) -> str:
    """Return how messages show an array: `bfloat16[768, 3072]`."""
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return type(leaf).__name__


def cast_tree(tree: T, dtype: DTypeLike, which: Callable[[Any], bool] = lambda leaf: True) -> T:
    """Cast the floating leaves of a tree, or those that a function picks, to one dtype; see `cast_by_path`."""
    dtype = np.dtype(dtype)
    leaves, treedef = jax.tree.flatten(tree)
    dtypes = [dtype if is_floating(leaf) and which(leaf) else None for leaf in leaves]
    return treedef.unflatten(_cast_leaves(leaves, dtypes))


def cast_by_path(tree: T, dtype_at: Callable[[str], np.dtype]) -> T:
    """Cast each floating leaf of a tree to the dtype that a function returns for its path, as `path_string` gives it.

    A leaf of the right dtype is returned as the same object; entries that are one array stay one array; each
    array keeps its sharding. All concrete arrays of one set of devices are cast in one compiled call: a call
    a leaf costs a dispatch a leaf.
    """
    leaves, treedef = jax.tree.flatten_with_path(tree)
    names = path_names(tree)
    dtypes = [dtype_at(names[path]) if is_floating(leaf) else None for path, leaf in leaves]
    return treedef.unflatten(_cast_leaves([leaf for _, leaf in leaves], dtypes))


def _cast_leaves(leaves: list[Any], dtypes: list[np.dtype | None]) -> list[Any]:
    """Return the leaves, each in its dtype; those whose dtype is None as they are."""
    cast = list(leaves)
    firsts: dict[tuple[np.dtype, int], int] = {}  # where an array stands first, by its identity
    repeated: list[tuple[int, int]] = []
    together: dict[Any, list[int]] = defaultdict(list)  # which concrete arrays one program can take
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
        # An array that the user has placed is kept where it is; one that JAX placed stays free to move.
        shardings = None if residence is None else tuple([x.sharding for x in arrays])
        convert = _converter(tuple([dtypes[i] for i in indices]), shardings)
        for i, new in zip(indices, convert(arrays), strict=True):
            cast[i] = new
    for i, first in repeated:
        cast[i] = cast[first]
    return cast


def _residence(sharding: jax.sharding.Sharding) -> Any:
    """Return a key that is equal for shardings on the same devices in the same order: one program can take them."""
    devices = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else sharding
    return devices, sharding.memory_kind


@functools.lru_cache(maxsize=256)
def _converter(dtypes: tuple[np.dtype | None, ...], shardings: tuple[Any, ...] | None) -> Any:
    def convert(arrays):
        return [x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]

    return jax.jit(convert) if shardings is None else jax.jit(convert, out_shardings=list(shardings))
