"""Programs of jax as data: facts about primitives, and one way to follow values through a program.

`check_chain`, the check that an optimizer works element by element, the plan of `autocast` and its check of arguments
that change in place each follow values of their own kind: they differ in the rule that they give to `propagate`.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

T = TypeVar("T")

BLOCKS = "mpx:blocks"  # the named scope of code that works on whole blocks of elements, which sharding never divides


# ---- facts about primitives, by their names -------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Sums of products. Nearly all floating-point operations of a model are theirs.
CONTRACTIONS = _names("conv_general_dilated dot_general ragged_dot_general")

# Each result is an operand, every element at its place.
IDENTITIES = _names(
    "copy copy_p device_put layout_constraint name optimization_barrier pvary reshard sharding_constraint stop_gradient"
)
# The results are elements of the operands at other places. Only indices decide which.
REARRANGEMENTS = _names(
    "broadcast_in_dim broadcast_to concatenate dynamic_slice gather reshape rev roll slice split squeeze stack tile "
    "transpose unstack"
)
MOVES = IDENTITIES | REARRANGEMENTS
# Of these, the ones that may repeat an element: the cotangents of its copies are still to be added up.
REPEATS = _names("broadcast_in_dim broadcast_to gather tile")
# The one result has the elements of the one operand, each of them once. So have their cotangents.
PERMUTATIONS = _names("copy name reshape rev sharding_constraint squeeze transpose")
# The results are elements of the operands. Values, or which operand is written over which, decide which elements.
SELECTIONS = _names(
    "clamp cummax cummin dynamic_update_slice max min pad reduce_max reduce_min reduce_window_max reduce_window_min "
    "scatter select_n sort top_k"
)
# The results are elements that other devices have.
EXCHANGES = _names(
    "all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast ppermute ragged_all_to_all"
)
# The results are equal on all devices of an axis, and are elements of one of them.
AGREEMENTS = _names("pmax pmin")
# Linear sums, over axes of an array or over devices.
SUMS = _names("add_any psum psum_invariant reduce_scatter reduce_sum")

# An element of a result depends only on the elements of the operands that stand at its place.
ELEMENTWISE = IDENTITIES | _names(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp conj "
    "convert_element_type cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow "
    "is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polynomial pow real "
    "reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh "
    "sqrt square sub tan tanh xor"
)
_RESHAPES = _names("broadcast_in_dim broadcast_to concatenate pad reshape rev slice split squeeze transpose")
_OF_DERIVATIVES = _names("one_minus_square reciprocal")  # of tanh and of quotients, since jax 0.11
_NOT_CHEAP = _names("and device_put digamma eq erf_inv ge gt is_finite le lgamma lt ne not or reshard xor")
# The results cost less to compute again than to keep in float32. (What a comparison finds takes a byte, and is kept.)
CHEAP = (ELEMENTWISE | _RESHAPES | _OF_DERIVATIVES) - _NOT_CHEAP
# The results depend on where an element stands in the array, or on which device this is.
POSITIONAL = _names("axis_index iota random_bits threefry2x32")

# Run one other program, once, on all operands.
CALLS = _names("call closed_call eval_jaxpr jit remat2")
# The same, with a derivative that its author wrote.
CUSTOM_CALLS = _names("custom_jvp_call custom_vjp_call")
LOOPS = _names("scan while")


# ---- what an equation holds -----------------------------------------------------------------------------------------


def is_literal(v: Any) -> bool:
    """Return whether an operand is a constant of the program text."""
    return isinstance(v, jex_core.Literal)


def dtype_of(v: Any) -> Any:
    """Return the dtype of an operand; `void` if it is no array, such as a token."""
    return getattr(v.aval, "dtype", np.dtype(np.void))


def open_jaxpr(jaxpr: Any) -> jex_core.Jaxpr:
    """Return the jaxpr of an open or closed one (jax 0.11 has one class for both)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants_of(jaxpr: Any) -> list[Any]:
    """Return the values of the constant inputs of an open or closed jaxpr."""
    return list(getattr(jaxpr, "consts", ()))


def closed_jaxpr(jaxpr: Any) -> jex_core.ClosedJaxpr:
    """Return an open or closed jaxpr with the values of its constants."""
    return jex_core.ClosedJaxpr(open_jaxpr(jaxpr), constants_of(jaxpr))


def count_uses(program: jex_core.Jaxpr) -> Counter[Any]:
    """Return how often each value is an operand or a result."""
    used = [v for eqn in program.eqns for v in eqn.invars] + list(program.outvars)
    return Counter(v for v in used if not is_literal(v))


def called_jaxpr(eqn: JaxprEqn) -> Any:
    """Return the program that a call runs, open or closed as the equation holds it."""
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def holds_programs_run_once(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a call, or a conditional: it runs one of its programs once, on its operands."""
    return eqn.primitive.name in CALLS | CUSTOM_CALLS | {"cond", "shard_map"}


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Return how many constants a scan closes over, and how many values it carries."""
    if "ft_in" in eqn.params:  # jax 0.11
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


# ---- running equations -----------------------------------------------------------------------------------------------


def run_equations(program: jex_core.Jaxpr, eqns: list[JaxprEqn], values: dict[Any, Any]) -> None:
    """Run equations as they were traced, and add their results to the values.

    As a jaxpr of their own: that keeps custom derivatives, effects, names and source lines, with public functions only.
    """
    if not eqns:
        return
    inside = dict.fromkeys(v for eqn in eqns for v in eqn.outvars if not isinstance(v, jex_core.DropVar))
    invars = list(dict.fromkeys(v for eqn in eqns for v in eqn.invars if not is_literal(v) and v not in inside))
    outvars = list(inside)
    effects = set().union(*[eqn.effects for eqn in eqns])
    part = program.replace(constvars=[], invars=invars, outvars=outvars, eqns=eqns, effects=effects)
    results = jex_core.jaxpr_as_fun(closed_jaxpr(part))(*[values[v] for v in invars])
    values.update(zip(outvars, results, strict=True))


@contextlib.contextmanager
def at_the_place_of(eqn: JaxprEqn) -> Iterator[None]:
    """Give operations that are bound inside the source line, the name stack and the context of an equation."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


# ---- following values through a program -----------------------------------------------------------------------------


def propagate(
    jaxpr: Any,
    inputs: Sequence[T],
    rule: Callable[[JaxprEqn, list[T]], Sequence[T]],
    constant: Callable[[Any], T],
) -> list[T]:
    """Return what is known of each result of a program, open or closed, from what is known of its inputs.

    `rule` goes from an equation, and what is known of its operands, to what is known of its results. It enters programs
    inside of the equation by calling `propagate` again. `constant` says what is known of a literal or a constant input.
    """
    program = open_jaxpr(jaxpr)
    known = dict(zip(program.invars, inputs, strict=True))
    look_up = lambda v: constant(v) if is_literal(v) or v not in known else known[v]
    for eqn in program.eqns:
        found = rule(eqn, [look_up(v) for v in eqn.invars])
        known.update(zip(eqn.outvars, found, strict=True))
    return [look_up(v) for v in program.outvars]


def propagate_inside(
    eqn: JaxprEqn, operands: list[T], rule: Callable[[JaxprEqn, list[T]], Sequence[T]], constant: Callable[[Any], T]
) -> list[tuple[T, ...]]:
    """Return, for each result of a call or a conditional, what is known of it in each of the programs inside."""
    is_cond = eqn.primitive.name == "cond"
    programs = eqn.params["branches"] if is_cond else [called_jaxpr(eqn)]
    operands = operands[1:] if is_cond else operands  # the first one is the index of the branch
    return list(zip(*[propagate(program, operands, rule, constant) for program in programs], strict=True))


_WHOLE, PART = None, "part"  # what a value depends on: whole arrays, or one element of an array each; or a culprit


def mixing_culprit(program: jex_core.ClosedJaxpr, inputs: Sequence[str | None], axis: str) -> str | None:
    """Return the first primitive that makes a result depend on more of a sharded array than one element, or None.

    `inputs` has for each input None if every device has the whole array, `PART` if it has a part of it along `axis` of
    the mesh, or a name for an input on which no result may depend: that name is returned if one does.
    """
    is_culprit = lambda found: found not in (_WHOLE, PART)

    def rule(eqn: JaxprEqn, found: list[str | None]) -> Sequence[str | None]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name in AGREEMENTS and axis in eqn.params["axes"]:
            return [_WHOLE] * count
        culprit = next(filter(is_culprit, found), None)
        if culprit is not None:
            return [culprit] * count
        if name in CALLS | CUSTOM_CALLS:
            return propagate(called_jaxpr(eqn), found, rule, lambda v: _WHOLE)
        if BLOCKS in str(eqn.source_info.name_stack):
            return [PART if PART in found else _WHOLE] * count
        is_array = any(getattr(v.aval, "shape", ()) for v in eqn.outvars)
        if name in POSITIONAL and (is_array or name == "axis_index"):
            return [name] * count
        if PART not in found:
            return [_WHOLE] * count
        return [PART if name in ELEMENTWISE else name] * count

    results = propagate(program, inputs, rule, lambda v: _WHOLE)
    return next(filter(is_culprit, results), None)
