"""List what mpx knows about jax's primitives: one table, which every part of the
library reads.

A primitive that is not in the table gets the careful answer: it mixes elements, moves
nothing, and is expensive. Primitives with the same facts share a row.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple


class Facts(NamedTuple):
    """The facts about a primitive."""

    # adds up products; nearly all floating-point operations of a model are in
    # contractions
    contraction: bool = False
    # an element of a result depends only on the operands' elements at the same place
    elementwise: bool = False
    # costs less to compute again than to keep in float32; comparisons are kept, in a
    # byte
    cheap: bool = False
    # a function such as tanh, which XLA keeps in float32 for the derivative
    transcendental: bool = False
    # is linear in each operand; what `moves` elements is too, and need not say so
    linear: bool = False
    # Results consist of elements of the operands: the operands themselves ("same"),
    # elements that indices choose ("moved"), elements that values or the order of
    # writing choose ("chosen"), elements of other devices ("received").
    moves: Literal["", "same", "moved", "chosen", "received"] = ""
    # How often the one result has each element of the one operand. For "many",
    # cotangents have yet to be added up.
    copies_of_operand: Literal["", "one", "many"] = ""
    communicates: bool = False  # needs other devices, or may
    # depends on where an element is in the array, or on which device this is
    positional: bool = False
    # the floating-point numbers that Pallas' Triton has it for
    triton: Literal["any", "32 bits", "none"] = "any"
    # how it acts on rows of whole blocks, if it is not elementwise
    blocks: Literal["", "view", "reduce"] = ""
    # The programs it holds: one that runs once on all operands ("call"), the same with
    # a derivative by its author ("custom"), or others.
    runs: Literal["", "call", "custom", "branches", "devices", "loop"] = ""


NOTHING_KNOWN = Facts()
_KEPT = Facts(elementwise=True)
_FREE = Facts(elementwise=True, cheap=True)
_ITSELF = _FREE._replace(moves="same", copies_of_operand="one")
_CURVE = _FREE._replace(transcendental=True)
_VIEW = Facts(cheap=True, moves="moved")
_RECEIVED = Facts(moves="received", linear=True, communicates=True)
_TOTAL = Facts(linear=True, communicates=True)
_ROWS = {
    "conv_general_dilated dot_general ragged_dot_general": Facts(contraction=True),
    # Of autocast: a product of a vector and a matrix.
    "product_that_may_be_mapped": Facts(linear=True),
    # The operands themselves.
    "copy name": _ITSELF,
    "optimization_barrier pvary stop_gradient": _FREE._replace(moves="same"),
    # Of autocast: the first operand.
    "value_with_derivative_of": _FREE._replace(triton="none"),
    "kept_between_passes": _ITSELF._replace(triton="none"),  # of `checkpoint`
    "rounding_kept": _ITSELF._replace(triton="none"),  # of autocast
    # Of gradients around autocast.
    "cotangent_watched": _ITSELF._replace(triton="none"),
    "layout_constraint": _FREE._replace(moves="same", triton="none"),
    "device_put": _KEPT._replace(moves="same", triton="none"),
    "sharding_constraint": _ITSELF._replace(communicates=True),
    "reshard": _KEPT._replace(moves="same", copies_of_operand="one", communicates=True),
    # Elements at other places.
    "rev transpose": _VIEW._replace(copies_of_operand="one"),
    "reshape squeeze": _VIEW._replace(copies_of_operand="one", blocks="view"),
    "broadcast_in_dim": _VIEW._replace(copies_of_operand="many", blocks="view"),
    "broadcast_to": _VIEW._replace(copies_of_operand="many"),
    "concatenate slice split": _VIEW,
    "gather tile": Facts(moves="moved", copies_of_operand="many"),
    "dynamic_slice roll stack unstack": Facts(moves="moved"),
    # Elements that values choose.
    "clamp max min select_n": _FREE._replace(moves="chosen"),
    "pad": Facts(cheap=True, moves="chosen"),
    "reduce_max reduce_min": Facts(moves="chosen", blocks="reduce"),
    "reduce_and reduce_or": Facts(blocks="reduce"),
    (
        "cummax cummin dynamic_update_slice reduce_window_max reduce_window_min "
        "scatter sort top_k"
    ): Facts(moves="chosen"),
    # Elements of other devices, and sums over them.
    "all_to_all": _RECEIVED._replace(copies_of_operand="one"),
    # Some devices may get nothing of `ppermute`.
    (
        "all_gather all_gather_invariant all_gather_reduced pbroadcast ppermute "
        "ragged_all_to_all"
    ): _RECEIVED,
    "pmax pmin": Facts(moves="chosen", communicates=True),
    "psum psum_invariant reduce_scatter": _TOTAL,
    "reduce_sum": Facts(linear=True, blocks="reduce"),
    # Arithmetic on elements.
    (
        "abs add add_any bitcast_convert_type ceil conj convert_element_type floor "
        "imag mul polynomial real rem round rsqrt shift_left shift_right_arithmetic "
        "shift_right_logical sign sqrt square sub"
    ): _FREE,
    (
        "acos acosh asin asinh atan atan2 atanh cbrt cos cosh exp exp2 expm1 log "
        "log1p pow sin sinh tan tanh"
    ): _CURVE,
    "erf erfc": _CURVE._replace(triton="none"),
    "logistic": _CURVE._replace(triton="32 bits"),
    "neg": _FREE._replace(linear=True),
    "div integer_pow nextafter": _FREE._replace(triton="32 bits"),
    "reduce_precision": _FREE._replace(triton="none"),
    # Derivatives of tanh and quotients since jax 0.11.
    "one_minus_square reciprocal": _FREE._replace(triton="none"),
    "and eq ge gt is_finite le lt ne not or xor": _KEPT,
    "erf_inv": _KEPT._replace(triton="32 bits"),
    "digamma lgamma": _KEPT._replace(triton="none"),
    "axis_index iota random_bits threefry2x32": Facts(positional=True),
    # Programs.
    "call closed_call eval_jaxpr jit remat2": Facts(runs="call"),
    "custom_jvp_call custom_vjp_call": Facts(runs="custom"),
    "cond": Facts(runs="branches"),
    "shard_map": Facts(runs="devices"),
    "custom_partitioning": Facts(triton="none"),
    "scan while": Facts(runs="loop"),
}

PRIMITIVES = {name: facts for names, facts in _ROWS.items() for name in names.split()}


def facts_of(equation_or_primitive: Any) -> Facts:
    """Return the facts about a primitive, or about the primitive of an equation."""
    primitive = getattr(equation_or_primitive, "primitive", equation_or_primitive)
    return PRIMITIVES.get(primitive.name, NOTHING_KNOWN)


def is_call(eqn: Any) -> bool:
    """Return whether an equation runs one other program, once, on all its operands."""
    return facts_of(eqn).runs in ("call", "custom")


def holds_programs_run_once(eqn: Any) -> bool:
    """Return whether an equation runs one of its programs once: a call or a
    conditional.
    """
    return facts_of(eqn).runs not in ("", "loop")


@dataclasses.dataclass(frozen=True)
class OfMatrices:
    """Tells XLA where to compute an operation, and the reader of a program what it is:
    each matrix of the result is a function of the same matrix of the last operand.

    Attributes:
        partition: a callback of `custom_partitioning`, as this is.
        whole: the operation on matrices that a device has whole: `[k, m, n]`.
    """

    partition: Callable[..., Any]
    whole: Callable[[Any], Any]

    def __call__(self, *given: Any) -> Any:
        """Say where to compute it."""
        return self.partition(*given)


def of_matrices(eqn: Any) -> OfMatrices | None:
    """Return what is said of a function of matrices, of one leaf; None if an equation
    is something else.
    """
    said = eqn.params.get("partition")
    is_one = isinstance(said, OfMatrices) and len(eqn.invars) == 2
    return said if is_one else None


def matrix_size(eqn: Any) -> int:
    """Return how many numbers a function of matrices needs together; 1 if an equation
    is something else.
    """
    return math.prod(eqn.outvars[0].aval.shape[-2:]) if of_matrices(eqn) else 1
