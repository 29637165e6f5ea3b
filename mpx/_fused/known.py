"""Read off a step what is known of its values: what updates land on, and where a cheap
instruction gives the same bits.
"""

from typing import Any

from jax.extend.core import JaxprEqn

from mpx._jaxprs import Calls, Graph, dtype_of, is_f32, is_half, is_literal
from mpx._stored.blocks import ORDINARY
from mpx._writeback import LANDING, WHERE_IT_LANDS


class Known:
    """Tells what is known of the values of a program without calls."""

    def __init__(self, graph: Graph, calls: Calls):
        self._graph, self._calls = graph, calls

    def landed(self) -> dict[Any, Any]:
        """Return the sums of a parameter and an update that was made to land on a
        value, and this value; and what is kept beside it.

        Only if nothing else reads the update: what is kept depends on whether it lands.
        """
        found, landing = {}, set()
        for update, (name, operands) in self._calls.items():
            readers = self._graph.readers(update)
            if name == LANDING and all(self._adds_to(x, operands[0]) for x in readers):
                landing.add(update)
                found |= {eqn.outvars[0]: operands[1] for eqn in readers if eqn}
        for result, (name, operands) in self._calls.items():
            if name == WHERE_IT_LANDS and operands[1] in landing:
                found[result] = operands[3]
        return found

    def _adds_to(self, eqn: JaxprEqn | None, p: Any) -> bool:
        if eqn is None or eqn.primitive.name != "add":
            return False
        # Of two float32 numbers the sum need not reach what it was made for.
        return self.narrow(eqn.invars[0]) is p and is_half(p) and is_f32(eqn.outvars[0])

    def narrow(self, v: Any) -> Any:
        """Return what a value was before it was widened."""
        eqn = self._graph.maker(v)
        if eqn is None or eqn.primitive.name != "convert_element_type":
            return v
        is_wider = dtype_of(v).itemsize > dtype_of(eqn.invars[0]).itemsize
        return eqn.invars[0] if is_wider else v

    def is_ordinary(self, eqn: JaxprEqn) -> bool:
        """Return whether a root or quotient of float32 numbers has the same bits if
        subnormal operands of the root, or divisors beyond 2**64, count as zero; or
        whether a call says that operands are ordinary.

        So it is with what a rule like Adam divides by, `sqrt(x) + eps`: roots of
        subnormal numbers are below 2**-63, too small to change `eps`.
        """
        name, v = eqn.primitive.name, eqn.outvars[0]
        if self._calls.get(v, ("",))[0] in ORDINARY:
            return True
        if not is_f32(v):
            return False
        if name == "sqrt":
            return all(map(_adds_a_little, self._graph.readers(v)))
        divisor = self._graph.maker(eqn.invars[1]) if name == "div" else None
        makers = map(self._graph.maker, divisor.invars) if divisor else ()
        return _adds_a_little(divisor) and any(
            maker and maker.primitive.name == "sqrt" for maker in makers
        )


def _adds_a_little(eqn: Any) -> bool:
    if eqn is None or eqn.primitive.name != "add":
        return False
    return any(is_literal(v) and 2.0**-38 <= v.val <= 1 for v in eqn.invars)
