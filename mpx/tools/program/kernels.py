"""Count what each kernel of a compiled program moves and computes."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar, get_args

from mpx._fused.kernels import ONE_OF
from mpx.tools.program.graph import Program, Use
from mpx.tools.program.targets import Target
from mpx.tools.program.text import Instruction, Shape

Kind = Literal[
    "products",
    "library calls",
    "collectives",
    "reductions",
    "elementwise",
    "conversions and copies",
]
K = TypeVar("K", bound=Hashable)

# What an operation does. One that stands in no line is a library call, or works element
# by element. A fusion does what stands first in `Kind` of what its parts do.
_OPERATIONS: dict[Kind | None, str] = {
    "products": "dot convolution",
    "collectives": (
        "all-reduce all-gather reduce-scatter all-to-all collective-permute"
        " collective-broadcast ragged-all-to-all"
    ),
    "reductions": "reduce reduce-window scatter sort select-and-scatter",
    "conversions and copies": (
        "convert copy transpose reshape broadcast slice concatenate pad reverse iota"
        " gather dynamic-slice dynamic-update-slice select compare bitcast-convert"
    ),
    None: (
        "parameter constant tuple get-tuple-element bitcast after-all partition-id"
        " replica-id opt-barrier add-dependency ConcatBitcast AllocateBuffer"
    ),
}
_KINDS = {
    operation: kind
    for kind, operations in _OPERATIONS.items()
    for operation in operations.split()
}
_TAKE_PARTS = {"slice", "dynamic-slice", "gather"}
# And which operand has the new numbers.
_REPLACE_PARTS = {"dynamic-update-slice": 1, "scatter": 2}
# Groups of devices: listed, of some size in a grid, or along axes of a mesh.
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]<=|mesh\[([^\]]*)\] *\{([^}]*)\})"
)
_ALGORITHMS = {
    "tf32_tf32_f32": "tf32",
    "bf16_bf16_f32": "bf16",
    "bf16_bf16_f32_x3": "bf16 x 3",
    "f32_f32_f32": "f32",
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a program, or one operation on a CPU."""

    name: str  # of its instruction, which profiles call `hlo_op`
    operation: str  # `fusion`, another operation of XLA, or the name of a library call
    kind: Kind  # what it does most
    # that it reads and writes each time: operands and results, or the parts of them
    # that it touches
    bytes: int
    # of its matrix products and convolutions each time, by the dtype of their operands
    flops: Mapping[str, int]
    times: int  # how often it runs in a step
    # What all its runs take at least; None if the target's figures are not known.
    seconds: float | None
    shapes: tuple[Shape, ...]  # the arrays that it writes
    source: str  # the line that asks for it
    # of a collective, what a device sends to others each time, as a ring of the devices
    # does it
    sent_bytes: int = 0

    @property
    def dtype(self) -> str:
        """The dtype of what it writes first."""
        return self.shapes[0].dtype if self.shapes else ""

    @property
    def result(self) -> str:
        """The dtypes and shapes of the arrays that it writes."""
        return ", ".join(map(str, self.shapes))

    @property
    def sent_by_dtype(self) -> dict[str, int]:
        """Return what a device sends in all runs, by dtype: XLA may send arrays of
        several dtypes at once.
        """
        return totals((x.dtype, self.times * self.sent_of([x])) for x in self.shapes)

    def sent_of(self, shapes: Iterable[Shape]) -> int:
        """Return what a device sends each time of some of the arrays that it writes."""
        part, whole = (sum(x.size for x in given) for given in (shapes, self.shapes))
        return self.sent_bytes * part // max(1, whole)


def kernels(
    program: Program,
    target: Target | None = None,
    float32: str = "f32",
) -> list[tuple[Instruction, Kernel]]:
    """Return the instructions of a program that are kernels, in the order of execution,
    with what they do.

    Without a target there are no bounds of times. `float32` is how the device
    multiplies float32 numbers unless more is asked for, such as `tf32`.
    """

    def kernel_of(x, kind, times):
        products = list(filter(_flops, x.parts))
        flops = totals((dtype_of_product(y, float32), _flops(y)) for y in products)
        moved = _moved(x, program)
        operation, sent = _sent(x) if kind == "collectives" else (x.operation, 0)
        return Kernel(
            name=x.hlo_name,
            operation=operation,
            kind="products" if products else kind,
            bytes=moved,
            flops=flops,
            times=times,
            seconds=target and times * target.bound_seconds(moved, flops),
            shapes=x.results,
            source=next((y.source for y in products if y.source), x.source),
            sent_bytes=sent,
        )

    def runs_of(computation, times):
        found = []
        for x in computation:
            if x.op in ("while", "call", "conditional", "async-start"):
                branches = [
                    runs_of(inner, times * (x.trips or 1)) for inner in x.called
                ]
                # Of the branches of a conditional one runs: count the one that moves
                # most.
                found += max(branches, key=lambda runs: moved_by(y for _, y in runs))
            elif kind := kind_of(x):
                found.append((x, kernel_of(x, kind, times)))
        return found

    return runs_of(program.entry, 1)


def moved_by(kernels: Iterable[Kernel]) -> int:
    """Return the bytes that kernels read and write in all their runs."""
    return sum(kernel.bytes * kernel.times for kernel in kernels)


def _sent(x: Instruction) -> tuple[str, int]:
    """Return the operation of a collective, and what a device sends."""
    collective = next(
        part for part in x.parts if _KINDS.get(part.operation) == "collectives"
    )
    # A TPU has a sum and a slice of it in one fusion.
    is_scattered = x.op == "fusion" and any(
        part.op == "dynamic-slice" for part in x.parts
    )
    operation = "reduce-scatter" if is_scattered else collective.operation
    given = [shape for operand in collective.operands for shape in operand.shapes]
    sent = max(
        sum(shape.size for shape in shapes) for shapes in (collective.results, given)
    )
    # In a ring: all parts of an array but one.
    if not operation.startswith("collective"):
        rounds, devices = 2 if operation == "all-reduce" else 1, _group_size(collective)
        sent = rounds * sent * (devices - 1) // devices
    return operation, sent


def _group_size(collective: Instruction) -> int:
    """Return how many devices send each other their parts."""
    groups = _GROUPS.search(collective.attributes)
    if groups is None:  # all, and XLA does not say how many
        return 2**30
    listed, size, mesh, along = groups.groups("")
    if mesh:
        axes = re.findall(r"('\w+')=(\d+)", mesh)
        return math.prod(int(devices) for axis, devices in axes if axis in along)
    return int(size or len(listed.split(",")))


def flops_by_dtype(kernels: Iterable[Kernel]) -> dict[str, int]:
    """Return the FLOPs of all runs of kernels, by the dtype of their operands."""
    return totals(
        (dtype, n * kernel.times)
        for kernel in kernels
        for dtype, n in kernel.flops.items()
    )


def totals(pairs: Iterable[tuple[K, int]]) -> dict[K, int]:
    """Return the sum of the numbers of each name, the largest first."""
    counts: Counter[K] = Counter()
    for name, count in pairs:
        counts[name] += count
    return dict(counts.most_common())


def kind_of(instruction: Instruction) -> Kind | None:
    """Return what a kernel does most; None for what is no work."""
    if instruction.op.endswith(("-done", "-update")):
        return None
    other: Kind = "library calls" if instruction.op == "custom-call" else "elementwise"
    operations = {part.operation for part in instruction.parts}
    found = {_KINDS.get(operation, other) for operation in operations}
    if "AsyncCollectiveDone" in operations or (
        "products" in found and "AsyncCollectiveStart" not in operations
    ):
        # A TPU names the collective in all kernels that run beside it.
        found.discard("collectives")
    return next((kind for kind in get_args(Kind) if kind in found), None)


def _moved(x: Instruction, program: Program) -> int:
    """Return the bytes that a kernel reads and writes."""
    if layers := x.attribute(f"{ONE_OF}(\\d+)"):
        return _moved_of_one(x, int(layers))
    if x.op == "fusion":
        uses = {
            y: list(program.last_users(y, lambda _, user: user.op == "bitcast"))
            for y in x.called[0]
            if y.op == "parameter"
        }
    else:
        uses = {y: [(y, x)] for y in x.operands}
    read = sum(_read(y, of_array) for y, of_array in uses.items())
    return read + sum(_written(y, program) for y in x.makers)


def _moved_of_one(x: Instruction, layers: int) -> int:
    """Return the bytes of a kernel that steps one of so many layers of what it writes
    over.
    """
    over = {int(number) for number in re.findall(r"\}: \((\d+), ", x.attributes)}
    read = [y.bytes // (layers if i in over else 1) for i, y in enumerate(x.operands)]
    return sum(read) + x.bytes // layers


def _read(array: Instruction, uses: Sequence[Use]) -> int:
    """Return the bytes that are read of an array: only the parts that are taken, if
    parts are taken or replaced.
    """
    whole = array.bytes
    if not uses or any(
        user is None
        or user.operation not in {*_TAKE_PARTS, *_REPLACE_PARTS}
        or view in user.operands[1:]
        for view, user in uses
    ):
        return whole
    # A scatter adds to what it replaces, and so reads as much as it writes.
    taken = [
        user.results[0] if user.operation in _TAKE_PARTS else _replaced(user)
        for _, user in uses
        if user is not None and user.operation != "dynamic-update-slice"
    ]
    # A gather may take a row of a small table a million times. The table is read once:
    # caches hold it.
    return min(
        whole,
        sum(shape._replace(layout=array.shapes[0].layout).bytes for shape in taken),
    )


def _written(part: Instruction, program: Program) -> int:
    """Return the bytes of a result; of one that replaces a part of an operand, that
    part.
    """
    part = program.walk_back(part, "bitcast")
    whole = part.bytes
    if part.operation in _REPLACE_PARTS and len(part.results) == 1:
        return min(whole, _replaced(part).bytes)
    return whole


def _replaced(part: Instruction) -> Shape:
    """Return the shape of what is written over parts of an operand."""
    new = part.operands[_REPLACE_PARTS[part.operation]].shapes[0]
    return part.results[0]._replace(dims=new.dims)


def _flops(part: Instruction) -> int:
    """Return the FLOPs of a matrix product or convolution; 0 of anything else."""
    if part.operation.startswith(("convolution", "__cudnn$conv")):
        return _conv_flops(part)
    contracted = part.attribute(
        r"lhs_contracting_dim(?:ension)?s\"?[=:][{\[]([\d,\"]*)"
    )
    if contracted is None:
        return 0
    left = part.operands[0].shapes[0]
    depth = math.prod(left.dims[int(axis)] for axis in re.findall(r"\d+", contracted))
    return 2 * math.prod(part.shapes[0].dims) * depth


def _conv_flops(part: Instruction) -> int:
    """Return the FLOPs of a convolution: its output times the filter, whose output
    features no product adds up.
    """
    images, filters = (operand.shapes[0].dims for operand in part.operands[:2])
    result = part.shapes[0].dims
    # cuDNN's gradients have the labels of the forward convolution: input, filter and
    # output stand elsewhere.
    if "BackwardInput" in part.operation:
        images, result = result, images
    elif "BackwardFilter" in part.operation:
        filters, result = result, filters
    features = filters[(part.attribute(r"dim_labels=\w+_(\w+)->") or "o").index("o")]
    return 2 * math.prod(result) * math.prod(filters) // max(1, features)


def dtype_of_product(product: Instruction, float32: str) -> str:
    """Return the dtype that a product multiplies in."""
    algorithm = product.attribute(r"algorithm=dot_(\w+)")
    if algorithm in _ALGORITHMS:
        return _ALGORITHMS[algorithm]
    left, right = (operand.shapes[0].dtype for operand in product.operands[:2])
    asked = product.attribute(r"operand_precision\"?[=:][{\[]\"?(\w+)") or "default"
    if left != right:
        return f"{left} with {right}"
    return float32 if left == "f32" and asked.lower() == "default" else left
