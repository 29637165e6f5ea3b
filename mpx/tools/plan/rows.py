"""What each array of a training is: a parameter, a gradient, or which part of an optimizer's state."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from mpx import _trees
from mpx._stored.roles import FIRST_MOMENTS, kind_of
from mpx._transforms.kahan_summation import KahanSummationState
from mpx._transforms.low_precision_state import LowPrecisionState
from mpx._transforms.master_weights import MasterWeightsState
from mpx._transforms.params_ema import ParamsEmaState

Kind = Literal[
    "parameters", "not trained", "gradients", "copy of gradients", "masters", "low bits", "first moment",
    "second moment", "scales of blocks", "compensation", "average", "sum of gradients", "other state",
]  # fmt: skip
OUTSIDE_STATE: tuple[Kind, ...] = ("parameters", "not trained", "gradients", "copy of gradients")
SCALARS, KEY = "counts and scalars", "key"  # the names of rows that do not grow with the model

Entry = tuple[Kind, str, Any, NamedSharding]  # what an array is, its name, the array, and how it is divided

_KINDS_OF_FIELDS: dict[tuple[type, str], Kind] = {
    (MasterWeightsState, "master"): "masters",
    (KahanSummationState, "compensation"): "compensation",
    (ParamsEmaState, "ema"): "average",
    (LowPrecisionState, "block_scales"): "scales of blocks",
    (optax.MultiStepsState, "acc_grads"): "sum of gradients",
    (optax.ApplyEvery, "grad_acc"): "sum of gradients",
}


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One part of what a training run holds.

    Attributes:
        name: `parameters`, `gradients`, or the field of the optimizer's state: `mu`, `nu`, `master`, `low bits`...
        kind: the role of the part, whatever the rule calls it.
        dtypes: the dtypes in which it is stored.
        elements: the number of its elements.
        bytes: the bytes of all elements.
        bytes_a_device: the bytes of the elements on one device; all of them without a mesh.
        bytes_a_parameter: those of one device, divided by the number of parameters of the whole model.
    """

    name: str
    kind: Kind
    dtypes: tuple[str, ...]
    elements: int
    bytes: int
    bytes_a_device: int
    bytes_a_parameter: float


def entries_of(kind: Kind, tree: Any, shardings: Any) -> Iterator[Entry]:
    """Yield the leaves of a tree as parts of one kind; the shardings may be those of a larger tree."""
    by_path = _trees.leaves_by_path(shardings)
    for path, leaf in _trees.leaves_by_path(tree).items():
        yield kind, kind, leaf, by_path[path]


def state_entries(state: Any, shardings: Any) -> Iterator[Entry]:
    """Yield the leaves of an optimizer's state, named by their fields."""
    for (path, leaf), sharding in zip(_trees.leaves_by_path(state).items(), jax.tree.leaves(shardings), strict=True):
        yield *_kind_and_name(state, path, leaf), leaf, sharding


def rows_of(entries: Iterable[Entry], parameters: int) -> tuple[PlanRow, ...]:
    """Return one row for all arrays of one kind and name, in the order of the kinds."""
    found = collections.defaultdict(list)
    for kind, name, leaf, sharding in entries:
        found[kind, name].append((leaf, math.prod(sharding.shard_shape(leaf.shape))))
    rows = []
    for (kind, name), arrays in found.items():
        dtypes = tuple(dict.fromkeys(str(leaf.dtype) for leaf, _ in arrays))
        elements = sum(math.prod(leaf.shape) for leaf, _ in arrays)
        whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf, _ in arrays)
        on_a_device = sum(count * leaf.dtype.itemsize for leaf, count in arrays)
        rows.append(PlanRow(name, kind, dtypes, elements, whole, on_a_device, on_a_device / parameters))
    return tuple(sorted(rows, key=lambda row: get_args(Kind).index(row.kind)))


def _kind_and_name(state: Any, path: _trees.Path, leaf: Any) -> tuple[Kind, str]:
    """What a leaf of a state is, and what its field is called."""
    owner, field = _field_of(state, path)
    kind = _KINDS_OF_FIELDS.get((owner, field))
    if kind == "masters" and leaf.dtype == np.uint16:
        return "low bits", "low bits"
    if kind is None and kind_of(state, path) == "second moment":
        kind = "second moment"
    elif kind is None and kind_of(state, path) == "signed" and field in FIRST_MOMENTS:
        kind = "first moment"
    if kind is not None:
        return kind, field
    if field == KEY or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "other state", KEY
    return "other state", field if leaf.shape else SCALARS


def _field_of(state: Any, path: _trees.Path) -> tuple[type, str]:
    """The type in a state that a leaf stands in, and its field there: the first one that holds no other states.

    In states that are no NamedTuples it is the first key of a dictionary.
    """
    node, first_key = state, ""
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey) and hasattr(node, key.name):
            owner, node = type(node), getattr(node, key.name)
            if not key.name.endswith(("state", "states")):
                return owner, key.name
        elif isinstance(key, jax.tree_util.SequenceKey) and isinstance(node, (tuple, list)):
            node = node[key.idx]
        elif isinstance(key, jax.tree_util.DictKey) and isinstance(node, Mapping):
            node, first_key = node[key.key], first_key or str(key.key)
        else:
            break
    return type(state), first_key or "state"
