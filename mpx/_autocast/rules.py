"""The table of `autocast`: which operations run in the compute dtype, and which pass
16-bit values on.

| rule | what happens |
|---|---|
| `narrow` | float32 operands are rounded to the compute dtype, and so is the result |
| `follow` | results are values of operands: what 16 bits have, they have there too |
| `enter` | an operation that holds a program: the table is applied to that program |
| `keep` | runs as traced, in float32: also what the table does not name |

What follows runs as traced, but for two operations. They move a float32 value in 16
bits where that loses nothing: a transfer to other devices, if every use behind it
rounds the value, or 16 bits have it and a collective sends it; and a name for
`jax.checkpoint`, if 16 bits have the value.
"""

import functools
from typing import Literal

from jax.extend import core as jex_core
from jax.extend.core import primitives

from mpx._primitives import PRIMITIVES, Facts

Rule = Literal["narrow", "follow", "enter", "keep"]

# Rounding their operands first gives the rounded result.
_COMMUTE_WITH_ROUNDING = {
    "abs",
    "ceil",
    "convert_element_type",
    "floor",
    "neg",
    "round",
    "sign",
}


def _default_rule(name: str, facts: Facts) -> Rule:
    if facts.contraction:
        return "narrow"
    if facts.moves or name in _COMMUTE_WITH_ROUNDING:
        return "follow"
    return "enter" if facts.runs not in ("", "custom") else "keep"


DEFAULT_RULES: dict[str, Rule] = {
    name: rule
    for name, facts in PRIMITIVES.items()
    if (rule := _default_rule(name, facts)) != "keep"
}
"""The rules of primitives that do not just run as traced.
`rules={"conv_general_dilated": "keep"}` changes one.
"""

# Arithmetic that stays float32, but that a user's table may narrow.
_ARITHMETIC = " ".join(
    [
        # A sum adds up the roundings of its terms.
        "add add_any cumsum psum psum_invariant reduce_scatter reduce_sum sub",
        # A product can leave the range of float16.
        (
            "cumprod div integer_pow mul one_minus_square polynomial pow reciprocal"
            " reduce_prod square"
        ),
        # Exponentials, logarithms and roots magnify rounding errors or leave the range.
        (
            "acosh asinh cbrt cosh cumlogsumexp exp exp2 expm1 log log1p log2 rsqrt"
            " sinh sqrt"
        ),
        # Elementwise, fused into its neighbours: float32 costs nothing there.
        "atanh erf erf_inv erfc logistic tanh",
        # The low bits of angles and positions matter.
        "acos asin atan atan2 cos rem sin tan",
    ]
).split()


def can_narrow(name: str) -> bool:
    """Return whether a user's table may narrow a primitive of jax: arithmetic on
    floating-point arrays.
    """
    return DEFAULT_RULES.get(name) == "narrow" or name in _ARITHMETIC


@functools.cache
def known_names() -> frozenset[str]:
    """Return the names of primitives that a user's table may have: a misspelled name
    would do nothing.
    """
    exported = {
        value.name
        for value in vars(primitives).values()
        if isinstance(value, jex_core.Primitive)
    }
    return frozenset(exported | PRIMITIVES.keys() | set(_ARITHMETIC))
