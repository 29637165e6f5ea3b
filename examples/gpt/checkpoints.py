"""Save a training run to checkpoints by Orbax, and resume it from the newest one to the same bits.

A checkpoint has the parameters, the optimizer state, and a description in JSON: steps done, the position in the data,
and the settings that a resumed run must share. It gets its name when all of it is written, so the newest one is whole
even if the process is killed.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp

import mpx

KEPT = 2  # the newest ones
REASON_CHARACTERS = 200


class CheckpointError(ValueError):
    """A checkpoint cannot be written or used; the message says why and what to do."""


@contextmanager
def opened(folder: Path, *, cleans: bool = False) -> Iterator[ocp.CheckpointManager]:
    """Yield the checkpoints in a folder, and wait at the end until all are written.

    `cleans` removes half-written ones, and is only for the run that saves there.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True, cleanup_tmp_directories=cleans)
    manager = ocp.CheckpointManager(folder.absolute(), options=options)
    try:
        yield manager
    except Exception:
        if jax.process_count() == 1:  # other processes may never reach the point where all save together
            with suppress(Exception):  # the error that ended the context came first
                manager.close()
        raise
    with _saving(manager):
        manager.wait_until_finished()
        manager.close()


def save(
    manager: ocp.CheckpointManager, params: Any, opt_state: optax.OptState, step: int, description: Mapping[str, Any]
) -> None:
    """Save everything on which the rest of a run depends, unless every step is skipped; a step that is saved is kept.

    Writing continues in the background. If it fails, the next call raises a `CheckpointError`, or the end of `opened`.
    """
    check_health(opt_state, params)
    if step == manager.latest_step():
        return
    content = {"step": step, "is_synced": is_synced(params, opt_state), **description}
    arrays = ocp.args.StandardSave((params, opt_state))
    with _saving(manager):
        manager.save(step, args=ocp.args.Composite(state=arrays, description=ocp.args.JsonSave(content)))


def description_of(manager: ocp.CheckpointManager) -> dict[str, Any]:
    """Return the description of the newest checkpoint, or raise a `CheckpointError` without one."""
    if manager.latest_step() is None:
        raise CheckpointError(f"there is no checkpoint in {manager.directory}; start without --resume.")
    return _read(manager, "description", ocp.args.JsonRestore())


def restore(manager: ocp.CheckpointManager, shapes: Any, shardings: Any) -> tuple[Any, optax.OptState]:
    """Return parameters and optimizer state of the newest checkpoint, to the bit, with the shardings of this run."""
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return _read(manager, "state", ocp.args.StandardRestore(jax.tree.map(place, shapes, shardings)))


def resume(
    manager: ocp.CheckpointManager, shapes: Any, shardings: Any, identity: Mapping[str, Any]
) -> tuple[Any, optax.OptState, dict[str, Any]]:
    """Return parameters, optimizer state and description of the newest checkpoint.

    The checkpoint must have the same `identity`, but a finished run may go on to more steps. If its parameters were
    changed from outside, the masters follow them, and the description says `"is_changed"`.
    """
    saved = description_of(manager)
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
            f"this is not the run of the checkpoint in {manager.directory}. Give the same options as then (more "
            f"--steps after the last one only), or begin anew in another --out: {'; '.join(differences)}."
        )
    params, opt_state = restore(manager, shapes, shardings)
    # A weight close to zero can be out of sync without an edit; then it was so when it was saved.
    is_changed = saved["is_synced"] and not is_synced(params, opt_state)
    if is_changed:
        opt_state = jax.jit(mpx.resync, out_shardings=shardings[1])(params, opt_state)
    return params, opt_state, saved | {"is_changed": is_changed}


def is_synced(params: Any, opt_state: optax.OptState) -> bool:
    """Return whether the parameters are the rounded masters of the optimizer state."""
    return bool(jax.jit(mpx.is_synced)(params, opt_state))


def check_health(opt_state: optax.OptState, params: Any = None) -> None:
    """Wait for the device, and raise a `mpx.StuckError` if every step of a run with loss scaling is skipped."""
    if not isinstance(mpx.get_loss_scale(opt_state), mpx.NoOpLossScale):
        mpx.check_health(opt_state, params=params)


def _read(manager: ocp.CheckpointManager, name: str, how: Any) -> Any:
    step = manager.latest_step()
    try:
        return manager.restore(step, args=ocp.args.Composite(**{name: how}))[name]
    except Exception as error:  # Orbax raises many types for a damaged file
        raise CheckpointError(
            f"the checkpoint of step {step} in {manager.directory} cannot be read: {_reason(error)}. Move its folder "
            "away to go on from the one before."
        ) from error


@contextmanager
def _saving(manager: ocp.CheckpointManager) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Orbax, TensorStore and the system raise other types for the same full disk
        raise CheckpointError(
            f"a checkpoint could not be saved in {manager.directory}: {_reason(error)}. The ones before it are whole: "
            "when the cause is mended, go on with --resume."
        ) from error


def _reason(error: Exception) -> str:
    """Return what the system said of a file, or else the beginning of TensorStore's message, which has pages."""
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(number[1])) if number else " ".join(str(error).split())[:REASON_CHARACTERS]
