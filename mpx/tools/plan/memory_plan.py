"""Bytes of a training before anything is allocated: parameters, gradients and each part of the optimizer state.

Nothing is run. The shapes of the parameters are those of `jax.eval_shape`, the shapes of the state those that the
transformation's own `init` gives for them, and what a device holds of each array is what `zero1_shardings` says. So the
bytes of a state are those of the real one, whatever the rule and its wrappers are.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from mpx import _errors, _tables, _trees
from mpx._dtypes import dtype_or_none
from mpx._parallel.placement import is_spec, parameter_specs, require_axis
from mpx._parallel.zero1 import zero1_shardings
from mpx._policy import Policy, as_policy
from mpx._stored.blockwise import Blockwise8bit
from mpx.tools.plan.capacity import checked_memory, largest_that_fits
from mpx.tools.plan.rows import (
    KEY,
    OUTSIDE_STATE,
    SCALARS,
    Kind,
    PlanRow,
    gradient_entries,
    param_entries,
    rows_of,
    state_entries,
)

_UNDIVIDED = "undivided"  # the axis, of one device, along which a state is cut that shall not be cut
_BLOCK = Blockwise8bit().block_size


@dataclasses.dataclass(frozen=True)
class MemoryPlan(_tables.OldTable):
    """What a training holds between two steps and its gradients; prints as a table, with `rich.print` too.

    Attributes:
        rows: the parts. Those of the optimizer state are one a field; counts, flags and other single numbers of all
            fields are one row together.
        parameters: how many numbers are trained.
        devices: of the mesh; 1 without one.

    Example:
        >>> plan = memory_plan(1_000_000, optax.sgd(0.1, momentum=0.9))
        >>> {row.name: row.bytes for row in plan.rows}, plan.total_bytes, plan.largest_model(1.2e9)
        ({'parameters': 4000000, 'gradients': 4000000, 'trace': 4000000}, 12000000, 100000000)
    """

    rows: tuple[PlanRow, ...]
    parameters: int
    devices: int = 1
    _plan_of: "Callable[[int], MemoryPlan] | None" = dataclasses.field(default=None, repr=False, compare=False)
    _texts: ClassVar[int] = 3

    @property
    def state_bytes(self) -> int:
        """Of the whole optimizer state: the sum of `nbytes` of the arrays that `tx.init(params)` makes."""
        return sum(row.bytes for row in self.rows if row.kind not in OUTSIDE_STATE)

    @property
    def state_bytes_a_device(self) -> int:
        """Of the optimizer state on one device."""
        return sum(row.bytes_a_device for row in self.rows if row.kind not in OUTSIDE_STATE)

    @property
    def total_bytes(self) -> int:
        """Of all rows."""
        return sum(row.bytes for row in self.rows)

    @property
    def total_bytes_a_device(self) -> int:
        """Of all rows on one device."""
        return sum(row.bytes_a_device for row in self.rows)

    @property
    def bytes_a_parameter(self) -> float:
        """Of all rows on one device, for each parameter of the whole model."""
        return self.total_bytes_a_device / self.parameters

    def bytes_of(self, kind: Kind) -> int:
        """Of all rows of a kind on one device; 0 if there are none."""
        if kind not in get_args(Kind):
            raise ValueError(f"`MemoryPlan.bytes_of`: `kind` must be one of {get_args(Kind)}, but got {kind!r}.")
        return sum(row.bytes_a_device for row in self.rows if row.kind == kind)

    def largest_model(self, memory_bytes: float) -> int:
        """How many parameters may be trained in this way on devices of so much memory, activations not counted.

        Where a number of parameters was planned, other numbers are planned the same way: the answer fits, and one more
        does not. Where a model was planned, it is the number at this model's own bytes a parameter: it is assumed that
        all of its parts grow in the same proportion, and its counts and keys not at all.

        Args:
            memory_bytes: of one device, such as `80e9`.

        Returns:
            The number; 0 if not even one fits.

        Raises:
            ValueError: if `memory_bytes` is not a number above 0.
        """
        memory_bytes = checked_memory(memory_bytes, "MemoryPlan.largest_model")
        fixed = sum(row.bytes_a_device for row in self.rows if row.name in (SCALARS, KEY))
        count = max(0, (memory_bytes - fixed) * self.parameters // (self.total_bytes_a_device - fixed))
        plan_of = self._plan_of
        if plan_of is None:
            return count
        return largest_that_fits(lambda n: plan_of(n).total_bytes_a_device, memory_bytes, start=max(1, count))

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        rows = [
            dataclasses.asdict(row)
            | {"dtypes": list(row.dtypes), "bytes_a_parameter": row.bytes_a_device / self.parameters}
            for row in self.rows
        ]
        names = ("state_bytes", "state_bytes_a_device", "total_bytes", "total_bytes_a_device", "bytes_a_parameter")
        numbers = {name: getattr(self, name) for name in names}
        return {"parameters": self.parameters, "devices": self.devices, "rows": rows} | numbers

    def _title_and_lines(self) -> tuple[str, list[tuple[str, ...]]]:
        lines = [("part", "kind", "dtype", "numbers", "bytes", "bytes a device", "a parameter")]
        for r in self.rows:
            lines.append(
                (r.name, r.kind, " ".join(r.dtypes), f"{r.elements:,}", *self._bytes(r.bytes, r.bytes_a_device))
            )
        lines.append(("total", "", "", "", *self._bytes(self.total_bytes, self.total_bytes_a_device)))
        if self.devices == 1:
            return f"{self.parameters:,} parameters", [(*line[:5], line[6]) for line in lines]
        return f"{self.parameters:,} parameters on {self.devices:,} devices", lines

    def _bytes(self, whole: int, a_device: int) -> tuple[str, str, str]:
        return f"{whole:,}", f"{a_device:,}", f"{a_device / self.parameters:.4g}"


def memory_plan(
    model: Any,
    tx: optax.GradientTransformation,
    policy: Policy | str | None = None,
    *,
    gradient_dtype: DTypeLike | None = "float32",
    gradient_copy: DTypeLike | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str | None = "data",
    param_specs: Any = None,
) -> MemoryPlan:
    """Counts what a training will hold, from shapes alone: no array is made, whatever the model's size.

    Counted are parameters, gradients and the optimizer state, to the byte. Not counted are activations and what else
    a step needs while it runs, for which see `step_memory`. An array that stands in the tree twice counts twice: after
    a step of `jax.jit` it is two.

    Args:
        model: a function without arguments that makes the parameters, which is traced and not run; or a tree of them,
            or of their shapes (`jax.ShapeDtypeStruct`), in which what is no array does not count; or their number. A
            number stands for one vector of float32 numbers. On a mesh it is rounded up to a multiple of 256 times the
            number of devices, so that all of it can be divided, 8-bit blocks too.
        tx: any Optax transformation or chain, with the wrappers of mpx in it. `zero1` is not needed: see `mesh`.
        policy: a `Policy` or the string of one, which says how parameters are stored. None: as they are.
        gradient_dtype: of the gradients: float32, as `mpx.value_and_grad` returns them (float64 ones stay so). None:
            each in the dtype of its parameter, as the backward pass delivers it.
        gradient_copy: the dtype of a second copy of those gradients that are narrower, divided as the optimizer state
            is. None: there is no copy.
        mesh: of the devices, or one without devices (`jax.sharding.AbstractMesh`); None for a single device.
        axis: the axis of the mesh among whose devices `zero1` divides the optimizer state. None: it is not divided,
            but lies as the parameters do; then these may be divided along any axis.
        param_specs: how the parameters are divided among the other axes, as in `zero1`. The gradients lie as
            they do, each device having its own before they are added up.

    Returns:
        A `MemoryPlan`.

    Raises:
        TypeError: if `tx` is not a transformation, `policy` no policy, `mesh` no mesh, or the number not an integer.
        ValueError: if there are no floating-point parameters; if a dtype is none of floating-point numbers, or
            `gradient_copy` would copy nothing; if the mesh has no such axis, or a parameter cannot be divided so.

    Example:
        >>> tx = mixed_precision(optax.adamw(1e-3), "bf16", storage="split")
        >>> plan = memory_plan(lambda: {"w": jnp.zeros((1024, 1024))}, tx, "bf16", gradient_dtype=None)
        >>> print(plan)
        1,048,576 parameters
        part                kind           dtype       numbers       bytes  a parameter
        parameters          parameters     bfloat16  1,048,576   2,097,152            2
        gradients           gradients      bfloat16  1,048,576   2,097,152            2
        low bits            low bits       uint16    1,048,576   2,097,152            2
        mu                  first moment   float32   1,048,576   4,194,304            4
        nu                  second moment  float32   1,048,576   4,194,304            4
        counts and scalars  other state    int32             1           4    3.815e-06
        total                                                   14,680,068           14
        >>> memory_plan(7_000_000_000, tx, "bf16").largest_model(80e9)
        4999999999

    References:
        Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv
        1910.02054), whose 16 bytes a parameter are float32 masters with `gradient_dtype=None`. With d devices along
        the axis, the table of Megatron-LM's distributed optimizer is 6 + 12/d for float32 gradients of bfloat16
        parameters, and 4 + 16/d for `gradient_dtype=None, gradient_copy="float32"`.
    """
    tx = _errors.as_transformation(tx, "memory_plan")
    policy = None if policy is None else as_policy(policy, "memory_plan")
    on, along, specs = _checked_layout(mesh, axis, param_specs)
    arrays = _arrays_of(model, 1 if mesh is None else _BLOCK * on.size)
    specs = parameter_specs(arrays, specs, on, along, "memory_plan")
    params = _shapes_of(arrays) if policy is None else policy.cast_to_param(_shapes_of(arrays))
    trained = jax.tree.map(lambda p: p if jnp.issubdtype(p.dtype, jnp.inexact) else None, params)
    count = _count(trained)
    _require_divisible(params, specs, on)
    gradients = _gradients_of(trained, gradient_dtype)
    copies = _copies_of(gradients, gradient_copy)
    state = jax.eval_shape(tx.init, params)
    divided = lambda tree: zero1_shardings(params, tree, on, along, param_specs=specs)
    of_params = jax.tree.map(lambda _, spec: NamedSharding(on, spec), params, specs)
    rows = rows_of(
        [
            *param_entries(params, of_params),
            *gradient_entries("gradients", gradients, of_params),
            *gradient_entries("copy of gradients", copies, divided(copies)),
            *state_entries(state, divided(state)),
        ]
    )

    def plan_of(number: int) -> MemoryPlan:
        return memory_plan(
            number,
            tx,
            policy,
            gradient_dtype=gradient_dtype,
            gradient_copy=gradient_copy,
            mesh=mesh,
            axis=axis,
            param_specs=param_specs,
        )

    return MemoryPlan(rows, count, on.size, plan_of if _errors.is_integer(model) else None)


# What is given.


def _checked_layout(
    mesh: Any, axis: str | None, param_specs: Any
) -> tuple[Mesh | AbstractMesh, str, PartitionSpec | Any]:
    """The mesh, the axis along which a state is divided, and the specs: those of one device if there is no mesh."""
    if mesh is None:
        if param_specs is not None:
            raise ValueError("`memory_plan`: `param_specs` was given without a `mesh`, so it would do nothing.")
        return AbstractMesh((1,), (_UNDIVIDED,), axis_types=(AxisType.Auto,)), _UNDIVIDED, PartitionSpec()
    if axis is not None or not isinstance(mesh, (Mesh, AbstractMesh)):
        require_axis(mesh, str(axis), "memory_plan")
        return mesh, str(axis), param_specs
    names = (*mesh.axis_names, _UNDIVIDED)
    return AbstractMesh((*mesh.axis_sizes, 1), names, axis_types=(AxisType.Auto,) * len(names)), _UNDIVIDED, param_specs


def _checked_dtype(given: Any, argument: str) -> np.dtype:
    dtype = dtype_or_none(given)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`memory_plan`: `{argument}` must be a floating-point dtype or None, but got {given!r}.")
    return dtype


def evaluated(model: Any) -> Any:
    """The shapes of what a function makes; anything else as it is."""
    # Modules of Equinox and Flax NNX can be called too, but are trees.
    is_function = callable(model) and jax.tree_util.treedef_is_leaf(jax.tree.structure(model))
    return _made_by(model) if is_function else model


def _arrays_of(model: Any, multiple: int) -> Any:
    """The arrays of a model, or their shapes, with None for all other leaves."""
    if isinstance(model, (int, float, np.number)):
        return {"parameters": jax.ShapeDtypeStruct((_rounded_up(model, multiple),), np.float32)}
    return jax.tree.map(_array_or_none, evaluated(model))


def _rounded_up(count: Any, multiple: int) -> int:
    if not _errors.is_integer(count):
        raise TypeError(f"`memory_plan`: a number of parameters must be an integer, but got {count!r}.")
    if count < 1:
        raise ValueError(f"`memory_plan`: a number of parameters must be above 0, but got {count}.")
    return -(-int(count) // multiple) * multiple


def _made_by(function: Callable[[], Any]) -> Any:
    """The shapes of what a function makes, in which there may be functions and strings, as in modules of Equinox."""
    structures = []

    def arrays():
        leaves, structure = jax.tree.flatten(function())
        structures.append(structure)
        return [_array_or_none(leaf) for leaf in leaves]

    shapes = jax.eval_shape(arrays)
    return structures[0].unflatten(shapes)


def _array_or_none(leaf: Any) -> Any:
    return leaf if _trees.is_array(leaf) or isinstance(leaf, (bool, int, float, complex)) else None


def _shapes_of(arrays: Any) -> Any:
    """The shapes of all arrays, without their shardings: all that is counted is where the plan's own mesh puts them."""
    shapes = jax.eval_shape(lambda tree: tree, arrays)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)


def _count(trained: Any) -> int:
    """How many numbers are trained; raises if there are none."""
    count = sum(math.prod(p.shape) for p in jax.tree.leaves(trained))
    if not count:
        raise ValueError(
            "`memory_plan`: there are no floating-point numbers in the model. It must be a tree of parameters or of "
            "their shapes, a function that makes one, or the number of parameters."
        )
    return count


def _require_divisible(params: Any, specs: Any, mesh: Mesh | AbstractMesh) -> None:
    """Raises, naming every such parameter, if a spec does not divide its shape."""
    wrong = []
    for (path, p), spec in zip(
        _trees.leaves_by_path(params).items(), jax.tree.leaves(specs, is_leaf=is_spec), strict=True
    ):
        try:
            NamedSharding(mesh, spec).shard_shape(p.shape)
        except ValueError:
            wrong.append(f"  {_trees.path_string(path)!r}: {_trees.dtype_and_shape(p)} as {spec}")
    if wrong:
        listed = "\n".join(wrong)
        raise ValueError(
            f"`memory_plan`: on the mesh {dict(mesh.shape)} these parameters cannot be divided as `param_specs` says:\n"
            f"{listed}\nAn axis of a parameter must be a multiple of the number of devices along it."
        )


# What is counted.


def _gradients_of(trained: Any, dtype: Any) -> Any:
    """Gradients as `mpx.value_and_grad` returns them."""
    if dtype is None:
        return trained
    return _trees.cast_tree(trained, _checked_dtype(dtype, "gradient_dtype"), which=lambda p: p.dtype.itemsize <= 4)


def _copies_of(gradients: Any, dtype: Any) -> Any:
    """Copies of the gradients that are narrower than a dtype; None for all others."""
    if dtype is None:
        return jax.tree.map(lambda g: None, gradients)
    wide = _checked_dtype(dtype, "gradient_copy")
    copies = jax.tree.map(lambda g: g.update(dtype=wide) if _trees.is_narrower(g, wide) else None, gradients)
    if not jax.tree.leaves(copies):
        raise ValueError(
            f"`memory_plan`: `gradient_copy` is {wide}, but all gradients are as wide already, so there would be no "
            "copy. Leave it out, or give `gradient_dtype=None` for gradients in the parameters' dtypes."
        )
    return copies
