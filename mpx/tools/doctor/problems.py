"""Name what stands in the way of a training run on this machine, and the remedy."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Literal

from mpx.tools.doctor.environment import Environment
from mpx.tools.doctor.exactness import Check
from mpx.tools.doctor.products import Product


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that stands in the way of a training run, or that one should know.

    Attributes:
        severity: `"error"` spoils a training run; `"warning"` costs time, or may surprise; a `"note"` describes this
            machine.
        what: the finding.
        remedy: what to do.
    """

    severity: Literal["error", "warning", "note"]
    what: str
    remedy: str


def find_problems(
    found: Environment,
    backend: str,
    failure: str,
    autocast_narrows: bool,
    products: Sequence[Product],
    checks: Sequence[Check],
) -> Iterator[Problem]:
    """Yield another package called mpx, a device that is missing or not used, and what computes wrongly or coarsely."""
    if found.other_distributions:
        others = " ".join(found.other_distributions)
        what = f"{others} also brings a package called mpx; which one Python finds depends on where it looks"
        remedy = f"`pip uninstall {others}`, then install mpx again (`pip install --force-reinstall --no-deps`)"
        yield Problem("warning", what, remedy)
    here = found.in_this_folder
    if here is not None and os.path.realpath(os.path.dirname(here)) != os.path.realpath(found.package):
        severity, remedy = ("warning", "") if found.in_this_folder_is_mpx else ("error", "rename that, or ")
        yield Problem(severity, f"a Python started in this folder imports {here}", f"{remedy}start Python elsewhere")
    if failure:
        remedy = "install the jax that fits the hardware (`pip install 'jax[cuda13]'`), or set JAX_PLATFORMS=cpu"
        yield Problem("error", f"JAX finds no device: {failure}", remedy)
    if backend == "cpu" and found.has_nvidia_driver:
        remedy = "`pip install 'jax[cuda13]'` (or cuda12), and look whether JAX_PLATFORMS says cpu"
        yield Problem("warning", "there is an NVIDIA driver, but JAX computes on the CPU", remedy)
    if not autocast_narrows:
        remedy = "unset JAX_DEFAULT_MATMUL_PRECISION, or `jax.default_matmul_precision`"
        yield Problem("warning", "autocast narrows no product: all ask for a higher precision", remedy)
    report = "report it, with this page: on this machine, mpx is not what it claims to be"
    yield from (Problem("error", f"not exact: {c.name}. {c.detail}", report) for c in checks if not c.exact)
    for product in products:
        if not product.works and product.error is not None:
            severity = "error" if product.name in ("f32", "f32 by default", "bf16", "f16") else "warning"
            yield Problem(severity, f"products in {product.name}: {product.refusal}", "do not compute in it here")
        if product.name == "f32 by default" and product.bits is not None and product.bits < 24:
            what = f"products of float32 numbers use {product.bits} of their 24 bits, if nothing else is asked for"
            yield Problem("note", what, 'ask for more where it matters: `jax.default_matmul_precision("float32")`')
