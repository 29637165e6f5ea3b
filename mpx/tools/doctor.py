"""Examine this machine: what is here, which dtypes are worth using, whether mpx is exact, and the recipe for it.

Claims of exactness are tried in compiled programs, whose results are compared, bit by bit, with numbers that NumPy and
ml_dtypes compute.
"""

import collections
import dataclasses
import importlib.metadata
import math
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from mpx._autocast.explain import explain
from mpx._inspect.masters import master_params
from mpx._tables import Result, Table
from mpx._transforms.kahan_summation import kahan_summation
from mpx._transforms.master_weights import master_weights
from mpx.formats import round_to
from mpx.tools.plan.recipes import STANDARD_RECIPES

_PACKAGES = ("mpx-jax", "jax", "jaxlib", "optax", "flax", "numpy", "ml_dtypes")
_FASTER = 1.2  # times the rate of float32: less is lost again outside of the products
SIZE = 64  # rows and columns of the matrices whose product is compared with NumPy's
LARGE = {"cpu": 512, "gpu": 4096, "tpu": 4096}  # rows and columns of the timed ones, by backend
SECONDS = 0.6  # of timing, for each way
_BF16, _F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
_STEPS = 1000
UPDATES = (np.arange(64) % 8 - 3).astype(_F32) * np.float32(2.0**-13)  # every sum from 1 on is exact in float32
SUMS = np.float32(1) + np.float32(_STEPS) * UPDATES


@dataclasses.dataclass(frozen=True)
class Product:
    """One way to multiply matrices, tried on the default device.

    Attributes:
        name: the dtype or the algorithm.
        refusal: why it does not work; empty if it ran with the precision that its name promises.
        bits: the number of significant bits of an operand that reach the result; None if it did not run.
        teraflops: 10^12 floating-point operations a second, in the fastest of several calls; None if not timed.
    """

    name: str
    refusal: str = ""
    bits: int | None = None
    teraflops: float | None = None


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that mpx claims to be exact."""

    name: str
    exact: bool  # whether mpx's numbers are the ones computed beforehand
    detail: str = ""  # how many numbers are wrong, or the error that was raised


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that stands in the way of a training run, or that one should know.

    Attributes:
        severity: `"error"` spoils a training run; `"warning"` costs time, or may surprise.
        what: the finding.
        remedy: what to do.
    """

    severity: Literal["error", "warning"]
    what: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A recipe, and the reasons for it."""

    recipe: str  # its name, as in `mpx.tools.plan.STANDARD_RECIPES`
    reasons: tuple[str, ...]  # with the rates that were measured


@dataclasses.dataclass(frozen=True)
class Diagnosis(Result):
    """Hold the result of `examine`; prints as tables and the recipe's code, with `rich.print` too.

    Attributes:
        versions: of Python and the packages around mpx.
        package: the folder of this mpx.
        failure: why no backend started; all that needs a device is then empty.
        devices: the number of devices of each kind.
        products: the dtypes that work, and their rates unless the examination was quick.
        checks: whether mpx is exact, claim by claim.
        autocast_narrows: whether `mpx.autocast` narrows an ordinary product.
    """

    versions: dict[str, str]
    package: str
    failure: str = ""
    devices: dict[str, int] = dataclasses.field(default_factory=dict)
    products: tuple[Product, ...] = ()
    checks: tuple[Check, ...] = ()
    autocast_narrows: bool = True

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return what is wrong or may surprise, errors first."""
        return tuple(sorted(self._problems(), key=lambda problem: problem.severity))

    @property
    def recommendation(self) -> Recommendation | None:
        """Return the recipe for this machine; None without a device, or where it would have to be measured.

        It is bfloat16 where its products are faster than a float32 program's and about as fast as float16's, or where a
        float32 program rounds to bfloat16 anyway; float16 where only its products are faster; else float32.
        """
        working = {product.name: product for product in self.products if not product.refusal}
        memory = "`bf16-split` takes 14 bytes a parameter with AdamW, where float32 takes 16"
        range_ = "bfloat16 has the range of float32, so no loss scaling is needed"
        float32 = working.get("f32 by default", Product("f32"))
        if "bf16" in working and float32.bits == 8:
            reason = "a float32 program rounds the operands of its products to bfloat16 here anyway"
            return Recommendation("bf16-split", (reason, memory, range_))
        if float32.teraflops is None:
            return None
        rates = {name: (product.teraflops or 0.0) / float32.teraflops for name, product in working.items()}
        bf16, f16, fp8 = (rates.get(name, 0.0) for name in ("bf16", "f16", "float8_e4m3fn"))
        reason = f"bfloat16 runs at {bf16:.2g} times the rate of float32, float16 at {f16:.2g} times"
        if bf16 >= _FASTER and bf16 >= 0.8 * f16:
            advice = "is worth a try" if fp8 >= _FASTER * bf16 else "gains nothing"
            of_fp8 = f"8-bit floats run at {fp8 / bf16:.2g} times the rate of bfloat16: `compute=fp8` {advice}"
            return Recommendation("bf16-split", (reason, memory, range_, *([of_fp8] if fp8 else ())))
        if f16 >= _FASTER:
            scaling = "float16 gradients under- and overflow, so `mpx.mixed_precision` adds loss scaling"
            return Recommendation("f16-scaled", (reason, scaling))
        return Recommendation("f32", (reason, f"to save memory: {memory}"))

    @property
    def is_exact(self) -> bool:
        """Return whether everything that mpx claims to be exact is exact here; False if nothing could be tried."""
        return bool(self.checks) and all(check.exact for check in self.checks)

    @property
    def exit_code(self) -> int:
        """Return the exit code of a command: 1 with an error, 3 with a warning, else 0; 2 is for wrong usage."""
        severities = {problem.severity for problem in self.problems}
        return 1 if "error" in severities else 3 if "warning" in severities else 0

    def _problems(self) -> Iterator[Problem]:
        if self.failure:
            remedy = "install the jax that fits the hardware (`pip install 'jax[cuda13]'`), or set JAX_PLATFORMS=cpu"
            yield Problem("error", f"JAX finds no device: {self.failure}", remedy)
        if not self.autocast_narrows:
            remedy = "unset JAX_DEFAULT_MATMUL_PRECISION, or `jax.default_matmul_precision`"
            yield Problem("warning", "autocast narrows no product: all ask for a higher precision", remedy)
        report = "report it, with this page: on this machine, mpx is not what it claims to be"
        yield from (Problem("error", f"not exact: {c.name}. {c.detail}", report) for c in self.checks if not c.exact)
        for product in self.products:
            if product.refusal and product.bits is not None:  # it runs, and is wrong
                severity = "error" if product.name in ("f32", "f32 by default", "bf16", "f16") else "warning"
                yield Problem(severity, f"products in {product.name}: {product.refusal}", "do not compute in it here")

    def _parts(self) -> Iterator[Table | str]:
        devices = ", ".join(f"{count} x {kind}" for kind, count in self.devices.items())
        here = {"mpx imported from": self.package, "devices": devices or "none"}
        yield Table("System", [("what", "is"), *(self.versions | here).items()], ())
        if self.products:
            rate = lambda product: "" if product.teraflops is None else f"{product.teraflops:.3g}"
            works = lambda product: f"no: {product.refusal}" if product.refusal else "yes"
            lines = [(p.name, str(p.bits or ""), rate(p), works(p)) for p in self.products]
            yield Table("Products", [("product", "bits", "TFLOP/s", "works"), *lines], (1, 2))
        if self.checks:
            wrong, count = sum(not check.exact for check in self.checks), len(self.checks)
            yield f"Exact to the bit: {f'NO, {wrong} of {count} checks fail' if wrong else f'yes, all {count} checks'}."
        found = [f"{p.severity}: {p.what}\n  what to do: {p.remedy}" for p in self.problems]
        yield "\n".join(["Problems", *found]) if found else "No problems."
        if self.recommendation is None:
            yield "No recipe is recommended: no rates of products were measured."
        else:
            recipe = STANDARD_RECIPES[self.recommendation.recipe]
            reasons = [f"- {reason}" for reason in self.recommendation.reasons]
            yield "\n".join([f"Recommended: {self.recommendation.recipe} ({recipe.policy})", *reasons])


def examine(*, quick: bool = False) -> Diagnosis:
    """Examine this machine: what is here, which dtypes are worth using, and whether mpx is exact.

    Everything runs on the default device, under the settings that a training run would find. It takes about 10 seconds
    on a CPU with 2 cores, and fewer with `quick`.

    Args:
        quick: leave out what is timed.

    Returns:
        A `Diagnosis`.

    Example:
        >>> diagnosis = examine(quick=True)
        >>> diagnosis.is_exact, {product.teraflops for product in diagnosis.products}
        (True, {None})
    """
    versions = {"python": platform.python_version()}
    found = {each.name: each.version for each in importlib.metadata.distributions()}
    versions |= {name: found[name] for name in _PACKAGES if name in found}
    package = str(pathlib.Path(__file__).parents[1])
    try:
        devices = collections.Counter(device.device_kind for device in jax.devices())
    except Exception as error:  # jax raises assertions too, if JAX_PLATFORMS names what is not installed
        failure = f"{first_line(error)} (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')})"
        return Diagnosis(versions, package, failure=failure)
    with jax.disable_jit(False):  # compiled programs are examined, whatever the mode
        matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        return Diagnosis(
            versions,
            package,
            devices=dict(devices),
            products=tuple(try_product(name, way, is_timed=not quick) for name, way in WAYS.items()),
            checks=tuple(try_claims()),
            autocast_narrows=explain(jnp.matmul, "bf16")(matrix, matrix).narrowed_share == 1,
        )


class Way(NamedTuple):
    """A way to multiply: the operands' dtype, the function, and the largest error that its name allows."""

    dtype: Any
    multiply: Callable[..., jax.Array]
    limit: float


_algorithms = lax.DotAlgorithmPreset
_into_f32 = partial(lax.dot, preferred_element_type=np.float32)
WAYS = {
    "f32": Way(np.float32, partial(lax.dot, precision=lax.Precision.HIGHEST), 2.0**-18),
    "f32 by default": Way(np.float32, lax.dot, 2.0**-7),
    "tf32": Way(np.float32, partial(lax.dot, precision=_algorithms.TF32_TF32_F32), 2.0**-9),
    "bf16x3": Way(np.float32, partial(lax.dot, precision=_algorithms.BF16_BF16_F32_X3), 2.0**-13),
    "bf16": Way(jnp.bfloat16, lax.dot, 2.0**-7),
    "f16": Way(np.float16, lax.dot, 2.0**-8),
    # The operands are exact, but some devices keep the sums in 14 bits.
    "float8_e4m3fn": Way(jnp.float8_e4m3fn, _into_f32, 2.0**-6),
    "float8_e5m2": Way(jnp.float8_e5m2, _into_f32, 2.0**-6),
}


def try_product(name: str, way: Way, *, is_timed: bool) -> Product:
    """Multiply, compare with the product in float64, and measure the rate if the product is right."""
    operands = np.random.default_rng(0).uniform(-1, 1, (2, SIZE, SIZE)).astype(np.float32).astype(way.dtype)
    a, b = operands.astype(np.float64)
    two_bits = 1 + 0.5 ** np.arange(1, SIZE + 1)  # two bits in each number, further and further apart
    multiply = jax.jit(way.multiply)
    try:
        result = np.asarray(multiply(*operands)).astype(np.float64)
        copied = multiply(np.diag(two_bits).astype(way.dtype), np.eye(SIZE).astype(way.dtype))
    except Exception as error:  # whatever the compiler or the device raises is the finding
        return Product(name, first_line(error))
    numbers = np.diag(np.asarray(copied).astype(np.float64))
    bits = 1 + int(np.argmax((numbers != two_bits) | (numbers == 1)))  # the first that lost its second bit
    error = np.max(np.abs(result - a @ b)) / np.max(np.abs(a) @ np.abs(b))
    if not error <= way.limit:  # True for NaN
        return Product(name, f"its error of {error:.1e} is above {way.limit:.1e}", bits)
    return Product(name, "", bits, _teraflops(way) if is_timed else None)


def _teraflops(way: Way) -> float:
    size = LARGE.get(jax.default_backend(), 4096)
    # Ordinary numbers: a GPU draws less power on zeros, and is faster.
    operands = np.random.default_rng(0).normal(size=(2, size, size)).astype(np.float32).astype(way.dtype)
    operands, multiply = jax.device_put(list(operands)), jax.jit(way.multiply)
    jax.block_until_ready(multiply(*operands))  # compiles
    fastest, end = math.inf, time.perf_counter() + SECONDS
    while fastest == math.inf or time.perf_counter() < end:
        began = time.perf_counter()
        jax.block_until_ready([multiply(*operands) for _ in range(4)])  # enqueued together
        fastest = min(fastest, (time.perf_counter() - began) / 4)
    return 2e-12 * size**3 / fastest


def first_line(error: BaseException) -> str:
    """Return what an error says, on one line of at most 160 characters."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).strip()[:160]


def try_claims() -> Iterator[Check]:
    """Train a few weights with each kind of state, and round where a compiler may drop a rounding."""
    wide = lambda x: np.asarray(x).astype(_F32)
    compensated = lambda params, state: wide(params) + wide(state.compensation)
    split = master_weights(optax.sgd(-1.0), storage="split")
    yield check("Kahan compensations keep 1,000 updates", lambda: compensated(*trained(kahan_summation())), SUMS)
    yield check("masters split in two keep 1,000 updates", lambda: master_params(*trained(split)), SUMS)
    for dtype in (_BF16, np.dtype(np.float16)):
        for name, program, operands, expected in roundings(dtype, partial(round_to, dtype=dtype)):
            yield check(f"`round_to` {dtype} {name}", partial(jax.jit(program), *operands), expected)


def roundings(dtype: np.dtype, round_to: Callable[[Any], Any]) -> Iterator[tuple[str, Callable[..., Any], Any, Any]]:
    """Yield places where a compiler may drop a rounding or flush to 0: a name, a program, its operands, its result."""
    kept = lambda x: x.astype(dtype).astype(_F32)
    x, y = np.random.default_rng(1).normal(size=(2, 4096)).astype(_F32)
    yield "after a sum", lambda x, y: round_to(x + y), (x, y), kept(x + y)
    # Multiples of 1/64: every sum of products is exact in float32, in any order, and too long for 16 bits.
    a, b = np.random.default_rng(2).integers(-127, 128, (2, 64, 64)) / 64
    product = lambda a, b: round_to(lax.dot(a, b, preferred_element_type=_F32))
    yield "after a product of 16-bit matrices", product, (a.astype(dtype), b.astype(dtype)), kept((a @ b).astype(_F32))
    # 1 added to an even number whose neighbour is 2 away is that number itself; the second time too.
    large, ones = np.full(8, 2.0 ** (jnp.finfo(dtype).nmant + 1), _F32), np.ones(8, dtype)
    once = lambda x, y: round_to(x.astype(_F32) + y.astype(_F32))
    yield "between sums of 16-bit numbers", lambda x, y: once(once(x, y), y), (large.astype(dtype), ones), large
    half = np.full(1, float(jnp.finfo(dtype).smallest_normal) / 2, _F32)
    yield "to a subnormal number", round_to, (half,), half


def check(name: str, compute: Callable[[], Any], expected: np.ndarray) -> Check:
    """Compare the bits of the float32 array that is computed with those of the expected one."""
    try:
        with jax.numpy_dtype_promotion("standard"):  # Optax adds float32 updates to bfloat16 parameters
            result = np.asarray(compute())
    except Exception as error:  # on a machine where this fails, that is the finding
        return Check(name, False, first_line(error))
    wrong = int(np.sum(result.view(np.uint32) != expected.view(np.uint32)))
    return Check(name, wrong == 0, f"{wrong} of {expected.size} numbers are wrong" if wrong else "")


def trained(tx: optax.GradientTransformation) -> tuple[jax.Array, Any]:
    """Return bfloat16 weights and the state after all steps, which are one program."""

    def step(carry, gradients):
        params, state = carry
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    train = jax.jit(lambda params, gradients: lax.scan(step, (params, tx.init(params)), gradients)[0])
    return train(jnp.ones(UPDATES.shape, _BF16), np.tile(UPDATES, (_STEPS, 1)))
