"""Declare what each field of an optimizer state is: once, next to the state's type, and
read by everything else.

The type of a state and the field in it decide what a leaf is. Names alone would
mislead: `nu` is a second moment in Adam, a momentum in SM3, and an estimate of the
Hessian in Sophia, which may be negative.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import optax
from jax import export

T = TypeVar("T", bound=type)

# Strings, because users write them, as the values of keyword arguments.
Role = Literal[
    "inner",  # the state of the wrapped rule
    "master",  # the master of each parameter, or its low bits (uint16)
    "compensation",  # the part of each parameter's updates that rounding cut off
    "weights",  # a copy of the weights
    "first moment",
    "second moment",  # never negative
    "signed",  # may be negative
    "sum of gradients",
    "loss scale",  # a number that belongs to the settings of a loss scale
    "key",  # a PRNG key
    # a count that a wrapper keeps for itself; the counts of a rule are "unknown"
    "count",
    "measure",  # what was measured, which changes no training run
    "unknown",
]
# Roles of leaves that, with the parameter, give the exact weight.
KEPT_OF_WEIGHTS: tuple[Role, ...] = ("master", "compensation")
# Roles of leaves that must stay exact and are never rounded.
EXACT: tuple[Role, ...] = ("master", "compensation", "weights")


# What types of states have declared: the role of each field, and the transformation
# that chooses 16-bit parameters.
ROLES: dict[type, dict[str, Role]] = {}
WRITES_BACK: dict[Any, str] = {}


def register_state(
    *, writes_back: str | None = None, **roles: Role
) -> Callable[[T], T]:
    """Declare what each field of the state of a gradient transformation is.

    With it `master_params`, `is_synced`, `resync`, `convert_state`, `memory_plan`,
    `check_chain` and `zero1` know the state of a wrapper that mpx has never seen. A
    state that is not declared belongs to a rule: its leaves are carried over unchanged.

    Args:
        writes_back: the name of the transformation, if it chooses the values that
            16-bit parameters get, so that nothing may change its updates afterwards.
            For `check_chain` to see that, emit them by
            `mpx.states.landing_update(parameter, new_value, name)`.
        **roles: for each field of the NamedTuple its role: `"inner"` (the state of the
            wrapped rule), `"master"`, `"compensation"`, `"weights"`, `"first moment"`,
            `"second moment"`, `"signed"`, `"sum of gradients"`, `"loss scale"`,
            `"key"`, `"count"`, `"measure"` or `"unknown"`. A tree of masters or
            compensations has the structure of the parameters, with `optax.MaskedNode`
            where nothing is kept.

    Example:
        >>> import typing
        >>> @register_state(copy="master", inner_state="inner")
        ... class CopyState(typing.NamedTuple):
        ...     copy: typing.Any
        ...     inner_state: typing.Any
        >>> print(
        ...     master_params(
        ...         {"w": jnp.bfloat16(1)}, CopyState({"w": jnp.float32(1.001)}, ())
        ...     )
        ... )
        {'w': Array(1.001, dtype=float32)}
    """
    wrong = {field: role for field, role in roles.items() if role not in get_args(Role)}
    if wrong:
        raise ValueError(
            f"`register_state`: unknown roles {wrong}; the roles are {get_args(Role)}."
        )

    def declare(kind: T) -> T:
        fields = getattr(kind, "_fields", None)
        if fields is None or set(fields) != set(roles):
            raise TypeError(
                "`register_state` needs a NamedTuple and a role for each of its"
                f" fields, but {kind.__name__} has the fields {fields}, and roles were"
                f" given for {tuple(roles)}."
            )
        ROLES[kind] = roles
        # Others may register their own types, once.
        if kind.__module__.startswith("mpx."):
            export.register_namedtuple_serialization(
                kind, serialized_name=f"mpx.{kind.__name__}"
            )
        if writes_back is not None:
            WRITES_BACK[kind] = writes_back
        return kind

    return declare


def role_of_field(kind: type, field: str) -> Role:
    """Return the role of a field of a state's type, declared or known by its name."""
    if kind in ROLES:
        return ROLES[kind][field]
    if field.endswith(("state", "states")):
        return "inner"
    return role_by_name(
        kind.__name__,
        field,
        "signed" if kind.__module__.partition(".")[0] == "optax" else "unknown",
    )


# What fields are by their names, in states of some types by theirs alone. In states of
# Optax others may be negative. `MadgradState.s` is no moment: weights are made of it,
# and in 8 bits they end further away (a loss of 0.017 for 0.011 in a regression).
_NAMES: dict[Role, str] = {
    "first moment": (
        "mu m m1 m2 trace momentum exp_avg ema ScaleByAdanState.g"
        " ScaleByAdanState.v ScaleBySM3State.nu SophiaState.nu"
    ),
    "second moment": (
        "nu nu_max exp_avg_sq max_exp_avg_sq sum_of_squares grad_sum_sq v_row v_col"
        " FactoredState.v ScaleByAdaDeltaState.e_g ScaleByAdaDeltaState.e_x"
        " ScaleByAdanState.n ScaleBySM3State.mu ScaleBySimplifiedAdEMAMixState.n"
    ),
    "weights": (
        "COCOBState.init_particles DoGState.init_params DoWGState.init_params"
        " MadgradState.x0 MechanicState.x0 ProdigyState.params0 SAMState.cache"
        " ScheduleFreeState.z"
    ),
    "sum of gradients": "MultiStepsState.acc_grads ApplyEvery.grad_acc",
}
_ROLE_OF: dict[str, Role] = {
    name: role for role, names in _NAMES.items() for name in names.split()
}


def role_by_name(owner: str, field: str, otherwise: Role) -> Role:
    """Return the role of a field of an undeclared state, or of an entry of a state that
    is a dictionary.
    """
    return _ROLE_OF.get(f"{owner}.{field}") or _ROLE_OF.get(field, otherwise)


register_state(measurements="measure", measure_states="measure")(optax.MonitorState)
register_state(measurement="measure")(optax.SnapshotState)
register_state(found_nan="measure")(optax.ZeroNansState)
