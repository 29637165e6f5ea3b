"""Whether a traced function treats each number by itself, so that it may be given a part of an array for the whole."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

BLOCKS = "mpx:blocks"  # the named scope of what works on blocks of numbers that are not cut

_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp conj "
    "convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag "
    "integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not optimization_barrier "
    "or pow pvary real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical "
    "sign sin sinh sqrt square stop_gradient sub tan tanh xor".split()
)
# What makes equal on all devices what each had of its part. (Not sums: arrays that are not cut would count often.)
_AGREEMENTS = frozenset({"pmin", "pmax"})

_WHOLE, _PART = None, "part"  # what a value depends on: whole arrays only, parts number by number, or an equation


def mixing_equation(program: ClosedJaxpr, is_part: Sequence[bool]) -> JaxprEqn | None:
    """The first equation that mixes numbers of a partial array and on which a result depends; None if there is none.

    Args:
        program: a traced function.
        is_part: of each input, whether it is a part of an array.
    """
    results = _results(program.jaxpr, [_PART if part else _WHOLE for part in is_part])
    return next((found for found in results if found not in (_WHOLE, _PART)), None)


def _results(jaxpr: Jaxpr, inputs: Sequence[Any]) -> list[Any]:
    """What each output of a program depends on."""
    known: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    look_up = lambda atom: _WHOLE if isinstance(atom, Literal) else known.get(atom, _WHOLE)
    for equation in jaxpr.eqns:
        found = _equation_results(equation, [look_up(atom) for atom in equation.invars])
        known |= dict(zip(equation.outvars, found, strict=True))
    return [look_up(atom) for atom in jaxpr.outvars]


def _equation_results(equation: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    count = len(equation.outvars)
    mixed = next((found for found in inputs if found not in (_WHOLE, _PART)), None)
    name, inner = equation.primitive.name, _called(equation.params)
    if all(found is _WHOLE for found in inputs) or name in _AGREEMENTS:
        return [_WHOLE] * count
    if mixed is not None:
        return [mixed] * count
    if name in _ELEMENTWISE or BLOCKS in str(equation.source_info.name_stack):
        return [_PART] * count
    if inner is not None and len(inner.invars) == len(inputs):
        return _results(inner, inputs)
    return [equation] * count


def _called(params: Mapping[str, Any]) -> Jaxpr | None:
    """The program that an equation runs once, as `jit` and functions with derivatives of their own do."""
    if "branches" in params or "cond_jaxpr" in params or "length" in params:
        return None
    inner = params.get("jaxpr") or params.get("call_jaxpr")
    return getattr(inner, "jaxpr", inner)
