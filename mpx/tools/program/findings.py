"""Find what a compiled step does that its author would not want, with what it costs and
the remedy.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpx._dtypes import bytes_of
from mpx._inspect.check_chain import GRADIENT, OLD, Value, followed
from mpx._transforms.loss_scaling import SCALED
from mpx.tools.program.graph import Program
from mpx.tools.program.kernels import (
    Kernel,
    flops_by_dtype,
    kind_of,
    moved_by,
)
from mpx.tools.program.memory import Array, Memory
from mpx.tools.program.targets import Target
from mpx.tools.program.text import Instruction, Shape

# of all bytes of its kind: XLA may copy a bias, or gather one in float32, for other
# reasons
WORTH_A_WORD = 0.01
_NARROW = ("bf16", "f16", "f8")
_BACKWARD = "transpose("  # in the name of an instruction of the backward pass
# of all FLOPs: a program with so many narrow products is meant to multiply in few bits
_MANY = 0.1
# Numbers stay the same.
_MOVES = ("bitcast", "copy", "transpose", "reshape", "slice", "dynamic-slice")
Type = tuple[tuple[int, ...], str]  # the shape and the dtype of an array
# Kernels, how many bytes of each run are found fault with, and a dtype.
Found = list[tuple[Kernel, int, str]]
Runs = Sequence[tuple[Instruction, Kernel]]
_GATHER_AGAIN = (
    "Gather each weight in a checkpoint around its layer, which gathers it again for"
    " the backward pass: `jax.checkpoint(layer)`, or `jax.checkpoint(layer,"
    " policy=jax.checkpoint_policies.dots_saveable)`, which computes no product twice."
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in a program that costs memory, time or precision for nothing, or makes
    numbers wrong.
    """

    what: str  # the finding
    # that are held, moved or sent for nothing on one device; 0 if it makes numbers
    # wrong
    bytes: int
    remedy: str  # what to do
    # the line of the user's code that it comes from, the first of several; empty if not
    # known
    source: str = ""

    def __str__(self) -> str:
        return f"{self.what}{self.source and f' ({self.source})'}. {self.remedy}"


class Argument(NamedTuple):
    """An array that a step takes."""

    position: int  # of the argument that holds it
    name: str  # of that argument
    shape: tuple[int, ...]
    shard: tuple[int, ...]  # the shape of what one device holds
    dtype: np.dtype
    is_donated: bool = False

    @property
    def type(self) -> Type:
        """Its shape and dtype."""
        return self.shape, str(self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes that one device holds."""
        return bytes_of(self.dtype, math.prod(self.shard))


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step as it was traced, lowered and compiled: what finders look at."""

    jaxpr: Any
    program: Program
    runs: Runs
    arguments: Sequence[Argument]
    results: Sequence[Type]
    float32: str  # how the device multiplies float32 numbers unless more is asked for
    peak_bytes: int = 0  # memory that one run needs
    target: Target | None = None  # if its figures are known

    @functools.cached_property
    def least_bytes(self) -> float:
        """Bytes that are held or sent for nothing and worth a word."""
        return WORTH_A_WORD * sum(argument.bytes for argument in self.arguments)

    @functools.cached_property
    def weights(self) -> set[tuple[int, ...]]:
        """The shapes of weights, of what one device has of them, and of one layer of a
        stack, with sorted axes.

        A weight is an argument with the shape of a result: a new weight, or its
        gradient.
        """
        results = {shape for shape, _ in self.results}
        wholes = [
            whole
            for x in self.arguments
            if jnp.issubdtype(x.dtype, jnp.floating) and x.shape in results
            for whole in (x.shape, x.shard)
        ]
        return {tuple(sorted(part)) for whole in wholes for part in (whole, whole[1:])}

    @functools.cached_property
    def memory(self) -> Memory:
        """Where its arrays lie, and when."""
        return Memory(self.program)

    @functools.cached_property
    def gathered(self) -> list[Array]:
        """The gathered weights, and their copies, such as stacks of them that loops
        fill.
        """
        users, writers = self.memory.users, self.memory.writers
        found = {
            x
            for x in users
            if x.maker.operation == "all-gather"
            and any(
                self.has_shape_of_weight(shape)
                for given in x.maker.operands
                for shape in given.shapes
            )
        }
        kinds = {x: kernel.kind for x, kernel in self.runs}
        copying = {
            user
            for x in found
            for user in users[x]
            if kinds.get(user) == "conversions and copies"
        }
        return [x for x in users if x in found or writers.get(x, x.maker) in copying]

    def has_shape_of_weight(self, shape: Shape) -> bool:
        """Return whether a weight has this shape, in any order of the axes."""
        return tuple(sorted(shape.dims)) in self.weights

    def sends(self, *operations: str) -> Runs:
        """Return the kernels of collectives."""
        return [
            (x, kernel) for x, kernel in self.runs if kernel.operation in operations
        ]


def findings_of(
    step: CompiledStep, *, is_cpu: bool, is_donation_known: bool
) -> Iterator[Finding]:
    """Yield all findings."""
    finders = [
        of_chain,
        sums_in_16_bits,
        sums_of_which_a_part_is_used,
        gathers_of_states,
        beyond_the_memory,
        gathered_weights_that_are_kept,
    ]
    if is_donation_known:
        finders.insert(1, of_donation)
    if not is_cpu:  # which computes and sends in float32 whatever the dtype
        finders += [
            gradients_of_all_layers,
            products_of_a_rule,
            float32_products,
            float32_that_is_rounded,
        ]
    for finder in finders:
        yield from finder(step)


def arguments_of(jaxpr: Any, lowered: Any, compiled: Any) -> Iterator[Argument]:
    """Yield the arrays that a step takes."""
    leaves = jax.tree.leaves_with_path(lowered.args_info)
    # There is None for the sharding of an argument that the program does not use.
    shardings = jax.tree.structure(lowered.args_info).flatten_up_to(
        compiled.input_shardings
    )
    names = jaxpr.jaxpr.debug_info.arg_names
    for name, (path, leaf), sharding in zip(names, leaves, shardings, strict=True):
        shape = leaf.shape
        shard = shape if sharding is None else sharding.shard_shape(shape)
        first = re.split(r"\W", name)[0]  # of `params['w']`
        yield Argument(path[1].idx, first, shape, shard, leaf.dtype, leaf.donated)


def _worth_a_word(
    found: Found, what: str, remedy: str, least: float = 0
) -> Iterator[Finding]:
    """Yield a finding on kernels, each with the bytes of a run that it has for nothing,
    if there are more than `least` bytes.

    In its text `{dtypes}` stands for the dtypes that were found.
    """
    size = sum(kernel.times * size for kernel, size, _ in found)
    if size > least:
        dtypes = " or ".join(sorted({dtype for *_, dtype in found}))
        source = next((kernel.source for kernel, *_ in found if kernel.source), "")
        yield Finding(what.format(dtypes=dtypes), size, remedy, source)


def of_chain(step: CompiledStep) -> Iterator[Finding]:
    """Yield what a training step changes between `value_and_grad`, the chain of its
    optimizer and its parameters.
    """
    given = [Value(OLD)] * len(step.jaxpr.in_avals)
    _, received, landed = followed(step.jaxpr, given)
    scaled = [value for value in received[SCALED] if value.origin == GRADIENT]
    for (origin, by), count in Counter(
        (value.origin, value.changed_by)
        for value in scaled + landed
        if value.changed_by
    ).items():
        if origin == GRADIENT:
            where = "gradients in front of `loss_scaling`, where they are scaled"
            chain = "optax.chain(clip, rule)"
        else:
            where = f"updates after `{origin}` has chosen where parameters land"
            chain = "optax.chain(rule, change)"
        yield Finding(
            f"`{by}` changes {where} ({count} arrays)",
            0,
            f"Put it inside, as in `mpx.mixed_precision({chain}, recipe)`.",
        )


def of_donation(step: CompiledStep) -> Iterator[Finding]:
    """Yield arguments that come back and are not donated, and donated buffers that XLA
    copies.
    """
    free = Counter(step.results)
    free -= Counter(leaf.type for leaf in step.arguments if leaf.is_donated)
    donated: list[tuple[Type, ...]] = []  # of each argument
    for i, group in itertools.groupby(step.arguments, lambda leaf: leaf.position):
        leaves = list(group)
        if given := tuple(leaf.type for leaf in leaves if leaf.is_donated):
            donated.append(given)
        kept = [leaf for leaf in leaves if not leaf.is_donated]
        size = sum(leaf.bytes for leaf in kept)
        types = Counter(leaf.type for leaf in kept)
        if size > step.least_bytes and types <= free:
            free -= types
            yield Finding(
                f"Argument {i} (`{leaves[0].name}`) comes back in the same shape and is"
                " not donated, so that old and new are held at once",
                size,
                "If the new one takes its place, donate it (`donate_argnums` of"
                " `jax.jit`).",
            )
    rest = iter(step.results)
    come_back_in_order = all(each in rest for types in donated for each in types)
    # Nobody can tell the order of two arguments that are alike.
    if come_back_in_order and len(set(donated)) == len(donated):
        return
    copied = [
        x
        for x in step.program.entry
        if x.op == "copy"
        and x.operands[0].is_donated
        and x.shapes == x.operands[0].shapes  # in the same layout
    ]
    size = sum(x.bytes for x in copied)
    if size > step.least_bytes:
        yield Finding(
            f"XLA copies donated buffers ({len(copied)}) before it writes over them",
            size,
            "Return arguments in the order in which they are taken (JAX gives donated"
            " memory to results of the same type in turn), and do not use an old one"
            " after the new one is made.",
        )


def sums_in_16_bits(step: CompiledStep) -> Iterator[Finding]:
    """Yield the sums of gradients, which have the shapes of weights in any order of the
    axes.
    """
    found: Found = []
    for x, kernel in step.sends("all-reduce", "reduce-scatter"):
        added = [
            shape
            for given in x.operands
            for part in _joined_in(given, step.program)
            for shape in part.shapes
        ]
        whole = sum(shape.size for shape in added)
        found += [
            (kernel, kernel.sent_bytes * shape.size // whole, shape.dtype)
            for shape in added
            if shape.dtype in ("bf16", "f16") and step.has_shape_of_weight(shape)
        ]
    yield from _worth_a_word(
        found,
        "Devices add up arrays of the shapes of weights in {dtypes}, which rounds at"
        " each addition",
        "If they are gradients, differentiate with float32 sums: `mpx.autocast` has"
        " them if you leave out `reduce_dtype`, and `reduce=` of its policy.",
        step.least_bytes,
    )


def _joined_in(array: Instruction, program: Program) -> Sequence[Instruction]:
    """Return the arrays that a kernel joins into one, as XLA sends many of them; else
    the array itself.
    """
    joined = program.walk_back(array, "bitcast").makers[0]
    if joined.op != "concatenate":
        return [array]
    return [program.walk_back(part, "bitcast") for part in joined.operands]


def sums_of_which_a_part_is_used(step: CompiledStep) -> Iterator[Finding]:
    """Yield sums that all devices get whole, though each of them keeps a part."""
    program = step.program
    yield from _worth_a_word(
        [
            (kernel, kernel.sent_bytes // 2, "")
            for x, kernel in step.sends("all-reduce")
            if all(
                _is_at_most_half(user, view)
                for array in program.arrays_of(x)
                for view, user in program.last_users(array, _stays_whole)
            )
        ],
        "Every device gets a whole sum and keeps a part of it",
        "XLA has not made them reduce-scatters, which send half. `jax.lax.psum_scatter`"
        " in a `jax.shard_map` does.",
        step.least_bytes,
    )


def _is_at_most_half(user: Instruction | None, x: Instruction) -> bool:
    """Return whether a user takes a part of an array, another one on each device."""
    return (
        user is not None
        and user.op == "dynamic-slice"
        and 2 * user.shapes[0].size <= x.shapes[0].size
    )


def _stays_whole(x: Instruction, user: Instruction) -> bool:
    """Return whether a user computes of an array no more than its own users need.

    A `slice` takes the same on every device: an array out of several that were joined.
    """
    return user.op in ("bitcast", "slice") or (
        kind_of(user) in ("elementwise", "conversions and copies")
        and not user.called
        and user.shapes[0].dims == x.shapes[0].dims
    )


def float32_that_is_rounded(step: CompiledStep) -> Iterator[Finding]:
    """Yield float32 arrays that devices send, or that one kernel writes and others
    read, though all uses round them first.
    """
    sent: Found = []
    written: Found = []
    for x, kernel in step.runs:
        for array in step.program.arrays_of(x):
            dtype = _rounded_to(array, step.program)
            if dtype and kernel.operation in ("all-gather", "all-to-all"):
                sent.append((kernel, kernel.sent_of(array.shapes) // 2, dtype))
            elif dtype and kernel.kind != "collectives":
                times = 1 + len(step.program.used_by[array])
                written.append((kernel, times * array.shapes[0].bytes // 2, dtype))
    yield from _worth_a_word(
        sent,
        "Devices send float32 arrays that are rounded to {dtypes} right after",
        "Cast them before they are sent, as `mpx.autocast` does: with `.astype` in"
        " front of the gather.",
        step.least_bytes,
    )
    yield from _worth_a_word(
        written,
        "Kernels write float32 numbers that all others round to {dtypes} before they"
        " use them",
        "Cast them where they are made. The gradient of a look-up, as in a"
        " cross-entropy of integer labels, is one: with one-hot labels there is none.",
        WORTH_A_WORD * moved_by(kernel for _, kernel in step.runs),
    )


def _rounded_to(array: Instruction, program: Program) -> str:
    """Return the dtype with fewer bits that all uses of a float32 array convert it to
    first; empty if there is no such.
    """
    dtypes = {
        user.shapes[0].dtype
        if user and user.op == "convert" and user.shapes[0].bits < 32
        else ""
        for _, user in program.last_users(array, lambda _, user: user.op in _MOVES)
    }
    return dtypes.pop() if array.shapes[0].dtype == "f32" and len(dtypes) == 1 else ""


def products_of_a_rule(step: CompiledStep) -> Iterator[Finding]:
    """Yield what devices send to multiply divided matrices outside of the loss and its
    gradient, as Muon does: an operand or a result of a product.
    """
    has_gradient = any("jvp(" in x.name for x, _ in step.runs)
    yield from _worth_a_word(
        [
            (kernel, kernel.sent_bytes, "")
            for x, kernel in step.runs
            # XLA gives what it sends for a product the name of the product.
            if has_gradient and kernel.sent_bytes and "jvp(" not in x.name
            if x.name.endswith("dot_general")
        ],
        "A rule multiplies matrices that lie on several devices, which send them for"
        " each product",
        "Write the rule as a chain that gives each device whole matrices:"
        ' `mpx.each_matrix(mpx.newton_schulz, sent="bf16")` for Muon.',
        step.least_bytes,
    )


def gathers_of_states(step: CompiledStep) -> Iterator[Finding]:
    """Yield optimizer states in 8 bits that devices gather."""
    has_codes = any(x.type[1] in ("int8", "uint8") for x in step.arguments)
    yield from _worth_a_word(
        [
            (kernel, kernel.sent_of([shape]), "")
            for _, kernel in step.sends("all-gather")
            for shape in kernel.shapes
            if has_codes and shape.dtype in ("s8", "u8", "u32")
        ],
        "Devices gather numbers of an optimizer state in 8 bits, whose blocks reach"
        " over several of them",
        "Give `block_size` a divisor of the columns that a device has, or use a"
        " mesh of explicit axes.",
        step.least_bytes,
    )


def gathered_weights_that_are_kept(step: CompiledStep) -> Iterator[Finding]:
    """Yield gathered weights, or copies of them, that the forward pass makes and the
    backward pass uses.
    """
    kept = [
        x
        for x in step.gathered
        if _BACKWARD not in x.maker.name
        and any(_BACKWARD in user.name for user in step.memory.users[x])
    ]
    size = sum(x.shape.bytes for x in kept)
    if size > step.least_bytes:
        yield Finding(
            "Weights that were gathered for the forward pass are kept for the backward"
            f" pass ({len(kept)})",
            size,
            _GATHER_AGAIN,
            kept[0].maker.source,
        )


def gradients_of_all_layers(step: CompiledStep) -> Iterator[Finding]:
    """Yield gradients of all layers, which the loop of a backward pass writes one by
    one, and which are held at the peak.
    """
    writers = step.memory.writers
    kept = [
        x
        for x in step.memory.peak
        if x in writers
        and _BACKWARD in writers[x].name
        and x.maker.op != "parameter"
        and step.has_shape_of_weight(x.shape)
    ]
    size = sum(x.shape.bytes for x in kept)
    if size > step.least_bytes:
        yield Finding(
            f"Gradients of all layers are kept for the optimizer ({len(kept)})",
            size,
            "`mpx.train_step` runs the step of a layer where its gradient is made. Its"
            " `plan` says what it cannot do so.",
            writers[kept[0]].source,
        )


def beyond_the_memory(step: CompiledStep) -> Iterator[Finding]:
    """Yield the three largest groups of arrays, of one line and dtype, at the peak of a
    program that does not fit.
    """
    target = step.target
    if target is None or step.peak_bytes <= target.usable_bytes:
        return
    memory = step.memory
    groups: dict[tuple[str, str, str], list[Array]] = defaultdict(list)
    for x in memory.peak:
        writer = memory.writers.get(x, x.maker)
        is_wide = x.shape.dtype == "f32"
        is_forward = "jvp(" in writer.name
        is_backward = _BACKWARD in writer.name
        is_weight = step.has_shape_of_weight(x.shape)
        if x.maker.op == "parameter":
            remedy = (
                "Hold it in fewer bits (`mpx.compare_plans` shows how), or on more"
                " devices."
            )
        elif x not in memory.users:
            remedy = "Donate the argument whose place it takes (`donate_argnums`)."
        elif x in step.gathered:
            remedy = _GATHER_AGAIN
        elif is_wide and is_weight and is_backward:
            remedy = 'Keep gradients in 16 bits: `mpx.grad(..., grad_dtype="bf16")`.'
        elif is_wide and is_weight and not is_forward:
            remedy = "`mpx.fused_update` needs none, but for a sum over microbatches."
        elif is_wide and is_forward and not is_backward:
            remedy = (
                'Keep activations in fewer bits: `mpx.checkpoint(..., kept="bf16",'
                " argnums=...)`."
            )
        else:
            remedy = (
                "Take a smaller batch or more devices, or compute it again"
                " (`jax.checkpoint` around a layer)."
            )
        groups[x.shape.dtype, writer.source, remedy].append(x)

    peak = (
        f"The peak of {step.peak_bytes / 1e9:.4g} GB is above the"
        f" {target.usable_bytes / 1e9:.4g} GB that JAX takes of one {target.name}"
    )
    found = []
    for (_, source, remedy), arrays in groups.items():
        largest = max(arrays, key=lambda x: x.shape.bytes)
        are_alike = len({x.shape.dims for x in arrays}) == 1
        many = f"{len(arrays)} {'x' if are_alike else 'arrays up to'} {largest.shape}"
        is_given = largest.maker.op == "parameter"
        such = f", such as `{largest.maker.name}`" if is_given else ""
        size = sum(x.shape.bytes for x in arrays)
        found.append(Finding(f"{peak}. It holds {many}{such}", size, remedy, source))
    yield from sorted(found, key=lambda finding: -finding.bytes)[:3]


def float32_products(step: CompiledStep) -> Iterator[Finding]:
    """Yield products of float32 numbers in a program that mostly multiplies in fewer
    bits.
    """
    flops = flops_by_dtype(kernel for _, kernel in step.runs)
    total, wide = sum(flops.values()), flops.get(step.float32, 0)
    narrow = sum(n for dtype, n in flops.items() if dtype.startswith(_NARROW))
    if wide > WORTH_A_WORD * total and narrow > _MANY * total:
        yield from _worth_a_word(
            [
                (kernel, kernel.bytes, "")
                for _, kernel in step.runs
                if step.float32 in kernel.flops
            ],
            f"{wide / total:.0%} of all FLOPs multiply float32 numbers, though others"
            " multiply in fewer bits",
            "Look for an array that nobody cast: one that the function closes over, or"
            " a gradient of a product with `preferred_element_type=float32`."
            " `mpx.autocast` casts both. For an optimizer that multiplies matrices"
            ' (Muon): `mpx.each_matrix(mpx.newton_schulz, products="f16")`.',
        )
