"""What the fields of optimizer states hold: which are second moments, which must stay exact.

A state's leaf is known by the NamedTuple that it stands in and its field there. Names alone would mislead: `nu` is a
second moment in Adam, a momentum in SM3 and an estimate of the Hessian in Sophia, which may be negative.
"""

from collections.abc import Iterator
from typing import Any

import jax

from mpx import _trees

# Fields of this name hold sums or means of squares in every state of Optax but those below, and by custom in others.
_SECOND_MOMENTS = {"nu", "nu_max", "exp_avg_sq", "sum_of_squares", "grad_sum_sq", "v_row", "v_col"}
_SECOND_MOMENTS_OF = {
    "FactoredState": {"v_row", "v_col", "v"},
    "ScaleByAdaDeltaState": {"e_g", "e_x"},
    "ScaleByAdanState": {"n"},
    "ScaleBySM3State": {"mu"},
    "ScaleBySimplifiedAdEMAMixState": {"n"},
    "SophiaState": set(),
}
# What these hold is kept so that nothing is lost.
_EXACT_OF = {"MasterWeightsState": {"master"}, "KahanSummationState": {"compensation"}, "ParamsEmaState": {"ema"}}


def holds_second_moment(state: Any, path: _trees.Path) -> bool:
    """Whether the leaf at a key path of an optimizer state is a second moment: never negative, its root a divisor."""
    return any(field in _SECOND_MOMENTS_OF.get(kind, _SECOND_MOMENTS) for kind, field in _fields(state, path))


def must_stay_exact(state: Any, path: _trees.Path) -> bool:
    """Whether the leaf at a key path of an optimizer state is a master, a compensation or an average of weights."""
    return any(field in _EXACT_OF.get(kind, ()) for kind, field in _fields(state, path))


def _fields(state: Any, path: _trees.Path) -> Iterator[tuple[str, str]]:
    """The names of the NamedTuples on the way to a leaf, each with the field that leads on."""
    node = state
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey) and isinstance(node, tuple) and hasattr(node, "_fields"):
            yield type(node).__name__, key.name
            node = getattr(node, key.name)
        elif isinstance(key, jax.tree_util.DictKey) and isinstance(node, dict):
            node = node[key.key]
        elif isinstance(key, jax.tree_util.SequenceKey) and isinstance(node, (tuple, list)):
            node = node[key.idx]
        else:  # a container of the user's: what it holds are parameters
            return
