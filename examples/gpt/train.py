"""Trains a GPT on shards of tokens, in any precision recipe, on all devices.

Run it from the root of the repository:

    python -m examples.gpt.train
    python -m examples.gpt.train --preset gpt2-124m --data tokens --batch-size 16 --token-budget 524288 --attention
        cudnn --loss-chunks 8 --learning-rate 6e-4 --steps 19000

The first trains the tiny model on Python's standard library; the second, on one line, is for a GPU and for shards that
`examples.gpt.data` made.

Everything of a run lies in its folder (`--out`): `log.jsonl`, `loss.png`, `checkpoints`, and `tokens` if the run made
its own. Ctrl-C and SIGTERM end the step at work, save a checkpoint and stop; the same command with `--resume` goes on
from the newest one.

With several processes (`--coordinator-address`, `--num-processes`, `--process-id`, or a cluster that JAX knows) each
reads its own part of every batch; the first one prints and writes. `examples.gpt.launch` starts some on one machine.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import typer
from jax.experimental import multihost_utils
from rich.console import Console

import mpx
from examples.gpt import data, devices, evaluate, meter, multiple_choice, output, processes, shards
from examples.gpt.checkpoints import CheckpointError, Checkpoints, SaveError
from examples.gpt.dashboard import progress_of
from examples.gpt.interruptions import interruptions
from examples.gpt.loader import Loader, prefetch
from examples.gpt.model import PRESETS
from examples.gpt.multiple_choice import MultipleChoiceError
from examples.gpt.recipes import RECIPES, get_recipe
from examples.gpt.resuming import check_health, save, start
from examples.gpt.run_log import Record, RunLog, read_records, write_plot
from examples.gpt.runs import Run, Settings, make_run
from examples.gpt.shards import ShardError


# --- The loop. ---
def train(run: Run, console: Console) -> int:
    """Trains to the last step, or until a signal; returns the exit code, which is not 0 in the second case."""
    settings, program = run.settings, run.program
    folder = settings.out / "checkpoints"
    with Checkpoints(folder, cleans=True) as checkpoints, interruptions(console) as interruption:
        params, opt_state, step, position = start(run, checkpoints, console)
        log = RunLog(settings.out / "log.jsonl", step) if jax.process_index() == 0 else None
        speed = Speed(program.recipe.compute_dtype)
        describe(run, step, speed, console)
        loader = Loader(
            run.folder, batch_size=run.microbatches * settings.batch_size, context=program.config.context,
            seed=settings.seed, position=position, process_index=jax.process_index(),
            process_count=jax.process_count(),
        )  # fmt: skip
        put = devices.microbatches_on(run.mesh, run.microbatches)
        batches = prefetch(loader, put=lambda item: (put(item[0]), item[1]))
        with progress_of(console, settings.steps, step) as show:
            while step < settings.steps:
                batch, position = next(batches)
                params, opt_state, metrics = program.train_step(params, opt_state, batch)
                step += 1
                # Asked once a step: after a Ctrl-C from here on the next step is the last, and it is saved too.
                is_last = interruption.is_due(step) or step == settings.steps
                is_evaluated = step % settings.evaluate_every == 0 or is_last
                if step % settings.report_every == 0 or is_evaluated or not speed.is_running:
                    record = report(run, step, metrics, opt_state, speed)
                    if is_evaluated:
                        record = dataclasses.replace(
                            record, validation_loss=float(program.evaluate(params, run.validation))
                        )
                    if log:
                        log.write(record)
                    show(record)
                    speed.start(step)
                if step % settings.save_every == 0 or is_last:
                    save(checkpoints, run, params, opt_state, step, position)
                    speed.start(step)
                if is_last:
                    break
        batches.close()
    is_done = step == settings.steps
    finish(run, params, console, is_done=is_done)
    return 0 if is_done else interruption.exit_code


def report(run: Run, step: int, metrics: Any, opt_state: Any, speed: "Speed") -> Record:
    """Waits for the device, and says how the last step went; a run that came to nothing ends here."""
    check_health(opt_state)
    loss, norm = float(metrics.loss), float(metrics.gradient_norm)
    skipped = int(mpx.skipped_steps(opt_state))
    seconds = speed.seconds_per_step(step)
    tokens_per_second = run.tokens_per_step / seconds if seconds else None
    in_use, peak = meter.device_memory()
    return Record(
        step=step,
        loss=loss,
        # A step that was skipped does not advance the schedule.
        learning_rate=float(run.hyperparameters.schedule()(step - 1 - skipped)),
        gradient_norm=norm,
        loss_scale=float(mpx.get_loss_scale(opt_state).loss_scale),
        skipped_steps=skipped,
        seconds_per_step=seconds,
        tokens_per_second=tokens_per_second,
        mfu=tokens_per_second and tokens_per_second * run.program.config.flops_per_token / speed.rate,
        memory_bytes=in_use,
        peak_memory_bytes=peak,
    )


class Speed:
    """The time of steps, from when the device was idle to when it is again; compilation is left out.

    Attributes:
        dtype: in which the recipe computes.
        rate: operations a second that all devices can do in matrix products of it, measured.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.rate = meter.matmul_rate(dtype) * jax.device_count()
        self._step, self._since = 0, None

    @property
    def is_running(self) -> bool:
        """False until the first step, which compiles, is done."""
        return self._since is not None

    def start(self, step: int) -> None:
        """Times from here; the device is idle."""
        self._step, self._since = step, time.perf_counter()

    def seconds_per_step(self, step: int) -> float | None:
        """The mean since `start`, with the device idle again; None if that was never called."""
        return None if self._since is None else (time.perf_counter() - self._since) / (step - self._step)


# --- What a run shows. ---
def describe(run: Run, step: int, speed: Speed, console: Console) -> None:
    """A few lines before the first step."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.shapes[0]))
    index, config = run.index, run.program.config
    console.print(
        f"{run.settings.preset}: {parameters:,} parameters, {run.program.recipe.label}, on {jax.device_count()} x "
        f"{jax.devices()[0].device_kind}. {index.tokens('training'):,} tokens ({index.tokenizer}) to train on, "
        f"{index.tokens('validation'):,} held out.\n"
        f"{'Going on from' if step else 'From'} step {step} to {run.settings.steps}, each of {run.microbatches} x "
        f"{run.settings.batch_size} x {config.context} = {run.tokens_per_step:,} tokens. MFU is of "
        f"{speed.rate / 1e12:,.2f} TFLOP/s, measured in {speed.dtype} matrix products.",
        soft_wrap=True,
        markup=False,
    )


def finish(run: Run, params: Any, console: Console, *, is_done: bool) -> None:
    """A plot; and if the last step is done a sample, and multiple choice if there are questions."""
    settings = run.settings
    if jax.process_index() == 0:
        log, plot = settings.out / "log.jsonl", settings.out / "loss.png"
        write_plot(plot, read_records(log), f"{settings.preset}, {run.program.recipe.label}")
        console.print(f"Written: {log}, {plot}", soft_wrap=True, markup=False)
    if is_done:
        evaluate.show(
            run.program, params, run.tokenizer, console, questions=settings.multiple_choice, prompt=settings.prompt,
            count=settings.sample_tokens, seed=settings.seed, temperature=settings.temperature, top_k=settings.top_k,
        )  # fmt: skip


# --- The command line. ---
def main(
    preset: Annotated[str, typer.Option(help=f"Of {', '.join(PRESETS)}.")] = "tiny",
    recipe: Annotated[str, typer.Option(help=f"Of {', '.join(r.name for r in RECIPES)}.")] = "bf16-split",
    data: Annotated[
        Path | None, typer.Option(help="Folder of shards; without it, bytes of Python's standard library.")
    ] = None,
    vocabulary_files: evaluate.VocabularyOption = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("run"),
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in --out.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the whole run.")] = 400,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a microbatch, on all devices together.")] = 8,
    token_budget: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an update; one microbatch if none.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule.")] = 1e-3,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Of the initial weights and the order of the data.")
    ] = 0,
    attention: Annotated[Literal["xla", "cudnn"], typer.Option(help="cudnn is flash attention, on a GPU.")] = "xla",
    layers: Annotated[Literal["unrolled", "scanned"], typer.Option(help="A scan compiles one block.")] = "unrolled",
    checkpoint: Annotated[
        Literal["none", "dots", "full"], typer.Option(help="What the backward pass computes again.")
    ] = "none",
    loss_chunks: Annotated[int, typer.Option(min=1, help="Parts in which the loss computes its logits.")] = 1,
    parallel: Annotated[
        Literal["replicated", "zero"], typer.Option(help="zero divides the optimizer state among devices.")
    ] = "replicated",
    report_every: Annotated[int, typer.Option(min=1, help="Steps between two lines of the log.")] = 10,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between two validation losses.")] = 100,
    validation_batches: Annotated[int, typer.Option(min=1, help="Batches of a validation loss.")] = 16,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 200,
    prompt: evaluate.PromptOption = "def ",
    sample_tokens: evaluate.SampleOption = 200,
    temperature: evaluate.TemperatureOption = 0.8,
    top_k: evaluate.TopKOption = None,
    multiple_choice: evaluate.QuestionsOption = None,
    coordinator_address: Annotated[
        str | None, typer.Option(help="Of several processes: HOST:PORT of the first.")
    ] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, help="How many processes train together.")] = None,
    process_id: Annotated[int | None, typer.Option(min=0, help="Which of them this is, from 0.")] = None,
) -> None:
    """Trains a GPT on shards of tokens, in any precision recipe, on all devices."""
    given = locals()
    settings = Settings(**{field.name: given[field.name] for field in dataclasses.fields(Settings)})
    with processes.together():
        try:
            processes.join(coordinator_address, num_processes, process_id)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        code = carry_out(settings, Console(quiet=jax.process_index() != 0))  # the first process speaks for all
    raise typer.Exit(code)


def carry_out(settings: Settings, console: Console) -> int:
    """The whole run; returns its exit code, and makes one line of each error that is not one of the program itself."""
    try:
        check(settings)
        run = make_run(settings, prepared_data(settings, console))
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    try:
        code = train(run, console)
    except SaveError as error:
        processes.fail(str(error))
    except (CheckpointError, ShardError, MultipleChoiceError) as error:
        raise typer.BadParameter(str(error)) from error
    except (mpx.StuckError, OSError) as error:
        processes.fail(str(error))
    if code:
        console.print("Stopped; the checkpoint is saved. Go on with --resume.")
    return code


def check(settings: Settings) -> None:
    """Refuses what is wrong with the options alone, and makes the folder of the run."""
    if settings.preset not in PRESETS:
        raise ValueError(f"--preset: no model is called {settings.preset!r}; there are {', '.join(PRESETS)}.")
    get_recipe(settings.recipe)
    if not (math.isfinite(settings.learning_rate) and settings.learning_rate > 0):
        raise ValueError(f"--learning-rate must be positive, but is {settings.learning_rate}.")
    if not math.isfinite(settings.temperature):
        raise ValueError(f"--temperature must be finite, but is {settings.temperature}.")
    if settings.multiple_choice:
        multiple_choice.read_items(settings.multiple_choice)
    try:
        output.require_folder(settings.out)
    except ValueError as error:
        raise ValueError(f"--out: {error}") from error


def prepared_data(settings: Settings, console: Console) -> Path:
    """The folder of the shards: of the option, of the run that goes on, or made of the standard library's bytes."""
    if settings.data is not None:
        return settings.data
    folder = settings.out / "tokens"
    if settings.resume:
        with Checkpoints(settings.out / "checkpoints") as checkpoints:
            return evaluate.shards_of(settings.out, checkpoints.description())
    if not (folder / shards.INDEX_NAME).exists():
        console.print(f"Reading Python's standard library into {folder}.", soft_wrap=True, markup=False)
        if jax.process_index() == 0:
            data.prepare(folder)
        multihost_utils.sync_global_devices("tokens")
    return folder


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    processes.run(app)
