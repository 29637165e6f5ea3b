"""ZeRO-1: the optimizer state is divided among the devices that hold the same parameters; and what they add up.

Where an array is cut: along the first of its axes whose part on each device the number of devices divides. An array
without such an axis stays whole; so do scalars. Shapes are those of a state that is not divided, for any number of
devices: what was saved on eight is restored on three.
"""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mpx import _checks, _trees
from mpx._elementwise import mixing_equation
from mpx._transforms.low_precision_state import LowPrecisionState
from mpx._writeback import MARK, SENT, landed, landing_update

T = TypeVar("T")

_F32 = np.dtype(np.float32)


def zero1(
    inner: optax.GradientTransformation, mesh: Mesh, axis: str = "data", *, param_specs: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Divides the state of any rule, and the work of its update, among the devices of a data-parallel axis.

    Parameters stay as they are: every device along the axis has them all. Of masters, low bits, moments, codes and
    compensations each device keeps a part, updates that part with its part of the gradients, and what is sent to the
    others are the new parameters: 2 bytes for each bfloat16 one, not the 4 of a float32 update. The state is that of
    `inner`, in the same shapes, so that checkpoints fit with and without `zero1` and on any number of devices; only
    where it lies differs.

    An array is cut along its first axis that the number of devices divides (what there is of it on each device, if
    `param_specs` divides it already). One without such an axis, and every scalar, is whole on every device.

    Under `jax.jit` (and eagerly) any rule works, those that clip by a global norm or divide by the norm of a layer too:
    XLA sees whole arrays. Gradients may come in any sharding; those of `data_parallel(..., scatter=True)` arrive
    divided already, by one reduce-scatter in float32.

    Inside `jax.shard_map` over the axis each device gives its own gradients, for its part of the batch. They are
    averaged over the axis in float32, by a reduce-scatter. Rules inside must then treat each number by itself, as
    Adam, momentum and decay do, since they see a part of each array: others are refused. `loss_scaling` inside needs
    `axis_name=axis`; states in `Blockwise8bit` need rows of whole blocks; stochastic rounding draws the same noise on
    all devices. Specs for the state are those of `zero1_shardings`.

    Args:
        inner: any Optax transformation or chain, with the wrappers of mpx in it: this is the outermost.
        mesh: of the devices.
        axis: its axis along which parameters are equal and batches differ.
        param_specs: how the parameters themselves are sharded over the other axes (tensor parallelism): a
            `jax.sharding.PartitionSpec` for all, or a tree of them, of which a prefix is enough. None: as their types
            say on a mesh of explicit axes, else not at all.

    Returns:
        A transformation with the state of `inner`.

    Raises:
        TypeError: if `inner` is not a transformation.
        ValueError: if the mesh has no such axis or a spec uses it; at `init`, if a parameter is sharded otherwise than
            `param_specs` says; inside `jax.shard_map`, if the rule mixes numbers of an array, or the state is not
            divided as `zero1_shardings` says.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> tx = zero1(master_weights(optax.adam(1e-3), storage="split"), mesh)
        >>> params = {"w": jnp.ones((48, 16), jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> print(*state.master["w"].sharding.spec)
        data

    References:
        Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv
        1910.02054), stage 1; Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel
        Training" (arXiv 2004.13336).
    """
    inner = _checks.as_transformation(inner, "zero1")
    _require_axis(mesh, axis, "zero1")

    def init_fn(params):
        specs = _parameter_specs(params, param_specs, mesh, axis, "zero1")
        if _is_manual(axis):
            cuts = _cuts(params, specs, mesh, axis)
            return inner.init(jax.tree.map(lambda p, cut: _part(p, cut, axis), params, cuts))
        _require_placed_as_said(params, specs)
        divided = zero1_shardings(params, jax.eval_shape(inner.init, params), mesh, axis, param_specs=specs)
        of_parts = _cut_shardings(params, specs, mesh, axis)
        # In one program, so that no device ever holds all of a state.
        start = _in_auto(lambda params: _placed(inner.init(_placed(params, of_parts)), divided), mesh, divided)
        if not any(isinstance(p, Tracer) for p in jax.tree.leaves(params)):
            params = jax.device_put(params, _shardings(params, specs, mesh))
        return jax.jit(start, keep_unused=True)(params)  # unused ones too tell on which devices it runs

    def update_fn(updates, state, params=None, **extra_args):
        _checks.require_params(params, "zero1")
        _checks.require_same_shapes(updates, params, "zero1")
        specs = _parameter_specs(params, param_specs, mesh, axis, "zero1")
        if _is_manual(axis):
            _require_parts(inner, state, params, specs, mesh, axis)
            _require_whole_blocks(state)
            return _update_of_parts(inner, updates, state, params, extra_args, _cuts(params, specs, mesh, axis), axis)
        divided = zero1_shardings(params, state, mesh, axis, param_specs=specs)
        of_parts = _cut_shardings(params, specs, mesh, axis)
        of_params = _shardings(params, specs, mesh)

        def update(updates, state, params, extra_args):
            parts, grads = _placed(params, of_parts), _placed(updates, of_parts)
            updates, state = inner.update(grads, _placed(state, divided), parts, **extra_args)
            # Placed twice: else XLA would be free to send what they are computed from.
            sent = _placed(_placed(jax.tree.map(_to_send, parts, updates), of_parts), of_params)
            return jax.tree.map(_from_sent, params, sent), _placed(state, divided)

        return _in_auto(update, mesh, (of_params, divided))(updates, state, params, extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def zero1_shardings(params: Any, opt_state: T, mesh: Mesh, axis: str = "data", *, param_specs: Any = None) -> T:
    """Where `zero1` keeps each array of an optimizer state: to restore one, or as the `out_shardings` of a step.

    An array of the state that belongs to a parameter, by its path and shape, is cut as the parameter would be, and so
    are the scales of its 8-bit blocks if each device has whole ones. Others, such as the rows and columns of Adafactor,
    are cut along their own first axis that the number of devices divides.

    Args:
        params: the parameters, or their shapes.
        opt_state: the state, or its shapes (`jax.eval_shape(tx.init, params)`).
        mesh: as given to `zero1`.
        axis: likewise.
        param_specs: likewise.

    Returns:
        A tree like `opt_state` of `jax.sharding.NamedSharding`s.

    Raises:
        ValueError: if the mesh has no such axis, or a spec uses it.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> params = {"w": jax.ShapeDtypeStruct((48, 16), jnp.bfloat16)}
        >>> state = jax.eval_shape(optax.adam(1e-3).init, params)
        >>> shardings = zero1_shardings(params, state, mesh)
        >>> print(*optax.tree.get(shardings, "mu")["w"].spec)
        data
    """
    _require_axis(mesh, axis, "zero1_shardings")
    specs = _parameter_specs(params, param_specs, mesh, axis, "zero1_shardings")
    own = _trees.leaves_by_path(jax.tree.map(lambda p, spec: (np.shape(p), spec), params, specs), _is_shape_and_spec)

    def place(path, leaf):
        shape = np.shape(leaf)
        candidates = (own.get(path[start:], (None, None)) for start in range(len(path) + 1))
        spec = next((spec for p_shape, spec in candidates if p_shape == shape), PartitionSpec())
        return NamedSharding(mesh, _cut_spec(shape, spec, mesh, axis))

    return _with_scales_beside_codes(opt_state, jax.tree.map_with_path(place, opt_state))


def data_parallel(
    fun: Callable[..., tuple[Any, Any]],
    mesh: Mesh,
    axis: str = "data",
    *,
    batch_specs: Any = None,
    scatter: bool = False,
    param_specs: Any = None,
) -> Callable[..., tuple[Any, Any]]:
    """Computes losses and gradients on each device's part of a batch, and averages them once, in float32.

    Left to `jax.jit`, the gradients of all devices are added up where they are computed: in bfloat16 if a product
    comes out in it, and once for every microbatch and every use of a weight. Sums over thousands of devices lose bits
    in bfloat16, and overflow in float16. Here each device computes alone, and what it has is added up at the end, in
    float32 whatever its dtype: one reduction for each leaf, after all microbatches.

    Args:
        fun: from parameters and batches to a value and gradients (trees like the parameters), such as
            `value_and_grad(loss_fn)` or a mean of that over microbatches. It sees a part of each batch; what it closes
            over is the same everywhere.
        mesh: of the devices.
        axis: its axis among whose devices batches are divided. All others stay with `jax.jit`: tensor parallelism
            works as without.
        batch_specs: of all arguments after the parameters, as in `jax.shard_map`; `PartitionSpec(axis)` if None: along
            their first axis.
        scatter: whether gradients are to be divided among the devices, as `zero1` wants them: by a reduce-scatter,
            which sends half as much. If not, each device gets all of them.
        param_specs: as given to `zero1`; it says along which axis a gradient is not to be cut.

    Returns:
        A function of the same arguments. Its value is the mean over devices (of floating arrays; loss and auxiliary
        ones), in float32 or wider, and so are its gradients. It is to be called under `jax.jit`.

    Raises:
        TypeError: at the call, if the value has an array that is not floating, of which there is no mean.
        ValueError: if the mesh has no such axis, or a spec uses it.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> loss_and_grads = value_and_grad(lambda w, x: jnp.mean(x * w))
        >>> x = jnp.arange(8.0)
        >>> jax.jit(data_parallel(loss_and_grads, mesh))(jnp.float32(2), x)
        (Array(7., dtype=float32), Array(3.5, dtype=float32))
    """
    _require_axis(mesh, axis, "data_parallel")
    batch_specs = PartitionSpec(axis) if batch_specs is None else batch_specs

    @functools.wraps(fun)
    def spread(params, *batches):
        specs = _parameter_specs(params, param_specs, mesh, axis, "data_parallel")
        cuts = _cuts(params, specs, mesh, axis) if scatter else jax.tree.map(lambda _: _WHOLE, params)

        def on_one_device(params, *batches):
            value, grads = fun(params, *batches)
            value = jax.tree.map_with_path(lambda path, x: _mean_value(path, x, axis), value)
            return value, jax.tree.map(lambda g, cut: _reduced(g, cut, axis), grads, cuts)

        of_grads = jax.tree.map(lambda cut: PartitionSpec(*[None] * cut, axis) if cut >= 0 else PartitionSpec(), cuts)
        return jax.shard_map(
            on_one_device,
            mesh=mesh,
            in_specs=(
                PartitionSpec(),
                *(batch_specs if isinstance(batch_specs, tuple) else [batch_specs] * len(batches)),
            ),
            out_specs=(PartitionSpec(), of_grads),
            axis_names={axis},
            check_vma=False,  # with it, JAX itself would add up gradients, in their own dtype and at each use
        )(params, *batches)

    return spread


# What is sent.


def _to_send(p: jax.Array, update: jax.Array) -> jax.Array:
    """Of a parameter and its update, what the other devices need: the bits of a new 16-bit parameter, or the update.

    As integers, because XLA would otherwise move the conversion to float32 before the transfer.
    """
    if not _trees.is_narrower(p, _F32):
        return update
    update = checkpoint_name(update, MARK + SENT)
    return lax.bitcast_convert_type(landed(p, update.astype(np.float32)).astype(p.dtype), np.uint16)


def _from_sent(p: jax.Array, sent: jax.Array) -> jax.Array:
    """The update that makes a parameter what was sent."""
    if sent.dtype != np.uint16:
        return sent
    return landing_update(p, lax.bitcast_convert_type(sent, p.dtype).astype(np.float32), "zero1")


# Inside `jax.shard_map`.


def _update_of_parts(
    inner: optax.GradientTransformationExtraArgs,
    updates: Any,
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
    cuts: Any,
    axis: str,
) -> tuple[Any, Any]:
    grads = jax.tree.map(lambda g, cut: _reduced(g, cut, axis), updates, cuts)
    parts = jax.tree.map(lambda p, cut: _part(p, cut, axis), params, cuts)
    _require_elementwise(inner, grads, state, parts, extra_args)
    updates, state = inner.update(grads, state, parts, **extra_args)
    gather = lambda x, cut: x if cut == _WHOLE else lax.all_gather(x, axis, axis=cut, tiled=True, to="invarying")
    sent = jax.tree.map(_to_send, parts, updates)
    return jax.tree.map(_from_sent, params, jax.tree.map(gather, sent, cuts)), state


def _reduced(g: jax.Array, cut: int, axis: str) -> jax.Array:
    """This device's part of the mean gradient, summed in float32."""
    wide = g.astype(_trees.promoted(g.dtype, np.float32))
    if _is_equal_everywhere(g, axis):
        return _part(wide, cut, axis)
    if cut == _WHOLE:
        return lax.pmean(wide, axis)
    total = lax.psum_scatter(wide, axis, scatter_dimension=cut, tiled=True)
    return total / total.dtype.type(lax.axis_size(axis))


def _is_equal_everywhere(x: jax.Array, axis: str) -> bool:
    """Whether the types say that all devices along an axis have the same; they do only under `check_vma`."""
    varies = lambda x: axis in jax.typeof(x).manual_axis_type.varying
    return varies(lax.axis_index(axis)) and not varies(x)


def _part(x: jax.Array, cut: int, axis: str) -> jax.Array:
    """This device's part of an array that it has whole."""
    if cut == _WHOLE:
        return x
    size = x.shape[cut] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, cut)


def _mean_value(path: _trees.Path, x: Any, axis: str) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f"`data_parallel`: the value at {_trees.path_string(path)!r} is {_trees.dtype_and_shape(x)}, of which "
            "there is no mean over devices. Return it as float32, or leave it out."
        )
    return lax.pmean(x.astype(_trees.promoted(x.dtype, np.float32)), axis)


def _require_elementwise(inner: Any, grads: Any, state: Any, parts: Any, extra_args: dict[str, Any]) -> None:
    """Raises if the rule has a result that depends on more of an array than one number."""
    update = lambda grads, state, parts: inner.update(grads, state, parts, **extra_args)
    program = jax.make_jaxpr(update)(grads, state, parts)
    mixing = mixing_equation(program, [np.ndim(leaf) > 0 for leaf in jax.tree.leaves((grads, state, parts))])
    if mixing is not None:
        raise ValueError(
            "`zero1`: inside `jax.shard_map` a rule sees a part of each array, but this one has a result that depends "
            f"on whole arrays (through {mixing.primitive.name!r}), such as a norm for clipping. Call `update` under "
            "`jax.jit`, outside of `jax.shard_map`, with the gradients of `mpx.data_parallel(..., scatter=True)`. "
            "(`loss_scaling` works here if it has `axis_name`.)"
        )


def _require_parts(inner: Any, state: Any, params: Any, specs: Any, mesh: Mesh, axis: str) -> None:
    """Raises unless a state consists of the parts of the one for whole parameters, as `zero1_shardings` cuts it."""
    shapes = lambda tree: jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), tree)
    whole = jax.eval_shape(inner.init, shapes(params))
    shardings = jax.tree.leaves(zero1_shardings(params, whole, mesh, axis, param_specs=specs))
    got = _trees.leaves_by_path(state)
    for (path, leaf), sharding in zip(_trees.leaves_by_path(whole).items(), shardings, strict=True):
        wanted = jax.ShapeDtypeStruct(_shape_of_part(leaf.shape, sharding.spec, mesh, axis), leaf.dtype)
        if path not in got or _trees.dtype_and_shape(got[path]) != _trees.dtype_and_shape(wanted):
            raise ValueError(
                f"`zero1`: inside `jax.shard_map` the state at {_trees.path_string(path)!r} should be "
                f"{_trees.dtype_and_shape(wanted)} on each device, but it is {_trees.dtype_and_shape(got.get(path))}. "
                "Make it outside, with `init`, and give `jax.shard_map` the specs of `mpx.zero1_shardings`."
            )


def _require_whole_blocks(state: Any) -> None:
    """Raises if 8-bit blocks may reach beyond a device's part, so that parts have other codes than the whole has."""
    for stored in _trees.find_states(state, LowPrecisionState):
        codes = jax.tree.leaves(stored.inner_state)
        for name, scale in stored.block_scales.items():
            code = codes[int(name.partition(".")[0])]
            if code.ndim < 2 or scale.ndim != code.ndim:
                raise ValueError(
                    "`zero1`: inside `jax.shard_map` states in 8 bits need rows that consist of whole blocks, but one "
                    f"of shape {list(code.shape)} has {list(scale.shape)} blocks. Choose a `block_size` that divides "
                    "the last axis, a larger `min_size`, or call `update` under `jax.jit`, outside of `jax.shard_map`."
                )


# Where arrays lie.

_WHOLE = -1  # instead of the axis along which an array is cut


def _is_manual(axis: str) -> bool:
    """Whether this is inside a `jax.shard_map` over an axis."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes


def _cut_of(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh, axis: str) -> int:
    """The axis along which an array of a sharding of its own is cut, or `_WHOLE`."""
    for i, size in enumerate(shape):
        parts = math.prod(mesh.shape[name] for name in _names(spec, i))
        if size and size % (parts * mesh.shape[axis]) == 0:
            return i
    return _WHOLE


def _cut_spec(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh, axis: str) -> PartitionSpec:
    """The sharding of an array after the cut; what it was divided among before comes first."""
    cut = _cut_of(shape, spec, mesh, axis)
    if cut == _WHOLE:
        return spec
    entries = list(spec) + [None] * (cut + 1 - len(spec))
    names = (*_names(spec, cut), axis)
    entries[cut] = names if len(names) > 1 else axis
    return PartitionSpec(*entries)


def _names(spec: PartitionSpec, i: int) -> tuple[str, ...]:
    """The axes of the mesh among which an axis of an array is divided."""
    entry = spec[i] if i < len(spec) else None
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _with_scales_beside_codes(opt_state: Any, shardings: T) -> T:
    """The shardings of a state, with the scales of rows of whole 8-bit blocks divided as the rows are."""

    def beside(state, placed):
        if not isinstance(state, LowPrecisionState):
            return placed
        codes, of_codes = jax.tree.leaves(state.inner_state), jax.tree.leaves(placed.inner_state)
        of_scales = dict(placed.block_scales)
        for name, scale in state.block_scales.items():
            i = int(name.partition(".")[0])
            if np.shape(scale)[:-1] == np.shape(codes[i])[:-1] and _divides(of_codes[i], np.shape(scale)):
                of_scales[name] = of_codes[i]
        return placed._replace(block_scales=of_scales)

    return jax.tree.map(beside, opt_state, shardings, is_leaf=lambda x: isinstance(x, LowPrecisionState))


def _divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Whether all devices have as much of an array of some shape."""
    parts = (math.prod(sharding.mesh.shape[name] for name in _names(sharding.spec, i)) for i in range(len(shape)))
    return all(size % count == 0 for size, count in zip(shape, parts, strict=True))


def _shape_of_part(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh, axis: str) -> tuple[int, ...]:
    """Of an array of which the other axes of the mesh have been divided already."""
    parts = [mesh.shape[axis] if axis in _names(spec, i) else 1 for i in range(len(shape))]
    return tuple([size // count for size, count in zip(shape, parts, strict=True)])


def _cuts(params: Any, specs: Any, mesh: Mesh, axis: str) -> Any:
    return jax.tree.map(lambda p, spec: _cut_of(np.shape(p), spec, mesh, axis), params, specs)


def _cut_shardings(params: Any, specs: Any, mesh: Mesh, axis: str) -> Any:
    return jax.tree.map(lambda p, spec: NamedSharding(mesh, _cut_spec(np.shape(p), spec, mesh, axis)), params, specs)


def _shardings(params: Any, specs: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda _, spec: NamedSharding(mesh, spec), params, specs)


def _placed(tree: T, shardings: Any) -> T:
    now = jax.sharding.get_abstract_mesh()

    def place(x, sharding):
        return lax.with_sharding_constraint(x, sharding if now.empty else NamedSharding(now, sharding.spec))

    return jax.tree.map(place, tree, shardings)


def _in_auto(function: Callable[..., Any], mesh: Mesh, out_shardings: Any) -> Callable[..., Any]:
    """The function with XLA in charge of the placement in it, on a mesh of explicit axes too."""
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if not explicit:
        return function
    return jax.sharding.auto_axes(function, axes=tuple(explicit), out_sharding=out_shardings)


def _spec_of_type(p: Any) -> PartitionSpec:
    """How a parameter is sharded over the explicit axes of its mesh, which its type knows."""
    sharding = jax.typeof(p).sharding if _trees.is_array(p) and not isinstance(p, jax.ShapeDtypeStruct) else None
    entries = () if sharding is None else tuple(sharding.spec)
    while entries and entries[-1] is None:  # (a sharding of the same meaning but another name compiles a step again)
        entries = entries[:-1]
    return PartitionSpec(*entries)


def _require_placed_as_said(params: Any, specs: Any) -> None:
    """Raises for concrete parameters of another sharding than the one that updates will be told of."""
    for (path, p), spec in zip(
        _trees.leaves_by_path(params).items(), jax.tree.leaves(specs, is_leaf=_is_spec), strict=True
    ):
        if isinstance(p, Tracer) or not isinstance(p, jax.Array) or not isinstance(p.sharding, NamedSharding):
            continue
        if not NamedSharding(p.sharding.mesh, spec).is_equivalent_to(p.sharding, p.ndim):
            raise ValueError(
                f"`zero1`: the parameter {_trees.path_string(path)!r} is sharded as {p.sharding.spec}, but "
                f"`param_specs` says {spec}. Give its own, as in `jax.tree.map(lambda p: p.sharding.spec, params)`."
            )


def _parameter_specs(params: Any, given: Any, mesh: Mesh, axis: str, caller: str) -> Any:
    """A tree like the parameters of the specs of their own sharding."""
    if given is None:
        return jax.tree.map(_spec_of_type, params)
    specs = jax.tree.map(lambda spec, subtree: jax.tree.map(lambda _: spec, subtree), given, params, is_leaf=_is_spec)
    for path, spec in _trees.leaves_by_path(specs, _is_spec).items():
        used = [name for i in range(len(spec)) for name in _names(spec, i)]
        if axis in used or not set(used) <= set(mesh.axis_names):
            raise ValueError(
                f"`{caller}`: `param_specs` has {spec} for the parameter {_trees.path_string(path)!r}, but it may name "
                f"axes of the mesh {mesh.axis_names} other than {axis!r}, over which parameters are equal."
            )
    manual = jax.sharding.get_abstract_mesh().manual_axes  # shapes are those of parts along them
    return jax.tree.map(lambda spec: _without(spec, manual), specs, is_leaf=_is_spec) if manual else specs


def _without(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    return PartitionSpec(
        *(tuple(name for name in _names(spec, i) if name not in axes) or None for i in range(len(spec)))
    )


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _is_shape_and_spec(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and _is_spec(x[1])


def _require_axis(mesh: Any, axis: str, caller: str) -> None:
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"`{caller}`: `mesh` must be a jax.sharding.Mesh, but got {type(mesh).__name__}.")
    if axis not in mesh.axis_names:
        raise ValueError(f"`{caller}`: the mesh has the axes {mesh.axis_names}, and none is called {axis!r}.")
