"""Whether a traced function treats each number by itself, so that it may be given a part of an array for the whole."""

from collections.abc import Sequence
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
# What runs another program once, as it is.
_CALLS = frozenset({"jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"})
# What makes equal on all devices what each had of its part. (Not sums: arrays that are not cut would count often.)
_AGREEMENTS = frozenset({"pmin", "pmax"})
# What gives every part the same numbers, where the parts of a whole would differ; and the other way round.
_POSITIONS = frozenset({"iota", "axis_index", "random_bits", "threefry2x32"})

_WHOLE, PART = None, "part"  # what a value depends on: whole arrays only, parts number by number, or a culprit


def mixing_culprit(program: ClosedJaxpr, inputs: Sequence[str | None], axis: str) -> str | None:
    """What mixes numbers of a partial array, or depends on the part, such that a result does; None if nothing does.

    Args:
        program: a traced function.
        inputs: of each input, None if it is whole, `PART` if it is a part of an array; or a name for what no result
            may depend on.
        axis: of the mesh, along which devices have parts.
    """
    results = _Follower(axis).results(program.jaxpr, inputs)
    return next((found for found in results if found not in (_WHOLE, PART)), None)


class _Follower:
    """Follows through a program what each value depends on."""

    def __init__(self, axis: str) -> None:
        self.axis = axis

    def results(self, jaxpr: Jaxpr, inputs: Sequence[str | None]) -> list[str | None]:
        """What each output of a program depends on."""
        known: dict[Any, str | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        look_up = lambda atom: _WHOLE if isinstance(atom, Literal) else known.get(atom, _WHOLE)
        for equation in jaxpr.eqns:
            found = self.of_equation(equation, [look_up(atom) for atom in equation.invars])
            known |= dict(zip(equation.outvars, found, strict=True))
        return [look_up(atom) for atom in jaxpr.outvars]

    def of_equation(self, equation: JaxprEqn, inputs: list[str | None]) -> Sequence[str | None]:
        """What the results of one equation depend on."""
        name, count = equation.primitive.name, len(equation.outvars)
        culprit = next((found for found in inputs if found not in (_WHOLE, PART)), None)
        if name in _AGREEMENTS and self.axis in equation.params["axes"]:
            return [_WHOLE] * count
        if culprit is not None:
            return [culprit] * count
        if name in _CALLS:
            inner: Any = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
            return self.results(getattr(inner, "jaxpr", inner), inputs)
        if BLOCKS in str(equation.source_info.name_stack):
            return [PART if PART in inputs else _WHOLE] * count
        if name in _POSITIONS and (
            name == "axis_index" or any(getattr(var.aval, "shape", ()) for var in equation.outvars)
        ):
            return [name] * count
        if all(found is _WHOLE for found in inputs):
            return [_WHOLE] * count
        return [PART if name in _ELEMENTWISE else name] * count
