"""What arithmetic does on this machine: which products are right, which roundings survive, and that mpx is exact.

Everything is tried on the default device and compared with numbers that NumPy and ml_dtypes compute.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from mpx import formats
from mpx._inspect.masters import master_params
from mpx._transforms.kahan_summation import kahan_summation
from mpx._transforms.master_weights import Storage, master_weights
from mpx.tools.doctor.measuring import first_line

Rounding = Literal["kept", "dropped", "other"]
Subnormals = Literal["kept", "flushed"]


@dataclasses.dataclass(frozen=True)
class Product:
    """One kind of matrix product, tried.

    Attributes:
        name: the dtype or the dot algorithm.
        operands: their dtype.
        works: whether it ran, and to the precision that its name promises.
        error: the largest error, as a part of the largest sum of the products' magnitudes; None if it did not run.
        bits: how many significant bits of an operand reach the result; None if it did not run.
        refusal: why it does not work.
    """

    name: str
    operands: str
    works: bool
    error: float | None = None
    bits: int | None = None
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class RoundTrip:
    """What becomes of numbers that a compiled program rounds to 16 bits and computes on with in float32.

    Attributes:
        where: what comes before the rounding.
        dtype: that is rounded to.
        astype: what becomes of the rounding of `x.astype(dtype)`: `"kept"`; `"dropped"`, when the results are those of
            a program without it; `"other"`, when they are neither.
        round_to: the same of `mpx.formats.round_to`.
    """

    where: str
    dtype: str
    astype: Rounding
    round_to: Rounding


@dataclasses.dataclass(frozen=True)
class SubnormalNumbers:
    """What becomes of the numbers below the smallest normal one of a dtype.

    Attributes:
        dtype: which one.
        arithmetic: whether half of the smallest normal number is kept or flushed to zero.
        round_to: the same for what `mpx.formats.round_to` rounds to that dtype; float32 passes through it.
    """

    dtype: str
    arithmetic: Subnormals
    round_to: Subnormals


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that mpx claims to be exact, tried in one compiled program.

    Attributes:
        name: the claim.
        exact: whether every number came out as computed beforehand.
        detail: how many did not, or what was raised.
    """

    name: str
    exact: bool
    detail: str = ""


_SIZE = 64  # rows and columns of the products that are tried

# The largest error that the name of an algorithm or dtype allows, as a part of the sums of the products' magnitudes.
_LIMITS = {
    "F64_F64_F64": 2.0**-40,
    "F32_F32_F32": 2.0**-18,
    "BF16_BF16_F32_X9": 2.0**-18,
    "BF16_BF16_F32_X6": 2.0**-16,
    "TF32_TF32_F32_X3": 2.0**-16,
    "BF16_BF16_F32_X3": 2.0**-13,
    "TF32_TF32_F32": 2.0**-9,
    "F16_F16_F32": 2.0**-9,
    "F16_F16_F16": 2.0**-8,
    "BF16_BF16_F32": 2.0**-7,
    "BF16_BF16_BF16": 2.0**-5,
}
_LIMIT_OF_FP8 = 2.0**-6  # of products of exact operands, whose sums some devices keep in 14 bits


def try_dtypes() -> tuple[Product, ...]:
    """A product in each dtype, as `jax.numpy.dot` runs it, and one in float32 with all of its bits asked for.

    Example:
        >>> next(product for product in try_dtypes() if product.name == "bf16").works
        True
    """
    fp8 = functools.partial(_try_product, result=jnp.float32, limit=_LIMIT_OF_FP8)
    return (
        _try_product("f32", jnp.float32, limit=2.0**-18, precision=lax.Precision.HIGHEST),
        _try_product("f32 by default", jnp.float32, limit=2.0**-7),
        _try_product("bf16", jnp.bfloat16, limit=2.0**-7),
        _try_product("f16", jnp.float16, limit=2.0**-8),
        fp8("float8_e4m3fn", jnp.float8_e4m3fn),
        fp8("float8_e5m2", jnp.float8_e5m2),
        _try_product("f64", np.float64, limit=2.0**-40),
    )


def try_algorithms() -> tuple[Product, ...]:
    """A product by each dot algorithm that this version of jax has a name for."""
    return tuple(
        _try_product(
            algorithm.name,
            _operands_of(algorithm.name),
            limit=_LIMITS.get(algorithm.name, _LIMIT_OF_FP8),
            precision=algorithm,
            result=_result_of(algorithm.name),
        )
        for algorithm in lax.DotAlgorithmPreset
        if algorithm.name != "DEFAULT"
    )


def try_round_trips() -> tuple[RoundTrip, ...]:
    """Rounds to 16 bits and back in the places where a compiler may drop it, plainly and with `round_to`."""
    return tuple(
        round_trip(where, dtype, functools.partial(programs, dtype=dtype), *numbers(dtype))
        for where, programs, numbers in (
            ("a sum of float32 numbers", _after_a_sum, _numbers_to_add),
            ("a product of 16-bit matrices", _after_a_product, _matrices),
            ("a sum of 16-bit numbers", _after_a_narrow_sum, _one_below_a_spacing),
            ("a sum of 16-bit numbers, added to", _between_sums, _twice_below_a_spacing),
        )
        for dtype in (np.dtype(jnp.bfloat16), np.dtype(np.float16))
    )


def round_trip(
    where: str,
    dtype: np.dtype,
    program: Callable[..., jax.Array],
    operands: tuple[np.ndarray, ...],
    rounded: np.ndarray,
    unrounded: np.ndarray,
) -> RoundTrip:
    """Runs a program with each kind of rounding and says what became of it.

    Args:
        where: what it rounds.
        dtype: to which it rounds.
        program: called with the operands, and with `exact`: whether to round with `round_to`.
        operands: its arrays.
        rounded: what it returns if nothing is dropped.
        unrounded: what it returns if every rounding is.
    """
    found = []
    for exact in (False, True):
        result = np.asarray(jax.jit(functools.partial(program, exact=exact))(*operands)).astype(np.float32)
        found.append("kept" if _same(result, rounded) else "dropped" if _same(result, unrounded) else "other")
    return RoundTrip(where, dtype.name, *found)


def try_subnormals() -> tuple[SubnormalNumbers, ...]:
    """Whether numbers below the smallest normal one survive arithmetic, and mpx's roundings."""
    found = []
    for dtype in map(np.dtype, (np.float32, jnp.bfloat16, np.float16)):
        normal = np.array([jnp.finfo(dtype).smallest_normal], dtype)
        half = np.asarray(jax.jit(lambda x: x * x.dtype.type(0.5))(normal))
        expected = np.ldexp(np.float64(normal), -1).astype(dtype).astype(np.float32)
        rounded = np.asarray(jax.jit(functools.partial(formats.round_to, dtype=dtype))(expected))
        found.append(
            SubnormalNumbers(
                dtype.name,
                "kept" if _same(half.astype(np.float32), expected) else "flushed",
                "kept" if _same(rounded, expected) else "flushed",
            )
        )
    return tuple(found)


def try_claims() -> tuple[Check, ...]:
    """Trains a few weights by each kind of state and compares them, to the bit, with the sums computed beforehand.

    Example:
        >>> all(check.exact for check in try_claims())
        True
    """
    return (
        _check("bfloat16 weights and Kahan compensations are the sum of 1,000 small updates", _kahan_sum),
        _check("float32 masters are the sum of 1,000 small updates", functools.partial(_master_sum, storage="full")),
        _check("masters split in two are the same sum", functools.partial(_master_sum, storage="split")),
        _check("bfloat16 weights are their masters, rounded once", _rounded_masters),
        _check("float32 numbers, split in two and joined, have their bits", _split_and_joined),
    )


def _try_product(name: str, dtype: Any, *, limit: float, precision: Any = None, result: Any = None) -> Product:
    operands = np.random.default_rng(0).uniform(-1, 1, (2, _SIZE, _SIZE)).astype(np.float32).astype(dtype)
    a, b = operands.astype(np.float64)
    product = jax.jit(functools.partial(lax.dot, precision=precision, preferred_element_type=result))
    long_numbers = np.diag(1 + 0.5 ** np.arange(1, _SIZE + 1)).astype(np.float64)  # two bits, further and further apart
    try:
        # float64 exists in 64-bit mode only; the other dtypes are tried in the mode that is on.
        with jax.enable_x64(True) if operands.dtype == np.float64 else contextlib.nullcontext():
            got = np.asarray(product(*operands)).astype(np.float64)
            copied = product(long_numbers.astype(dtype), np.eye(_SIZE).astype(dtype))
    except Exception as error:  # whatever the compiler or the device raises is the finding
        return Product(name, operands.dtype.name, False, refusal=first_line(error))
    numbers = np.diag(np.asarray(copied).astype(np.float64))
    bits = 1 + int(np.argmax((numbers != np.diag(long_numbers)) | (numbers == 1)))  # the first that lost its second bit
    error = float(np.max(np.abs(got - a @ b)) / np.max(np.abs(a) @ np.abs(b)))
    if error <= limit:  # False for NaN
        return Product(name, operands.dtype.name, True, error, bits)
    refusal = f"the result is wrong: its error is above {limit:.1e}"
    return Product(name, operands.dtype.name, False, error, bits, refusal)


def _operands_of(algorithm: str) -> Any:
    """The operands' dtype: float32 where an algorithm rounds its operands itself."""
    if algorithm == "BF16_BF16_BF16":
        return jnp.bfloat16
    return {"ANY": jnp.float8_e4m3fn, "F16": np.float16, "F64": np.float64}.get(algorithm.split("_")[0], np.float32)


def _result_of(algorithm: str) -> Any:
    results = {"F16_F16_F16": np.float16, "BF16_BF16_BF16": jnp.bfloat16, "F64_F64_F64": np.float64}
    return results.get(algorithm, np.float32)


def _after_a_sum(x: jax.Array, y: jax.Array, *, dtype: np.dtype, exact: bool) -> jax.Array:
    return _rounded(x + y, dtype, exact)


def _numbers_to_add(dtype: np.dtype) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    x, y = np.random.default_rng(1).normal(size=(2, 4096)).astype(np.float32)
    return (x, y), (x + y).astype(dtype).astype(np.float32), x + y


def _after_a_product(a: jax.Array, b: jax.Array, *, dtype: np.dtype, exact: bool) -> jax.Array:
    if exact:
        return formats.round_to(lax.dot(a, b, preferred_element_type=np.float32), dtype)
    return lax.dot(a, b, preferred_element_type=dtype).astype(np.float32)


def _matrices(dtype: np.dtype) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """Multiples of 1/64, so that every sum of products is exact in float32, in any order, and long for 16 bits."""
    a, b = np.random.default_rng(2).integers(-127, 128, (2, _SIZE, _SIZE)) / 64
    product = (a @ b).astype(np.float32)
    return (a.astype(dtype), b.astype(dtype)), product.astype(dtype).astype(np.float32), product


def _after_a_narrow_sum(x: jax.Array, y: jax.Array, *, dtype: np.dtype, exact: bool) -> jax.Array:
    if exact:
        return formats.round_to(x.astype(np.float32) + y.astype(np.float32), dtype)
    return (x + y).astype(np.float32)


def _one_below_a_spacing(dtype: np.dtype) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """1 added to a number whose neighbour is 2 away, and which is even: that number itself."""
    large = 2.0 ** (jnp.finfo(dtype).nmant + 1)
    x, y = np.full(8, large, dtype), np.ones(8, dtype)
    return (x, y), np.full(8, large, np.float32), np.full(8, large + 1, np.float32)


def _between_sums(x: jax.Array, y: jax.Array, *, dtype: np.dtype, exact: bool) -> jax.Array:
    if not exact:
        return (x + y) + y
    wide = y.astype(np.float32)
    return formats.round_to(formats.round_to(x.astype(np.float32) + wide, dtype) + wide, dtype)


def _twice_below_a_spacing(dtype: np.dtype) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """1 added twice: that number itself again, unless the sum in between is not rounded."""
    operands, rounded, _ = _one_below_a_spacing(dtype)
    return operands, rounded, rounded + 2


def _rounded(x: jax.Array, dtype: np.dtype, exact: bool) -> jax.Array:
    return formats.round_to(x, dtype) if exact else x.astype(dtype).astype(np.float32)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float32 arrays have the same bits."""
    return a.dtype == b.dtype == np.float32 and np.array_equal(a.view(np.uint32), b.view(np.uint32))


_STEPS = 1000
_UPDATES = (np.arange(64) % 8 - 3).astype(np.float32) * np.float32(2.0**-13)  # every sum from 1 on is exact in float32
_SUMS = np.float32(1) + np.float32(_STEPS) * _UPDATES


def _check(name: str, results: Callable[[], tuple[Any, np.ndarray]]) -> Check:
    try:
        with jax.numpy_dtype_promotion("standard"):  # Optax adds float32 updates to bfloat16 parameters
            result, expected = results()
    except Exception as error:  # on a machine where this fails, that is the finding
        return Check(name, False, first_line(error))
    unsigned = expected.view(f"u{expected.itemsize}")
    wrong = int(np.sum(np.asarray(result).view(unsigned.dtype) != unsigned))
    return Check(name, wrong == 0, f"{wrong} of {expected.size} numbers are wrong" if wrong else "")


def _trained(tx: optax.GradientTransformation) -> tuple[jax.Array, Any]:
    """bfloat16 weights after all steps in one program, and the state that goes with them."""

    @jax.jit
    def train(params, gradients):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry, _ = lax.scan(step, (params, tx.init(params)), length=_STEPS)
        return carry

    return train(jnp.ones(_UPDATES.shape, jnp.bfloat16), _UPDATES)


def _kahan_sum() -> tuple[Any, np.ndarray]:
    params, state = _trained(kahan_summation())
    return np.asarray(params).astype(np.float32) + np.asarray(state.compensation).astype(np.float32), _SUMS


def _master_sum(storage: Storage) -> tuple[Any, np.ndarray]:
    return master_params(*_trained(master_weights(optax.sgd(-1.0), storage=storage))), _SUMS


def _rounded_masters() -> tuple[Any, np.ndarray]:
    params, _ = _trained(master_weights(optax.sgd(-1.0)))
    return params, _SUMS.astype(jnp.bfloat16)


def _split_and_joined() -> tuple[Any, np.ndarray]:
    """All signs and exponents that are finite, subnormal numbers among them, each with several fractions."""
    exponents = np.arange(0, 2**9, dtype=np.uint32)[:, None] << 23
    bits = (exponents | np.array([0, 1, 0x7FFF, 0x8000, 0x7F_FFFF], np.uint32)).ravel()
    numbers = bits[(bits & 0x7F80_0000) != 0x7F80_0000].view(np.float32)
    return jax.jit(lambda x: formats.join_f32(*formats.split_f32(x)))(numbers), numbers
