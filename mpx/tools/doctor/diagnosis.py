"""What an examination found: the problems, the recipe, and how all of it is printed."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from mpx._tables import Result, Table
from mpx.tools.doctor.exactness import Check
from mpx.tools.doctor.products import Product
from mpx.tools.doctor.recommendation import Recommendation, recommend
from mpx.tools.plan.recipes import STANDARD_RECIPES, training_code


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
class Diagnosis(Result):
    """Hold the result of `examine`; prints as tables and the recipe's code, with `rich.print` too.

    Attributes:
        versions: of Python and the packages around mpx.
        package: the folder of this mpx.
        failure: why no backend started; all that needs a device is then empty.
        backend: the backend that JAX computes on.
        devices: the number of devices of each kind.
        products: the dtypes that work, and their rates unless the examination was quick.
        checks: whether mpx is exact, claim by claim.
        autocast_narrows: whether `mpx.autocast` narrows an ordinary product.
    """

    versions: dict[str, str]
    package: str
    failure: str = ""
    backend: str = ""
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
        """Return whether everything that mpx claims to be exact is exact here."""
        return all(check.exact for check in self.checks)

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
