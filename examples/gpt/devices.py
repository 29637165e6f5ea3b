"""Place arrays on all devices: each has a part of every microbatch and, with ZeRO, a part of the optimizer state.

Each device computes the gradients of its part. `mpx.data_parallel` averages them once a step, in float32.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mpx

AXIS = "data"
BATCHES = PartitionSpec(None, AXIS)  # (N, B, T + 1)
Gradients = Callable[[Any, jax.Array], tuple[jax.Array, Any]]
Parallel = Literal["replicated", "zero"]


def make_mesh() -> Mesh:
    """Return all devices of all processes in a row."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def averaged(gradients: Gradients, mesh: Mesh | None, parallel: Parallel) -> Gradients:
    """Return the gradients of microbatches (A, B, T + 1) on all devices, from a function that runs on each."""
    if mesh is None or mesh.size == 1:
        return gradients
    return mpx.data_parallel(gradients, mesh, AXIS, batch_specs=BATCHES, scatter=parallel == "zero")


def state_shardings(mesh: Mesh, params: Any, opt_state: Any, parallel: Parallel) -> tuple[Any, Any]:
    """Return the shardings of parameters and optimizer state, which may be given as shapes.

    Parameters are replicated. So is the optimizer state, or with `"zero"` each device keeps and updates its part (ZeRO
    stage 1, Rajbhandari et al., 2020).
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    if parallel == "zero":
        of_state = mpx.zero1_shardings(params, opt_state, mesh, AXIS)
    else:
        of_state = jax.tree.map(lambda leaf: replicated, opt_state)
    return jax.tree.map(lambda leaf: replicated, params), of_state


def microbatches_on(mesh: Mesh, count: int) -> Callable[[np.ndarray], jax.Array]:
    """Return a function that puts this process's rows of a batch (rows, T + 1) on its devices, as (count, B, T + 1).

    A batch has the same rows for any number of processes, but which microbatch has a row depends on that number.
    """
    sharding = NamedSharding(mesh, BATCHES)

    def put(rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, rows.reshape(count, -1, rows.shape[-1]))

    return put


def batches_on(mesh: Mesh, batches: np.ndarray) -> jax.Array:
    """Put batches (N, B, T + 1), which every process has, on all devices."""
    return jax.device_put(batches, NamedSharding(mesh, BATCHES))
