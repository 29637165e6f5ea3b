"""Place arrays on a mesh: how a data-parallel axis shards them."""

from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mpx import _errors, _trees
from mpx._shardings import entries_of, names_at, parts_at, spec_of

T = TypeVar("T")


def require_axis(mesh: Any, axis: str, caller: str) -> None:
    """Raise if `mesh` is not a mesh, or lacks the axis."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(
            f"`{caller}`: `mesh` must be a jax.sharding.Mesh, but got"
            f" {type(mesh).__name__}."
        )
    if axis not in mesh.axis_names:
        raise ValueError(
            f"`{caller}`: the mesh has the axes {mesh.axis_names}, and none is called"
            f" {axis!r}."
        )


def sharded_spec(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh, axis: str
) -> PartitionSpec:
    """Return a spec that also shards an array along the mesh axis: at its first axis
    that can be divided further.
    """
    for i, size in enumerate(shape):
        if size and size % (parts_at(mesh, spec, i) * mesh.shape[axis]) == 0:
            entries = entries_of(spec, i + 1)
            entries[i] = (*names_at(spec, i), axis)
            return PartitionSpec(*entries)
    return spec


def shardings_along(params: Any, specs: Any, mesh: Mesh, axis: str) -> Any:
    """Return the shardings of parameters that are sharded along the mesh axis too."""
    return jax.tree.map(
        lambda p, spec: NamedSharding(
            mesh, sharded_spec(np.shape(p), spec, mesh, axis)
        ),
        params,
        specs,
    )


def shardings_of(specs: Any, mesh: Mesh) -> Any:
    """Return the shardings that the specs of parameters describe."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def place(tree: T, shardings: Any) -> T:
    """Constrain arrays to shardings, eagerly or in the program that is traced."""
    now = jax.sharding.get_abstract_mesh()

    def constrain(x, sharding):
        # In `in_auto` all axes are automatic; those of the sharding may be explicit,
        # which JAX refuses here.
        return lax.with_sharding_constraint(
            x, sharding if now.empty else NamedSharding(now, sharding.spec)
        )

    return jax.tree.map(constrain, tree, shardings)


def parameter_specs(
    params: Any, given: Any, mesh: Mesh | AbstractMesh, axis: str, caller: str
) -> Any:
    """Return a tree like the parameters, with the spec of how each is sharded already;
    raise if it cannot be so.
    """
    leaves = jax.tree.leaves(params)
    if leaves and not any(
        _trees.is_array(p) or isinstance(p, (int, float, complex)) for p in leaves
    ):
        kind = type(leaves[0]).__name__
        raise TypeError(
            f"`{caller}` needs the parameters, or their shapes, but got a tree of"
            f" {kind}."
        )
    where, remedy = (
        "their types say",
        (
            "A state that is divided like its parameters needs neither `zero1` nor its"
            " axis."
        ),
    )
    if given is None:
        specs = jax.tree.map(_spec_of_type, params)
    else:
        where = "`param_specs` says"
        remedy = (
            "Give one `jax.sharding.PartitionSpec` for all parameters, or a tree of"
            " specs like theirs."
        )
        try:
            specs = jax.tree.map(
                lambda spec, subtree: jax.tree.map(lambda _: spec, subtree),
                given,
                params,
            )
        except ValueError as error:
            raise ValueError(
                f"`{caller}`: `param_specs` is no prefix of the parameters."
                f" {remedy} {error}"
            ) from None
    pairs = zip(
        _trees.leaves_by_path(params).items(), jax.tree.leaves(specs), strict=True
    )
    found = {
        path: _why_not_sharded(np.shape(p), spec, mesh, axis)
        for (path, p), spec in pairs
    }
    wrong = {path: reason for path, reason in found.items() if reason}
    _errors.refuse(
        wrong, f"`{caller}`: parameters cannot be sharded as {where}", remedy, params
    )
    return specs


def _why_not_sharded(
    shape: tuple[int, ...], spec: Any, mesh: Mesh | AbstractMesh, axis: str
) -> str:
    """Return why a parameter cannot be sharded by a spec in front of an axis; empty if
    it can.
    """
    if not isinstance(spec, PartitionSpec):
        return f"{type(spec).__name__} is no `jax.sharding.PartitionSpec`"
    used = [name for i in range(len(spec)) for name in names_at(spec, i)]
    if not set(used) <= set(mesh.axis_names):
        return f"{spec}, but the mesh has the axes {mesh.axis_names}"
    if axis in used:
        return (
            f"{spec}, but parameters are equal along {axis!r}, which shards their"
            " optimizer state"
        )
    if len(spec) > len(shape) or any(
        size % parts_at(mesh, spec, i) for i, size in enumerate(shape)
    ):
        return f"{spec}, which does not divide {list(shape)} evenly"
    return ""


def _spec_of_type(p: Any) -> PartitionSpec:
    """Return how a parameter is sharded over the explicit axes of its mesh, which its
    type knows.
    """
    is_typed = _trees.is_array(p) and not isinstance(p, jax.ShapeDtypeStruct)
    return spec_of(list(jax.typeof(p).sharding.spec) if is_typed else [])
