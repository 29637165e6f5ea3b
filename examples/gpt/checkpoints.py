"""Save a training run to checkpoints by Orbax, and resume it from the newest one to the same bits.

A checkpoint has the parameters, the optimizer state, and a description in JSON: steps done, the loader's position, and
the settings that a resumed run must share. It gets its name when all of it is written, so the newest one is complete
even if the process is killed. A half-written one keeps a temporary name until the run is resumed.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
from rich.console import Console

import mpx

KEPT = 2  # the newest ones
NAMED = 5  # arrays in a message about differences
REASON_CHARACTERS = 200


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says why and what to do."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; those before it are complete."""


class Checkpoints:
    """The checkpoints in a folder. Saving continues in the background; the end of the context waits for it.

    `cleans` removes half-written ones, and is only for the run that saves there.
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
            elif jax.process_count() == 1:  # other processes may never reach the point where all save together
                with suppress(Exception):  # the error that ended the context came first
                    self._manager.wait_until_finished()
                    self._manager.close()
        finally:
            logging.getLogger("absl").removeFilter(_is_no_error_of_orbax)

    def wait(self) -> None:
        """Wait until all is on the disk, and raise a `SaveError` if that failed."""
        with self._saving():
            self._manager.wait_until_finished()
            self._pending = None

    @property
    def newest(self) -> int | None:
        """Return the step of the newest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, description: Mapping[str, Any]) -> None:
        """Save a tree of arrays and a description for JSON; the arrays may be donated as soon as this returns.

        A failure raises a `SaveError` here or, if it happens in the background, at the next call.
        """
        if step == self.newest:
            return
        self.wait()
        self._pending = step
        content = {"run": description, "arrays": _types(state)}
        saved = ocp.args.Composite(state=ocp.args.StandardSave(state), description=ocp.args.JsonSave(content))
        with self._saving():
            self._manager.save(step, args=saved)

    def description(self) -> dict[str, Any]:
        """Return the description of the newest checkpoint, or raise a `CheckpointError` if there is none."""
        return self._content()["run"]

    def restore(self, shapes: Any, shardings: Any) -> Any:
        """Return the arrays of the newest checkpoint, to the bit, with the shardings of this run."""
        # Orbax would convert another dtype silently, and not name an array of another shape.
        differences = _differences(_types(shapes), self._content()["arrays"])
        if differences:
            raise CheckpointError(
                f"the checkpoint of step {self.newest} in {self.folder} does not hold the arrays of this run: "
                f"{differences}. Resume with the recipe and sizes of then; `mpx.convert_state` converts a restored "
                "state to another recipe."
            )
        wanted = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
        )
        return self._read("state", ocp.args.StandardRestore(wanted))

    def _content(self) -> dict[str, Any]:
        """Return the JSON of the newest checkpoint: the description of the run, and the types of its arrays."""
        if self.newest is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}; start without --resume.")
        return self._read("description", ocp.args.JsonRestore())

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of TensorStore, of Orbax, or of the system, for the same full disk
            raise SaveError(
                f"the checkpoint of step {self._pending} could not be saved in {self.folder}: {_reason(error)}. The "
                "checkpoints before it are whole: when the cause is mended, go on with --resume."
            ) from error

    def _read(self, name: str, how: Any) -> Any:
        try:
            content = self._manager.restore(self.newest, args=ocp.args.Composite(**{name: how}))[name]
            return content if name == "state" else {key: content[key] for key in ("run", "arrays")}
        except Exception as error:  # Orbax raises many types for a damaged file
            raise CheckpointError(
                f"the checkpoint of step {self.newest} in {self.folder} cannot be read: {_reason(error)}. Move its "
                f"folder, {self.folder / str(self.newest)}, away to go on from the one before."
            ) from error


def _types(tree: Any) -> dict[str, str]:
    """Return dtype and shape of each array by its path."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _differences(wanted: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Describe the arrays that are not the same; empty if all are."""
    named = [
        f"{path} is {there.get(path, 'missing')}, but should be {wanted.get(path, 'absent')}"
        for path in {**wanted, **there}
        if wanted.get(path) != there.get(path)
    ]
    return "; ".join(named[:NAMED] + [f"and {len(named) - NAMED} more"] * (len(named) > NAMED))


def _reason(error: Exception) -> str:
    """Return what the system said of a file, or else the beginning of TensorStore's message, which has pages."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = re.search(r"\[os_error_code='(\d+)'\]", str(error))
    return os.strerror(int(number[1])) if number else " ".join(str(error).split())[:REASON_CHARACTERS]


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    """Suppress pages of tracebacks in the log of an error that is raised as well."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


# --- A training run. ---
def save(
    checkpoints: Checkpoints, params: Any, opt_state: optax.OptState, *, step: int, position: int, **description: Any
) -> None:
    """Save everything on which the rest of a training run depends, unless every step is skipped."""
    check_health(opt_state, params)
    described = {"step": step, "position": position, "is_synced": is_synced(params, opt_state)} | description
    checkpoints.save(step, (params, opt_state), described)


def resume(
    checkpoints: Checkpoints, shapes: Any, shardings: Any, identity: Mapping[str, Any], console: Console
) -> tuple[Any, optax.OptState, int, int]:
    """Return parameters, optimizer state, steps done and the loader's position from the newest checkpoint.

    The checkpoint must have the same `identity`, but a finished run may go on to more steps. If its parameters were
    changed from outside, the masters follow them.
    """
    saved = checkpoints.description()
    before = saved["identity"]
    if saved["step"] == before.get("steps") and identity["steps"] > saved["step"]:
        before = before | {"steps": identity["steps"]}
    differences = [
        f"{name} is {value!r}, but was {before.get(name)!r}"
        for name, value in identity.items()
        if before.get(name) != value
    ]
    if differences:
        raise CheckpointError(
            f"this is not the run of the checkpoint in {checkpoints.folder}: {'; '.join(differences)}. Give the same "
            "options as then (more --steps after the last one only), or begin anew in another --out."
        )
    params, opt_state = checkpoints.restore(shapes, shardings)
    # A weight close to zero can be out of sync without an edit; then it was so when it was saved.
    if saved["is_synced"] and not is_synced(params, opt_state):
        console.print(
            "The parameters of the checkpoint do not match its optimizer state: they were changed from outside. Going "
            "on from them, as they are.",
            soft_wrap=True,
        )
        opt_state = jax.jit(mpx.resync, out_shardings=shardings[1])(params, opt_state)
    return params, opt_state, saved["step"], saved["position"]


def is_synced(params: Any, opt_state: optax.OptState) -> bool:
    """Return whether the parameters are the rounded masters of the optimizer state."""
    return bool(jax.jit(mpx.is_synced)(params, opt_state))


def check_health(opt_state: optax.OptState, params: Any = None) -> None:
    """Wait for the device, and raise a `mpx.StuckError` if every step of a run with loss scaling is skipped."""
    if not isinstance(mpx.get_loss_scale(opt_state), mpx.NoOpLossScale):
        mpx.check_health(opt_state, params=params)
