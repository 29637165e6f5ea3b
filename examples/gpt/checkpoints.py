"""Checkpoints of a run, by Orbax: parameters, optimizer state, and a description in JSON with the loader's position.

A checkpoint gets its name only when all of it is written, so the newest one is whole whatever happens. What was half
written stays under a name of its own, until the run goes on.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

KEPT = 2  # the newest ones
NAMED = 5  # in a message, of the arrays that differ
REASON_CHARACTERS = 200


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says why and what to do."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; those before it are whole."""


class Checkpoints:
    """The checkpoints in a folder. Saving goes on in the background, and the end of the context waits for it.

    Args:
        folder: made if it does not exist.
        cleans: removes what a run that was killed left half written. Only for the one process, or the processes of one
            run, that save there.

    Raises:
        CheckpointError: if the folder cannot be made or read.
    """

    def __init__(self, folder: Path, *, cleans: bool = False) -> None:
        self.folder = folder.absolute()
        self._pending: int | None = None  # the step that may not be on the disk yet
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True, cleanup_tmp_directories=cleans)
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise CheckpointError(f"the folder {self.folder} cannot be used: {_reason(error)}.") from error

    def __enter__(self) -> "Checkpoints":
        logging.getLogger("absl").addFilter(_is_no_error_of_orbax)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if error is None:
                self.wait()
                self._manager.close()
            elif jax.process_count() == 1:  # of several, others may not come to where they save together
                with suppress(Exception):  # the error that is on its way came first
                    self._manager.wait_until_finished()
                    self._manager.close()
        finally:
            logging.getLogger("absl").removeFilter(_is_no_error_of_orbax)

    def wait(self) -> None:
        """Waits until all is on the disk.

        Raises:
            SaveError: if that failed.
        """
        with self._told():
            self._manager.wait_until_finished()
            self._pending = None

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, description: Mapping[str, Any]) -> None:
        """Saves a tree of arrays and what can be written as JSON; arrays may be donated as soon as this returns.

        Raises:
            SaveError: if it cannot be saved, or the one before it, which was written in the background, was not.
        """
        if step == self.newest:
            return
        self.wait()
        self._pending = step
        content = {"run": description, "arrays": _types(state)}
        saved = ocp.args.Composite(state=ocp.args.StandardSave(state), description=ocp.args.JsonSave(content))
        with self._told():
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
                f"the checkpoint of step {step} in {self.folder} does not hold the arrays of this run: {differences}. "
                "Go on with the recipe and sizes of then; `mpx.convert_state` makes the state of another recipe of one "
                "that was restored so."
            )
        wanted = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
        )
        with self._readable(step):
            return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))).state

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Makes one line of what goes wrong while a checkpoint is saved."""
        try:
            yield
        except Exception as error:  # of TensorStore, of Orbax, or of the system, for the same full disk
            raise SaveError(
                f"the checkpoint of step {self._pending} could not be saved in {self.folder}: {_reason(error)}. The "
                "checkpoints before it are whole: when the cause is mended, go on with --resume."
            ) from error

    @contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        """Makes one line of what is wrong with a checkpoint."""
        try:
            yield
        except Exception as error:  # a damaged file is a ValueError, a KeyError, a TypeError or another to Orbax
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} cannot be read: {_reason(error)}. Move its folder, "
                f"{self.folder / str(step)}, away to go on from the one before."
            ) from error

    def _existing(self) -> int:
        """The step of the newest checkpoint, which must be there."""
        if self.newest is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}; start without --resume.")
        return self.newest

    def _content(self, step: int) -> dict[str, Any]:
        """What was saved as JSON: the description of the run, and the types of its arrays."""
        with self._readable(step):
            content = self._manager.restore(step, args=ocp.args.Composite(description=ocp.args.JsonRestore()))
            return {name: content.description[name] for name in ("run", "arrays")}


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


def _reason(error: Exception) -> str:
    """What the system said of a file, or else the beginning of what TensorStore said, which goes on for pages."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = re.search(r"\[os_error_code='(\d+)'\]", str(error))
    return os.strerror(int(number[1])) if number else " ".join(str(error).split())[:REASON_CHARACTERS]


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    """False for pages of tracebacks in the log of an error that is raised as well."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname
