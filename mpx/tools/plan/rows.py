"""The parts of a plan: parameters, gradients, and the fields of an optimizer's state by
their roles.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from mpx import _trees
from mpx._dtypes import bytes_of
from mpx._stored.leaves import StateLeaf, leaves_of
from mpx._stored.state_format import is_stored
from mpx._stored.weights import LowBits

Kind = Literal[
    "parameters", "not trained", "gradients", "masters", "low bits", "first moment",
    "second moment", "scales of blocks", "compensation", "sum of gradients",
    "other state",
]  # fmt: skip
OUTSIDE_STATE: tuple[Kind, ...] = ("parameters", "not trained", "gradients")
# The names of rows that do not grow with the model.
SCALARS, KEY = "counts and scalars", "key"
# The kind of an array, its name, the array, and how it is sharded.
Entry = tuple[Kind, str, Any, NamedSharding]


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One part of what a training run holds."""

    # `parameters`, `gradients`, or the field of the optimizer's state: `mu`, `nu`,
    # `master`, `low bits`...
    name: str
    kind: Kind  # the role of the part, whatever the rule calls it
    dtypes: tuple[str, ...]  # the dtypes that it is stored in
    bytes: int  # of all its elements
    bytes_a_device: int  # of the elements on one device; all of them without a mesh


def entries_of(kind: Kind, tree: Any, shardings: Any) -> Iterator[Entry]:
    """Yield the leaves of a tree as parts of one kind; the shardings may belong to a
    larger tree.
    """
    by_path = _trees.leaves_by_path(shardings)
    for path, leaf in _trees.leaves_by_path(tree).items():
        yield kind, kind, leaf, by_path[path]


def state_entries(state: Any, shardings: Any) -> Iterator[Entry]:
    """Yield the leaves of an optimizer's state, which go by the names of its fields."""
    by_path = _trees.leaves_by_path(shardings, is_stored)
    for found in leaves_of(state):
        shardings = jax.tree.leaves(by_path[found.path])
        # A plain leaf is its own codes.
        (codes, of_codes), *others = zip(
            jax.tree.leaves(found.leaf), shardings, strict=True
        )
        yield *_kind_and_name(found), codes, of_codes
        for scales, of_scales in others:
            yield "scales of blocks", "scales", scales, of_scales


def rows_of(entries: Iterable[Entry]) -> tuple[PlanRow, ...]:
    """Return one row for all arrays of one kind and name, in the order of the kinds."""
    found = collections.defaultdict(list)
    for kind, name, leaf, sharding in entries:
        sizes = (
            math.prod(shape) for shape in (leaf.shape, sharding.shard_shape(leaf.shape))
        )
        found[kind, name].append(
            (str(leaf.dtype), *(bytes_of(leaf.dtype, size) for size in sizes))
        )
    rows = []
    for (kind, name), arrays in found.items():
        dtypes, whole, on_a_device = zip(*arrays, strict=True)
        rows.append(
            PlanRow(
                name, kind, tuple(dict.fromkeys(dtypes)), sum(whole), sum(on_a_device)
            )
        )
    return tuple(sorted(rows, key=lambda row: get_args(Kind).index(row.kind)))


def _kind_and_name(leaf: StateLeaf) -> tuple[Kind, str]:
    """Return the kind of a leaf of a state, and the name of its field."""
    array = leaf.leaf
    role = cast("Kind", "masters" if leaf.role == "master" else leaf.role)
    kind = role if role in get_args(Kind) else "other state"
    field = leaf.field or (leaf.path_in_rule[0] if leaf.path_in_rule else "state")
    if kind == "masters" and not is_stored(array) and isinstance(leaf.storage, LowBits):
        return "low bits", "low bits"
    if kind == role or is_stored(array):
        return kind, field
    if (
        leaf.role == "key"
        or field == KEY
        or jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    ):
        return "other state", KEY
    return "other state", field if array.shape else SCALARS
