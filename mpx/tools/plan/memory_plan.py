"""Count the bytes of a training run before anything is allocated.

Nothing runs. `jax.eval_shape` gives the shapes of the parameters, and of the state that
the transformation's own `init` makes; `zero1_shardings` gives the part of each array
that one device holds. So a state has the bytes of the real one, for any optimizer and
any wrapper.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._parallel.placement import parameter_specs, require_axis
from mpx._parallel.zero1 import zero1_shardings
from mpx._policy import Policy, as_policy
from mpx._stored.blockwise import Blockwise8bit
from mpx._tables import Result, Table, Unit, digits, shown, unit_for
from mpx.tools.plan.rows import (
    OUTSIDE_STATE,
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
    """Hold the bytes that a training run keeps, without activations; prints as a
    table.
    """

    rows: tuple[PlanRow, ...]  # a field of the optimizer state each; scalars are one
    parameters: int  # the number of trained elements
    devices: int = 1  # of the mesh; 1 without a mesh

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

    def left(self, memory_bytes: float) -> int:
        """Return the bytes of a device's memory that are left for activations.

        Below 0 a step may run where XLA frees each gradient as soon as it is used.
        """
        return math.floor(memory_bytes) - self.total_bytes_a_device

    def is_too_large(self, memory_bytes: float) -> bool:
        """Return whether weights and state alone take more than so many bytes, so that
        no program of a step fits.
        """
        return self.left(memory_bytes) + self.bytes_of("gradients") < 0

    def bytes_of(self, kind: Kind) -> int:
        """Return the bytes of all rows of a kind on one device; 0 if there are none."""
        _errors.require_choice(get_args(Kind), kind, "`MemoryPlan.bytes_of`: `kind`")
        return sum(row.bytes_a_device for row in self.rows if row.kind == kind)

    def _parts(self) -> Iterator[Table | str]:
        unit = unit_for([self.total_bytes_a_device])
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
) -> MemoryPlan:
    """Count the bytes that a training run needs, from shapes alone: nothing is
    allocated, however large the model is.

    Parameters, gradients and optimizer state are counted to the byte, inside one jitted
    step, where a gradient has the narrower of its parameter's dtype and the policy's
    compute dtype, or on several devices the dtype of their sum. An array that stands in
    the tree twice counts twice, since `jax.jit` returns two.

    What is left of a memory is for activations. How much of it a step needs is a
    property of its program: `step_report`.

    Args:
        model: a function without arguments that makes the parameters, which is traced
            and not run; or a tree of them, or of their shapes (`jax.ShapeDtypeStruct`),
            whose other leaves do not count; or their number, which stands for one
            float32 vector. On a mesh its elements are rounded up to 256 for each
            device, so that 8-bit blocks are sharded too.
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

    Returns:
        A `MemoryPlan`.

    Raises:
        TypeError: if `tx`, `policy` or `mesh` has another type.
        ValueError: if there are no floating-point parameters, a dtype is not
            floating-point, the mesh has no such axis, or `param_specs` do not divide a
            parameter.

    Example:
        >>> tx = mixed_precision(optax.adamw(1e-3), "bf16", storage="split")
        >>> print(memory_plan(lambda: {"w": jnp.zeros((1024, 1024))}, tx, "bf16"))
        Memory to train 1,048,576 parameters, in MB
        part                kind           dtype        MB  a param
        parameters          parameters     bfloat16  2.097    2.000
        gradients           gradients      bfloat16  2.097    2.000
        low bits            low bits       uint16    2.097    2.000
        mu                  first moment   float32   4.194    4.000
        nu                  second moment  float32   4.194    4.000
        counts and scalars  other state    int32     0.000    0.000
        held                                         14.68    14.00
        >>> plan = memory_plan(4_000_000_000, tx, "bf16")
        >>> f"{plan.left(60e9) / 1e9:.1f} GB are left for activations"
        '4.0 GB are left for activations'
    """
    tx = _errors.as_transformation(tx, "memory_plan")
    on, along = _layout(mesh, axis, param_specs)
    arrays = _arrays_of(model, 1 if mesh is None else _BLOCK * on.size)
    # Shapes without their shardings, since the plan has a mesh of its own.
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.eval_shape(lambda tree: tree, arrays),
    )
    specs = parameter_specs(
        params if mesh is None else arrays, param_specs, on, along, "memory_plan"
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
    summed = np.dtype((policy and policy.reduce_dtype) or np.float32)
    gradients = _gradients_of(
        trained, policy, gradient_dtype or (summed if policy and on.size > 1 else None)
    )
    state = jax.eval_shape(tx.init, params)
    shardings = zero1_shardings(params, state, on, along, param_specs=specs)
    rows = rows_of(
        [
            *entries_of("parameters", trained, whole),
            *entries_of("not trained", others, whole),
            *entries_of("gradients", gradients, whole),
            *state_entries(state, shardings),
        ]
    )
    return MemoryPlan(rows, count, on.size)


def _layout(
    mesh: Any, axis: str | None, param_specs: Any
) -> tuple[Mesh | AbstractMesh, str]:
    """Return the mesh, and the axis that shards a state; without an axis one of a
    single device is added.
    """
    if mesh is None and param_specs is not None:
        raise ValueError(
            "`memory_plan`: `param_specs` was given without a `mesh`, so it would do"
            " nothing."
        )
    if mesh is not None and axis is not None:
        require_axis(mesh, axis, "memory_plan")
        return mesh, axis
    sizes = dict({} if mesh is None else mesh.shape) | {_UNSHARDED: 1}
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=types
    ), _UNSHARDED


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
