"""Train a GPT on shards of tokens, in any precision recipe, on all devices.

Run it from the root of the repository:

    python -m examples.gpt.train
    python -m examples.gpt.train --preset gpt2-124m --data tokens --batch-size 16 --token-budget 524288 --attention
        cudnn --loss-chunks 8 --learning-rate 6e-4 --steps 19000

The first trains the tiny model on Python's standard library. The second, on one line, is for a GPU and for shards that
`examples.gpt.data` made. The folder of the run (`--out`) gets `log.jsonl`, `loss.png`, `checkpoints`, and `tokens` if
the run makes its own.

Ctrl-C and SIGTERM finish the current step, save a checkpoint and stop; the same command with `--resume` goes on from
the newest one. A finished run goes on with `--resume` and more `--steps`: its learning rate then jumps up to where that
of a longer run would be, and falls again.

Of several processes (`--coordinator-address`, `--num-processes`, `--process-id`, or a cluster that JAX knows) each
reads its own part of every batch; the first one prints and writes. `examples.gpt.launch` starts some on one machine.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import typer
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console
from typer import Option

import mpx
from examples.gpt import data, devices, evaluate, meter, multiple_choice, output, processes, shards
from examples.gpt.checkpoints import CheckpointError, Checkpoints, SaveError, check_health, resume, save
from examples.gpt.loader import Loader, Rows, prefetch, validation_batches
from examples.gpt.model import PRESETS, Config
from examples.gpt.processes import interruptions
from examples.gpt.recipes import RECIPES, get_recipe
from examples.gpt.run_log import Record, RunLog, progress_of, read_records, write_plot
from examples.gpt.tokenizers import Tokenizer, get_tokenizer
from examples.gpt.training import Hyperparameters, Program, make_program


# --- The options. ---
@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `examples.gpt.train`."""

    preset: Annotated[str, Option(help=f"One of {', '.join(PRESETS)}.")] = "tiny"
    recipe: Annotated[str, Option(help=f"One of {', '.join(r.name for r in RECIPES)}.")] = "bf16-split"
    data: Annotated[Path | None, Option(help="Folder of shards; without it, bytes of Python's standard library.")] = (
        None
    )
    vocabulary_files: evaluate.VocabularyOption = None
    out: Annotated[Path, Option(help="Folder of the run.")] = Path("run")
    resume: Annotated[bool, Option(help="Go on from the newest checkpoint in --out.")] = False
    steps: Annotated[int, Option(min=1, help="Updates of the whole run.")] = 400
    batch_size: Annotated[int, Option(min=1, help="Sequences of a microbatch, on all devices together.")] = 8
    token_budget: Annotated[int | None, Option(min=1, help="Tokens of an update; one microbatch if none.")] = None
    learning_rate: Annotated[float, Option(help="Peak of the schedule.")] = 1e-3
    seed: Annotated[int, Option(min=0, max=2**31 - 1, help="Decides initial weights and the order of the data.")] = 0
    attention: Annotated[Literal["xla", "cudnn"], Option(help="cudnn is flash attention, on a GPU.")] = "xla"
    layers: Annotated[Literal["unrolled", "stacked", "scanned"], Option(help="A scan compiles one block.")] = "unrolled"
    checkpoint: Annotated[Literal["none", "dots", "thin", "full"], Option(help="What is kept.")] = "none"
    loss_chunks: Annotated[int, Option(min=1, help="Parts in which the loss computes its logits.")] = 1
    parallel: Annotated[
        Literal["replicated", "zero"], Option(help="zero divides the optimizer state among devices.")
    ] = "replicated"
    report_every: Annotated[int, Option(min=1, help="Steps between two lines of the log.")] = 10
    evaluate_every: Annotated[int, Option(min=1, help="Steps between two validation losses.")] = 100
    validation_batches: Annotated[int, Option(min=1, help="Batches of a validation loss.")] = 16
    save_every: Annotated[int, Option(min=1, help="Steps between two checkpoints.")] = 200
    prompt: evaluate.PromptOption = "def "
    sample_tokens: evaluate.SampleOption = 200
    temperature: evaluate.TemperatureOption = 0.8
    top_k: evaluate.TopKOption = None
    multiple_choice: evaluate.QuestionsOption = None
    coordinator_address: Annotated[str | None, Option(help="HOST:PORT of the first of several processes.")] = None
    num_processes: Annotated[int | None, Option(min=1, help="Number of processes that train together.")] = None
    process_id: Annotated[int | None, Option(min=0, help="Number of this process, from 0.")] = None


# --- What is made of them, before anything is compiled. ---
@dataclasses.dataclass(frozen=True)
class Run:
    """A training run, ready to start."""

    settings: Settings
    folder: Path  # of the shards
    index: shards.Index
    program: Program  # compiled when its functions are first called
    hyperparameters: Hyperparameters
    mesh: Mesh  # all devices
    microbatches: int  # of one step
    shapes: Any  # of parameters and optimizer state
    shardings: Any
    validation: jax.Array  # tokens (N, B, T + 1) on the devices
    tokenizer: Tokenizer

    @property
    def tokens_per_step(self) -> int:
        """Return the number of targets of one update."""
        return self.microbatches * self.settings.batch_size * self.program.config.context

    @functools.cached_property
    def peak_rate(self) -> float:
        """Return the operations a second that all devices can do in matrix products of the compute dtype, measured."""
        return meter.matmul_rate(self.program.recipe.compute_dtype) * jax.device_count()

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint and the run that resumes it must have in common."""
        config = {name: getattr(self.program.config, name) for name in evaluate.SIZES}
        names = ("recipe", "seed", "batch_size", "token_budget")
        settings = {name: getattr(self.settings, name) for name in names}
        hyperparameters = dataclasses.asdict(self.hyperparameters)
        return config | settings | hyperparameters | {"tokens": shards.fingerprint(self.index)}


def make_run(settings: Settings, console: Console) -> Run:
    """Check the options against each other, data and devices, and build everything from them; compile nothing."""
    recipe, config = get_recipe(settings.recipe), _checked(settings)
    folder = _shards(settings, console)
    index = shards.read_index(folder)
    if settings.top_k is not None and settings.top_k > index.vocabulary:
        raise ValueError(f"--top-k {settings.top_k} is more than the vocabulary, {index.vocabulary} tokens.")
    config = dataclasses.replace(config, vocabulary=index.vocabulary)
    hyperparameters = Hyperparameters(settings.steps, settings.learning_rate)
    mesh = devices.make_mesh()
    program = make_program(
        recipe, config, hyperparameters, loss_chunks=settings.loss_chunks, mesh=mesh, parallel=settings.parallel
    )
    shapes = jax.eval_shape(program.init, settings.seed)
    shardings = devices.state_shardings(mesh, *shapes, settings.parallel)
    compiled = dataclasses.replace(
        program,
        init=jax.jit(program.init, out_shardings=shardings),
        train_step=jax.jit(program.train_step, donate_argnums=(0, 1), out_shardings=(*shardings, None)),
        evaluate=jax.jit(program.evaluate),
        token_losses=jax.jit(program.token_losses),
    )
    validation = validation_batches(
        folder, count=settings.validation_batches, batch_size=settings.batch_size, context=config.context
    )
    return Run(
        settings, folder, index, compiled, hyperparameters, mesh,
        microbatches=count_microbatches(settings, config),
        shapes=shapes, shardings=shardings,
        validation=devices.batches_on(mesh, validation),
        tokenizer=get_tokenizer(index.tokenizer, settings.vocabulary_files),
    )  # fmt: skip


def count_microbatches(settings: Settings, config: Config) -> int:
    """Return the number of microbatches in the token budget of a step; one, if there is no budget."""
    if settings.batch_size % jax.device_count():
        raise ValueError(
            f"--batch-size {settings.batch_size} cannot be divided among {jax.device_count()} devices; choose a "
            "multiple."
        )
    tokens = settings.batch_size * config.context
    budget = settings.token_budget or tokens
    if budget % tokens:
        raise ValueError(
            f"--token-budget {budget:,} is not a multiple of a microbatch, {settings.batch_size} x "
            f"{config.context} = {tokens:,} tokens; change it, or --batch-size."
        )
    return budget // tokens


def _checked(settings: Settings) -> Config:
    """Refuse options that are wrong by themselves, make the folder of the run, and return the model."""
    if settings.preset not in PRESETS:
        raise ValueError(f"--preset: no model is called {settings.preset!r}; there are {', '.join(PRESETS)}.")
    recipe, preset = get_recipe(settings.recipe), PRESETS[settings.preset]
    Hyperparameters(settings.steps, settings.learning_rate)
    if not math.isfinite(settings.temperature):
        raise ValueError(f"--temperature must be finite, but is {settings.temperature}.")
    if preset.context % settings.loss_chunks:
        raise ValueError(f"--loss-chunks {settings.loss_chunks} does not divide the context, {preset.context}.")
    if settings.attention == "cudnn" and (jax.default_backend() != "gpu" or recipe.compute_dtype == "float32"):
        raise ValueError(
            "--attention cudnn is a kernel for 16-bit numbers on a GPU, but this run computes in "
            f"{recipe.compute_dtype} on a {jax.default_backend()}; use --attention xla."
        )
    if settings.multiple_choice:
        multiple_choice.read_items(settings.multiple_choice)
    output.require_folder(settings.out)
    layout = {"attention_dtype": recipe.attention_dtype, "layers": settings.layers, "checkpoint": settings.checkpoint}
    return dataclasses.replace(preset, attention=settings.attention, **layout)


def _shards(settings: Settings, console: Console) -> Path:
    """Return the folder of shards: that of the options, that of the resumed run, or a new one in the run's folder."""
    if settings.data is not None:
        return settings.data
    if settings.resume:
        with Checkpoints(settings.out / "checkpoints") as checkpoints:
            return evaluate.shards_of(settings.out, checkpoints.description())
    folder = settings.out / "tokens"
    if not (folder / shards.INDEX_NAME).exists():
        console.print(f"Reading Python's standard library into {folder}.", soft_wrap=True, markup=False)
        if jax.process_index() == 0:
            data.prepare(folder)
        multihost_utils.sync_global_devices("tokens")
    return folder


# --- The loop. ---
def train(run: Run, console: Console) -> int:
    """Train to the last step, or until a signal; return the exit code, which is not 0 in the second case."""
    settings, program = run.settings, run.program
    folder = settings.out / "checkpoints"
    with Checkpoints(folder, cleans=True) as checkpoints, interruptions(console) as interruption:
        params, opt_state, step, position = start(run, checkpoints, console)
        log = RunLog(settings.out / "log.jsonl", step) if jax.process_index() == 0 else None
        describe(run, step, console)
        batches, stopwatch = batches_from(run, position), meter.Stopwatch()
        with progress_of(console, settings.steps, step) as show:
            while step < settings.steps:
                batch, position = next(batches)
                params, opt_state, metrics = program.train_step(params, opt_state, batch)
                step += 1
                # Asked once a step: a later Ctrl-C makes the next step the last one, which is saved as well.
                is_last = interruption.is_due(step) or step == settings.steps
                is_evaluated = step % settings.evaluate_every == 0 or is_last
                if step == 1 or step % settings.report_every == 0 or is_evaluated:
                    record = report(run, step, metrics, opt_state, stopwatch)
                    if is_evaluated:
                        loss = float(program.evaluate(params, run.validation))
                        record = dataclasses.replace(record, validation_loss=loss)
                    if log:
                        log.write(record)
                    show(record)
                    stopwatch.start(step)
                elif stopwatch.seconds_per_step(step) is None:
                    jax.block_until_ready(metrics)  # a resumed run has compiled; it logs the steps of any other run
                    stopwatch.start(step)
                if step % settings.save_every == 0 or is_last:
                    described = {"identity": run.identity, "data": str(run.folder.absolute())}
                    save(checkpoints, params, opt_state, step=step, position=position, **described)
                    stopwatch.start(step)
                if is_last:
                    break
        batches.close()
    is_done = step == settings.steps
    finish(run, params, console, is_done=is_done)
    return 0 if is_done else interruption.exit_code


def start(run: Run, checkpoints: Checkpoints, console: Console) -> tuple[Any, Any, int, int]:
    """Return parameters, optimizer state, steps done and the loader's position: new ones, or those of a checkpoint."""
    if run.settings.resume:
        resumed = resume(checkpoints, run.shapes, run.shardings, run.identity, console)
        describe_extension(run, checkpoints.description()["identity"]["steps"], resumed[1], console)
        return resumed
    if checkpoints.newest is not None:
        raise CheckpointError(
            f"{run.settings.out} has a checkpoint of step {checkpoints.newest}; go on with --resume, or choose "
            "another --out."
        )
    return *run.program.init(run.settings.seed), 0, 0


def batches_from(run: Run, position: int) -> Iterator[tuple[jax.Array, int]]:
    """Return microbatches (A, B, T + 1) on the devices, each with the position after it."""
    loader = Loader(
        Rows(run.folder, "training", run.program.config.context),
        batch_size=run.microbatches * run.settings.batch_size,
        seed=run.settings.seed,
        position=position,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    put = devices.microbatches_on(run.mesh, run.microbatches)
    return prefetch(loader, put=lambda item: (put(item[0]), item[1]))


def report(run: Run, step: int, metrics: Any, opt_state: Any, stopwatch: meter.Stopwatch) -> Record:
    """Wait for the device, stop a run that diverged, and return the record of the last step."""
    check_health(opt_state, run.shapes[0])
    loss, norm = float(metrics.loss), float(metrics.gradient_norm)
    seconds = stopwatch.seconds_per_step(step)  # the device is idle now
    skipped = int(mpx.skipped_steps(opt_state))
    tokens_per_second = run.tokens_per_step / seconds if seconds else None
    in_use, peak = meter.device_memory()
    return Record(
        step=step,
        loss=loss,
        # A skipped step does not advance the schedule.
        learning_rate=float(run.hyperparameters.schedule()(step - 1 - skipped)),
        gradient_norm=norm,
        loss_scale=float(mpx.get_loss_scale(opt_state).loss_scale),
        skipped_steps=skipped,
        seconds_per_step=seconds,
        tokens_per_second=tokens_per_second,
        mfu=tokens_per_second and tokens_per_second * run.program.config.flops_per_token / run.peak_rate,
        memory_bytes=in_use,
        peak_memory_bytes=peak,
    )


# --- What a run prints. ---
def describe(run: Run, step: int, console: Console) -> None:
    """Print the run before its first step."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.shapes[0]))
    settings, index, recipe = run.settings, run.index, run.program.recipe
    console.print(
        f"{settings.preset}: {parameters:,} parameters, {recipe.label}, on {jax.device_count()} x "
        f"{jax.devices()[0].device_kind}. {index.tokens('training'):,} tokens ({index.tokenizer}) to train on, "
        f"{index.tokens('validation'):,} held out.\n"
        f"{'Going on from' if step else 'From'} step {step} to {settings.steps}, each of {run.microbatches} x "
        f"{settings.batch_size} x {run.program.config.context} = {run.tokens_per_step:,} tokens. MFU is of "
        f"{run.peak_rate / 1e12:,.2f} TFLOP/s, measured in {recipe.compute_dtype} matrix products.",
        soft_wrap=True,
        markup=False,
    )


def describe_extension(run: Run, steps_before: int, opt_state: Any, console: Console) -> None:
    """Print what more steps mean for the learning rate, if the run was finished after fewer."""
    steps = run.settings.steps
    if steps == steps_before:
        return
    updates = steps_before - int(mpx.skipped_steps(opt_state))
    rate = lambda total, update: float(dataclasses.replace(run.hyperparameters, steps=total).schedule()(update))
    console.print(
        f"The run was finished after {steps_before} steps, at a learning rate of {rate(steps_before, updates):.2e}. It "
        f"goes on along the schedule of {steps} steps, which is at {rate(steps, updates):.2e} here and ends at "
        f"{rate(steps, steps):.2e}. A run with --steps {steps} from the start would have had other learning rates "
        "until now.",
        soft_wrap=True,
    )


def finish(run: Run, params: Any, console: Console, *, is_done: bool) -> None:
    """Write the plot; after the last step also print a sample, and the accuracy if there are questions."""
    settings = run.settings
    if jax.process_index() == 0:
        log, plot = settings.out / "log.jsonl", settings.out / "loss.png"
        write_plot(plot, read_records(log), f"{settings.preset}, {run.program.recipe.label}")
        console.print(f"Written: {log}, {plot}", soft_wrap=True, markup=False)
    if is_done:
        names = ("multiple_choice", "prompt", "sample_tokens", "temperature", "top_k", "seed")
        evaluate.show(run.program, params, run.tokenizer, console, **{name: getattr(settings, name) for name in names})


# --- The command line. ---
def main(**options: Any) -> None:
    """Train a GPT on shards of tokens, in any precision recipe, on all devices."""
    settings = Settings(**options)
    try:
        processes.join(settings.coordinator_address, settings.num_processes, settings.process_id)
        console = Console(quiet=jax.process_index() != 0)  # the first process speaks for all
        run = make_run(settings, console)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(f"{processes.prefix()}{error}") from error
    try:
        code = train(run, console)
    except (SaveError, mpx.StuckError, OSError) as error:
        typer.echo(f"Error: {processes.prefix()}{error}", err=True)
        raise typer.Exit(1) from error
    except (CheckpointError, shards.ShardError, multiple_choice.MultipleChoiceError) as error:
        raise typer.BadParameter(f"{processes.prefix()}{error}") from error
    if code:
        console.print("Stopped; the checkpoint is saved. Go on with --resume.")
    raise typer.Exit(code)


# Typer reads the options off the signature: they are those of `Settings`, written once.
main.__signature__ = inspect.signature(Settings)
main.__annotations__ = dict(Settings.__annotations__)
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    processes.run(app)
