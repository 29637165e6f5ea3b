"""What a traced program says about its gradients: which are float32 sums, and which of
them must be.
"""

from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from mpx._jaxprs import scan_counts
from tests.helpers import all_eqns

CONTRACTIONS = ("conv_general_dilated", "dot_general", "ragged_dot_general")
MOVES = set(
    "broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice expand_dims"
    " gather pad reshape rev scatter select_n slice split squeeze transpose unstack".split()
)
SUMS = set(
    "add add_any cumsum psum reduce_sum reduce_window_sum scatter-add sub".split()
)
PASSES = (
    MOVES
    | SUMS
    | {"convert_element_type", "neg", "optimization_barrier", "reduce_precision"}
)


def is_16_bit(v: Any) -> bool:
    return getattr(v.aval, "dtype", np.dtype(bool)).name in ("bfloat16", "float16")


def inner(eqn):
    """Return the programs inside of an equation whose operands and results are those of
    the equation, and its carry.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        return [(branch, 1, 0) for branch in params["branches"]]
    if name == "scan":
        return [(params["jaxpr"], 0, scan_counts(eqn)[1])]
    if name in ("jit", "remat2", "closed_call", "custom_jvp_call"):
        return [(params.get("jaxpr", params.get("call_jaxpr")), 0, 0)]
    return []


def follow(jaxpr, inputs, rule, join):
    """Return what is known about the results of a program; a scan is repeated until
    nothing new is carried.
    """
    program = getattr(jaxpr, "jaxpr", jaxpr)
    known = dict(zip(program.invars, inputs, strict=True))
    read = lambda v: None if isinstance(v, jex_core.Literal) else known.get(v)
    for eqn in program.eqns:
        operands, results = [read(v) for v in eqn.invars], None
        for inside, skipped, carried in inner(eqn):
            given = operands[skipped:]
            found = follow(inside, given, rule, join)
            first = scan_counts(eqn)[0] if carried else 0
            while carried:
                grown = [
                    join(a, b)
                    for a, b in zip(given[first : first + carried], found, strict=False)
                ]
                if grown == given[first : first + carried]:
                    break
                given = [*given[:first], *grown, *given[first + carried :]]
                found = follow(inside, given, rule, join)
            results = found if results is None else list(map(join, results, found))
        known.update(
            zip(
                eqn.outvars,
                rule(eqn, operands) if results is None else results,
                strict=True,
            )
        )
    return [read(v) for v in program.outvars]


def contracted_directly(loss, params, batch):
    """Return for each parameter whether all its uses are in contractions, as it is or
    with its elements moved.
    """
    leaves, tree = jax.tree.flatten((params, batch))
    program = jax.make_jaxpr(lambda *leaves: loss(*tree.unflatten(leaves)))(*leaves)
    contracted, used_otherwise = set(), set()
    join = lambda a, b: (a or frozenset()) | (b or frozenset())

    def rule(eqn, operands):
        sources = frozenset().union(*[s for s in operands if s])
        if eqn.primitive.name in MOVES:
            return [sources] * len(eqn.outvars)
        is_narrowed = eqn.primitive.name in CONTRACTIONS and all(
            v.aval.dtype == np.float32 for v in eqn.invars[:2]
        )
        (contracted if is_narrowed else used_otherwise).update(sources)
        return [None] * len(eqn.outvars)

    returned = follow(program, [frozenset({i}) for i in range(len(leaves))], rule, join)
    used_otherwise.update(*[s for s in returned if s])
    return [
        i in contracted - used_otherwise for i in range(len(jax.tree.leaves(params)))
    ]


def rounded_after_contraction(program):
    """Return for each result whether it is a contraction's result that was rounded to
    16 bits, or a sum of such.
    """

    def rule(eqn, operands):
        name = eqn.primitive.name
        if name in CONTRACTIONS or name not in PASSES:
            return [name in CONTRACTIONS and is_16_bit(v) for v in eqn.outvars]
        return [is_16_bit(v) or any(operands) for v in eqn.outvars]

    return follow(
        program, [False] * len(program.in_avals), rule, lambda a, b: bool(a) or bool(b)
    )


def sums_in_16_bits(program):
    """Return the names of additions whose results are in 16 bits."""
    return [
        eqn.primitive.name
        for eqn in all_eqns(program)
        if eqn.primitive.name in SUMS and any(is_16_bit(v) for v in eqn.outvars)
    ]
