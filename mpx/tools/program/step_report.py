"""Read off a compiled program what a step costs: memory, traffic, precision, and a bound of its time."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpx import _tables, _trees
from mpx.tools.plan import units
from mpx.tools.program import text as texts
from mpx.tools.program.kernels import Collective, Kernel, Kind, Reader
from mpx.tools.program.targets import Target, get_target, target_devices, target_here

_MOST_KERNELS = 12  # that are printed


@dataclasses.dataclass(frozen=True)
class StepReport(_tables.Result):
    """The cost of one run of a compiled step on one device; prints as tables, with `rich.print` too.

    Attributes:
        target: the device that it was compiled for, if its figures are known.
        argument_bytes: parameters, optimizer state and batch.
        output_bytes: everything that the step returns.
        donated_bytes: the outputs that are written over donated arguments.
        temporary_bytes: activations, gradients and buffers for communication.
        code_bytes: the program itself.
        kernels: what runs, in its order.
        collectives: exchanges between devices.
        has_unknown_loop: whether a loop of unknown length is counted as if it ran once.
        compile_seconds: the time that XLA took here.
    """

    target: Target | None
    argument_bytes: int
    output_bytes: int
    donated_bytes: int
    temporary_bytes: int
    code_bytes: int
    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    has_unknown_loop: bool
    compile_seconds: float

    @property
    def peak_bytes(self) -> int:
        """Memory that one run needs: arguments, outputs that are not donated, temporaries and code.

        Anything else that lives on the device comes on top: a second batch that waits, or the last step's results.
        """
        outputs = self.output_bytes - self.donated_bytes
        return self.argument_bytes + outputs + self.temporary_bytes + self.code_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(kernel.bytes * kernel.times for kernel in self.kernels)

    @property
    def moved_by_kind(self) -> dict[str, int]:
        """Bytes that kernels read and write, by what they do most."""
        counts = dict.fromkeys(get_args(Kind), 0)
        for kernel in self.kernels:
            counts[kernel.kind] += kernel.bytes * kernel.times
        return {kind: moved for kind, moved in counts.items() if moved}

    @property
    def kernel_count(self) -> int:
        """How many kernels run in a step."""
        return sum(kernel.times for kernel in self.kernels)

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of matrix products and convolutions, by the dtype of their operands; library calls are not counted."""
        counts: Counter[str] = Counter()
        for kernel in self.kernels:
            for dtype, flops in kernel.flops.items():
                counts[dtype] += flops * kernel.times
        return dict(counts.most_common())

    @property
    def bound_seconds(self) -> float | None:
        """A bound from below, no time: what the kernels need, one after another, by the target's published figures."""
        target = self.target
        return None if target is None else sum(kernel.bound_seconds(target) for kernel in self.kernels)

    @property
    def memory_bound_share(self) -> float | None:
        """The part of the bound in which kernels wait for memory or their launch, and not for products."""
        target = self.target
        if target is None or not self.bound_seconds:
            return None
        is_free = lambda kernel: dataclasses.replace(kernel, products=())
        waits = [k for k in self.kernels if k.bound_seconds(target) == is_free(k).bound_seconds(target)]
        return sum(kernel.bound_seconds(target) for kernel in waits) / self.bound_seconds

    def _parts(self) -> Iterator[_tables.Table | str]:
        yield from self._memory()
        unit = units.unit_for([self.moved_bytes], False)
        moved = [(kind, units.shown(n, unit), f"{n / self.moved_bytes:.0%}") for kind, n in self.moved_by_kind.items()]
        lines = [("", unit[0], "share"), *moved, ("in all", units.shown(self.moved_bytes, unit), "")]
        yield _tables.Table("Moved by kernels, read and written", lines, right=(1, 2))
        yield _tables.Table(f"Kernels that move most, of {self.kernel_count:,}", self._rows(unit), right=(1, 2))
        if self.flops:
            total = sum(self.flops.values())
            rows = [(dtype, f"{n / 1e12:.4g}", f"{n / total:.1%}") for dtype, n in self.flops.items()]
            yield _tables.Table("Matrix products", [("operands", "TFLOP", "share"), *rows], right=(1, 2))
            yield from self._others()
        if self.collectives:
            lines = [("", "times", "dtype", unit[0], "axes", "source")]
            lines += [
                (c.operation, str(c.times), c.dtype, units.shown(c.bytes, unit), c.axes, c.source)
                for c in self.collectives
            ]
            yield _tables.Table("Between devices", lines, right=(1, 3))
        yield "\n".join(self._notes())

    def _memory(self) -> Iterator[_tables.Table | str]:
        rows = {
            "arguments": self.argument_bytes,
            "outputs": self.output_bytes,
            "donated": -self.donated_bytes,
            "temporaries": self.temporary_bytes,
            "code": self.code_bytes,
            "peak": self.peak_bytes,
        }
        unit = units.unit_for([self.peak_bytes], False)
        lines = [(name, units.shown(n, unit)) for name, n in rows.items() if n]
        yield _tables.Table("Memory of one device", [("", unit[0]), *lines], right=(1,))
        donated = "" if self.donated_bytes else " Nothing is donated: old and new arrays are held at the same time."
        where = "Compiled for this machine."
        if self.target is not None:
            fits = "fits" if self.peak_bytes <= self.target.memory_bytes else "does NOT fit"
            where = f"It {fits} into the {self.target.memory_bytes / 1e9:.4g} GB of one {self.target.name}."
        yield where + donated

    def _rows(self, unit: units.Unit) -> list[tuple[str, ...]]:
        """Return a line for each group of kernels that differ in nothing that is shown."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for kernel in self.kernels:
            group = groups.setdefault((kernel.kind, _shortened(kernel.result), kernel.source), [0, 0])
            group[0] += kernel.times
            group[1] += kernel.times * kernel.bytes
        largest = sorted(groups.items(), key=lambda item: -item[1][1])[:_MOST_KERNELS]
        header = ("kind", "times", unit[0], "writes", "source")
        return [header, *((key[0], str(times), units.shown(moved, unit), *key[1:]) for key, (times, moved) in largest)]

    def _others(self) -> Iterator[_tables.Table]:
        """Yield the products that are not in the dtype of most FLOPs."""
        common = next(iter(self.flops))
        found: Counter[tuple[str, str]] = Counter()
        for kernel in self.kernels:
            for product in kernel.products:
                if product.dtype != common:
                    found[product.dtype, product.source] += product.flops * kernel.times
        rows = [(dtype, f"{flops / 1e12:.4g}", source) for (dtype, source), flops in found.most_common(_MOST_KERNELS)]
        if rows:
            yield _tables.Table(f"Not in {common}", [("operands", "TFLOP", "source"), *rows], right=(1,))

    def _notes(self) -> Iterator[str]:
        if self.bound_seconds is not None and self.target is not None:
            share = f"{self.memory_bound_share:.0%} of it memory and launches"
            yield f"Bound on one {self.target.name}: {1e3 * self.bound_seconds:.4g} ms, {share}. No time is below it."
        if any(kernel.kind == "library calls" for kernel in self.kernels):
            yield "Library calls count bytes and no FLOPs."
        if self.has_unknown_loop:
            yield "A loop of unknown length is counted as if it ran once."
        yield f"Compiled in {self.compile_seconds:.3g} s. Nothing ran."


def step_report(
    step: Callable[..., Any],
    *args: Any,
    target: str | Target | None = None,
    donate_argnums: int | Sequence[int] = (),
) -> StepReport:
    """Compile a step without running it, and read off its program what it costs.

    Memory is XLA's own analysis. Traffic is what each kernel of the program reads and writes: exact, but for caches.
    FLOPs are those of matrix products and convolutions. The bound is the sum over kernels of the larger of bytes over
    bandwidth and FLOPs over rate, and of a launch.

    Args:
        step: a function, or one that `jax.jit` returned.
        args: the arguments of the step or their shapes (`jax.ShapeDtypeStruct`). For a target they may have shardings
            on a mesh of `mpx.tools.program.target_devices`; without any, the step runs on one device.
        target: what to compile for: None for this machine; `"a100"`, `"h100"`, `"h200"`, `"b200"` with
            `jax[cuda12]` or `jax[cuda13]` installed, `"v5e"`, `"v6e"` with `jax[tpu]`; or a `Target`. The device need
            not be there.
        donate_argnums: as for `jax.jit`, for a step that it has not returned. Donate parameters and state, as a
            training loop does: else old and new ones are held at the same time.

    Returns:
        A `StepReport`.

    Raises:
        TypeError: if `step` is not a function.
        ValueError: if the target is not known, or `donate_argnums` is given for a function of `jax.jit`.
        RuntimeError: if the compiler for the target is not installed, or the backend has no analysis of memory.

    Example:
        >>> step = lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        >>> shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        >>> report = step_report(step, shape, shape, donate_argnums=0)
        >>> report.argument_bytes, report.output_bytes, report.donated_bytes, report.flops
        (524288, 262144, 262144, {'f32': 67108864})
    """
    if not callable(step):
        raise TypeError(f"`step_report` needs a function, but got {type(step).__name__}.")
    is_jitted = hasattr(step, "lower")
    if is_jitted and donate_argnums != ():
        raise ValueError("`step_report`: give `donate_argnums` to `jax.jit`, which returned this step.")
    figures = target_here() if target is None else get_target(target)
    platform = jax.default_backend() if figures is None else figures.platform
    if target is not None and figures is not None:
        args = _placed(args, figures)
    options = {"xla_gpu_autotune_level": 0} if target is not None and platform == "cuda" else {}  # nothing can be timed
    lowered: Any = (step if is_jitted else jax.jit(step, donate_argnums=donate_argnums)).lower(*args)
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=options)
    seconds = time.perf_counter() - start
    mesh = next((dict(leaf.sharding.mesh.shape) for leaf in jax.tree.leaves(args) if _is_on_mesh(leaf)), {})
    return report_of(compiled, target=figures, mesh_shape=mesh, compile_seconds=seconds)


def report_of(
    compiled: Any, *, target: Target | None, mesh_shape: Mapping[str, int] | None = None, compile_seconds: float
) -> StepReport:
    """Return the report of a program that has been compiled, for a target or, with None, for an unknown device here."""
    platform = jax.default_backend() if target is None else target.platform
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError(f"`step_report`: the backend {platform!r} gives no analysis of memory.")
    float32 = {"cpu": "f32", "tpu": "bf16"}.get(platform, "tf32")
    reader = Reader(texts.parse(compiled.as_text()), float32, mesh_shape)
    return StepReport(
        target=target,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        kernels=tuple(reader.kernels),
        collectives=tuple(reader.collectives),
        has_unknown_loop=reader.has_unknown_loop,
        compile_seconds=compile_seconds,
    )


def _placed(args: Any, target: Target) -> Any:
    """Return the shapes of arguments on devices of a target: where they are, if any is, else on one device."""
    devices = target_devices(target)
    is_there = lambda leaf: (
        _is_on_mesh(leaf) and leaf.sharding.mesh.devices.flat[0].device_kind == devices[0].device_kind
    )
    mesh = next((leaf.sharding.mesh for leaf in jax.tree.leaves(args) if is_there(leaf)), Mesh(devices, ("device",)))
    replicated = NamedSharding(mesh, PartitionSpec())

    def placed(leaf):
        if not _trees.is_array(leaf):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if is_there(leaf) else replicated)

    return jax.tree.map(placed, args)


def _is_on_mesh(leaf: Any) -> bool:
    return isinstance(getattr(leaf, "sharding", None), NamedSharding)


@dataclasses.dataclass(frozen=True)
class ReportComparison(_tables.Result):
    """Reports of several steps, side by side; prints as a table, with `rich.print` too."""

    reports: Mapping[str, StepReport]

    def _parts(self) -> Iterator[_tables.Table]:
        yield _tables.Table("", [("", *self.reports), *self._lines()], right=range(1, 1 + len(self.reports)))

    def _lines(self) -> Iterable[tuple[str, ...]]:
        reports = list(self.reports.values())
        unit = units.unit_for([max(r.peak_bytes, r.moved_bytes) for r in reports], False)
        shown = lambda number: units.shown(number, unit)
        yield (f"peak, {unit[0]}", *(shown(r.peak_bytes) for r in reports))
        yield (f"temporaries, {unit[0]}", *(shown(r.temporary_bytes) for r in reports))
        yield (f"moved, {unit[0]}", *(shown(r.moved_bytes) for r in reports))
        for kind in get_args(Kind):
            if any(kind in r.moved_by_kind for r in reports):
                yield (f"  {kind}", *(shown(r.moved_by_kind.get(kind, 0)) for r in reports))
        yield ("kernels", *(f"{r.kernel_count:,}" for r in reports))
        for dtype in dict.fromkeys(dtype for r in reports for dtype in r.flops):
            yield (f"TFLOP in {dtype}", *(f"{r.flops.get(dtype, 0) / 1e12:.4g}" for r in reports))
        if all(r.target is not None for r in reports):
            yield ("bound, ms", *(f"{1e3 * (r.bound_seconds or 0):.4g}" for r in reports))
        yield ("compiled in, s", *(f"{r.compile_seconds:.3g}" for r in reports))


def compare_reports(reports: Mapping[str, StepReport]) -> ReportComparison:
    """Put reports side by side: two recipes, two targets, before and after a change.

    Example:
        >>> report = step_report(lambda x: x @ x, jax.ShapeDtypeStruct((64, 64), jnp.float32))
        >>> print(compare_reports({"before": report, "after": report}).reports["after"].flops)
        {'f32': 524288}
    """
    return ReportComparison(dict(reports))


def _shortened(result: str) -> str:
    return result if len(result) <= 40 else result[:37] + "..."
