"""Read off a compiled program what a step costs: memory, traffic, precision, and a
bound of its time.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mpx import _tables, _trees
from mpx.tools.program.findings import (
    CompiledStep,
    Finding,
    arguments_of,
    findings_of,
)
from mpx.tools.program.graph import Program
from mpx.tools.program.kernels import (
    Kernel,
    Kind,
    flops_by_dtype,
    kernels,
    moved_by,
    totals,
)
from mpx.tools.program.measured import MeasuredStep, measured_step
from mpx.tools.program.targets import Target, get_target, target_devices, target_here
from mpx.tools.program.text import parse

_MOST_ROWS = 12  # of kernels that are printed
_GFLOP = ("GFLOP", 10**9)
# What is known to help where XLA "couldn't find output tile sizes".
_HELPS = (
    "Its Triton compiler finds no tiles for such a product, in plain bfloat16 too."
    " Leave products to cuBLAS: `jax.jit(step,"
    " compiler_options={'xla_gpu_enable_triton_gemm': False})`, or for all programs"
    " XLA_FLAGS=--xla_gpu_enable_triton_gemm=false. Sequences of a multiple of 64"
    " tokens may do, too."
)


@dataclasses.dataclass(frozen=True)
class StepReport(_tables.Result):
    """The cost of one run of a compiled step on one device; prints as tables."""

    # The device that it was compiled for, if its figures are known.
    target: Target | None
    argument_bytes: int  # parameters, optimizer state and batch
    output_bytes: int  # everything that the step returns
    donated_bytes: int  # the outputs that are written over donated arguments
    temporary_bytes: int  # activations, gradients and buffers for communication
    code_bytes: int  # the program itself
    kernels: tuple[Kernel, ...]  # what runs, in its order
    # whether a loop of unknown length is counted as if it ran once
    has_unknown_loop: bool
    compile_seconds: float  # the time that XLA took here
    module: str  # the program's name
    callers: tuple[str, ...]  # instructions that only run others: loops, calls
    # what the program does that its author would not want
    findings: tuple[Finding, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Memory that one run needs: arguments, outputs that are not donated,
        temporaries and code.

        Anything else that lives on the device comes on top: a second batch that waits,
        or the last step's results.
        """
        outputs = self.output_bytes - self.donated_bytes
        return self.argument_bytes + outputs + self.temporary_bytes + self.code_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return moved_by(self.kernels)

    @property
    def moved_by_kind(self) -> dict[Kind, int]:
        """Bytes that kernels read and write, by what they do most."""
        return totals(
            (kernel.kind, kernel.bytes * kernel.times) for kernel in self.kernels
        )

    @property
    def kernel_count(self) -> int:
        """How many kernels run in a step."""
        return sum(kernel.times for kernel in self.kernels)

    @property
    def collectives(self) -> tuple[Kernel, ...]:
        """The kernels that exchange arrays between devices."""
        return tuple(kernel for kernel in self.kernels if kernel.kind == "collectives")

    @property
    def sent_by_kind(self) -> dict[str, int]:
        """Bytes that a device sends to others, by operation and dtype, such as
        `all-gather bf16`.
        """
        return totals(
            (f"{c.operation} {dtype}", n)
            for c in self.collectives
            for dtype, n in c.sent_by_dtype.items()
        )

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of matrix products and convolutions, by the dtype of their operands;
        library calls are not counted.
        """
        return flops_by_dtype(self.kernels)

    @property
    def bound_seconds(self) -> float | None:
        """Return what kernels take at least, one after another, by the target's
        published figures: a bound, no time.
        """
        seconds = [kernel.seconds or 0 for kernel in self.kernels]
        return None if self.target is None else sum(seconds)

    def measured(self, folder: str | pathlib.Path) -> MeasuredStep:
        """Return what each kernel took in a profile, beside its bound.

        Run the step that was reported, wait for its result, and then trace a few runs
        and wait for theirs. Of the newest trace below the folder one device is read, a
        GPU or a CPU, and its step of median length. Events of the program that belong
        to no kernel are listed.

        Kernels are found by the names of their instructions, which another program has
        too. Report the function of `jax.jit` that runs, for the same arguments, and on
        the GPU itself without `target`, for which XLA gets other options. The result
        says where most of the time belongs to no kernel.

        Command buffers (CUDA graphs) may hide the names. To see them, set
        `XLA_FLAGS=--xla_gpu_enable_command_buffer=` before JAX starts. A GPU's trace
        does not tell one step from the next: of the kernels that have the fewest
        events, the first starts a step.

        Args:
            folder: what `jax.profiler.trace` wrote to.

        Raises:
            ValueError: if the newest trace has no event of the program, or there is
                none.

        Example:
            >>> import tempfile
            >>> step = jax.jit(lambda w, x: w - 0.1 * jnp.tanh(x @ w))
            >>> w = x = jnp.ones((256, 256))
            >>> report = step_report(step, w, x)
            >>> w = jax.block_until_ready(step(w, x))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     with jax.profiler.trace(folder):
            ...         for _ in range(3):
            ...             w = jax.block_until_ready(step(w, x))
            ...     found = report.measured(folder)
            >>> found.step_count, len(found.kernels) == len(report.kernels)
            (3, True)
        """
        return measured_step(folder, self.module, self.kernels, self.callers)

    def _parts(self) -> Iterator[_tables.Table | str]:
        if self.findings:
            yield "\n".join(["Findings", *map(_line_of, self.findings)])
        yield self._summary()
        yield "\n".join(self._notes())
        rows = [
            (
                (
                    k.operation if k.kind == "library calls" else k.kind,
                    k.result if len(k.result) <= 40 else k.result[:37] + "...",
                    k.source,
                ),
                k.times,
                k.times * k.bytes,
            )
            for k in self.kernels
        ]
        yield from _most("Kernels that move most", ("kind", "writes", "source"), rows)
        common = next(iter(self.flops), "")
        rows = [
            ((dtype, k.source), k.times, k.times * n)
            for k in self.kernels
            for dtype, n in k.flops.items()
            if dtype != common
        ]
        title = f"Products that are not in {common}"
        yield from _most(title, ("operands", "source"), rows, _GFLOP)
        rows = [
            ((c.operation, dtype, c.source), c.times, n)
            for c in self.collectives
            for dtype, n in c.sent_by_dtype.items()
        ]
        yield from _most("Sent between devices", ("operation", "dtype", "source"), rows)

    def _summary(self) -> _tables.Table:
        """Return the figures of the step, without lines of zeros."""
        unit = _tables.unit_for([self.peak_bytes, self.moved_bytes])
        in_bytes = {
            f"peak of memory, {unit[0]}": self.peak_bytes,
            "  arguments": self.argument_bytes,
            "  outputs": self.output_bytes,
            "  donated": -self.donated_bytes,
            "  temporaries": self.temporary_bytes,
            "  code": self.code_bytes,
            f"moved by kernels, {unit[0]}": self.moved_bytes,
            **{f"  {kind}": n for kind, n in self.moved_by_kind.items()},
        }
        rows = [("", self.target.name if self.target else "this machine")]
        rows += [
            (name, _tables.shown(number, unit))
            for name, number in in_bytes.items()
            if number
        ]
        rows.append(("kernels", f"{self.kernel_count:,}"))
        rows += [
            (f"products in {dtype}, GFLOP", _tables.shown(n, _GFLOP))
            for dtype, n in self.flops.items()
        ]
        if self.bound_seconds is not None:
            rows.append(("bound, ms", f"{1e3 * self.bound_seconds:.4g}"))
        rows.append(("compiled in, s", f"{self.compile_seconds:.3g}"))
        return _tables.Table("", rows)

    def _notes(self) -> Iterator[str]:
        if self.target is None:
            yield (
                "Compiled for this machine. A CPU works in float32: give a target for a"
                " GPU's dtypes and bound."
            )
        else:
            yield _how_it_fits(self.peak_bytes, self.target)
            yield (
                "The bound is no time: its kernels one after another at published"
                " rates."
            )
        if self.has_unknown_loop:
            yield "A loop of unknown length is counted as if it ran once."
        if "library calls" in self.moved_by_kind:
            yield (
                "Calls of libraries and kernels written by hand count bytes and no"
                " FLOPs."
            )


def _most(
    title: str,
    header: tuple[str, ...],
    rows: Sequence[tuple[tuple[str, ...], int, int]],
    unit: _tables.Unit | None = None,
) -> Iterator[_tables.Table]:
    """Yield a table of names, how often they run, and their largest numbers, if there
    are any; equal names are one.
    """
    unit = unit or _tables.unit_for([sum(number for *_, number in rows)])
    times = totals((names, count) for names, count, _ in rows)
    numbers = totals((names, number) for names, _, number in rows)
    lines = [
        (names[0], str(times[names]), _tables.shown(number, unit), *names[1:])
        for names, number in [*numbers.items()][:_MOST_ROWS]
    ]
    if lines:
        head = (header[0], "times", unit[0], *header[1:])
        yield _tables.Table(title, [head, *lines], right=(1, 2))


def _how_it_fits(peak: int, target: Target) -> str:
    limit = target.usable_bytes if peak <= target.usable_bytes else target.memory_bytes
    size = f"{peak / 1e9:.4g} of {limit / 1e9:.4g} GB of one {target.name}"
    if peak <= target.usable_bytes:
        return f"fits: yes, {size}"
    largest = "The findings name what is largest, by lines."
    if peak > target.memory_bytes:
        return f"fits: no, {size}. {largest}"
    share = math.ceil(100 * peak / target.memory_bytes) / 100
    return (
        f"fits: only with XLA_PYTHON_CLIENT_MEM_FRACTION={share:.2f}, {size}: JAX takes"
        f" 75% by default. {largest}"
    )


def _line_of(finding: Finding) -> str:
    if not finding.bytes:
        return f"- {finding}"
    unit = _tables.unit_for([finding.bytes])
    return f"- {_tables.shown(finding.bytes, unit)} {unit[0]}: {finding}"


def step_report(
    step: Callable[..., Any],
    *args: Any,
    target: str | Target | None = None,
    donate_argnums: int | Sequence[int] = (),
) -> StepReport:
    """Compile a step without running it, and read off its program what it costs.

    Memory is XLA's own analysis. Traffic is what each kernel of the program reads and
    writes: exact, but for caches. FLOPs count matrix products and convolutions. The
    bound adds up, over kernels, a launch and the larger of bytes over bandwidth and
    FLOPs over rate.

    Args:
        step: a function, or one that `jax.jit` returned.
        args: the arguments of the step or their shapes (`jax.ShapeDtypeStruct`). For a
            target they may have shardings on a mesh of
            `mpx.tools.program.target_devices`; without any, the step runs on one
            device. Unless the step comes from `jax.jit`, an argument may hold other
            things, such as Python numbers or an Equinox model's functions.
        target: what to compile for: None for this machine; `"a100"`, `"h100"`,
            `"h200"`, `"b200"`, `"gb200"` with the extra `compiler`, `cuda12` or
            `cuda13` installed, `"v5e"`, `"v6e"` with `jax[tpu]`; or a `Target`. It need
            not be there.
        donate_argnums: as for `jax.jit`, for a step that it has not returned. Donate
            parameters and state, as a training loop does: else old and new ones are
            held at the same time, and a finding says so.

    Raises:
        ValueError: if the target is not known, no argument holds an array to compile
            for it, or `donate_argnums` is given for a function of `jax.jit`.
        RuntimeError: if the compiler for the target is not installed; or XLA fails,
            with what is known to help.

    Example:
        >>> step = lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        >>> shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        >>> report = step_report(step, shape, shape, donate_argnums=0)
        >>> (
        ...     report.argument_bytes,
        ...     report.output_bytes,
        ...     report.donated_bytes,
        ...     report.flops,
        ... )
        (524288, 262144, 262144, {'f32': 67108864})
    """
    device = target_here() if target is None else get_target(target)
    context = contextlib.nullcontext()
    options, platforms = None, None
    if target is not None and device is not None:
        args, mesh = _placed(args, target_devices(device))
        # Kernels of Pallas ask it for the device.
        context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
        # Nothing can be timed.
        options = None if device.tpu else {"xla_gpu_autotune_level": "0"}
        platforms = ("tpu",) if device.tpu else ("cuda",)
    try:
        with context:
            lowered, jaxpr = _lowered(step, args, donate_argnums, platforms)
    except RuntimeError as error:
        if "Unknown backend" not in str(error):
            raise
        raise RuntimeError(
            "`step_report`: a step that calls Python while it runs (`jax.debug.print`,"
            " `io_callback`) cannot be compiled for a device that is not here. Leave"
            " the call out."
        ) from error
    start = time.perf_counter()
    try:
        compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
        if "Couldn't find output tile sizes" not in said:
            raise
        raise RuntimeError(
            f"`step_report`: XLA failed: {said.splitlines()[0][:200]}. {_HELPS}"
        ) from error
    seconds = time.perf_counter() - start
    # What another library's jit donates (`equinox.filter_jit`) is not known from
    # outside.
    is_donation_known = (
        isinstance(step, jax.stages.Wrapped)
        or not hasattr(step, "lower")
        or donate_argnums != ()
    )
    return report_of(
        compiled,
        lowered,
        jaxpr,
        target=device,
        compile_seconds=seconds,
        is_donation_known=is_donation_known,
    )


def report_of(
    compiled: Any,
    lowered: Any = None,
    jaxpr: Any = None,
    *,
    target: Target | None,
    compile_seconds: float,
    is_donation_known: bool = True,
) -> StepReport:
    """Return the report of a program that has been compiled, for a target or, with
    None, for an unknown device here.

    Its findings need the program as it was lowered and traced too.
    """
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    program = Program(parse(text))
    is_cpu = target is None and jax.default_backend() == "cpu"
    float32 = target.float32 if target else "f32" if is_cpu else "tf32"
    runs = kernels(program, target, float32)
    report = StepReport(
        target=target,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        kernels=tuple(kernel for _, kernel in runs),
        has_unknown_loop=any(x.trips is None for x in program.nodes),
        compile_seconds=compile_seconds,
        module=text.split()[1].rstrip(","),
        callers=tuple(
            x.hlo_name
            for x in program.nodes
            if x.op in ("while", "call", "conditional")
        ),
    )
    if lowered is None:
        return report
    step = CompiledStep(
        jaxpr,
        program,
        runs,
        list(arguments_of(jaxpr, lowered, compiled)),
        [(x.shape, str(x.dtype)) for x in jax.tree.leaves(lowered.out_info)],
        float32,
        report.peak_bytes,
        target,
    )
    findings = findings_of(step, is_cpu=is_cpu, is_donation_known=is_donation_known)
    return dataclasses.replace(report, findings=tuple(findings))


def _lowered(
    step: Any,
    args: Sequence[Any],
    donate_argnums: int | Sequence[int],
    platforms: tuple[str, ...] | None,
) -> tuple[Any, Any]:
    """Lower a step for platforms, and return its jaxpr too.

    Platforms are None for those of its arguments, as explicit axes of a target cannot
    tell.
    """
    if isinstance(step, jax.stages.Wrapped):
        if donate_argnums != ():
            raise ValueError(
                "`step_report`: this step comes from `jax.jit` (or `nnx.jit`), which"
                " says what is donated. Leave `donate_argnums` out here."
            )
        traced: Any = step.trace(*args)
        lowered = traced.lower(lowering_platforms=platforms)
        # `nnx.jit` has classes of its own around those of jax.
        return (
            getattr(lowered, "lowered", lowered),
            getattr(traced, "traced", traced).jaxpr,
        )

    def arrays_of(tree):
        return jax.tree.map(lambda leaf: leaf if _trees.is_array(leaf) else None, tree)

    def put(array, leaf):
        return leaf if array is None else array

    @functools.wraps(step)  # with the names of its arguments
    def of_arrays(*argument):
        return arrays_of(
            step(*jax.tree.map(put, argument, args, is_leaf=lambda leaf: leaf is None))
        )

    traced = jax.jit(of_arrays, donate_argnums=donate_argnums).trace(*arrays_of(args))
    return traced.lower(lowering_platforms=platforms), traced.jaxpr


def _placed(args: Any, devices: Sequence[Any]) -> tuple[Any, Mesh]:
    """Return shapes of arguments on devices of a target, where they are, if any is,
    else on one; and their mesh.
    """
    if not any(map(_trees.is_array, jax.tree.leaves(args))):
        raise ValueError(
            "`step_report`: a step without arrays among its arguments has no device to"
            " be compiled for."
        )
    kind = devices[0].device_kind

    def is_there(mesh):
        return (
            isinstance(mesh, Mesh)
            and not mesh.empty
            and mesh.devices.flat[0].device_kind == kind
        )

    meshes = [
        *(sharding.mesh for sharding in _shardings(args)),
        jax.sharding.get_mesh(),
    ]
    mesh = next(filter(is_there, meshes), Mesh(devices, ("device",)))

    def placed(leaf):
        if not _trees.is_array(leaf):
            return leaf
        sharding = NamedSharding(mesh, PartitionSpec())
        for own in _shardings(leaf):
            if is_there(own.mesh):
                sharding = own
            # Of `jax.eval_shape`: it knows no devices.
            elif isinstance(own.mesh, AbstractMesh) and own.mesh.shape == mesh.shape:
                sharding = NamedSharding(mesh, own.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, args), mesh


def _shardings(args: Any) -> list[NamedSharding]:
    """Return the shardings of arguments that are on a mesh."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    return [sharding for sharding in shardings if isinstance(sharding, NamedSharding)]
