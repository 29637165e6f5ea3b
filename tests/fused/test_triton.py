"""Check which operations of one element Triton can compute: a leaf with another one is
left to XLA.

A kernel of one operation is lowered for a GPU, which needs no GPU and none of its
libraries.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpx._fused import partition
from mpx._fused.kernels import in_a_kernel
from mpx._fused.partition import Partition
from mpx._fused.tile import columns
from mpx._jaxprs import flatten
from mpx._primitives import PRIMITIVES
from tests.helpers import on_an_absent_gpu

SIZE = 2048
FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int32", "uint8", "uint16")
UNARY = (
    "abs acos acosh asin asinh atan atanh cbrt ceil cos cosh digamma erf erf_inv erfc"
    " exp exp2 expm1 floor is_finite lgamma log log1p logistic neg rsqrt sign sin sinh"
    " sqrt square tan tanh"
).split()
BINARY = "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub".split()
BITWISE = "and or xor".split()
SHIFTS = "shift_left shift_right_arithmetic shift_right_logical".split()
OPERATIONS = {
    **{name: (getattr(lax, name), 1, FLOATS) for name in UNARY},
    **{name: (getattr(lax, name), 2, FLOATS) for name in BINARY},
    **{name: (getattr(lax, f"bitwise_{name}"), 2, INTEGERS) for name in BITWISE},
    **{name: (getattr(lax, name), 2, INTEGERS) for name in SHIFTS},
    "not": (lax.bitwise_not, 1, INTEGERS),
    "add_any": (lambda x, y: jax.vjp(lambda x: x * y + x, x)[1](x)[0], 2, FLOATS),
    "bitcast_convert_type": (
        lambda x: lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"),
        1,
        FLOATS,
    ),
    "clamp": (lambda x: lax.clamp(x, x + x, x), 1, FLOATS),
    "convert_element_type": (
        lambda x: x.astype(np.uint8).astype(x.dtype),
        1,
        (*FLOATS, "int32"),
    ),
    "integer_pow": (lambda x: lax.integer_pow(x, -2), 1, FLOATS),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 2), 1, FLOATS),
    "round": (lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), 1, FLOATS),
    "select_n": (lambda x: lax.select_n(x > 0, x, x * x), 1, (*FLOATS, *INTEGERS)),
    "reduce_max": (lambda x: in_blocks(x, jnp.max), 1, (*FLOATS, "int32")),
    "reduce_min": (lambda x: in_blocks(x, jnp.min), 1, (*FLOATS, "int32")),
    "reduce_and": (lambda x: in_blocks(x > 0, jnp.all).astype(x.dtype), 1, FLOATS),
    "reduce_or": (lambda x: in_blocks(x > 0, jnp.any).astype(x.dtype), 1, FLOATS),
}
COMPLEX = {"conj", "imag", "real"}
# Of later releases of JAX: in kernels they are products and sums, or do not occur
# (derivatives).
BY_OTHER_NAMES = {"one_minus_square", "polynomial", "reciprocal"}


def in_blocks(x, reduce):
    blocks = x.reshape(-1, 256)
    return jnp.broadcast_to(
        reduce(blocks, axis=1, keepdims=True), blocks.shape
    ).reshape(x.shape)


def part_of(name, dtype):
    """Return the part that computes one operation, and its leaf."""
    operation, operands, _ = OPERATIONS[name]
    shapes = [jax.ShapeDtypeStruct((SIZE,), dtype)] * operands

    def run(*xs):
        result = operation(*xs)
        return result.astype(np.float32) if result.dtype == bool else result

    program, _, calls = flatten(jax.make_jaxpr(run)(*shapes))
    (leaf,) = Partition(program, calls).leaves
    return leaf


def lower(part):
    arrays = [
        jax.ShapeDtypeStruct((SIZE // part.width, columns(v, part)), v.aval.dtype)
        for v in part.arrays
    ]
    run = jax.jit(lambda *arrays: in_a_kernel(part, {}, False, list(arrays), []))
    with on_an_absent_gpu():
        run.trace(*arrays).lower(lowering_platforms=("cuda",))


CASES = [  # the first dtype of each operation, and in CI one of the others in turn
    pytest.param(name, dtype, marks=[] if dtype == dtypes[0] else pytest.mark.slow)
    for i, (name, (_, _, dtypes)) in enumerate(OPERATIONS.items())
    for dtype in (dtypes[0], dtypes[1 + i % (len(dtypes) - 1)])
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_triton_computes_what_a_part_may_hold(name, dtype, monkeypatch):
    leaf = part_of(name, dtype)
    if leaf.part is not None:
        lower(leaf.part)
        return
    assert leaf.reason.startswith("Triton has no `")
    monkeypatch.setattr(partition, "_missing_in_triton", lambda eqn: "")
    with pytest.raises(NotImplementedError):
        lower(part_of(name, dtype).part)


def test_every_operation_that_a_part_may_hold_is_tried():
    elementwise = {
        name
        for name, facts in PRIMITIVES.items()
        if facts.elementwise and facts.moves != "same"
    }
    # Autocast's own.
    assert elementwise - COMPLEX - BY_OTHER_NAMES - {"value_with_derivative_of"} <= set(
        OPERATIONS
    )
