"""Examine this machine: what is here, which dtypes are worth using, whether mpx is exact, and the recipe for it."""

import collections
import dataclasses
import math
import os
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from mpx._autocast.explain import explain
from mpx._tables import Result, Table
from mpx.tools.doctor import environment
from mpx.tools.doctor.environment import Environment
from mpx.tools.doctor.exactness import Check, try_claims
from mpx.tools.doctor.problems import Problem, find_problems
from mpx.tools.doctor.products import WAYS, Product, first_line, try_product, with_rates
from mpx.tools.doctor.recommendation import Recommendation, recommend


@dataclasses.dataclass(frozen=True)
class Diagnosis(Result):
    """Hold the result of `examine`; prints as a verdict and tables, with `rich.print` too.

    Attributes:
        environment: versions, and other packages called mpx.
        backend: the backend that JAX computes on; empty if none started.
        devices: the number of devices of each kind.
        products: the dtypes that work, and their rates unless the examination was quick.
        checks: whether mpx is exact, claim by claim.
        autocast_narrows: whether `mpx.autocast` narrows an ordinary product.
        failure: why no backend started; all that needs a device is then empty.
        seconds: the duration of the examination.
    """

    environment: Environment
    backend: str = ""
    devices: dict[str, int] = dataclasses.field(default_factory=dict)
    products: tuple[Product, ...] = ()
    checks: tuple[Check, ...] = ()
    autocast_narrows: bool = True
    failure: str = ""
    seconds: float = 0.0

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return what is wrong or worth knowing, errors first."""
        found = find_problems(
            self.environment, self.backend, self.failure, self.autocast_narrows, self.products, self.checks
        )
        return tuple(sorted(found, key=lambda problem: ("error", "warning", "note").index(problem.severity)))

    @property
    def recommendation(self) -> Recommendation | None:
        """Return the recipe for this machine; None without a device, or where it would have to be measured."""
        return None if self.failure else recommend(self.products)

    @property
    def is_exact(self) -> bool:
        """Return whether everything that mpx claims to be exact is exact here."""
        return all(check.exact for check in self.checks)

    @property
    def exit_code(self) -> int:
        """Return the exit code of a command: 1 with an error, 3 with a warning, else 0; 2 is for wrong usage."""
        severities = {problem.severity for problem in self.problems}
        return 1 if "error" in severities else 3 if "warning" in severities else 0

    @property
    def verdict(self) -> str:
        """Return five lines: the recipe and why, what is exact, what is not supported, and that nothing is wrong.

        Errors and warnings stand in place of the last line, each with its remedy.
        """
        grave = [f"{p.severity.capitalize()}: {p.what}; {p.remedy}." for p in self.problems if p.severity != "note"]
        if self.failure:
            return "\n".join(grave)
        recipe, count, wrong = self.recommendation, len(self.checks), sum(not c.exact for c in self.checks)
        refused = [product.name for product in self.products if not product.works]
        lines = [
            f"Recipe for {self._devices()}: {recipe.title if recipe else 'measure first, without --quick'}",
            f"Why: {recipe.reasons[0] if recipe else 'it was not measured whether 16-bit products are faster here'}.",
            f"Exact to the bit: {f'NO, {wrong} of {count} checks fail' if wrong else f'yes, all {count} checks'}.",
            f"Not supported here: {', '.join(refused) or 'nothing'}.",
        ]
        nothing = f"No errors, no warnings; notes: {len(self.problems)}. All of it: mpx doctor --full"
        return "\n".join([*lines, *(grave or [nothing])])

    def _devices(self) -> str:
        return ", ".join(f"{count} x {kind}" for kind, count in self.devices.items())

    def _parts(self) -> Iterator[Table | str]:
        yield self.verdict
        here = {"mpx imported from": self.environment.package, "backend": self.backend or "none"}
        here["devices"] = self._devices()
        yield Table("System", [("what", "is"), *(self.environment.versions | here).items()], ())
        if self.products:
            header = ("product", "error", "bits", "TFLOP/s", "to f32", "works")
            yield Table("Products", [header, *map(_product_line, self.products)], (1, 2, 3, 4))
        if self.checks:
            lines = [(c.name, "yes" if c.exact else f"no: {c.detail}") for c in self.checks]
            yield Table("Exact to the bit", [("claim", "holds"), *lines], ())
        found = [f"{p.severity}: {p.what}\n  what to do: {p.remedy}" for p in self.problems]
        yield "\n".join(["Problems", *found]) if found else "No problems."
        if self.recommendation is not None:
            reasons = [f"- {reason}" for reason in self.recommendation.reasons]
            yield "\n".join([f"Recommended: {self.recommendation.title}", *reasons])
            yield from (f"{library}:\n\n{code}" for library, code in self.recommendation.code.items())
        yield f"Examined in {self.seconds:.1f} s."


def examine(*, quick: bool = False, seconds: float = 0.6) -> Diagnosis:
    """Examine this machine: what is here, which dtypes are worth using, and whether mpx is exact.

    Everything runs on the default device, under the settings that a training run would find. It takes about 10 seconds
    on a CPU with 2 cores, and fewer with `quick`.

    Args:
        quick: leave out what is timed.
        seconds: about how long each rate is measured.

    Returns:
        A `Diagnosis`.

    Raises:
        ValueError: if `seconds` is not a number above 0.

    Example:
        >>> diagnosis = examine(quick=True)
        >>> diagnosis.is_exact, {product.teraflops for product in diagnosis.products}
        (True, {None})
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"`examine`: `seconds` must be a finite number above 0, but got {seconds!r}.")
    start, around = time.perf_counter(), environment.collect_environment()
    try:
        devices = collections.Counter(device.device_kind for device in jax.devices())
    except Exception as error:  # jax raises assertions too, if JAX_PLATFORMS names what is not installed
        failure = f"{first_line(error)} (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')})"
        return Diagnosis(around, failure=failure, seconds=time.perf_counter() - start)
    with jax.disable_jit(False):  # compiled programs are examined, whatever the mode
        matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        narrows = explain(jnp.matmul, "bf16")(matrix, matrix).narrowed_share == 1
        products = tuple(try_product(name, way) for name, way in WAYS.items())
        products = products if quick else with_rates(products, seconds=seconds)
        checks = tuple(try_claims())
    parts = (jax.default_backend(), dict(devices), products, checks, narrows)
    return Diagnosis(around, *parts, seconds=time.perf_counter() - start)


def _product_line(product: Product) -> tuple[str, ...]:
    shown = lambda value, form: "" if value is None else format(value, form)
    numbers = (shown(product.error, ".0e"), shown(product.bits, ""), shown(product.teraflops, ".3g"))
    works = "yes" if product.works else f"no: {product.refusal}"
    return (product.name, *numbers, shown(product.times_f32, ".2f"), works)
