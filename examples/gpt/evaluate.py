"""Evaluate a trained GPT: validation loss, multiple-choice questions, and a sample.

Run it from the root of the repository, on the folder of a run of `examples.gpt.train`:

    python -m examples.gpt.evaluate
    python -m examples.gpt.evaluate --run run --multiple-choice hellaswag_val.jsonl --prompt "import "

A question is the start of a text and several endings, one of them right. Each ending is appended to the start, and the
model's answer is the ending that it finds most likely. HellaSwag's validation split is `hellaswag_val.jsonl` of
https://github.com/rowanz/hellaswag, 10,042 questions of four endings each; chance is 0.25.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from jax.sharding import SingleDeviceSharding
from numpy.typing import ArrayLike
from typer import Option

from examples.gpt import checkpoints, data, devices, sample
from examples.gpt.model import SIZES, Config
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, Program

BATCH_SIZE = 8
PADDING = 0  # any token: it stands after all that counts, and the model is causal


# --- Multiple-choice questions. ---
@dataclasses.dataclass(frozen=True)
class Question:
    """The start of a text, its endings without the space before them, and the index of the right one."""

    context: str
    endings: tuple[str, ...]
    label: int


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The share of questions answered right."""

    acc: float
    acc_norm: float
    questions: int


def read_questions(path: Path) -> list[Question]:
    """Read a JSONL file: "ctx", "endings" and "label", and any other keys, on each line."""
    with path.open(encoding="utf-8") as lines:
        fields = list(map(json.loads, lines))
    return [Question(each["ctx"], tuple(each["endings"]), int(each["label"])) for each in fields]


def accuracy(
    losses_of: Callable[[np.ndarray], ArrayLike],
    questions: Sequence[Question],
    encode: Callable[[str], np.ndarray],
    *,
    context: int,
    batch_size: int = BATCH_SIZE,
) -> Accuracy:
    """Score every ending by the loss of its tokens after the context, and count how often the right one is lowest.

    For an ending e of the context c, with l(t) the cross-entropy of token t given all tokens before it:

        tokens     = encode(c), encode(" " + e)
        total loss = sum of l(t) over the tokens of " " + e     the lowest wins `acc`
        mean loss  = total loss / number of these tokens        the lowest wins `acc_norm`

    Of equal losses the first ending wins. Reproductions of GPT-2 print this `acc_norm`; lm-evaluation-harness divides
    by the length of the ending's text instead. `losses_of` goes from int32 tokens (batch_size, context + 1) to the loss
    of each prediction (batch_size, context), always of one shape. A context that is too long loses its start.
    """
    rows, lengths = [], []  # lengths count the tokens of the endings
    for question in questions:
        start = encode(question.context)
        for text in question.endings:
            ending = encode(" " + text)
            rows.append(np.concatenate([start, ending])[-(context + 1) :])
            lengths.append(len(ending))
    if max(lengths) > context:
        raise ValueError(f"an ending has {max(lengths)} tokens, but the model has room for {context}.")
    totals = []
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        tokens = np.full((batch_size, context + 1), PADDING, np.int32)
        for padded, row in zip(tokens, batch, strict=False):
            padded[: len(row)] = row
        losses = np.asarray(losses_of(tokens)).astype(np.float64)
        for of_row, row, length in zip(losses, batch, lengths[first:], strict=False):
            end = len(row) - 1  # token i is predicted at position i - 1
            totals.append(of_row[end - length : end].sum())
    ends = np.cumsum([len(question.endings) for question in questions])[:-1]
    labels = [question.label for question in questions]
    answers = lambda losses: [of_question.argmin() for of_question in np.split(losses, ends)]
    share = lambda losses: float(np.mean(np.equal(answers(losses), labels)))
    return Accuracy(share(np.array(totals)), share(totals / np.array(lengths)), len(questions))


# --- A trained run. ---
def restored(folder: Path) -> tuple[Program, Any, int, dict[str, Any]]:
    """Return program and parameters of a run, and step and description of its newest checkpoint, on one device."""
    if not (folder / "checkpoints").is_dir():
        raise ValueError(f"{folder} is no folder of a run: there is no folder of checkpoints in it.")
    with checkpoints.opened(folder / "checkpoints") as manager:
        step, described = checkpoints.newest(manager)
        identity = described["identity"]
        config = Config(**{name: identity[name] for name in SIZES})
        # The optimizer's state has the same shapes whatever the schedule is.
        program = Program(get_recipe(identity["recipe"]), config, Hyperparameters(steps=1, learning_rate=1.0))
        shapes = devices.shapes_on(described["mesh"], program.init, 0)
        device = SingleDeviceSharding(jax.local_devices()[0])
        params, _ = checkpoints.restore(manager, jax.tree.map(lambda leaf: leaf.update(sharding=device), shapes))
    return program, params, step, described


def main(
    run: Annotated[Path, Option(help="Folder of the run.")] = Path("run"),
    data_folder: Annotated[
        Path | None, Option("--data", help="Folder of tokens; without it the one of the run.")
    ] = None,
    batches: Annotated[int, Option(min=1, help="Batches of the validation loss, 8 sequences each.")] = 16,
    multiple_choice: Annotated[Path | None, Option(help="Questions in HellaSwag's JSONL form.")] = None,
    prompt: Annotated[str, Option(help="Text that the sample continues.")] = "def ",
    sample_tokens: Annotated[int, Option(min=1, help="Length of the sample in tokens.")] = 200,
    temperature: Annotated[float, Option(min=0, help="Of the sample; 0 takes the most likely token.")] = 0.8,
) -> None:
    """Print the validation loss of a run, its accuracy if there are questions, and a sample."""
    try:
        program, params, step, described = restored(run)
        folder, config = data_folder or Path(described["data"]), program.config
        tokenizer = data.get_tokenizer(data.read_index(folder).tokenizer)
        if tokenizer.vocabulary != config.vocabulary:
            raise ValueError(f"{folder} has {tokenizer.vocabulary:,} kinds of tokens, the model {config.vocabulary:,}.")
        questions = read_questions(multiple_choice) if multiple_choice else []
        tokens = data.validation_batches(folder, batches, BATCH_SIZE, config.context)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    loss = float(jax.jit(program.evaluate)(params, tokens))
    typer.echo(f"step {step}: validation loss {loss:.4f} nats a token, of {tokens[..., 1:].size:,} tokens")
    if questions:
        losses_of = jax.jit(program.token_losses)
        found = accuracy(lambda tokens: losses_of(params, tokens), questions, tokenizer.encode, context=config.context)
        typer.echo(f"{found.questions} questions: acc {found.acc:.4f}, acc_norm {found.acc_norm:.4f}")
    started = tokenizer.encode(prompt) if prompt else np.array([tokenizer.separator])  # which begins a document
    continued = sample.generate(
        program.logits, params, started, count=sample_tokens, context=config.context, key=jax.random.key(0),
        temperature=temperature,
    )  # fmt: skip
    text = prompt + tokenizer.decode(continued)
    text = "".join(x if x.isprintable() or x in "\n\t" else "\ufffd" for x in text)  # a terminal obeys the others
    typer.echo(f"A sample:\n{text}")


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
