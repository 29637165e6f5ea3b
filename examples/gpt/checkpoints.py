"""Checkpoints of a run, by Orbax: parameters, optimizer state, and a description in JSON with the loader's position."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

KEPT = 2  # the newest ones


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says why and what to do."""


class Checkpoints:
    """The checkpoints in a folder. Saving goes on in the background; `close` waits for it.

    Args:
        folder: made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._manager = ocp.CheckpointManager(
            self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True)
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, description: Mapping[str, Any]) -> None:
        """Saves a tree of arrays and what can be written as JSON; arrays may be donated as soon as this returns."""
        if step == self.newest:
            return
        saved = ocp.args.Composite(state=ocp.args.StandardSave(state), description=ocp.args.JsonSave(description))
        self._manager.save(step, args=saved)

    def description(self) -> dict[str, Any]:
        """That of the newest checkpoint.

        Raises:
            CheckpointError: if there is no checkpoint.
        """
        if self.newest is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}; start without --resume.")
        return self._manager.restore(
            self.newest, args=ocp.args.Composite(description=ocp.args.JsonRestore())
        ).description

    def restore(self, shapes: Any, shardings: Any) -> Any:
        """The arrays of the newest checkpoint, to the bit, on the devices of this run.

        Args:
            shapes: the tree, with a shape and dtype for each array.
            shardings: where each is to lie; the checkpoint may come from another number of devices.

        Raises:
            CheckpointError: if there is no checkpoint, or it holds other arrays.
        """
        step = self.newest
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}; start without --resume.")
        wanted = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
        )
        try:
            return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))).state
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} does not hold the arrays of this run: {error}"
            ) from error
