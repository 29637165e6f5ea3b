"""All devices as one mesh: every microbatch is divided among them, and so is the optimizer state if wanted (ZeRO).

What is divided, and therefore what is sent, follows from the placement of arrays alone; XLA inserts the transfers. The
training step knows nothing of it.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "data"
Parallel = Literal["replicated", "zero"]


def make_mesh() -> Mesh:
    """All devices of all processes in a row."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def state_shardings(mesh: Mesh, params: Any, opt_state: Any, parallel: Parallel) -> tuple[Any, Any]:
    """Where parameters and optimizer state lie.

    Args:
        mesh: of `make_mesh`.
        params: arrays or their shapes.
        opt_state: likewise.
        parallel: `"replicated"`: every device has both; `"zero"`: parameters likewise, but each device keeps and
            updates its part of the optimizer state only (ZeRO stage 1, Rajbhandari et al., 2020). A leaf is cut along
            its first axis that can be divided by the number of devices, and kept whole if there is none.
    """
    whole = NamedSharding(mesh, PartitionSpec())

    def part(leaf: Any) -> NamedSharding:
        for axis, size in enumerate(leaf.shape):
            if size and size % mesh.size == 0:
                return NamedSharding(mesh, PartitionSpec(*[None] * axis, AXIS))
        return whole

    place = part if parallel == "zero" else lambda leaf: whole
    return jax.tree.map(lambda leaf: whole, params), jax.tree.map(place, opt_state)


def microbatches_on(mesh: Mesh, count: int) -> Callable[[np.ndarray], jax.Array]:
    """Puts this process's rows of a batch (rows, T + 1) on its devices, as its part of (count, B, T + 1).

    A batch is the same set of rows for any number of processes; which microbatch a row is in depends on it.
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, AXIS))

    def put(rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, rows.reshape(count, -1, rows.shape[-1]))

    return put


def batches_on(mesh: Mesh, batches: np.ndarray) -> jax.Array:
    """Puts batches (N, B, T + 1), which every process has, on all devices."""
    return jax.device_put(batches, NamedSharding(mesh, PartitionSpec(None, AXIS)))
