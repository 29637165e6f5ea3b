"""Count the bytes of a training run before anything is allocated.

Nothing runs. `jax.eval_shape` gives the shapes of the parameters, and of the state that
the transformation's own `init` makes; `zero1_shardings` gives the part of each array
that one device holds. So a state has the bytes of the real one, for any optimizer and
any wrapper.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._dtypes import bytes_of
from mpx._parallel.placement import parameter_specs, require_axis, sharded_spec
from mpx._parallel.zero1 import zero1_shardings
from mpx._policy import Policy, as_policy
from mpx._stored.blockwise import Blockwise8bit
from mpx._tables import Result, Table, Unit, digits, shown, unit_for
from mpx.tools.plan import peak as peaks
from mpx.tools.plan.peak import Attention, Kept, Logits, Peak
from mpx.tools.plan.rows import (
    KEY,
    OUTSIDE_STATE,
    SCALARS,
    Entry,
    Kind,
    PlanRow,
    entries_of,
    rows_of,
    state_entries,
)

_UNSHARDED = "unsharded"  # an axis of one device: a state sharded along it is whole
_BLOCK = Blockwise8bit().block_size


@dataclasses.dataclass(frozen=True)
class MemoryPlan(Result):
    """Hold the bytes of a training run and of its gradients; prints as a table."""

    rows: tuple[
        PlanRow, ...
    ]  # one for each field of the optimizer state, and one for all scalars
    parameters: int  # the number of trained elements
    step: str  # whose peak is planned; empty for a batch of 0, and without matrices
    _peaks: tuple[Peak, ...]  # of all programs that this step may be
    devices: int = 1  # of the mesh; 1 without a mesh
    gathered_bytes_a_parameter: float = (
        0.0  # of new parameters of `zero1`, or of weights, for either pass
    )
    summed_bytes_a_parameter: float = (
        0.0  # bytes of gradients that devices add up in a step
    )

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer state that `tx.init(params)` makes; two 4-bit numbers
        take one.
        """
        return sum(row.bytes for row in self.rows if row.kind not in OUTSIDE_STATE)

    @property
    def state_bytes_a_device(self) -> int:
        """Bytes of the optimizer state on one device."""
        return sum(
            row.bytes_a_device for row in self.rows if row.kind not in OUTSIDE_STATE
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(row.bytes for row in self.rows)

    @property
    def total_bytes_a_device(self) -> int:
        """Bytes of all rows on one device."""
        return sum(row.bytes_a_device for row in self.rows)

    @property
    def bytes_a_parameter(self) -> float:
        """Bytes of all rows on one device, divided by the number of parameters of the
        whole model.
        """
        return self.total_bytes_a_device / self.parameters

    @property
    def peak(self) -> dict[str, tuple[int, int, str]]:
        """Return what the program that may need most needs besides at its peak: least
        and most bytes, and why.
        """
        return self._most.needs

    @property
    def least_peak_bytes_a_device(self) -> int:
        """Bytes that one device needs at the peak of the program that needs least."""
        return self.total_bytes_a_device + self._least.least

    @property
    def peak_bytes_a_device(self) -> int:
        """Bytes that one device needs at the peak at most, whatever the program."""
        return self.total_bytes_a_device + self._most.most

    @property
    def _least(self) -> Peak:
        return min(self._peaks, key=lambda peak: peak.least)

    @property
    def _most(self) -> Peak:
        return max(reversed(self._peaks), key=lambda peak: peak.most)

    def fits(self, memory_bytes: float) -> str:
        """Return whether a device with so many bytes can run the step.

        It is `"yes"`, whatever the program, or `"no"`; `"only with ..."`, followed by
        what makes a program fit for certain, in each way there is; or `"perhaps"`,
        where XLA's choices decide.
        """
        free = memory_bytes - self.total_bytes_a_device
        if self._most.most <= free or self._least.least > free:
            return "yes" if self._most.most <= free else "no"
        ways = peaks.ways_to_fit(self._peaks, free)
        return f"only with {', or with '.join(ways)}" if ways else "perhaps"

    def bytes_of(self, kind: Kind) -> int:
        """Return the bytes of all rows of a kind on one device; 0 if there are none."""
        _errors.require_choice(get_args(Kind), kind, "`MemoryPlan.bytes_of`: `kind`")
        return sum(row.bytes_a_device for row in self.rows if row.kind == kind)

    def largest_model(self, memory_bytes: float) -> int:
        """Return how many parameters can be trained in the memory of one device, by the
        program that needs least.

        All parts grow in proportion, except counts and keys. The answer is 0 if not
        even one parameter fits.
        """
        fixed = sum(
            row.bytes_a_device for row in self.rows if row.name in (SCALARS, KEY)
        )
        return max(
            0,
            (int(memory_bytes) - fixed)
            * self.parameters
            // (self.least_peak_bytes_a_device - fixed),
        )

    def _parts(self) -> Iterator[Table | str]:
        unit = unit_for([self.peak_bytes_a_device])
        parts = [
            (row.name, row.kind, " ".join(row.dtypes), row.bytes_a_device)
            for row in self.rows
        ]
        parts.append(("held", "", "", self.total_bytes_a_device))
        lines = [
            (*names, shown(count, unit), digits(count / self.parameters))
            for *names, count in parts
        ]
        yield Table(
            self.title(unit),
            [("part", "kind", "dtype", unit[0], "a param"), *lines],
            (3, 4),
        )
        if self.step:
            held, ends = self.total_bytes_a_device, {"peak, with held": self._most}
            if self._least.program != self._most.program:
                ends["least peak"] = self._least
            sums = {
                term: (held + end.least, held + end.most, "")
                for term, end in ends.items()
            }
            needs = (self._most.needs | sums).items()
            rows = [
                (term, shown(low, unit), shown(high, unit), why)
                for term, (low, high, why) in needs
            ]
            yield Table(
                f"Besides, with {self._most.program}",
                [("needs", "from", "to", "why"), *rows],
                (1, 2),
            )
            dtypes = ", ".join(
                next(row.dtypes for row in self.rows if row.kind == "gradients")
            )
            yield (
                f"The peak is that of {self.step}, gradients in"
                f" {dtypes}:\n{self.ends()}."
            )
        if self.devices > 1:
            gathered, summed = (
                digits(self.gathered_bytes_a_parameter),
                digits(self.summed_bytes_a_parameter),
            )
            yield (
                f"A step gathers {gathered} bytes a parameter, and adds up {summed} of"
                " gradients over devices."
            )

    def least_program(self) -> peaks.Program:
        """Return how the program is written that needs least."""
        return self._least.program

    def ends(self) -> str:
        """Name the program whose peak this is, or those with the least and the most."""
        least, most = self.least_program(), self._most.program
        return f"from {least},\nto {most}" if least != most else f"{most}"

    def title(self, unit: Unit) -> str:
        """Return the title of a table of bytes in some unit."""
        where = f" on each of {self.devices:,} devices" if self.devices > 1 else ""
        return f"Memory to train {self.parameters:,} parameters, in {unit[0]}{where}"


def memory_plan(
    model: Any,
    tx: optax.GradientTransformation,
    policy: Policy | str | None = None,
    *,
    gradient_dtype: DTypeLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str | None = "data",
    param_specs: Any = None,
    batch: int = 1,
    sequence: int = 4096,
    kept: Kept | None = None,
    attention: Attention | None = None,
    logits: Logits | None = None,
    checkpoint: bool | None = None,
    scan: bool | None = None,
    heads: int | None = None,
) -> MemoryPlan:
    """Count the bytes that a training run needs, from shapes alone: nothing is
    allocated, however large the model is.

    Parameters, gradients and optimizer state are counted to the byte, inside one jitted
    step, where a gradient has the narrower of its parameter's dtype and the policy's
    compute dtype, or on several devices the dtype of their sum. An array that stands in
    the tree twice counts twice, since `jax.jit` returns two.

    The peak is for a transformer with these weights, by formulas: from the program that
    needs least to the one that needs most, as far as `attention`, `logits`,
    `checkpoint` and `scan` leave it open. For a model of another kind read it off its
    program: `step_report`.

    Args:
        model: a function without arguments that makes the parameters, which is traced
            and not run; or a tree of them, or of their shapes (`jax.ShapeDtypeStruct`),
            whose other leaves do not count; or their number, which stands for one
            float32 vector, and at the peak for the layers of a Llama of this size. On a
            mesh its elements are rounded up to 256 for each device, so that 8-bit
            blocks are sharded too.
        tx: any Optax transformation or chain, with the wrappers of mpx in it but
            without `zero1`: see `axis`.
        policy: the policy for storing parameters and computing with them, or its
            string. None: unchanged.
        gradient_dtype: `"float32"` for gradients that leave the program, as
            `mpx.value_and_grad` returns them under `jax.jit`; or its `grad_dtype`, of
            all gradients that are not float64. None: those inside a step, as above.
        mesh: the devices, which need not exist (`jax.sharding.AbstractMesh`); None for
            a single device.
        axis: the axis of the mesh along which `zero1` shards the optimizer state. None:
            the state is sharded only like the parameters, along any axis.
        param_specs: how parameters and their gradients are sharded, as in `zero1`.
        batch: sequences of a device; 0 for what is held alone.
        sequence: tokens of a sequence.
        kept: as in `mpx.checkpoint`, `"bf16"` or `"8bit"`; None for `jax.checkpoint`.
        attention: `"xla"` if scores are arrays, `"kernel"` if attention is one, such as
            cuDNN's. None: either.
        logits: `"whole"`, or in `"parts"` whose logits are computed again in the
            backward pass. None: either.
        checkpoint: whether a layer keeps its input alone, by a checkpoint around it.
            None: either.
        scan: whether layers run in a `scan`; else they are unrolled. None: either.
        heads: of queries. None: as shapes tell, or of 64 to 128 numbers each.

    Returns:
        A `MemoryPlan`.

    Raises:
        TypeError: if `tx`, `policy` or `mesh` has another type.
        ValueError: if there are no floating-point parameters, a dtype is not
            floating-point, the mesh has no such axis, `param_specs` do not divide a
            parameter, `kept`, `attention` or `logits` is something else, `batch`,
            `sequence` or `heads` is no such count, or `heads` do not divide the width
            of a model.

    Example:
        >>> tx = mixed_precision(optax.adamw(1e-3), "bf16", storage="split")
        >>> print(
        ...     memory_plan(lambda: {"w": jnp.zeros((1024, 1024))}, tx, "bf16", batch=0)
        ... )
        Memory to train 1,048,576 parameters, in MB
        part                kind           dtype        MB  a param
        parameters          parameters     bfloat16  2.097    2.000
        gradients           gradients      bfloat16  2.097    2.000
        low bits            low bits       uint16    2.097    2.000
        mu                  first moment   float32   4.194    4.000
        nu                  second moment  float32   4.194    4.000
        counts and scalars  other state    int32     0.000    0.000
        held                                         14.68    14.00
        >>> plan = memory_plan(8_000_000_000, tx, "bf16")
        >>> plan.step
        'a transformer of 32 layers of width 4,096 on 1 x 4,096 tokens a device'
        >>> f"{plan.least_peak_bytes_a_device / 1e9:.1f} to {plan.peak_bytes_a_device / 1e9:.1f} GB"
        '103.3 to 251.3 GB'
    """
    tx = _errors.as_transformation(tx, "memory_plan")
    for name, given, least in (
        ("batch", batch, 0),
        ("sequence", sequence, 1),
        ("heads", heads, 1),
    ):
        if given is not None and not (_errors.is_integer(given) and given >= least):
            raise ValueError(
                f"`memory_plan`: `{name}` must be an integer of at least {least}, but"
                f" got {given!r}."
            )
    on, along, specs = _layout(mesh, axis, param_specs)
    arrays = _arrays_of(model, 1 if mesh is None else _BLOCK * on.size)
    # Shapes without their shardings, since the plan has a mesh of its own.
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.eval_shape(lambda tree: tree, arrays),
    )
    specs = parameter_specs(
        params if mesh is None else arrays, specs, on, along, "memory_plan"
    )
    policy = None if policy is None else as_policy(policy, "memory_plan")
    params = params if policy is None else policy.cast_to_param(params)
    trained, others = _trees.map_unzip(
        lambda p: (p, None) if jnp.issubdtype(p.dtype, jnp.inexact) else (None, p),
        params,
    )
    # The elements of a number of parameters were rounded up.
    count = (
        int(model)
        if _errors.is_integer(model)
        else sum(math.prod(p.shape) for p in jax.tree.leaves(trained))
    )
    if not count:
        raise ValueError(
            "`memory_plan`: there are no floating-point numbers in the model. It must"
            " be a tree of parameters or of their shapes, a function that makes one, or"
            " the number of parameters."
        )
    whole = jax.tree.map(lambda _, spec: NamedSharding(on, spec), params, specs)
    narrow = _gradients_of(trained, policy, None)
    summed = np.dtype(
        np.float32
        if policy is None or policy.reduce_dtype is None
        else policy.reduce_dtype
    )
    gradients = _gradients_of(
        trained, policy, gradient_dtype or (summed if policy and on.size > 1 else None)
    )
    state = jax.eval_shape(tx.init, params)
    shardings = zero1_shardings(params, state, on, along, param_specs=specs)
    weights = list(entries_of("parameters", trained, whole))
    entries = [
        *weights,
        *entries_of("not trained", others, whole),
        *entries_of("gradients", gradients, whole),
        *state_entries(state, shardings),
    ]
    sent = _sent(weights, entries_of("gradients", narrow, whole), policy, along)
    rows, needed, step = (
        rows_of(entries),
        (Peak(peaks.Program(True, True, True, True), 0, 0, {}),),
        "",
    )
    if batch:
        shapes = (
            peaks.shapes_of(count)
            if _errors.is_integer(model)
            else [p.shape for _, _, p, _ in weights]
        )
        is_gathered = along == _UNSHARDED and any(
            at.shard_shape(p.shape) != p.shape for _, _, p, at in weights
        )
        sizes = peaks.sizes_of(shapes, heads, is_guess=_errors.is_integer(model))
        devices = on.size if is_gathered else 1
        dtypes = {row.kind: row.dtypes for row in rows}
        # XLA may write what is stored in blocks, or in 24 bits, in float32 first.
        rounded = (
            8
            if "uint8" in dtypes.get("low bits", ())
            else 4 * ("scales of blocks" in dtypes)
        )
        largest = max(jax.tree.leaves(narrow), key=lambda p: math.prod(p.shape))
        update = rounded * max(map(math.prod, shapes)) // devices
        gradient = (
            sum(row.bytes_a_device for row in rows if row.kind == "gradients") / count
        )
        run = (
            batch * sequence,
            sequence,
            kept,
            largest.dtype.itemsize,
            summed.itemsize,
            gradient,
            devices,
            update,
        )
        written = peaks.programs(attention, logits, checkpoint, scan, kept)
        needed = tuple(
            peaks.peak_of(program, sizes, peaks.Run(*run)) for program in written
        )
        if sizes.layers:
            tokens = f"{batch:,} x {sequence:,} tokens a device"
            step = (
                f"a transformer of {sizes.layers:,} layers of width {sizes.width:,} on"
                f" {tokens}"
            )
    return MemoryPlan(rows, count, step, needed, on.size, *(n / count for n in sent))


def _layout(
    mesh: Any, axis: str | None, param_specs: Any
) -> tuple[Mesh | AbstractMesh, str, Any]:
    """Return the mesh, the axis that shards a state, and the specs; without an axis one
    of a single device is added.
    """
    if mesh is None and param_specs is not None:
        raise ValueError(
            "`memory_plan`: `param_specs` was given without a `mesh`, so it would do"
            " nothing."
        )
    if mesh is not None and axis is not None:
        require_axis(mesh, axis, "memory_plan")
        return mesh, axis, param_specs
    sizes = {**({} if mesh is None else mesh.shape), _UNSHARDED: 1}
    types = (AxisType.Auto,) * len(sizes)
    return (
        AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types),
        _UNSHARDED,
        param_specs,
    )


def evaluate(model: Any) -> Any:
    """Return the arrays of a model or their shapes, with None for all other leaves; a
    function is not run.
    """
    # Modules of Equinox and Flax NNX can be called too, but are trees.
    if callable(model) and jax.tree_util.treedef_is_leaf(jax.tree.structure(model)):
        return jax.eval_shape(lambda: jax.tree.map(_array_or_none, model()))
    return jax.tree.map(_array_or_none, model)


def _arrays_of(model: Any, multiple: int) -> Any:
    """Return the same; of a number of parameters, the shape of one array, rounded up to
    a multiple.
    """
    model = evaluate(model)
    if not isinstance(model, (int, float, np.number)):
        return model
    if not _errors.is_integer(model) or model < 1:
        raise ValueError(
            "`memory_plan`: a number of parameters must be an integer above 0, but got"
            f" {model!r}."
        )
    return {
        "parameters": jax.ShapeDtypeStruct(
            (-(-int(model) // multiple) * multiple,), np.float32
        )
    }


def _array_or_none(leaf: Any) -> Any:
    return (
        leaf
        if _trees.is_array(leaf) or isinstance(leaf, (bool, int, float, complex))
        else None
    )


def _sent(
    parameters: Iterable[Entry],
    narrow: Iterable[Entry],
    policy: Policy | None,
    axis: str,
) -> tuple[int, int]:
    """Return the bytes that all-gathers of a step write and that its sums of gradients
    read, on one device.

    With `zero1` these are the new parameters. Else they are the weights, which layers
    in checkpoints gather for either pass, along every axis that shards them, in the
    narrower of their own and the compute dtype. Sums are as `autocast` computes them.
    """
    gathered = summed = 0
    reduced = None if policy is None else policy.reduce_dtype
    for (_, _, p, sharding), (_, _, n, _) in zip(parameters, narrow, strict=True):
        mesh, whole, part = (
            sharding.mesh,
            math.prod(p.shape),
            math.prod(sharding.shard_shape(p.shape)),
        )
        if axis == _UNSHARDED:
            devices, is_gathered, size, dtype = mesh.size, part < whole, whole, n.dtype
        else:
            is_gathered = (
                sharded_spec(p.shape, sharding.spec, mesh, axis) != sharding.spec
            )
            devices, size, dtype = mesh.shape[axis], part, p.dtype
        if devices > 1:
            gathered += (
                is_gathered * bytes_of(dtype, size) * (2 if axis == _UNSHARDED else 1)
            )
            summed += bytes_of(
                np.dtype(reduced or _trees.promoted(p.dtype, np.float32)), size
            )
    return gathered, summed


def _gradients_of(trained: Any, policy: Policy | None, dtype: Any) -> Any:
    """Return the shapes of the gradients: in a dtype, or those inside one jitted
    step.
    """
    wide = _errors.floating_dtype(dtype, "`memory_plan`: `gradient_dtype`")
    if wide is not None:
        return _trees.cast_tree(trained, wide, which=lambda p: p.dtype.itemsize <= 4)
    computed = trained if policy is None else policy.cast_to_compute(trained)
    return jax.tree.map(
        lambda p, c: c if _trees.is_narrower(c, p.dtype) else p, trained, computed
    )
