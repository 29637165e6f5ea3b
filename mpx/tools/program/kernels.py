"""Count what each kernel of a compiled program moves and computes."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import numpy as np

from mpx.tools.program.targets import Target
from mpx.tools.program.text import Instruction, Program, Shape

Kind = Literal["products", "elementwise", "reductions", "conversions and copies", "collectives", "library calls"]

_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier "
    "add-dependency".split()
)
_COLLECTIVES = set(
    "all-reduce all-gather reduce-scatter all-to-all collective-permute collective-broadcast ragged-all-to-all".split()
)
_MOVES = _FREE | set(
    "convert copy transpose reshape broadcast slice concatenate pad reverse iota dynamic-slice dynamic-update-slice "
    "gather select compare bitcast-convert".split()
)
_PARTS = {"slice", "dynamic-slice", "gather"}
_REDUCTIONS = {"reduce", "reduce-window", "scatter", "sort", "select-and-scatter"}
_ALGORITHMS = {"tf32_tf32_f32": "tf32", "bf16_bf16_f32": "bf16", "bf16_bf16_f32_x3": "bf16 x 3", "f32_f32_f32": "f32"}


Shapes = Mapping[str, Sequence[Shape]]


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution.

    Attributes:
        dtype: of its operands; `tf32` where float32 operands may be rounded to it.
        flops: multiplications and additions.
        source: the line that asks for it.
    """

    dtype: str
    flops: int
    source: str


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a program, or one operation on a CPU.

    Attributes:
        operation: what it is: `fusion`, another operation of XLA, or the name of a library call.
        kind: what it does most.
        bytes: what it reads and writes each time: its operands and results, or the parts of them that it touches.
        times: how often it runs in a step.
        products: the matrix products and convolutions in it.
        result: the dtypes and shapes that it writes.
        source: the line that asks for it.
    """

    operation: str
    kind: Kind
    bytes: int
    times: int
    products: tuple[Product, ...]
    result: str
    source: str

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of its products each time, by the dtype of their operands."""
        counts: Counter[str] = Counter()
        for product in self.products:
            counts[product.dtype] += product.flops
        return dict(counts)

    def bound_seconds(self, target: Target) -> float:
        """Return the seconds of all its runs, if memory and arithmetic units did nothing else."""
        slowest = min(target.rates.values())
        work = sum(p.flops / target.rates.get(p.dtype.split(" ")[0], slowest) for p in self.products)
        return self.times * (max(self.bytes / target.bandwidth, work) + target.launch_seconds)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
        operation: such as `reduce-scatter`.
        dtype: of what is sent.
        bytes: of its results on one device, each time.
        times: how often it runs in a step.
        axes: the axes of the mesh along which it runs; empty if they are not known.
        source: the line that asks for it.
    """

    operation: str
    dtype: str
    bytes: int
    times: int
    axes: str
    source: str


class Reader:
    """Walks a program in the order in which it runs, and collects kernels and collectives."""

    def __init__(self, program: Program, float32: str = "f32", mesh_shape: Mapping[str, int] | None = None) -> None:
        """Read all of a program.

        Args:
            program: the program.
            float32: how the device multiplies float32 numbers unless more is asked for, such as `tf32`.
            mesh_shape: the axes of the mesh, to name the groups of devices in collectives.
        """
        self.has_unknown_loop = False
        self._program, self._float32, self._groups = program, float32, _groups_of(mesh_shape or {})
        self.kernels, self.collectives = self._found(program.entry, 1)

    def _found(self, name: str, times: int) -> tuple[list[Kernel], list[Collective]]:
        """Return what a computation runs, each of it that often."""
        body = self._program.computations[name]
        shapes = {instruction.name: instruction.shapes for instruction in body}
        kernels: list[Kernel] = []
        collectives: list[Collective] = []
        for instruction in body:
            op = instruction.op
            if op in _FREE or op.endswith(("-done", "-update")) or 'target="ConcatBitcast"' in instruction.attributes:
                continue  # the last one names the parts of an array that a TPU copied one by one
            if op in ("while", "call", "conditional", "async-start"):
                trips = instruction.attribute(r'known_trip_count":\{"n":"(\d+)"') if op == "while" else "1"
                self.has_unknown_loop |= trips is None
                branches = [self._found(inner, times * int(trips or 1)) for inner in instruction.called]
                # Of the branches of a conditional one runs: count the one that moves most.
                longest = max(branches, key=lambda found: sum(kernel.bytes * kernel.times for kernel in found[0]))
                kernels += longest[0]
                collectives += longest[1]
            else:
                kernels.append(self._kernel(instruction, shapes, times))
                if op.removesuffix("-start") in _COLLECTIVES:
                    collectives.append(self._collective(instruction, times))
        return kernels, collectives

    def _kernel(self, instruction: Instruction, shapes: Shapes, times: int) -> Kernel:
        inside = list(self._inside(instruction, shapes))
        products = tuple(product for part, beside in inside for product in self._products(part, beside))
        return Kernel(
            operation=instruction.attribute(r'custom_call_target="([^"]+)"') or instruction.op,
            kind=_kind(instruction, [part.op for part, _ in inside], products),
            bytes=self._bytes(instruction, shapes),
            times=times,
            products=products,
            result=", ".join(map(str, instruction.shapes)),
            source=next((p.source for p in products if p.source), self._program.source_of(instruction)),
        )

    def _collective(self, instruction: Instruction, times: int) -> Collective:
        received = _received(instruction)
        return Collective(
            operation=instruction.op.removesuffix("-start"),
            dtype=received[0].dtype,
            bytes=sum(shape.bytes for shape in received),
            times=times,
            axes=self._groups.get(_devices(instruction), ""),
            source=self._program.source_of(instruction),
        )

    def _inside(self, instruction: Instruction, shapes: Shapes) -> Iterator[tuple[Instruction, Shapes]]:
        """Yield the operation itself, or those of a fusion, with the shapes of what stands beside them."""
        if instruction.op != "fusion":
            yield instruction, shapes
            return
        for name in instruction.called:
            body = self._program.computations[name]
            beside = {part.name: part.shapes for part in body}
            for part in body:
                if part.op not in _FREE:
                    yield from self._inside(part, beside)

    def _bytes(self, instruction: Instruction, shapes: Shapes) -> int:
        """Return what a kernel reads and writes: of an array of which it takes or replaces a part, that part."""
        size = lambda shapes: sum(shape.bytes for shape in shapes)
        if instruction.op == "fusion":
            body = self._program.computations[instruction.called[0]]
            return _read(body) + _written(body)
        if instruction.op.removesuffix("-start") in _PARTS:
            part = _received(instruction)[0]
            return part.bytes + part._replace(is_on_chip=shapes[instruction.operands[0]][0].is_on_chip).bytes
        if instruction.op == "dynamic-update-slice":
            return 2 * size(shapes[instruction.operands[1]])
        return size(_received(instruction)) + sum(size(shapes[name]) for name in dict.fromkeys(instruction.operands))

    def _products(self, part: Instruction, shapes: Shapes) -> Iterator[Product]:
        """Yield the product that an operation is, if it is one."""
        target = part.attribute(r'custom_call_target="([^"]+)"') or ""
        is_conv = part.op == "convolution" or target.startswith("__cudnn$conv")
        contracted = part.attribute(r"lhs_contracting_dim(?:ension)?s\"?[=:][{\[]([\d,\"]*)")
        if len(part.operands) < 2 or not (is_conv or contracted is not None):
            return
        left, right = (shapes[name][0] for name in part.operands[:2])
        if is_conv:
            flops = _conv_flops(part, target, left, right)
        else:
            depth = math.prod(left.dims[int(axis)] for axis in re.findall(r"\d+", contracted or ""))
            flops = 2 * math.prod(part.shapes[0].dims) * depth
        yield Product(self._dtype(part, left, right), flops, self._program.source_of(part))

    def _dtype(self, part: Instruction, left: Shape, right: Shape) -> str:
        """Return in which dtype a product multiplies."""
        algorithm = part.attribute(r"algorithm=dot_(\w+)")
        if algorithm in _ALGORITHMS:
            return _ALGORITHMS[algorithm]
        if left.dtype != right.dtype:
            return f"{left.dtype} with {right.dtype}"
        asked = part.attribute(r"operand_precision\"?[=:][{\[]\"?(\w+)") or "default"
        return self._float32 if left.dtype == "f32" and asked.lower() == "default" else left.dtype


def _received(instruction: Instruction) -> Sequence[Shape]:
    """Return what an operation makes: of the start of an asynchronous one, not what it hands on."""
    if instruction.op == "copy-start":
        return instruction.shapes[:1]
    hands_on = instruction.op.endswith("-start") and len(instruction.shapes) > len(instruction.operands)
    return instruction.shapes[len(instruction.operands) :] if hands_on else instruction.shapes


def _conv_flops(part: Instruction, target: str, left: Shape, right: Shape) -> int:
    """Return the FLOPs of a convolution: its output times the filter, whose output features no product adds up."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", part.attributes)
    if labels is None:
        return 0
    result = part.shapes[0]
    # cuDNN's gradients have the labels of the forward convolution: input, filter and output stand elsewhere.
    output, filters = result, right
    if "BackwardInput" in target:
        output = left
    elif "BackwardFilter" in target:
        output, filters = right, result
    features = filters.dims[labels[2].index("o")]
    return 2 * math.prod(output.dims) * math.prod(filters.dims) // max(1, features)


def _read(body: Sequence[Instruction]) -> int:
    """Return the bytes that a fusion reads of its parameters: of one of which only parts are taken, those parts."""
    total = 0
    for parameter in body:
        if parameter.op != "parameter":
            continue
        views = {parameter.name}
        for part in body:  # a view comes after what it shows
            views |= {part.name} if part.op == "bitcast" and part.operands[0] in views else set()
        uses = [part for part in body if part.op != "bitcast" and views & set(part.operands)]
        if uses and all(_takes_a_part(use, views) for use in uses):
            total += sum(s.bytes for use in uses if use.op in _PARTS for s in use.shapes)
        else:
            total += sum(shape.bytes for shape in parameter.shapes)
    return total


def _takes_a_part(use: Instruction, views: Set[str]) -> bool:
    """Return whether an operation reads a part of an array, or replaces one, and uses the array for nothing else."""
    return use.op in {*_PARTS, "dynamic-update-slice"} and not views & set(use.operands[1:])


def _written(body: Sequence[Instruction]) -> int:
    """Return the bytes that a fusion writes: of a result that replaces a part of an operand, that part."""
    parts = {part.name: part for part in body}
    root = next(part for part in body if part.is_root)
    total = 0
    for name in root.operands if root.op == "tuple" else [root.name]:
        part = parts[name]
        while part.op == "bitcast":
            part = parts[part.operands[0]]
        written = parts[part.operands[1]] if part.op == "dynamic-update-slice" else part
        total += sum(shape.bytes for shape in written.shapes)
    return total


def _kind(instruction: Instruction, ops: Sequence[str], products: Sequence[Product]) -> Kind:
    if instruction.op.removesuffix("-start") in _COLLECTIVES:
        return "collectives"
    if instruction.op in ("copy-start", "slice-start"):
        return "conversions and copies"
    if instruction.op == "custom-call" and not products:
        return "library calls"
    if products:
        return "products"
    if _REDUCTIONS & set(ops):
        return "reductions"
    return "conversions and copies" if set(ops) <= _MOVES else "elementwise"


Groups = frozenset[frozenset[int]]


def _groups_of(mesh_shape: Mapping[str, int]) -> dict[Groups, str]:
    """Return the names of axes by the groups of devices that a collective along them has."""
    counts = range(len(mesh_shape), 0, -1)  # of axes of size 1 the shortest list stays
    choices = itertools.chain.from_iterable(itertools.combinations(mesh_shape, count) for count in counts)
    return {_along(mesh_shape, names): ", ".join(names) for names in choices}


def _along(sizes: Mapping[str, int], names: Sequence[str]) -> Groups:
    """Return the groups of devices of which each differs in some axes of a mesh only."""
    devices = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    others = [i for i, name in enumerate(sizes) if name not in names]
    chosen = [i for i, name in enumerate(sizes) if name in names]
    return _as_sets(devices.transpose(others + chosen).reshape(-1, math.prod(sizes[name] for name in names)))


def _devices(instruction: Instruction) -> Groups:
    """Return the groups of devices of a collective, in any of the three forms in which XLA writes them."""
    listed = instruction.attribute(r"replica_groups=\{(\{[\d,{}]*\})\}")
    if listed is not None:
        return _as_sets([re.findall(r"\d+", group) for group in listed.split("},{")])
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", instruction.attributes)
    if named is not None:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return _along(sizes, re.findall(r"'(\w+)'", named[2]))
    iota = re.search(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\])(?:T\(([\d,]+)\))?", instruction.attributes)
    if iota is None:
        return frozenset()
    shape, dims, order = (list(map(int, re.findall(r"\d+", part or ""))) for part in iota.groups())
    return _as_sets(np.arange(math.prod(dims)).reshape(dims).transpose(order or None).reshape(shape))


def _as_sets(groups: Any) -> Groups:
    return frozenset(frozenset(map(int, group)) for group in groups)
