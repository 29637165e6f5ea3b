"""Save a training run to checkpoints by Orbax, and resume it from the newest one to the
same bits.

A checkpoint has the parameters, the optimizer state, and a description in JSON: the
position in the data, and what a run that resumes it must share. It gets its name when
all of it is written, so the newest one is whole even if the process is killed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optax
import orbax.checkpoint as ocp

KEPT = 2  # the newest ones


def opened(folder: Path, *, cleans: bool = False) -> ocp.CheckpointManager:
    """Return the checkpoints in a folder, for a `with` block, which ends when all are
    written.

    `cleans` removes half-written ones, and is only for the run that saves there.
    """
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEPT, create=True, cleanup_tmp_directories=cleans
    )
    return ocp.CheckpointManager(folder.absolute(), options=options)


def save(
    manager: ocp.CheckpointManager,
    params: Any,
    opt_state: optax.OptState,
    step: int,
    description: Mapping[str, Any],
) -> None:
    """Save everything on which the rest of a run depends; writing continues in the
    background.
    """
    parts = {
        "state": ocp.args.StandardSave((params, opt_state)),
        "description": ocp.args.JsonSave(description),
    }
    manager.save(step, args=ocp.args.Composite(**parts))


def newest(manager: ocp.CheckpointManager) -> tuple[int, dict[str, Any]]:
    """Return step and description of the newest checkpoint."""
    step = manager.latest_step()
    if step is None:
        raise ValueError(f"there is no checkpoint in {manager.directory}.")
    return (
        step,
        manager.restore(
            step, args=ocp.args.Composite(description=ocp.args.JsonRestore())
        )["description"],
    )


def restore(manager: ocp.CheckpointManager, shapes: Any) -> tuple[Any, optax.OptState]:
    """Return parameters and optimizer state of the newest checkpoint, to the bit, where
    the shapes say.
    """
    arrays = ocp.args.StandardRestore(shapes)
    return manager.restore(
        manager.latest_step(), args=ocp.args.Composite(state=arrays)
    )["state"]
