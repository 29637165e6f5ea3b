"""How a run starts: anew, or from its newest checkpoint, which must be its own; and what it saves to be able to."""

from typing import Any

import jax
import optax
from rich.console import Console

import mpx
from examples.gpt.checkpoints import CheckpointError, Checkpoints
from examples.gpt.loader import Position
from examples.gpt.runs import Run


def start(run: Run, checkpoints: Checkpoints, console: Console) -> tuple[Any, Any, int, Position]:
    """Parameters, optimizer state, steps done and the loader's position: new ones, or those of a checkpoint.

    Raises:
        CheckpointError: if there is a checkpoint and the run does not go on from it, or the other way round, or it is
            that of another run.
    """
    if not run.settings.resume:
        if checkpoints.newest is not None:
            raise CheckpointError(
                f"{run.settings.out} has a checkpoint of step {checkpoints.newest}; go on with --resume, or choose "
                "another --out."
            )
        return *run.program.init(run.settings.seed), 0, Position()
    saved = checkpoints.description()
    differences = [
        f"{name} is {value!r}, but was {saved['identity'].get(name)!r}"
        for name, value in run.identity.items()
        if saved["identity"].get(name) != value
    ]
    if differences:
        raise CheckpointError(
            f"this is not the run of the checkpoint in {run.settings.out}: {'; '.join(differences)}. Give the same "
            "options as then, or begin anew in another --out."
        )
    params, opt_state = checkpoints.restore(run.shapes, run.shardings)
    # Of so many weights one may have come so close to zero that they are out of sync for now; then they were when they
    # were saved too.
    if saved["is_synced"] and not is_synced(params, opt_state):
        console.print(
            "The parameters of the checkpoint are not those that its optimizer state speaks of: they were changed from "
            "outside. Going on from them, as they are.",
            soft_wrap=True,
        )
        opt_state = jax.jit(mpx.resync, out_shardings=run.shardings[1])(params, opt_state)
    return params, opt_state, saved["step"], Position.from_dict(saved["position"])


def save(checkpoints: Checkpoints, run: Run, params: Any, opt_state: Any, step: int, position: Position) -> None:
    """Saves all that the rest of the run depends on.

    Raises:
        mpx.StuckError: if it is not worth to be gone on from.
        SaveError: if it cannot be saved.
    """
    check_health(opt_state, params)
    description = {"step": step, "position": position.as_dict(), "identity": run.identity}
    description |= {"data": str(run.folder.absolute()), "is_synced": is_synced(params, opt_state)}
    checkpoints.save(step, (params, opt_state), description)


def is_synced(params: Any, opt_state: optax.OptState) -> bool:
    """Whether the parameters are those that the optimizer state speaks of."""
    return bool(jax.jit(mpx.is_synced)(params, opt_state))


def check_health(opt_state: optax.OptState, params: Any = None) -> None:
    """Waits for the device; refuses to go on where a loss is scaled and every step is skipped.

    Raises:
        mpx.StuckError: then.
    """
    if not isinstance(mpx.get_loss_scale(opt_state), mpx.NoOpLossScale):
        mpx.check_health(opt_state, params=params)
