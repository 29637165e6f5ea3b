"""`zero1`: shard the optimizer state over the devices that hold the same parameters."""

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mpx import _errors, _flax, _trees
from mpx._chain import element
from mpx._parallel.placement import (
    parameter_specs,
    place,
    require_axis,
    sharded_spec,
    shardings_along,
    shardings_of,
)
from mpx._policy import policy_of, with_policy
from mpx._shardings import as_in_auto, in_auto, names_at, part_sharding
from mpx._stored.leaves import is_state
from mpx._stored.state_format import StoredLeaf, is_stored
from mpx._writeback import MARK, SENT, applied_bits, landing_update

T = TypeVar("T")


@element
def zero1(
    inner: optax.GradientTransformation,
    mesh: Mesh,
    axis: str = "data",
    *,
    param_specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Shard the state of any rule, and the work of its update, over the devices of a
    data-parallel axis.

    Parameters stay replicated along the axis, and the state is sharded. Each device
    updates its shard with its shard of the gradients, and sends the new parameters to
    the others: 2 bytes for each bfloat16 parameter, not the 4 of a float32 update. The
    state is `inner`'s own, in the same shapes: a checkpoint of eight devices can be
    restored on three, or without `zero1`. An array is sharded along its first axis
    whose size (on each device, if `param_specs` shards it already) is a multiple of the
    number of devices; without such an axis it is replicated.

    Any rule works, also one that clips by a global norm, and gradients may have any
    sharding: XLA sees whole arrays. So call it under `jax.jit` or eagerly, not inside
    `jax.shard_map`.

    Args:
        inner: any Optax transformation or chain, with the wrappers of mpx in it: this
            is the outermost. Without it this is an element of `chain`.
        mesh: the devices.
        axis: the axis of the mesh along which parameters are equal and batches differ.
        param_specs: how the parameters themselves are sharded over the other axes
            (tensor parallelism): one `jax.sharding.PartitionSpec` for all, or a tree of
            specs, which may be a prefix of the parameters' tree. None: as their types
            say on a mesh of explicit axes, else not at all.

    Returns:
        A transformation with the state of `inner`.

    Raises:
        ValueError: if the mesh has no such axis or a spec uses it; at `init`, if a
            parameter is sharded otherwise than `param_specs` says; inside
            `jax.shard_map`.

    Example:
        >>> mesh = jax.make_mesh(
        ...     (jax.device_count(),),
        ...     ("data",),
        ...     axis_types=(jax.sharding.AxisType.Auto,),
        ... )
        >>> tx = zero1(master_weights(optax.adam(1e-3), storage="split"), mesh)
        >>> params = {"w": jnp.ones((48, 16), jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> print(*state.master["w"].sharding.spec)
        data

    References:
        Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
            Parameter Models" (arXiv
        1910.02054), stage 1; Xu et al. 2020 (arXiv 2004.13336).
    """
    inner = _errors.as_transformation(inner, "zero1")
    require_axis(mesh, axis, "zero1")

    def init_fn(params):
        _require_whole_arrays()
        specs = parameter_specs(params, param_specs, mesh, axis, "zero1")
        _require_placed_as_said(params, specs)
        # As `start` is traced, or blocks would have other sizes.
        with as_in_auto(params):
            whole = jax.eval_shape(inner.init, _trees.shapes_of(params))
        divided = zero1_shardings(params, whole, mesh, axis, param_specs=specs)
        sharded = shardings_along(params, specs, mesh, axis)
        # In one program, so that no device ever holds all of a state.
        start = in_auto(
            lambda params: place(inner.init(place(params, sharded)), divided),
            mesh,
            divided,
        )
        if not any(isinstance(p, Tracer) for p in jax.tree.leaves(params)):
            params = jax.device_put(params, shardings_of(specs, mesh))
        # Unused ones too tell on which devices it runs.
        return jax.jit(start, keep_unused=True)(params)

    def update_fn(updates, state, params=None, **extra_args):
        # The state is any rule's.
        _errors.require_step("zero1", object, state, params, updates)
        _require_whole_arrays()
        params = _errors.trained(params, updates)
        specs = parameter_specs(params, param_specs, mesh, axis, "zero1")
        divided = zero1_shardings(params, state, mesh, axis, param_specs=specs)
        sharded = shardings_along(params, specs, mesh, axis)
        of_params = shardings_of(specs, mesh)

        def update(updates, state, params, extra_args):
            # Else XLA may shard what goes in, and gather it in the next step.
            params = place(params, of_params)
            shards, grads = place(params, sharded), place(updates, sharded)
            updates, state = inner.update(
                grads, place(state, divided), shards, **extra_args
            )
            # Placed before they are sent and after: else XLA sends what they are
            # computed from, for CPUs in float32: 3.5 bytes a parameter to 8 devices,
            # not 1.75.
            sent = place(
                place(jax.tree.map(_to_send, shards, updates), sharded), of_params
            )
            return jax.tree.map(_from_sent, params, sent), place(state, divided)

        return in_auto(update, mesh, (of_params, divided))(
            updates, state, params, extra_args
        )

    return with_policy(
        optax.GradientTransformationExtraArgs(init_fn, update_fn),
        policy_of(inner),
        "zero1",
    )


def zero1_shardings(
    params: Any,
    opt_state: T,
    mesh: Mesh | AbstractMesh,
    axis: str = "data",
    *,
    param_specs: Any = None,
) -> T:
    """Return the sharding of each array of a `zero1` state: to restore one, or as the
    `out_shardings` of a step.

    An array of the state that belongs to a parameter, by its path and shape, is sharded
    as the parameter would be. So are codes and scales of such an array if each device
    has whole blocks. Other floating arrays, such as the rows and columns of Adafactor,
    are sharded along their own first axis whose size is a multiple of the number of
    devices.

    Args:
        params: the parameters, or their shapes.
        opt_state: the state, or its shapes (`jax.eval_shape(tx.init, params)`).
        mesh: as given to `zero1`; or a `jax.sharding.AbstractMesh`, to plan with.
        axis: as given to `zero1`.
        param_specs: as given to `zero1`.

    Raises:
        TypeError: if `mesh` is no mesh, or `params` no parameters.
        ValueError: as `zero1`.

    Example:
        >>> mesh = jax.make_mesh(
        ...     (jax.device_count(),),
        ...     ("data",),
        ...     axis_types=(jax.sharding.AxisType.Auto,),
        ... )
        >>> params = {"w": jax.ShapeDtypeStruct((48, 16), jnp.bfloat16)}
        >>> state = jax.eval_shape(optax.adam(1e-3).init, params)
        >>> shardings = zero1_shardings(params, state, mesh)
        >>> print(*optax.tree.get(shardings, "mu")["w"].spec)
        data
    """
    require_axis(mesh, axis, "zero1_shardings")
    if is_state(params) and not is_state(opt_state):
        raise TypeError(
            "`zero1_shardings` takes the parameters first: `zero1_shardings(params,"
            " opt_state, mesh)`."
        )
    specs = parameter_specs(params, param_specs, mesh, axis, "zero1_shardings")
    own = {path: (np.shape(p), spec) for path, p, spec in _with_specs(params, specs)}
    # A stored leaf stands in place of a box.
    own |= {path[:-1]: own[path] for path in _flax.boxes_of(params)}

    def sharding_of(path, leaf):
        shape = leaf.shape if is_stored(leaf) else np.shape(leaf)
        # A moment stands at a path that ends as that of its parameter does:
        # `0/mu/layers/kernel`.
        candidates = (
            own.get(path[start:], (None, None)) for start in range(len(path) + 1)
        )
        spec = next((spec for p_shape, spec in candidates if p_shape == shape), None)
        # A key, a count.
        if spec is None and not is_stored(leaf) and not _trees.is_floating(leaf):
            return NamedSharding(mesh, PartitionSpec())
        spec = PartitionSpec() if spec is None else spec
        found = NamedSharding(mesh, sharded_spec(shape, spec, mesh, axis))
        return _sharding_of_stored(leaf, found, axis) if is_stored(leaf) else found

    return jax.tree.map_with_path(sharding_of, opt_state, is_leaf=is_stored)


def _sharding_of_stored(
    leaf: StoredLeaf, found: NamedSharding, axis: str
) -> StoredLeaf:
    """Shard codes and scales like the array, where each device then has whole rows or
    blocks.
    """

    def sharding_of(part):
        spec = part_sharding(found, leaf.shape, part.shape).spec
        is_along = any(axis in names_at(spec, i) for i in range(len(spec)))
        return NamedSharding(
            found.mesh,
            spec if is_along else sharded_spec(part.shape, spec, found.mesh, axis),
        )

    return jax.tree.map(sharding_of, leaf)


def _with_specs(
    params: Any, specs: Any
) -> Iterator[tuple[_trees.Path, Any, PartitionSpec]]:
    """Return the path, the parameter and the spec of each leaf."""
    leaves = _trees.leaves_by_path(params)
    return zip(leaves, leaves.values(), jax.tree.leaves(specs), strict=True)


def _require_whole_arrays() -> None:
    if manual := jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            "`zero1`: this is inside `jax.shard_map` over"
            f" {', '.join(map(repr, manual))}, where a device sees its own part only."
            " Add up the gradients there, and call `init` and `update` outside of it,"
            " under `jax.jit`."
        )


def _require_placed_as_said(params: Any, specs: Any) -> None:
    """Raise if concrete parameters are sharded otherwise than their specs say."""
    for path, p, spec in _with_specs(params, specs):
        if (
            isinstance(p, Tracer)
            or not isinstance(p, jax.Array)
            or not isinstance(p.sharding, NamedSharding)
        ):
            continue
        if not NamedSharding(p.sharding.mesh, spec).is_equivalent_to(
            p.sharding, p.ndim
        ):
            raise ValueError(
                f"`zero1`: the parameter {_trees.path_string(path, params)!r} is"
                f" sharded as {p.sharding.spec}, but `param_specs` says {spec}. Give"
                " its own, as in `jax.tree.map(lambda p: p.sharding.spec, params)`."
            )


# What is sent.

_NO_DERIVATIVE = (
    "`zero1` sends new parameters as bits, which have no derivative. To differentiate"
    " through steps of the optimizer, call the rule without `zero1`."
)


def _to_send(p: jax.Array, update: jax.Array) -> jax.Array:
    """Return what the other devices need: the bits of a new 16-bit parameter, or else
    the update.

    Bits are sent as integers: XLA would otherwise move the conversion to float32 before
    the transfer.
    """
    if not _trees.is_narrower(p):
        return update
    update = checkpoint_name(
        _errors.not_differentiable(update, _NO_DERIVATIVE), MARK + SENT
    )
    return applied_bits(p, update.astype(np.float32))


def _from_sent(p: jax.Array, sent: jax.Array) -> jax.Array:
    """Return the update that makes a parameter what was sent."""
    if not _trees.is_narrower(p):
        return sent
    return landing_update(p, sent.view(p.dtype).astype(np.float32), "zero1")
