"""What can be read off a jaxpr, by public names, in all versions of jax that mpx supports."""

from typing import Any

import numpy as np
from jax.extend import core as jex_core


def is_literal(v: Any) -> bool:
    """Whether an operand is a constant of the program text."""
    return isinstance(v, jex_core.Literal)


def dtype_of(v: Any) -> Any:
    """The dtype of an operand; `void` for what is no array, such as a token."""
    return getattr(v.aval, "dtype", np.dtype(np.void))


def open_jaxpr(jaxpr: Any) -> jex_core.Jaxpr:
    """The jaxpr of an open or closed one (jax 0.11 has one class for both)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants_of(jaxpr: Any) -> list[Any]:
    """The values of the constant inputs of an open or closed jaxpr."""
    return list(getattr(jaxpr, "consts", ()))


def scan_counts(eqn: jex_core.JaxprEqn) -> tuple[int, int]:
    """How many constants a scan closes over, and how many values it carries."""
    if "ft_in" in eqn.params:  # jax 0.11
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]
