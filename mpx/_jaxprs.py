"""Jaxprs as data: what an equation holds, how to run equations, and one way to follow
values through a program.

`check_chain` and the plan of `autocast` follow different kinds of values. Each gives
`propagate` a rule of its own.
"""

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from mpx._primitives import is_call

T = TypeVar("T")
Calls = dict[Any, tuple[str, list[Any]]]


# ---- what an equation holds ----------------------------------------------------------


def is_literal(v: Any) -> bool:
    """Return whether an operand is a constant in the program text."""
    return isinstance(v, jex_core.Literal)


def dtype_of(v: Any) -> Any:
    """Return the dtype of an operand; `void` for what is not an array, such as a
    token.
    """
    return getattr(v.aval, "dtype", np.dtype(np.void))


def is_f32(v: Any) -> bool:
    """Return whether an operand is a float32 array."""
    return dtype_of(v) == np.float32


def is_half(v: Any) -> bool:
    """Return whether an operand is a floating array in 16 bits."""
    return dtype_of(v).itemsize == 2 and jnp.issubdtype(dtype_of(v), jnp.floating)


def open_jaxpr(jaxpr: Any) -> jex_core.Jaxpr:
    """Return the open jaxpr of an open or closed one (jax 0.11 has one class for
    both).
    """
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants_of(jaxpr: Any) -> list[Any]:
    """Return the values of the constant inputs of an open or closed jaxpr."""
    return list(getattr(jaxpr, "consts", ()))


def closed_jaxpr(jaxpr: Any) -> jex_core.ClosedJaxpr:
    """Return a closed jaxpr, from an open or closed one."""
    return jex_core.ClosedJaxpr(open_jaxpr(jaxpr), constants_of(jaxpr))


def count_uses(program: jex_core.Jaxpr) -> Counter[Any]:
    """Count how often each value is an operand, or a result of the program."""
    used = [v for eqn in program.eqns for v in eqn.invars] + list(program.outvars)
    return Counter(v for v in used if not is_literal(v))


class Graph:
    """A program as a graph: which equation makes a value, and from which others it is
    computed.
    """

    def __init__(self, program: jex_core.Jaxpr):
        self._makers = {
            v: (number, eqn)
            for number, eqn in enumerate(program.eqns)
            for v in eqn.outvars
        }
        self._program = program

    def readers(self, v: Any) -> list[JaxprEqn | None]:
        """Return the equations that read a value, and None where it is a result."""
        return self._readers[v]

    @functools.cached_property
    def _readers(self) -> dict[Any, list[JaxprEqn | None]]:
        found: dict[Any, list[JaxprEqn | None]] = defaultdict(list)
        for eqn in (*self._program.eqns, None):
            for v in eqn.invars if eqn else self._program.outvars:
                if not is_literal(v):
                    found[v].append(eqn)
        return found

    def maker(self, v: Any) -> JaxprEqn | None:
        """Return the equation that makes a value; None for an input or a literal."""
        return None if is_literal(v) else self._makers.get(v, (-1, None))[1]

    def number(self, v: Any) -> int:
        """Return the place of that equation in the program; -1 for no equation."""
        return -1 if is_literal(v) else self._makers.get(v, (-1, None))[0]

    def behind(
        self,
        values: Iterable[Any],
        goes_on: Callable[[Any], bool] = lambda v: True,
        through: Callable[[Any], Any] = lambda v: v,
    ) -> list[Any]:
        """Return the values, and those from which they are computed, each once.

        The walk goes back from a value to the operands of its maker if `goes_on` says
        so. `through` gives the value to be taken for another one.
        """
        found: dict[Any, None] = {}
        waiting = list(values)[::-1]
        while waiting:
            v = through(waiting.pop())
            if not is_literal(v) and v not in found:
                found[v] = None
                if (eqn := self.maker(v)) and goes_on(v):
                    waiting += reversed(eqn.invars)
        return list(found)


def with_results_read(jaxpr: Any, is_read: Sequence[bool]) -> Any:
    """Return a program that has 0 for each result that nobody reads.

    `flax.nnx.scan` and `flax.nnx.remat` return the weights that they got, which is then
    no use of a weight.
    """
    if all(is_read):
        return jaxpr
    program, nothing = (
        open_jaxpr(jaxpr),
        jex_core.Literal(np.float32(0), jax.typeof(np.float32(0))),
    )
    outvars = [
        v if read else nothing for v, read in zip(program.outvars, is_read, strict=True)
    ]
    return jex_core.ClosedJaxpr(program.replace(outvars=outvars), constants_of(jaxpr))


def called_jaxpr(eqn: JaxprEqn) -> Any:
    """Return the program that a call runs, open or closed."""
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Return how many values a scan closes over, and how many it carries."""
    if "ft_in" in eqn.params:  # jax 0.11
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


# ---- running equations ---------------------------------------------------------------


def run_equations(
    program: jex_core.Jaxpr, eqns: list[JaxprEqn], values: dict[Any, Any]
) -> None:
    """Run equations as they were traced, and add their results to `values`.

    They run as a jaxpr of their own: that keeps custom derivatives, effects, names and
    source lines, and needs only public functions of jax.
    """
    if not eqns:
        return
    made = list(
        dict.fromkeys(
            v
            for eqn in eqns
            for v in eqn.outvars
            if not isinstance(v, jex_core.DropVar)
        )
    )
    part = part_of(program, eqns, made)
    results = jex_core.jaxpr_as_fun(closed_jaxpr(part))(
        *[values[v] for v in part.invars]
    )
    values.update(zip(made, results, strict=True))


def part_of(
    program: jex_core.Jaxpr, eqns: list[JaxprEqn], results: list[Any]
) -> jex_core.Jaxpr:
    """Return equations of a program as one of their own, whose inputs are all that they
    read from outside.
    """
    inside = {v for eqn in eqns for v in eqn.outvars}
    invars = list(
        dict.fromkeys(
            v
            for eqn in eqns
            for v in eqn.invars
            if not is_literal(v) and v not in inside
        )
    )
    effects = set().union(*[eqn.effects for eqn in eqns])
    return program.replace(
        constvars=[], invars=invars, outvars=results, eqns=eqns, effects=effects
    )


@contextlib.contextmanager
def with_source_of(eqn: JaxprEqn) -> Iterator[None]:
    """Give operations bound inside the source line, the name stack and the context of
    an equation.
    """
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        yield


# ---- programs without calls ----------------------------------------------------------


def traced_flat(
    function: Callable[..., Any],
    given: Sequence[Any],
) -> tuple[jex_core.Jaxpr, dict[Any, Any], Any, Calls]:
    """Return a function's program without calls, the values of its inputs and
    constants, its results' structure, and its calls, as `flatten` does.
    """
    jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*given)
    program, constants, calls = flatten(jaxpr)
    values = constants | dict(zip(program.invars, jax.tree.leaves(given), strict=True))
    return program, values, jax.tree.structure(results), calls


def flatten(
    jaxpr: jex_core.ClosedJaxpr,
) -> tuple[jex_core.Jaxpr, dict[jex_core.Var, Any], Calls]:
    """Inline the calls of a program; return it with the arrays that it closes over, and
    with the names and operands of the calls, by their first results.

    Calls that say where their arrays have to be stay, and so do those in which
    `jax.checkpoint` computes values again: XLA would else keep the first ones. Custom
    derivatives are lost with their calls.
    """
    equations: list[JaxprEqn] = []
    constants: dict[jex_core.Var, Any] = {}
    calls: Calls = {}

    def enter(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        inside = open_jaxpr(jaxpr)
        known = dict(zip(inside.invars, operands, strict=True))
        for variable, value in zip(inside.constvars, constants_of(jaxpr), strict=True):
            known[variable] = jex_core.Var(variable.aval)
            constants[known[variable]] = value

        def read(v):
            return v if is_literal(v) else known[v]

        for eqn in inside.eqns:
            operands = [read(v) for v in eqn.invars]
            if is_call(eqn) and not _is_placed(eqn) and not _is_computed_again(eqn):
                results = enter(called_jaxpr(eqn), operands)
                if results and not is_literal(results[0]):
                    name = eqn.params.get("name", "")
                    calls.setdefault(results[0], (name, operands))
            else:
                # New ones: two calls of one function share a program, and so its
                # variables.
                results = [jex_core.Var(v.aval) for v in eqn.outvars]
                equations.append(eqn.replace(invars=operands, outvars=results))
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in inside.outvars]

    program = open_jaxpr(jaxpr)
    outputs = enter(jaxpr, program.invars)
    flat = program.replace(constvars=[], outvars=outputs, eqns=equations)
    return flat, constants, calls


def _is_placed(eqn: JaxprEqn) -> bool:
    """Return whether a call says where its operands or results have to be."""
    shardings = (
        *eqn.params.get("in_shardings", ()),
        *eqn.params.get("out_shardings", ()),
    )
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def _is_computed_again(eqn: JaxprEqn) -> bool:
    """Return whether a call computes values for the second time, in a backward pass."""
    return bool(eqn.params.get("differentiated") and eqn.params["prevent_cse"])


# ---- following values through a program ----------------------------------------------


def propagate(
    jaxpr: Any,
    inputs: Sequence[T],
    rule: Callable[[JaxprEqn, list[T]], Sequence[T]],
    constant: Callable[[Any], T],
) -> list[T]:
    """Return what is known about each result of a program, from what is known about its
    inputs.

    `rule` takes an equation and what is known about its operands, and returns what is
    known about its results. It enters programs inside the equation by calling
    `propagate` again. `constant` says what is known about a literal or a constant
    input.
    """
    program = open_jaxpr(jaxpr)
    known = dict(zip(program.invars, inputs, strict=True))

    def look_up(v):
        return constant(v) if is_literal(v) or v not in known else known[v]

    for eqn in program.eqns:
        found = rule(eqn, [look_up(v) for v in eqn.invars])
        known.update(zip(eqn.outvars, found, strict=True))
    return [look_up(v) for v in program.outvars]


def propagate_inside(
    eqn: JaxprEqn,
    operands: list[T],
    rule: Callable[[JaxprEqn, list[T]], Sequence[T]],
    constant: Callable[[Any], T],
) -> list[tuple[T, ...]]:
    """Return, for each result of a call or a conditional, what each program inside says
    about it.
    """
    is_cond = eqn.primitive.name == "cond"
    programs = eqn.params["branches"] if is_cond else [called_jaxpr(eqn)]
    # The first one is the index of the branch.
    operands = operands[1:] if is_cond else operands
    return list(
        zip(
            *[propagate(program, operands, rule, constant) for program in programs],
            strict=True,
        )
    )
