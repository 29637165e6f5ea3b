"""Name what stands in the way of a training run on this machine, and the remedy."""

import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from mpx.tools.doctor.surroundings import Surroundings

if TYPE_CHECKING:  # which asks for the problems
    from mpx.tools.doctor.examine import Diagnosis

_REPORT = "report it, with this page: on this machine, mpx is not what it claims to be"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that stands in the way of a training run, or that one should know.

    Attributes:
        severity: `"error"` spoils a training run; `"warning"` costs time, or may surprise; a `"note"` is how this
            machine is.
        what: the finding.
        remedy: what to do.
    """

    severity: Literal["error", "warning", "note"]
    what: str
    remedy: str


def in_surroundings(found: Surroundings) -> Iterator[Problem]:
    """Yield another package called mpx that is in the way, or another copy of this one."""
    different = lambda folder: os.path.realpath(folder) != os.path.realpath(found.package)
    if found.other_distributions:
        others = " ".join(found.other_distributions)
        what = f"{others} also brings a package called mpx; which one Python finds depends on where it looks"
        remedy = f"`pip uninstall {others}`, then install mpx again (`pip install --force-reinstall --no-deps`)"
        yield Problem("warning", what, remedy)
    here = found.in_this_folder
    if here is not None and different(os.path.dirname(here)):
        severity, remedy = ("warning", "") if found.in_this_folder_is_mpx else ("error", "rename that, or ")
        yield Problem(severity, f"a Python started in this folder imports {here}", f"{remedy}start Python elsewhere")
    if found.installed is not None and different(found.installed):
        what = f"mpx-jax is installed in {found.installed}, but Python imports {found.package}"
        yield Problem("warning", what, "uninstall the one that you do not want; PYTHONPATH comes first")


def in_arithmetic(found: "Diagnosis") -> Iterator[Problem]:
    """Yield what computes wrongly, and what a program without mpx would lose."""
    for check in found.checks:
        if not check.exact:
            yield Problem("error", f"not exact: {check.name}. {check.detail}", _REPORT)
    for product in found.products:
        if not product.works and product.error is not None:
            severity = "error" if product.name in ("f32", "f32 by default", "bf16", "f16") else "warning"
            yield Problem(severity, f"products in {product.name}: {product.refusal}", "do not compute in it here")
        if product.name == "f32 by default" and product.bits is not None and product.bits < 24:
            what = f"products of float32 numbers use {product.bits} of their 24 bits, if nothing else is asked for"
            yield Problem("note", what, 'ask for more where it matters: `jax.default_matmul_precision("float32")`')
    lost = [check.name for check in found.checks if check.plain not in ("kept", None)]
    if lost:
        what = f"in a compiled program JAX's own operations lose what mpx keeps: {', '.join(lost)}"
        yield Problem("note", what, "nothing for mpx; in code of your own, round with `mpx.formats.round_to`")


def in_backend(found: "Diagnosis") -> Iterator[Problem]:
    """Yield a missing device, a GPU that is not used, and a setting that turns autocast off."""
    if found.failure:
        remedy = "install the jax that fits the hardware (`pip install 'jax[cuda13]'`), or set JAX_PLATFORMS=cpu"
        yield Problem("error", f"JAX finds no device: {found.failure}", remedy)
    if found.backend == "cpu" and found.surroundings.has_nvidia_driver:
        remedy = "`pip install 'jax[cuda13]'` (or cuda12), and look whether JAX_PLATFORMS says cpu"
        yield Problem("warning", "there is an NVIDIA driver, but JAX computes on the CPU", remedy)
    if not found.autocast_narrows:
        remedy = "unset JAX_DEFAULT_MATMUL_PRECISION, or `jax.default_matmul_precision`"
        yield Problem("warning", "autocast narrows no product: all ask for a higher precision", remedy)
