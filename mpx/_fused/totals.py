"""Add up many arrays in a few kernels, as for the norm of all gradients. XLA makes one
kernel or two for each array.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core as jex_core

from mpx._fused.partition import Var
from mpx._jaxprs import count_uses, is_literal, with_source_of

# sums in one operation: the arguments of a kernel have 4,096 bytes, and a thread has
# 255 registers
_TOGETHER = 32


def find_totals(program: jex_core.Jaxpr, eqns: Sequence[Any]) -> list[Any]:
    """Return the sums of whole float32 arrays that are added to another number, which
    waits for all of them anyway.

    For one that a single leaf needs, XLA computes its terms in the same kernel.
    """
    uses = count_uses(program)
    added = {
        v
        for eqn in eqns
        if eqn.primitive.name == "add"
        for v in eqn.invars
        if not is_literal(v)
    }
    return [
        eqn
        for eqn in eqns
        if is_total(eqn) and eqn.outvars[0] in added and uses[eqn.outvars[0]] == 1
    ]


def is_total(eqn: Any) -> bool:
    """Return whether an equation adds up a whole float32 array."""
    if eqn.primitive.name != "reduce_sum":
        return False
    operand, result = (v.aval for v in (*eqn.invars, *eqn.outvars))
    return operand.shape != () == result.shape and result.dtype == np.float32


def run_totals(totals: Sequence[Any], values: dict[Var, Any]) -> dict[Var, Any]:
    """Return the results of such sums. Arrays of one shape are added up in one
    operation, with a result for each.
    """
    alike: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for eqn in totals:
        alike[eqn.invars[0].aval.shape].append(eqn)
    results = {}
    for shape, group in alike.items():
        for some in (group[i : i + _TOGETHER] for i in range(0, len(group), _TOGETHER)):
            with with_source_of(some[0]):
                arrays = [values[eqn.invars[0]] for eqn in some]
                sums = lax.reduce(
                    arrays, [np.float32(0)] * len(some), _add, range(len(shape))
                )
            results |= zip([eqn.outvars[0] for eqn in some], sums, strict=True)
    return results


def _add(x: Sequence[Any], y: Sequence[Any]) -> list[Any]:
    return [a + b for a, b in zip(x, y, strict=True)]
