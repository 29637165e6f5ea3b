"""Examine this machine: what is here, which dtypes are worth using, whether mpx is exact, and the recipe for it."""

import collections
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from mpx._autocast.explain import explain
from mpx._tables import Result, Table
from mpx.tools.doctor.exactness import Check, try_claims
from mpx.tools.doctor.products import WAYS, Product, first_line, try_product
from mpx.tools.plan.recipes import STANDARD_RECIPES, training_code

_PACKAGES = ("mpx-jax", "jax", "jaxlib", "optax", "flax", "numpy", "ml_dtypes")
_FASTER = 1.2  # times the rate of float32: less is lost again outside of the products


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
        """Return the recipe for this machine; None without a device, or where it would have to be measured."""
        return recommend(self.products)

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
        if self.recommendation is not None:
            recipe = STANDARD_RECIPES[self.recommendation.recipe]
            reasons = [f"- {reason}" for reason in self.recommendation.reasons]
            yield "\n".join([f"Recommended: {self.recommendation.recipe} ({recipe.policy})", *reasons])
            yield f"For AdamW, with Flax Linen or any pytree:\n\n{training_code(recipe, 'linen')}"
            yield f"For AdamW, with Flax NNX:\n\n{training_code(recipe, 'nnx')}"


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
    versions |= {found.name: found.version for found in importlib.metadata.distributions() if found.name in _PACKAGES}
    package = str(pathlib.Path(__file__).parents[2])
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


def recommend(products: Sequence[Product]) -> Recommendation | None:
    """Return the recipe for a machine; None if nothing was timed.

    It is bfloat16 where its products are faster than a float32 program's and about as fast as float16's, or where a
    float32 program rounds to bfloat16 anyway; float16 where only its products are faster; else float32.
    """
    working = {product.name: product for product in products if not product.refusal}
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
        return Recommendation("bf16-split", (reason, memory, range_, of_fp8))
    if f16 >= _FASTER:
        scaling = "float16 gradients under- and overflow, so `mpx.mixed_precision` adds loss scaling"
        return Recommendation("f16-scaled", (reason, scaling))
    return Recommendation("f32", (reason, f"to save memory: {memory}"))
