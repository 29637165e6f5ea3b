"""Checkpoints of a run, by Orbax: parameters, optimizer state, and a description in JSON with the loader's position."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

KEPT = 2  # the newest ones
NAMED = 5  # in a message, of the arrays that differ
REASON_CHARACTERS = 200


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
        content = {"run": description, "arrays": _types(state)}
        saved = ocp.args.Composite(state=ocp.args.StandardSave(state), description=ocp.args.JsonSave(content))
        self._manager.save(step, args=saved)

    def description(self) -> dict[str, Any]:
        """That of the newest checkpoint.

        Raises:
            CheckpointError: if there is no checkpoint.
        """
        return self._content(self._existing())["run"]

    def restore(self, shapes: Any, shardings: Any) -> Any:
        """The arrays of the newest checkpoint, to the bit, on the devices of this run.

        Args:
            shapes: the tree, with a shape and dtype for each array.
            shardings: where each is to lie; the checkpoint may come from another number of devices.

        Raises:
            CheckpointError: if there is no checkpoint, or it holds other arrays.
        """
        step = self._existing()
        # Orbax would convert another dtype without a word, and name no array of another shape.
        differences = _differences(_types(shapes), self._content(step)["arrays"])
        if differences:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} does not hold the arrays of this run: {differences}."
            )
        wanted = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
        )
        try:
            return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))).state
        except (ValueError, KeyError, TypeError) as error:
            # What TensorStore says goes on for pages.
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} cannot be read: {str(error)[:REASON_CHARACTERS]}. "
                "Move its folder away to go on from the one before."
            ) from error

    def _existing(self) -> int:
        """The step of the newest checkpoint, which must be there."""
        if self.newest is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}; start without --resume.")
        return self.newest

    def _content(self, step: int) -> dict[str, Any]:
        """What was saved as JSON: the description of the run, and the types of its arrays."""
        return self._manager.restore(step, args=ocp.args.Composite(description=ocp.args.JsonRestore())).description


def _types(tree: Any) -> dict[str, str]:
    """Dtype and shape of each array by its path."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _differences(wanted: Mapping[str, str], there: Mapping[str, str]) -> str:
    """What to say of the arrays that are not the same; nothing if all are."""
    paths = [path for path in {**wanted, **there} if wanted.get(path) != there.get(path)]
    named = [
        f"{path} is {there.get(path, 'missing')}, but should be {wanted.get(path, 'absent')}" for path in paths[:NAMED]
    ]
    return "; ".join(named + [f"and {len(paths) - NAMED} more"] * (len(paths) > NAMED))
