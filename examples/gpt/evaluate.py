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

from examples.gpt import checkpoints, data, sample
from examples.gpt.model import Config
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, Program, make_program

# The fields of a configuration that decide the shapes of the arrays in a checkpoint.
SIZES = ("width", "depth", "heads", "context", "vocabulary", "vocabulary_multiple", "layers")
PADDING = 0  # any token: it stands after all that counts, and the model is causal

PromptOption = Annotated[str, typer.Option(help="Text that the sample continues.")]
SampleOption = Annotated[int, typer.Option(min=0, help="Length of the sample in tokens; 0 for none.")]
TemperatureOption = Annotated[
    float, typer.Option(min=0, help="Temperature of the sample; 0 takes the most likely token.")
]
TopKOption = Annotated[int | None, typer.Option(min=1, help="Sample from so many most likely tokens.")]
QuestionsOption = Annotated[Path | None, typer.Option(help="Questions in HellaSwag's JSONL form.")]
VocabularyOption = Annotated[Path | None, typer.Option(help="Folder with GPT-2's vocab.bpe and encoder.json.")]


# --- Multiple-choice questions. ---
class QuestionError(ValueError):
    """Questions cannot be used or scored; the message says which one and why."""


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
    """Read a JSONL file: "ctx", "endings" and "label", and any other keys, on each line that is not empty."""
    questions = []
    # Not `splitlines`, which also cuts at characters that may stand unescaped in a string of JSON.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            context, endings, label = fields["ctx"], fields["endings"], int(fields["label"])  # some copies have digits
            is_right = len(endings) > 1 and all(map(str.strip, [context, *endings])) and 0 <= label < len(endings)
        except (ValueError, TypeError, LookupError) as error:
            raise QuestionError(f"{path}, line {number} is no question: {error!r}.") from error
        if not is_right:
            raise QuestionError(
                f"{path}, line {number}: a question needs a text 'ctx', two texts or more as 'endings', and the "
                f"'label' of one of them, but this is {line[:80]}"
            )
        questions.append(Question(context, tuple(endings), label))
    if not questions:
        raise QuestionError(f"{path} has no questions; each line should be one, as JSON.")
    return questions


def accuracy(
    losses_of: Callable[[np.ndarray], ArrayLike],
    questions: Sequence[Question],
    encode: Callable[[str], np.ndarray],
    *,
    context: int,
    batch_size: int = 8,
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
    # All rows are made before the first loss, so that a wrong question is found before the model runs for minutes.
    rows, lengths = [], []  # lengths count the tokens of the endings
    for number, question in enumerate(questions):
        start = encode(question.context)
        for text in question.endings:
            ending = encode(" " + text)
            if len(ending) > context:
                raise QuestionError(
                    f"an ending of question {number} ({question.context[:40]!r}) has {len(ending)} tokens, but the "
                    f"model has room for {context}."
                )
            rows.append(np.concatenate([start, ending])[-(context + 1) :])
            lengths.append(len(ending))
    totals = np.concatenate(
        [
            _totals(losses_of, rows[i : i + batch_size], lengths[i : i + batch_size], context, batch_size)
            for i in range(0, len(rows), batch_size)
        ]
    )
    if not np.isfinite(totals).all():
        raise QuestionError("the loss of an ending is NaN or infinite; did the training run diverge?")
    ends = np.cumsum([len(question.endings) for question in questions])[:-1]
    labels = [question.label for question in questions]
    share = lambda losses: float(
        np.mean([x.argmin() == y for x, y in zip(np.split(losses, ends), labels, strict=True)])
    )
    return Accuracy(acc=share(totals), acc_norm=share(totals / np.array(lengths)), questions=len(questions))


def _totals(
    losses_of: Callable[[np.ndarray], ArrayLike],
    rows: Sequence[np.ndarray],
    lengths: Sequence[int],
    context: int,
    batch_size: int,
) -> list[float]:
    """Return the loss of each row's ending; rows and the last batch are padded at their ends."""
    tokens = np.full((batch_size, context + 1), PADDING, np.int32)
    for padded, row in zip(tokens, rows, strict=False):
        padded[: len(row)] = row
    losses = np.asarray(losses_of(tokens)).astype(np.float64)
    ends = [len(row) - 1 for row in rows]  # token i is predicted at position i - 1
    return [of_row[end - length : end].sum() for of_row, end, length in zip(losses, ends, lengths, strict=False)]


# --- A trained run. ---
def restored(folder: Path, loss_chunks: int = 1) -> tuple[Program, Any, dict[str, Any]]:
    """Return the program, the parameters and the description of the newest checkpoint of a run, on one device."""
    if not (folder / "checkpoints").is_dir():
        raise checkpoints.CheckpointError(f"{folder} is no folder of a run: there is no folder of checkpoints in it.")
    with checkpoints.opened(folder / "checkpoints") as manager:
        described = checkpoints.description_of(manager)
        identity = described["identity"]
        config = Config(**{name: identity[name] for name in SIZES})
        # The optimizer's state has the same shapes whatever the schedule is.
        training = Hyperparameters(steps=1, learning_rate=1.0)
        program = make_program(get_recipe(identity["recipe"]), config, training, loss_chunks=loss_chunks)
        shapes = jax.eval_shape(program.init, 0)
        device = SingleDeviceSharding(jax.local_devices()[0])
        params, _ = checkpoints.restore(manager, shapes, jax.tree.map(lambda leaf: device, shapes))
    compiled = {name: jax.jit(getattr(program, name)) for name in ("evaluate", "token_losses")}
    return dataclasses.replace(program, **compiled), params, described


def show(
    program: Program,
    params: Any,
    tokenizer: data.Tokenizer,
    say: Callable[[str], None],
    *,
    multiple_choice: Path | None,
    prompt: str,
    sample_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> None:
    """Say the accuracy, if there is a file of questions, and a sample, if its length is not 0."""
    context = program.config.context
    if multiple_choice:
        losses_of = lambda tokens: program.token_losses(params, tokens)
        found = accuracy(losses_of, read_questions(multiple_choice), tokenizer.encode, context=context)
        say(f"{found.questions} questions: acc {found.acc:.4f}, acc_norm {found.acc_norm:.4f}")
    if sample_tokens:
        tokens = tokenizer.encode(prompt) if prompt else np.array([tokenizer.separator])  # which begins a document
        continued = sample.generate(
            program.logits, params, tokens, count=sample_tokens, context=context, key=jax.random.key(seed),
            temperature=temperature, top_k=top_k,
        )  # fmt: skip
        text = prompt + tokenizer.decode(continued)
        text = "".join(x if x.isprintable() or x in "\n\t" else "\ufffd" for x in text)  # a terminal obeys the others
        say(f"A sample:\n{text}")


def main(
    run: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("run"),
    data_folder: Annotated[
        Path | None, typer.Option("--data", help="Folder of tokens; without it the one of the run.")
    ] = None,
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
    try:
        program, params, described = restored(run, loss_chunks)
        folder = data_folder or Path(described["data"])
        index = data.read_index(folder)
        tokenizer = data.get_tokenizer(index.tokenizer, vocabulary_files)
        if index.vocabulary != program.config.vocabulary:
            raise ValueError(
                f"the tokens in {folder} have a vocabulary of {index.vocabulary:,}, but the model has "
                f"{program.config.vocabulary:,}; name the folder that it was trained on with --data."
            )
        if index.sha256 != described["identity"]["tokens"]:
            typer.echo(f"Note: the run was trained on other tokens than {folder} has.")
        tokens = data.validation_batches(folder, count=batches, batch_size=batch_size, context=program.config.context)
        loss = float(program.evaluate(params, tokens))
        typer.echo(
            f"step {described['step']}: validation loss {loss:.4f} nats a token, of {tokens[..., 1:].size:,} tokens"
        )
        show(
            program, params, tokenizer, typer.echo, multiple_choice=multiple_choice, prompt=prompt,
            sample_tokens=sample_tokens, temperature=temperature, top_k=top_k, seed=seed,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
