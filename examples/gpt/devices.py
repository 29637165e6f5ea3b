"""All devices as one mesh: every microbatch is divided among them, and so is the optimizer state if wanted (ZeRO).

Each device computes the gradients of its part of every microbatch; they are averaged once a step, in float32, by
`mpx.data_parallel`. What else is sent follows from the placement of arrays.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mpx

AXIS = "data"
BATCHES = PartitionSpec(None, AXIS)  # (N, B, T + 1)
Gradients = Callable[[Any, jax.Array], tuple[jax.Array, Any]]
Parallel = Literal["replicated", "zero"]


def make_mesh() -> Mesh:
    """All devices of all processes in a row."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def averaged(gradients: Gradients, mesh: Mesh | None, parallel: Parallel) -> Gradients:
    """The gradients of microbatches (A, B, T + 1) on all devices, from a function that computes those on one."""
    if mesh is None or mesh.size == 1:
        return gradients
    return mpx.data_parallel(gradients, mesh, AXIS, batch_specs=BATCHES, scatter=parallel == "zero")


def divided(
    tx: optax.GradientTransformationExtraArgs, mesh: Mesh | None, parallel: Parallel
) -> optax.GradientTransformationExtraArgs:
    """The optimizer; with a part of its state on each device, if that is wanted."""
    return tx if mesh is None or parallel == "replicated" else mpx.zero1(tx, mesh, AXIS)


def state_shardings(mesh: Mesh, params: Any, opt_state: Any, parallel: Parallel) -> tuple[Any, Any]:
    """Where parameters and optimizer state lie.

    Args:
        mesh: of `make_mesh`.
        params: arrays or their shapes.
        opt_state: likewise.
        parallel: `"replicated"`: every device has both; `"zero"`: parameters likewise, but each device keeps and
            updates its part of the optimizer state only (ZeRO stage 1, Rajbhandari et al., 2020).
    """
    whole = NamedSharding(mesh, PartitionSpec())
    if parallel == "zero":
        of_state = mpx.zero1_shardings(params, opt_state, mesh, AXIS)
    else:
        of_state = jax.tree.map(lambda leaf: whole, opt_state)
    return jax.tree.map(lambda leaf: whole, params), of_state


def microbatches_on(mesh: Mesh, count: int) -> Callable[[np.ndarray], jax.Array]:
    """Puts this process's rows of a batch (rows, T + 1) on its devices, as its part of (count, B, T + 1).

    A batch is the same set of rows for any number of processes; which microbatch a row is in depends on it.
    """
    sharding = NamedSharding(mesh, BATCHES)

    def put(rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, rows.reshape(count, -1, rows.shape[-1]))

    return put


def batches_on(mesh: Mesh, batches: np.ndarray) -> jax.Array:
    """Puts batches (N, B, T + 1), which every process has, on all devices."""
    return jax.device_put(batches, NamedSharding(mesh, BATCHES))
