"""The leaves of an optimizer state, each with whose it is: the rule's, that of a wrapper of mpx, or a measure's."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from mpx import _trees
from mpx._stored.blockwise import scale_shape
from mpx._transforms.kahan_summation import KahanSummationState
from mpx._transforms.loss_scaling import LossScalingState
from mpx._transforms.low_precision_state import LowPrecisionState, coded_leaves
from mpx._transforms.master_weights import MasterWeightsState
from mpx._transforms.stochastic_rounding import StochasticRoundingState
from mpx._transforms.upcast import UpcastState
from mpx.tools.monitor.scale_history import ScaleHistoryState

# Of these states all fields but `inner_state` are not the rule's. Those of the first two are made from the weights, and
# those of the next three are what was measured, which changes no training.
KEEPERS = (MasterWeightsState, KahanSummationState)
MEASURES = (optax.MonitorState, optax.SnapshotState, ScaleHistoryState)
_WRAPPERS = (*KEEPERS, *MEASURES, UpcastState, LossScalingState, LowPrecisionState, StochasticRoundingState)
_BLOCK_SIZES = [2**i for i in range(4, 17)]  # those of `Blockwise8bit`


class Code(NamedTuple):
    """How a leaf is coded in 8 bits."""

    scale_path: _trees.Path
    scale: Any
    block_size: int
    signed: bool


class Part(NamedTuple):
    """A leaf of a state (or a node, on the way to its leaves), and whose it is."""

    leaf: Any
    path: _trees.Path = ()
    place: tuple[str, ...] = ()  # the path without mpx's wrappers and the positions in chains
    wrapped: bool = False  # whether it stands in a wrapper of mpx
    keeper: type | None = None  # the wrapper that keeps it for itself; None if it is the rule's
    below: _trees.Path = ()  # the path from that wrapper's field on: that of a parameter
    code: Code | None = None


def parts_of(state: Any) -> list[Part]:
    """All leaves of a state, in their order."""
    return list(_walk(Part(state), {}))


def of_the_rule(parts: list[Part]) -> list[Part]:
    """Those that no wrapper of mpx keeps for itself."""
    return [part for part in parts if part.keeper is None]


def _walk(here: Part, codes: dict[_trees.Path, Code]) -> Iterator[Part]:
    node = here.leaf
    if isinstance(node, LowPrecisionState):
        codes = _codes(node, here.path)
    for key, child in jax.tree.leaves_with_path(node, is_leaf=lambda x: x is not node):
        if key:
            yield from _walk(_child(here, key, child), codes)
        else:
            yield here._replace(code=codes.get(here.path))


def _child(here: Part, key: _trees.Path, child: Any) -> Part:
    node, path = here.leaf, here.path + key
    if isinstance(node, _WRAPPERS):
        if _name(key) == "inner_state":
            return here._replace(leaf=child, path=path, wrapped=True)
        return Part(child, path, (f"{type(node).__name__}.{_name(key)}",), wrapped=True, keeper=type(node))
    place = here.place
    if hasattr(node, "_fields"):
        place = (*place, f"{type(node).__name__}.{_name(key)}")
    elif type(node) is not tuple:
        place = (*place, _name(key))
    return here._replace(leaf=child, path=path, place=place, below=here.below + key if here.keeper else ())


def _name(key: _trees.Path) -> str:
    return jax.tree_util.keystr(key, simple=True)


def _codes(state: LowPrecisionState, path: _trees.Path) -> dict[_trees.Path, Code]:
    """How the coded leaves of a state are coded, by their paths; the names of their scales and all shapes tell."""
    attribute = jax.tree_util.GetAttrKey
    found = {}
    for name, below, codes, scale in coded_leaves(state):
        block_size = _block_size(np.shape(codes), np.shape(scale))
        scale_path = (*path, attribute("block_scales"), jax.tree_util.DictKey(name))
        code = Code(scale_path, scale, block_size, signed=name.endswith(".signed"))
        found[*path, attribute("inner_state"), attribute("inner_state"), *below] = code
    return found


@functools.cache
def _block_size(shape: tuple[int, ...], scales: tuple[int, ...]) -> int:
    """The smallest block size that gives these scales; if others do too, there is one block, and all do the same."""
    return next(size for size in _BLOCK_SIZES if scale_shape(shape, size) == scales)
