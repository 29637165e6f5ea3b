"""Evaluate a trained GPT: validation loss, multiple-choice questions, and a sample.

Run it from the root of the repository, on the folder of a run of `examples.gpt.train`:

    python -m examples.gpt.evaluate
    python -m examples.gpt.evaluate --run run --multiple-choice hellaswag_val.jsonl --prompt "import "
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from jax.sharding import SingleDeviceSharding
from rich.console import Console

from examples.gpt import multiple_choice as questions
from examples.gpt import sampling, shards
from examples.gpt.checkpoints import CheckpointError, Checkpoints
from examples.gpt.loader import validation_batches
from examples.gpt.model import Config
from examples.gpt.recipes import get_recipe
from examples.gpt.shards import ShardError
from examples.gpt.tokenizers import Tokenizer, get_tokenizer
from examples.gpt.training import Hyperparameters, Program, make_program

# The fields of a configuration on which the arrays of a checkpoint depend.
SIZES = ("width", "depth", "heads", "context", "vocabulary", "vocabulary_multiple", "layers")

PromptOption = Annotated[str, typer.Option(help="Text that the sample continues.")]
SampleOption = Annotated[int, typer.Option(min=0, help="Length of the sample in tokens; 0 for none.")]
TemperatureOption = Annotated[
    float, typer.Option(min=0, help="Temperature of the sample; 0 takes the most likely token.")
]
TopKOption = Annotated[int | None, typer.Option(min=1, help="Sample from so many most likely tokens.")]
QuestionsOption = Annotated[Path | None, typer.Option(help="Questions in HellaSwag's JSONL form.")]
VocabularyOption = Annotated[Path | None, typer.Option(help="Folder with GPT-2's vocab.bpe and encoder.json.")]


def restored(folder: Path, loss_chunks: int = 1) -> tuple[Program, Any, dict[str, Any]]:
    """Return the program, the parameters and the description of the newest checkpoint of a run, on one device."""
    if not (folder / "checkpoints").is_dir():
        raise CheckpointError(f"{folder} is no folder of a run: there is no folder of checkpoints in it.")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        described = checkpoints.description()
        identity = described["identity"]
        config = Config(**{name: identity[name] for name in SIZES})
        # The optimizer's state has the same shapes whatever the schedule is.
        training = Hyperparameters(steps=1, learning_rate=1.0)
        program = make_program(get_recipe(identity["recipe"]), config, training, loss_chunks=loss_chunks)
        shapes = jax.eval_shape(program.init, 0)
        device = SingleDeviceSharding(jax.local_devices()[0])
        params, _ = checkpoints.restore(shapes, jax.tree.map(lambda leaf: device, shapes))
    compiled = {name: jax.jit(getattr(program, name)) for name in ("evaluate", "token_losses")}
    return dataclasses.replace(program, **compiled), params, described


def shards_of(folder: Path, described: dict[str, Any]) -> Path:
    """Return the folder of the shards of a run, from the description of its checkpoint."""
    for found in (Path(described["data"]), folder / "tokens"):
        if (found / shards.INDEX_NAME).exists():
            return found
    raise ShardError(f"the shards of {folder} are not in {described['data']} any more; name their folder with --data.")


def show(
    program: Program,
    params: Any,
    tokenizer: Tokenizer,
    console: Console,
    *,
    multiple_choice: Path | None,
    prompt: str,
    sample_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> None:
    """Print the accuracy, if there is a file of questions, and a sample, if its length is not 0."""
    context = program.config.context
    if multiple_choice:
        losses_of = lambda tokens: program.token_losses(params, tokens)
        items = questions.read_items(multiple_choice)
        found = questions.accuracy(losses_of, items, tokenizer.encode, context=context)
        console.print(f"{found.items} questions: acc {found.acc:.4f}, acc_norm {found.acc_norm:.4f}")
    if sample_tokens:
        tokens = tokenizer.encode(prompt) if prompt else np.array([tokenizer.separator])  # which begins a document
        continued = sampling.generate(
            program.logits, params, tokens, count=sample_tokens, context=context, key=jax.random.key(seed),
            temperature=temperature, top_k=top_k,
        )  # fmt: skip
        text = prompt + tokenizer.decode(continued)
        text = "".join(x if x.isprintable() or x in "\n\t" else "\ufffd" for x in text)  # a terminal obeys the others
        console.print(f"A sample:\n{text}", soft_wrap=True, markup=False, highlight=False)


def main(
    run: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("run"),
    data: Annotated[Path | None, typer.Option(help="Folder of the shards; without it those in the run's own.")] = None,
    vocabulary_files: VocabularyOption = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches of the validation loss.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a batch.")] = 8,
    loss_chunks: Annotated[int, typer.Option(min=1, help="Parts in which the loss computes its logits.")] = 1,
    multiple_choice: QuestionsOption = None,
    prompt: PromptOption = "def ",
    sample_tokens: SampleOption = 200,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the sample.")] = 0,
) -> None:
    """Print the validation loss of a run, its accuracy if there are questions, and a sample."""
    console = Console()
    try:
        program, params, described = restored(run, loss_chunks)
        folder = data or shards_of(run, described)
        index = shards.read_index(folder)
        tokenizer = get_tokenizer(index.tokenizer, vocabulary_files)
        if index.vocabulary != program.config.vocabulary:
            raise ValueError(
                f"the shards in {folder} have a vocabulary of {index.vocabulary:,} tokens, but the model has "
                f"{program.config.vocabulary:,}; name those that it was trained on with --data."
            )
        if shards.fingerprint(index) != described["identity"]["tokens"]:
            console.print(f"Note: the run was trained on other shards than those in {folder}.", markup=False)
        tokens = validation_batches(folder, count=batches, batch_size=batch_size, context=program.config.context)
        loss = float(program.evaluate(params, tokens))
        console.print(
            f"step {described['step']}: validation loss {loss:.4f} nats a token, of {tokens[..., 1:].size:,} tokens"
        )
        show(
            program, params, tokenizer, console, multiple_choice=multiple_choice, prompt=prompt,
            sample_tokens=sample_tokens, temperature=temperature, top_k=top_k, seed=seed,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
