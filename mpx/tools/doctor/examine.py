"""What this machine is and can do, whether mpx is exact on it, and the recipe for it."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from mpx import _tables
from mpx.tools import json_values
from mpx.tools.doctor import arithmetic, measuring, surroundings
from mpx.tools.doctor.arithmetic import Check, Product, RoundTrip, SubnormalNumbers
from mpx.tools.doctor.measuring import CopyRate, MatmulRate
from mpx.tools.doctor.recommendation import Recommendation, recommend
from mpx.tools.doctor.surroundings import Devices, Imports, Setting, System

Severity = Literal["error", "warning", "note"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that stands in the way of a training, or that one should know.

    Attributes:
        severity: `"error"` spoils a training; `"warning"` costs time or memory, or may surprise; a `"note"` is how this
            machine is.
        what: the finding.
        remedy: what to do.
    """

    severity: Severity
    what: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What `examine` found; prints as tables, with `rich.print` too.

    Attributes:
        system: versions and drivers.
        devices: by kind.
        settings: environment variables that bear on mixed precision.
        imports: which package called mpx Python finds.
        products: which dtypes work.
        algorithms: which dot algorithms work.
        rates: of products in each precision; empty after a quick examination.
        copying: of memory; None after a quick examination.
        round_trips: whether the compiler keeps roundings.
        subnormals: whether the smallest numbers survive.
        checks: what mpx claims to be exact.
        failure: why JAX found no device; empty if it found one. All that needs a device is then empty.
        seconds: how long the examination took.
    """

    system: System
    devices: tuple[Devices, ...]
    settings: tuple[Setting, ...]
    imports: Imports
    products: tuple[Product, ...] = ()
    algorithms: tuple[Product, ...] = ()
    rates: tuple[MatmulRate, ...] = ()
    copying: CopyRate | None = None
    round_trips: tuple[RoundTrip, ...] = ()
    subnormals: tuple[SubnormalNumbers, ...] = ()
    checks: tuple[Check, ...] = ()
    failure: str = ""
    seconds: float = 0.0

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong or worth knowing, errors first."""
        found = [*_in_imports(self), *_in_devices(self), *_in_arithmetic(self), *_in_speed(self), *_in_settings(self)]
        order = ("error", "warning", "note")
        return tuple(sorted(found, key=lambda problem: order.index(problem.severity)))

    @property
    def recommendation(self) -> Recommendation | None:
        """The recipe for this machine; None without a device."""
        return None if self.failure else recommend(self.products, self.rates)

    @property
    def drops_roundings(self) -> bool:
        """Whether XLA drops a rounding to 16 bits here that a program asks for with `x.astype`."""
        return any(trip.astype != "kept" for trip in self.round_trips)

    @property
    def is_exact(self) -> bool:
        """Whether mpx keeps all of its roundings here, and what it claims to be exact is."""
        roundings = [found.round_to for found in (*self.round_trips, *self.subnormals)]
        return all(rounding == "kept" for rounding in roundings) and all(check.exact for check in self.checks)

    @property
    def exit_code(self) -> int:
        """What a command returns: 1 with an error, 3 with a warning, else 0; 2 is for wrong usage."""
        severities = {problem.severity for problem in self.problems}
        return 1 if "error" in severities else 3 if "warning" in severities else 0

    def as_dict(self) -> dict[str, Any]:
        """All of it in dictionaries, lists, strings and numbers; None for a number that is not finite."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        names = ("drops_roundings", "is_exact", "problems", "recommendation", "exit_code")
        rest = {name: getattr(self, name) for name in names}
        return {name: json_values.plain(value) for name, value in (found | rest).items()}

    def as_json(self) -> str:
        """`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=2, allow_nan=False)

    def __str__(self) -> str:
        """The tables as text."""
        tables = [f"{title}\n{_tables.text_table(lines, right)}" for title, lines, right in self._tables()]
        return "\n\n".join([*tables, _advice(self)])

    def __rich__(self) -> Any:
        """The tables as Rich shows them; only Rich calls this, so it is there."""
        from rich.console import Group
        from rich.text import Text

        tables = [_tables.rich_table(title, lines, right) for title, lines, right in self._tables()]
        return Group(*tables, Text(_advice(self)))

    def _tables(self) -> Iterator[tuple[str, list[tuple[str, ...]], tuple[int, ...]]]:
        """Title, lines with the header first, and the columns that are aligned to the right; no empty table."""
        for title, lines, right in (
            ("System", _system_lines(self), ()),
            ("Devices", _device_lines(self), (1, 3, 4)),
            ("Settings", [("variable", "value", "meaning"), *map(dataclasses.astuple, self.settings)], ()),
            ("Products", _product_lines(self.products), (2, 3)),
            ("Dot algorithms", _product_lines(self.algorithms), (2, 3)),
            ("Rates", _rate_lines(self), (1, 2, 3, 4)),
            ("Roundings to 16 bits, compiled", _round_trip_lines(self), ()),
            ("Numbers below the smallest normal one", _subnormal_lines(self), ()),
            ("Exact to the bit", _check_lines(self), ()),
        ):
            if len(lines) > 1:
                yield title, lines, right


def examine(*, quick: bool = False, seconds: float = 0.6, progress: Callable[[str], None] | None = None) -> Diagnosis:
    """Looks at the machine: what it is, what works, how fast it is, whether mpx is exact on it.

    All of it is measured on the default device, in the state in which a training would find it: settings that are on
    stay on. It takes about 20 seconds on a CPU with 2 cores; a few with `quick`.

    Args:
        quick: whether to leave out what is timed.
        seconds: how long each rate is measured, about.
        progress: called with the name of each part before it begins.

    Returns:
        A `Diagnosis`.

    Raises:
        ValueError: if `seconds` is not a number above 0.

    Example:
        >>> diagnosis = examine(quick=True)
        >>> sorted({check.exact for check in diagnosis.checks}), len(diagnosis.rates)
        ([True], 0)
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"`examine`: `seconds` must be a finite number above 0, but got {seconds!r}.")
    start, announce = time.perf_counter(), progress or (lambda name: None)
    announce("packages and settings")
    found = Diagnosis(
        surroundings.look_at_system(),
        (),
        surroundings.read_settings(os.environ),
        surroundings.look_at_imports(),
    )
    announce("devices")
    try:
        found = dataclasses.replace(
            found, system=surroundings.with_backend(found.system), devices=surroundings.look_at_devices()
        )
    except Exception as error:  # jax raises assertions too, if JAX_PLATFORMS names what is not installed
        return dataclasses.replace(found, failure=measuring.first_line(error), seconds=time.perf_counter() - start)
    with jax.disable_jit(False):  # what compiled programs do is the question, whatever the mode
        found = _tried(found, announce)
        found = found if quick else _measured(found, seconds, announce)
    return dataclasses.replace(found, seconds=time.perf_counter() - start)


def _tried(found: Diagnosis, announce: Callable[[str], None]) -> Diagnosis:
    for field, name, attempt in (
        ("products", "dtypes", arithmetic.try_dtypes),
        ("algorithms", "dot algorithms", arithmetic.try_algorithms),
        ("round_trips", "roundings", arithmetic.try_round_trips),
        ("subnormals", "subnormal numbers", arithmetic.try_subnormals),
        ("checks", "exactness", arithmetic.try_claims),
    ):
        announce(name)
        found = dataclasses.replace(found, **{field: attempt()})
    return found


def _measured(found: Diagnosis, seconds: float, announce: Callable[[str], None]) -> Diagnosis:
    device = surroundings.default_device()
    announce("rates of products")
    rates = measuring.matmul_rates(device.device_kind, seconds=seconds)
    announce("rate of copies")
    _, limit, used = surroundings.memory_of(device)
    eighth = measuring.LARGEST_COPY if limit is None or used is None else max(limit - used, 0) // 8
    copying = measuring.copy_rate(device.device_kind, rates, seconds=seconds, size=min(measuring.LARGEST_COPY, eighth))
    return dataclasses.replace(found, rates=rates, copying=copying)


def _in_imports(found: Diagnosis) -> Iterator[Problem]:
    """Another package called mpx in the way, or this one in the way of another copy of it."""
    imports = found.imports
    others = " and ".join(imports.other_distributions)
    again = "install mpx again, from where you have it (`pip install --force-reinstall --no-deps`)"
    remedy = f"`pip uninstall {' '.join(imports.other_distributions)}`, then {again}" if others else again
    if imports.changed_files:
        names = ", ".join(imports.changed_files[:5]) + (" and more" if len(imports.changed_files) > 5 else "")
        yield Problem("error", f"{len(imports.changed_files)} files of mpx are not those installed: {names}", remedy)
    elif others:
        yield Problem(
            "warning",
            f"{others} also brings a package called mpx; which one Python finds depends on where it looks first",
            remedy,
        )
    here = imports.in_this_folder
    if here is not None and not _is_same_folder(os.path.dirname(here), imports.package):
        yield Problem(
            "warning" if imports.in_this_folder_is_mpx else "error",
            f"a Python started in this folder imports {here}",
            "start it elsewhere" if imports.in_this_folder_is_mpx else "rename that, or start Python elsewhere",
        )
    if imports.installed is not None and not _is_same_folder(imports.installed, imports.package):
        yield Problem(
            "warning",
            f"mpx-jax is installed in {imports.installed}, but Python imports {imports.package}",
            "uninstall the one that you do not want; PYTHONPATH comes first",
        )
    elif imports.checkout:
        yield Problem("note", f"mpx runs from a checkout, {imports.package}", "nothing: that works")


def _is_same_folder(a: str, b: str) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def _in_devices(found: Diagnosis) -> Iterator[Problem]:
    if found.failure:
        asked = next((f" (JAX_PLATFORMS={s.value})" for s in found.settings if s.name == "JAX_PLATFORMS"), "")
        yield Problem(
            "error",
            f"JAX finds no device{asked}: {found.failure}",
            "install the jax that fits the hardware (`pip install 'jax[cuda13]'`), or set JAX_PLATFORMS=cpu",
        )
    elif found.system.backend == "cpu" and found.system.nvidia_driver is not None:
        yield Problem(
            "warning",
            f"there is an NVIDIA driver ({found.system.nvidia_driver}), but JAX computes on the CPU",
            "`pip install 'jax[cuda13]'` (or cuda12), and look whether JAX_PLATFORMS says cpu",
        )
    for devices in found.devices:
        limit, used = devices.bytes_limit or math.inf, devices.bytes_in_use or 0
        if devices.memory == "device" and used > 0.9 * limit:
            what = f"more than nine tenths of the memory of {devices.kind} are in use"
            yield Problem("warning", what, "delete arrays that are not needed")


def _in_arithmetic(found: Diagnosis) -> Iterator[Problem]:
    """What computes wrongly, and what a training that is not of mpx would lose."""
    report = "report it, with this page: on this machine, mpx is not what it claims to be"
    for check in found.checks:
        if not check.exact:
            yield Problem("error", f"not exact: {check.name}. {check.detail}", report)
    for trip in found.round_trips:
        if trip.round_to != "kept":
            yield Problem("error", f"`mpx.formats.round_to` to {trip.dtype} is lost after {trip.where}", report)
    for numbers in found.subnormals:
        if numbers.round_to != "kept":
            yield Problem("error", f"`mpx.formats.round_to` loses subnormal numbers of {numbers.dtype}", report)
    for product in found.products:
        if not product.works and product.error is not None:
            severity = "error" if product.name in ("f32", "f32 by default", "bf16", "f16") else "warning"
            yield Problem(severity, f"products in {product.name}: {product.refusal}", "do not compute in it here")
    lost = [f"{trip.where} ({trip.dtype})" for trip in found.round_trips if trip.astype != "kept"]
    if lost:
        yield Problem(
            "note",
            f"XLA does not keep the rounding of `x.astype` after {', '.join(lost)}",
            "nothing for mpx, which is immune; in code of your own, round with `mpx.formats.round_to`",
        )
    bits = next((product.bits for product in found.products if product.name == "f32 by default"), None)
    if bits is not None and bits < 24:
        yield Problem(
            "note",
            f"products of float32 numbers use {bits} of their 24 bits, if nothing else is asked for",
            'ask for more with `jax.default_matmul_precision("float32")`, where it matters; it keeps autocast from '
            "lowering what is traced under it",
        )


def _in_speed(found: Diagnosis) -> Iterator[Problem]:
    rates = {rate.name: rate for rate in found.rates}
    plain, cast = (rates[name].teraflops if name in rates else None for name in ("bf16", "bf16 by autocast"))
    if plain and cast and cast < 0.5 * plain:
        yield Problem(
            "note" if found.system.backend == "cpu" else "warning",  # what else runs on a CPU changes from call to call
            f"the bfloat16 product runs at {cast / plain:.0%} of its rate under autocast",
            "if the machine does nothing else, report it, with this page",
        )
    for rate in found.rates:
        if rate.share_of_peak is not None and rate.share_of_peak < 0.5 and rate.name in ("f32", "tf32", "bf16", "f16"):
            yield Problem(
                "note",
                f"products in {rate.name} reach {rate.share_of_peak:.0%} of the published peak",
                "look whether another program uses the device, and at its clock and power limit",
            )


def _in_settings(found: Diagnosis) -> Iterator[Problem]:
    if not found.system.autocast_lowers:
        yield Problem(
            "warning",
            "autocast lowers no product: all ask for a higher precision",
            "unset JAX_DEFAULT_MATMUL_PRECISION, or `jax.default_matmul_precision`",
        )
    for setting in found.settings:
        if "fast_math=true" in setting.value:
            yield Problem("warning", f"{setting.name} has fast math on: {setting.meaning}", "take that flag out")
        elif setting.name == "JAX_DISABLE_JIT" and setting.meaning:
            yield Problem("warning", f"{setting.name}={setting.value}: {setting.meaning}", f"unset {setting.name}")


def _system_lines(found: Diagnosis) -> list[tuple[str, ...]]:
    system, imports = found.system, found.imports
    backend = (
        f"{system.backend} {system.backend_version}" if system.backend_version != system.backend else system.backend
    )
    return [
        ("what", "is"),
        ("platform", system.platform),
        ("python", system.python),
        *system.packages.items(),
        ("backend", backend or "none"),
        *([("NVIDIA driver", system.nvidia_driver)] if system.nvidia_driver else []),
        *([("processes", str(system.processes))] if system.processes > 1 else []),
        ("mpx imported from", imports.package + (" (a checkout)" if imports.checkout else "")),
    ]


def _device_lines(found: Diagnosis) -> list[tuple[str, ...]]:
    gigabytes = lambda count: "" if count is None else f"{count / 1e9:.1f} GB"
    return [
        ("kind", "count", "memory of", "size", "in use"),
        *[(d.kind, str(d.count), d.memory, gigabytes(d.bytes_limit), gigabytes(d.bytes_in_use)) for d in found.devices],
    ]


def _product_lines(products: tuple[Product, ...]) -> list[tuple[str, ...]]:
    return [
        ("product", "operands", "error", "bits", "works"),
        *[
            (
                product.name,
                product.operands,
                "" if product.error is None else f"{product.error:.0e}",
                "" if product.bits is None else str(product.bits),
                "yes" if product.works else f"no: {product.refusal}",
            )
            for product in products
        ],
    ]


def _rate_lines(found: Diagnosis) -> list[tuple[str, ...]]:
    share = lambda value: "" if value is None else f"{value:.0%}"
    lines = [("precision", "size", "rate", "to f32", "of peak", "")]
    for rate in found.rates:
        speed = "" if rate.teraflops is None else f"{rate.teraflops:.3g} TFLOP/s"
        ratio = "" if rate.ratio_to_f32 is None else f"{rate.ratio_to_f32:.2f}"
        lines.append((rate.name, str(rate.size or ""), speed, ratio, share(rate.share_of_peak), rate.refusal))
    copying = found.copying
    if copying is not None:
        balance = (
            "" if copying.flops_per_byte is None else f"{copying.flops_per_byte:.3g} operations of a product a byte"
        )
        speed = f"{copying.gigabytes_per_second:.4g} GB/s"
        lines.append(
            ("read and write", f"{copying.bytes / 1e9:.2g} GB", speed, "", share(copying.share_of_peak), balance)
        )
    return lines


def _round_trip_lines(found: Diagnosis) -> list[tuple[str, ...]]:
    return [("after", "to", "x.astype", "mpx.formats.round_to"), *map(dataclasses.astuple, found.round_trips)]


def _subnormal_lines(found: Diagnosis) -> list[tuple[str, ...]]:
    return [("of", "arithmetic", "mpx.formats.round_to"), *map(dataclasses.astuple, found.subnormals)]


def _check_lines(found: Diagnosis) -> list[tuple[str, ...]]:
    return [("claim", "holds"), *[(c.name, "yes" if c.exact else f"no: {c.detail}") for c in found.checks]]


def _advice(found: Diagnosis) -> str:
    """What is wrong and what to do; the recipe, why, and its code."""
    problems = [f"{p.severity}: {p.what}\n  what to do: {p.remedy}" for p in found.problems]
    parts = ["Problems\n" + "\n".join(problems)] if problems else ["No problems."]
    recommended = found.recommendation
    if recommended is not None:
        parts.append(_recipe("Recommended", recommended))
        if recommended.alternative is not None:
            parts.append(_recipe("To save memory", recommended.alternative))
    return "\n\n".join([*parts, f"Examined in {found.seconds:.1f} s."])


def _recipe(purpose: str, recommended: Recommendation) -> str:
    reasons = [f"- {reason}" for reason in recommended.reasons]
    code = [f"    {line}" for line in recommended.code.splitlines()]
    return "\n".join([f"{purpose}: {recommended.recipe}", *reasons, "", *code])
