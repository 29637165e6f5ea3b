"""Evaluate a trained GPT: its validation loss, and a sample.

Run it from the root of the repository, on the folder of a run of `examples.gpt.train`:

    python -m examples.gpt.evaluate
    python -m examples.gpt.evaluate --run run --prompt "import "
"""

from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from jax.sharding import SingleDeviceSharding
from typer import Option

from examples.gpt import checkpoints, data, devices, sample
from examples.gpt.model import SIZES, Config
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, Program

BATCH_SIZE = 8


def restored(folder: Path) -> tuple[Program, Any, int, dict[str, Any]]:
    """Return program and parameters of a run, and step and description of its newest
    checkpoint, on one device.
    """
    if not (folder / "checkpoints").is_dir():
        raise ValueError(
            f"{folder} is no folder of a run: there is no folder of checkpoints in it."
        )
    with checkpoints.opened(folder / "checkpoints") as manager:
        step, described = checkpoints.newest(manager)
        identity = described["identity"]
        config = Config(**{name: identity[name] for name in SIZES})
        # The optimizer's state has the same shapes whatever the schedule is.
        program = Program(
            get_recipe(identity["recipe"]),
            config,
            Hyperparameters(steps=1, learning_rate=1.0),
        )
        shapes = devices.shapes_on(described["mesh"], program.init, 0)
        device = SingleDeviceSharding(jax.local_devices()[0])
        params, _ = checkpoints.restore(
            manager, jax.tree.map(lambda leaf: leaf.update(sharding=device), shapes)
        )
    return program, params, step, described


def main(
    run: Annotated[Path, Option(help="Folder of the run.")] = Path("run"),
    data_folder: Annotated[
        Path | None,
        Option("--data", help="Folder of tokens; without it the one of the run."),
    ] = None,
    batches: Annotated[
        int, Option(min=1, help="Batches of the validation loss, 8 sequences each.")
    ] = 16,
    prompt: Annotated[str, Option(help="Text that the sample continues.")] = "def ",
    sample_tokens: Annotated[
        int, Option(min=1, help="Length of the sample in tokens.")
    ] = 200,
    temperature: Annotated[
        float, Option(min=0, help="Of the sample; 0 takes the most likely token.")
    ] = 0.8,
) -> None:
    """Print the validation loss of a run, and a sample."""
    try:
        program, params, step, described = restored(run)
        folder, config = data_folder or Path(described["data"]), program.config
        tokenizer = data.get_tokenizer(data.read_index(folder).tokenizer)
        if tokenizer.vocabulary != config.vocabulary:
            raise ValueError(
                f"{folder} has {tokenizer.vocabulary:,} kinds of tokens, the model"
                f" {config.vocabulary:,}."
            )
        tokens = data.validation_batches(folder, batches, BATCH_SIZE, config.context)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    loss = float(jax.jit(program.evaluate)(params, tokens))
    typer.echo(
        f"step {step}: validation loss {loss:.4f} nats a token, of"
        f" {tokens[..., 1:].size:,} tokens"
    )
    # Which begins a document.
    started = tokenizer.encode(prompt) if prompt else np.array([tokenizer.separator])
    continued = sample.generate(
        program.logits,
        params,
        started,
        count=sample_tokens,
        context=config.context,
        key=jax.random.key(0),
        temperature=temperature,
    )
    text = prompt + tokenizer.decode(continued)
    # A terminal obeys the others.
    text = "".join(x if x.isprintable() or x in "\n\t" else "\ufffd" for x in text)
    typer.echo(f"A sample:\n{text}")


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command()(main)

if __name__ == "__main__":
    app()
