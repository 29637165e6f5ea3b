"""`data_parallel`: compute on each device's shard of a batch, and reduce gradients once, in float32."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._parallel.placement import (
    REPLICATED,
    parameter_specs,
    reduce_scatter_mean,
    require_axis,
    shard_axes,
    sharded_spec,
)


def data_parallel(
    fun: Callable[..., tuple[Any, Any]],
    mesh: Mesh,
    axis: str = "data",
    *,
    batch_specs: Any = None,
    scatter: bool = False,
    param_specs: Any = None,
    reduce_dtype: DTypeLike | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """Compute losses and gradients on each device's shard of a batch, and average them once, in float32.

    Under plain `jax.jit`, gradients are summed over devices where they are computed: once for every microbatch and
    every use of a weight, and in the dtype of the product that computes them. Here each device computes alone, and one
    float32 reduction of each leaf follows after all microbatches.

    Args:
        fun: from parameters and batches to a value and gradients, such as `value_and_grad(loss_fn)` or a mean of that
            over microbatches. It sees a shard of each batch; what it closes over is replicated. (On a mesh of explicit
            axes JAX lets it close over no array: pass the loss scale as an argument with a spec of its own,
            `batch_specs=(PartitionSpec(), PartitionSpec(axis))`.)
        mesh: the devices.
        axis: the mesh axis along which batches are sharded. All other axes stay with `jax.jit`.
        batch_specs: the specs of all arguments after the parameters, as in `jax.shard_map`. None: each is sharded along
            its first axis.
        scatter: whether to shard gradients over the devices, as `zero1` wants them, by a reduce-scatter, which sends
            half as much. If not, each device gets all gradients.
        param_specs: as given to `zero1`: how parameters, and so their gradients, are sharded over the other axes.
        reduce_dtype: the dtype in which gradients are added up over devices, such as `policy.reduce_dtype`. None for
            float32, or float64 where gradients are; bfloat16 sends half as many bytes.

    Returns:
        A function of the same arguments, to call under `jax.jit`. It returns means over devices, in float32 or wider:
        of the value (the loss and auxiliary arrays, which must be floating) and of the gradients.

    Raises:
        TypeError: at the call, if a parameter is not an array, or the value has an array without a mean, one that is
            not floating.
        ValueError: if the mesh has no such axis, a spec uses it, or `reduce_dtype` is no floating-point dtype.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> loss_and_grads = value_and_grad(lambda w, x: jnp.mean(x * w))
        >>> x = jnp.arange(8.0)
        >>> jax.jit(data_parallel(loss_and_grads, mesh))(jnp.float32(2), x)
        (Array(7., dtype=float32), Array(3.5, dtype=float32))
    """
    require_axis(mesh, axis, "data_parallel")
    dtype = _errors.floating_dtype(reduce_dtype, "`data_parallel`: `reduce_dtype`")
    batch_specs = PartitionSpec(axis) if batch_specs is None else batch_specs
    is_tuple = isinstance(batch_specs, tuple)

    @functools.wraps(fun)
    def spread(params, *batches):
        _require_arrays(params)
        specs = parameter_specs(params, param_specs, mesh, axis, "data_parallel")
        axes = shard_axes(params, specs, mesh, axis) if scatter else jax.tree.map(lambda _: REPLICATED, params)
        along = lambda p, spec: sharded_spec(jnp.shape(p), spec, mesh, axis)
        of_grads = jax.tree.map(along, params, specs) if scatter else specs

        def on_one_device(params, *batches):
            value, grads = fun(params, *batches)
            _errors.require_same_shapes(grads, params, "data_parallel")
            value = jax.tree.map_with_path(lambda path, x: _mean_value(path, x, axis), value)
            return value, jax.tree.map(lambda g: g[None], grads)  # side by side with the gradients of the other devices

        everywhere = jax.shard_map(
            on_one_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), *(batch_specs if is_tuple else [batch_specs] * len(batches))),
            out_specs=(PartitionSpec(), PartitionSpec(axis)),
            axis_names={axis},
            check_vma=False,  # with it, JAX itself would add up gradients, in their own dtype and at each use
        )
        mean = functools.partial(reduce_scatter_mean, axis=axis, reduce_dtype=dtype)
        # Over all axes of the mesh, or gradients that are sharded along another axis would be gathered along it.
        reduced = jax.shard_map(
            lambda grads: jax.tree.map(lambda along, g: None if g is None else mean(g[0], along), axes, grads),
            mesh=mesh,
            in_specs=(jax.tree.map(lambda _, spec: PartitionSpec(axis, *spec), params, specs),),
            out_specs=of_grads,
            check_vma=False,
        )
        value, grads = everywhere(params, *batches)
        return value, reduced(grads)

    return spread


def _require_arrays(params: Any) -> None:
    """Raise if a model has leaves that are not arrays: devices get arrays only."""
    leaves = _trees.leaves_by_path(params)
    is_number = lambda leaf: _trees.is_array(leaf) or isinstance(leaf, (bool, int, float, complex))
    wrong = {path: _trees.dtype_and_shape(leaf) for path, leaf in leaves.items() if not is_number(leaf)}
    if wrong:
        what = "`data_parallel`: the parameters have leaves that are not arrays"
        remedy = "Pass the arrays alone, as of `eqx.partition(model, eqx.is_array)`, and put them together in `fun`."
        raise _errors.leaves_error(TypeError, what, wrong, remedy, params)


def _mean_value(path: _trees.Path, x: Any, axis: str) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f"`data_parallel`: the value at {_trees.path_string(path)!r} is {_trees.dtype_and_shape(x)}, which has "
            "no mean over devices. Return it as float32, or leave it out."
        )
    return lax.pmean(_trees.at_least_float32(x), axis)
