"""Divide a training run among devices: a mesh with three axes, and where each weight
lies on it.

XLA does the work. Only places are named here: of weights, of their parts inside a
layer, and of the tokens.

- `data`: each part of the batch has all weights.
- `fsdp`: each part of the batch keeps a part of each large weight, of its gradient and
  of its optimizer state. A layer gathers its weights when it needs them (FSDP; ZeRO
  stage 3, Rajbhandari et al., 2020).
- `model`: these devices have the same tokens and share the work of each layer (tensor
  parallelism, Megatron-LM, Shoeybi et al., 2019). The first product of attention and of
  a perceptron is divided along its outputs, the heads and the hidden units; the second
  one along its inputs; the embedding along its tokens.

Outside of the model the axes are explicit: the type of an array says where it lies, to
the optimizer too. Inside of the model they are automatic. Without a mesh these
functions change nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "model")
BATCHES = PartitionSpec(None, ("data", "fsdp"))  # (N, B, T + 1)
REPEATED = PartitionSpec()
# The last axis of a weight is divided along `model` at most: 8-bit states have blocks
# along it.
FIRST, SECOND = PartitionSpec("fsdp", "model"), PartitionSpec(("model", "fsdp"), None)
# All others are small.
SPECS = {
    "query_key_value/kernel": FIRST,
    "query_key_value/bias": PartitionSpec("model"),
    "expand/kernel": FIRST,
    "expand/bias": PartitionSpec("model"),
    "out/kernel": SECOND,
    "contract/kernel": SECOND,
    "token_embedding": SECOND,
    "position_embedding": PartitionSpec("fsdp", None),
}


def is_divided() -> bool:
    """Return whether a mesh of these axes is set, by `jax.set_mesh`."""
    return jax.sharding.get_abstract_mesh().axis_names == AXES


def divide(params: Any) -> Any:
    """Return parameters of which each device keeps its part, on the mesh that is
    set.
    """
    if not is_divided():
        return params
    return jax.tree.map_with_path(
        lambda path, leaf: jax.sharding.reshard(leaf, spec_of(path, leaf)), params
    )


def gather(weights: Any, name: str = "") -> Any:
    """Return the weights of a block, or one with a name, as a layer needs them: divided
    along `model` alone.

    It stands inside of the model, where autocast casts weights before they are sent.
    """
    if not is_divided():
        return weights

    def gathered(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        spec = (
            "model" if "model" in (entry or ()) else None
            for entry in spec_of(path, leaf, name)
        )
        return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*spec))

    return jax.tree.map_with_path(gathered, weights)


def spec_of(path: tuple[Any, ...], leaf: jax.Array, name: str = "") -> PartitionSpec:
    """Return where a weight lies; an axis that stacks blocks stands before the
    others.
    """
    name += jax.tree_util.keystr(path, simple=True, separator="/")
    spec = next((spec for part, spec in SPECS.items() if part in name), ())
    return PartitionSpec(*[None] * (leaf.ndim - len(spec)), *spec)


def in_auto(function: Callable[..., Any], *, out: Any = REPEATED) -> Callable[..., Any]:
    """Return a function inside of which XLA chooses where arrays lie, on the mesh that
    is set.
    """
    if not is_divided():
        return function
    return jax.sharding.auto_axes(function, out_sharding=out)


def shapes_on(
    mesh: Mapping[str, int], function: Callable[..., Any], *arguments: Any
) -> Any:
    """Return shapes and places of what a function returns on a mesh of these sizes; no
    device is needed.

    Blocks of 8-bit states fit the parts that devices have, so shapes depend on the
    mesh.
    """
    kinds = (AxisType.Explicit,) * len(mesh)
    with jax.sharding.use_abstract_mesh(
        AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=kinds)
    ):
        return jax.eval_shape(function, *arguments)


def place(mesh: Mesh, shapes: Any) -> Any:
    """Return shapes with the same places on another mesh."""

    def spec(leaf):
        return leaf.sharding.spec if leaf.sharding else REPEATED  # of a constant

    return jax.tree.map(
        lambda leaf: leaf.update(sharding=NamedSharding(mesh, spec(leaf))), shapes
    )
