"""What the fields of optimizer states hold: first or second moments, or what must stay exact.

A state's leaf is known by the type that it stands in and its field there. Names alone would mislead: `nu` is a second
moment in Adam, a momentum in SM3, and an estimate of the Hessian in Sophia, which may be negative.
"""

from typing import Any, Literal

import jax

from mpx import _trees

Kind = Literal["second moment", "signed", "exact", "unknown"]

# In states of Optax these fields hold sums or means of squares, but for those types that are listed; all others may be
# negative. In other states names tell as much as they can.
_SECOND_MOMENTS = {"nu", "nu_max", "exp_avg_sq", "max_exp_avg_sq", "sum_of_squares", "grad_sum_sq", "v_row", "v_col"}
_SECOND_MOMENTS_OF = {
    "FactoredState": {"v_row", "v_col", "v"},
    "ScaleByAdaDeltaState": {"e_g", "e_x"},
    "ScaleByAdanState": {"n"},
    "ScaleBySM3State": {"mu"},
    "ScaleBySimplifiedAdEMAMixState": {"n"},
    "SophiaState": set(),
}
FIRST_MOMENTS = {"mu", "m", "trace", "momentum", "exp_avg", "ema"}
# What is kept so that nothing is lost: masters, compensations, and the weights themselves.
_EXACT_OF = {
    "COCOBState": {"init_particles"},
    "DoGState": {"init_params"},
    "DoWGState": {"init_params"},
    "KahanSummationState": {"compensation"},
    "MadgradState": {"x0"},
    "MasterWeightsState": {"master"},
    "MechanicState": {"x0"},
    "ParamsEmaState": {"ema"},
    "ProdigyState": {"params0"},
    "SAMState": {"cache"},
    "ScheduleFreeState": {"z"},
}


def kind_of(state: Any, path: _trees.Path) -> Kind:
    """What the leaf at a key path of an optimizer state holds.

    Decided by the first field on the way that is none of those which hold other states (`inner_state`,
    `base_optimizer_state`, ...): what lies below it are parameters, whose names say nothing.
    """
    node, below_states = state, False
    for key in path:
        if isinstance(key, jax.tree_util.SequenceKey) and isinstance(node, (tuple, list)):
            node = node[key.idx]
        elif isinstance(key, jax.tree_util.DictKey) and isinstance(node, dict):
            node, name = node[key.key], str(key.key)
            if not below_states and name in _SECOND_MOMENTS | FIRST_MOMENTS:  # a state that is a dictionary
                return _kind("", name)
            below_states = False
        elif isinstance(key, jax.tree_util.GetAttrKey) and hasattr(node, key.name):
            owner, node = type(node), getattr(node, key.name)
            below_states = key.name.endswith(("state", "states"))  # by whose labels nothing is decided
            if not below_states:
                return _kind(owner.__name__, key.name, owner.__module__.partition(".")[0] == "optax")
        else:
            break
    return "unknown"


def _kind(owner: str, field: str, is_of_optax: bool = False) -> Kind:
    if field in _EXACT_OF.get(owner, ()):
        return "exact"
    if field in _SECOND_MOMENTS_OF.get(owner, _SECOND_MOMENTS):
        return "second moment"
    return "signed" if is_of_optax or field in FIRST_MOMENTS else "unknown"
