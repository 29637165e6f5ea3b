"""Trains a GPT on shards of tokens, in any precision recipe, on all devices.

Run it from the root of the repository:

    python -m examples.gpt.train
    python -m examples.gpt.train --preset gpt2-124m --data tokens --batch-size 16 --token-budget 524288 --attention
        cudnn --loss-chunks 8 --learning-rate 6e-4 --steps 19000

The first trains the tiny model on Python's standard library; the second, on one line, is for a GPU and for shards that
`examples.gpt.data` made.

Everything of a run lies in its folder (`--out`): `log.jsonl`, `loss.png`, `checkpoints`, and `tokens` if the run made
its own. Ctrl-C ends the step at work, saves a checkpoint and stops; the same command with `--resume` goes on from the
newest one.

With several processes (`jax.distributed`, to be initialised before `main` is called) each reads its own part of every
batch; the first one prints and writes. Ctrl-C stops such a run at once, since the processes would not agree on a step.
"""

import dataclasses
import functools
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import typer
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console

import mpx
from examples.gpt import data, devices, evaluate, meter, multiple_choice, output, shards
from examples.gpt.checkpoints import CheckpointError, Checkpoints
from examples.gpt.dashboard import progress_of
from examples.gpt.loader import Loader, Position, prefetch, validation_batches
from examples.gpt.model import PRESETS, Config
from examples.gpt.multiple_choice import MultipleChoiceError
from examples.gpt.recipes import RECIPES, get_recipe
from examples.gpt.run_log import Record, RunLog, read_records, write_plot
from examples.gpt.shards import ShardError
from examples.gpt.tokenizers import Tokenizer, get_tokenizer
from examples.gpt.training import Hyperparameters, Program, make_program

INTERRUPTED = 130  # the exit code of a program that Ctrl-C stopped


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line says; the options of `main` explain each."""

    preset: str
    recipe: str
    data: Path | None
    vocabulary_files: Path | None
    out: Path
    resume: bool
    steps: int
    batch_size: int
    token_budget: int | None
    learning_rate: float
    seed: int
    attention: Literal["xla", "cudnn"]
    layers: Literal["unrolled", "scanned"]
    checkpoint: Literal["none", "dots", "full"]
    loss_chunks: int
    parallel: devices.Parallel
    report_every: int
    evaluate_every: int
    validation_batches: int
    save_every: int
    prompt: str
    sample_tokens: int
    temperature: float
    top_k: int | None
    multiple_choice: Path | None


# --- A run, made ready. ---
@dataclasses.dataclass(frozen=True)
class Run:
    """What does not change while a run trains.

    Attributes:
        settings: of the command line.
        folder: of the shards.
        index: of that folder.
        program: the functions of the recipe, compiled when they are first called.
        hyperparameters: of the optimizer.
        mesh: of all devices.
        microbatches: of one step.
        shapes: of parameters and optimizer state.
        shardings: of both.
        validation: tokens (N, B, T + 1) on the devices.
        tokenizer: of the shards.
    """

    settings: Settings
    folder: Path
    index: shards.Index
    program: Program
    hyperparameters: Hyperparameters
    mesh: Mesh
    microbatches: int
    shapes: Any
    shardings: Any
    validation: jax.Array
    tokenizer: Tokenizer

    @property
    def tokens_per_step(self) -> int:
        """Of one update."""
        return self.microbatches * self.settings.batch_size * self.program.config.context

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint and the run that goes on from it must have in common."""
        config = {name: getattr(self.program.config, name) for name in evaluate.SIZES}
        names = ("recipe", "seed", "batch_size", "token_budget")
        settings = {name: getattr(self.settings, name) for name in names}
        hyperparameters = dataclasses.asdict(self.hyperparameters)
        return config | settings | hyperparameters | {"tokens": shards.fingerprint(self.folder)}


def make_run(settings: Settings, folder: Path) -> Run:
    """Builds everything from the settings; refuses what cannot work, and compiles nothing.

    Raises:
        ValueError: if settings do not fit each other, the data or the devices.
    """
    index = shards.read_index(folder)
    recipe = get_recipe(settings.recipe)
    compute = recipe.compute_dtype
    if settings.attention == "cudnn" and (jax.default_backend() != "gpu" or compute == "float32"):
        raise ValueError(
            "--attention cudnn is a kernel for 16-bit numbers on a GPU, but this run computes in "
            f"{compute} on a {jax.default_backend()}; use --attention xla."
        )
    config = dataclasses.replace(
        PRESETS[settings.preset],
        vocabulary=index.vocabulary,
        attention=settings.attention,
        attention_dtype=recipe.attention_dtype,
        layers=settings.layers,
        checkpoint=settings.checkpoint,
    )
    microbatches = count_microbatches(settings, config)
    hyperparameters = Hyperparameters(settings.steps, settings.learning_rate)
    if settings.top_k is not None and settings.top_k > config.vocabulary:
        raise ValueError(f"--top-k {settings.top_k} is more than the vocabulary, {config.vocabulary} tokens.")
    program = make_program(recipe, config, hyperparameters, loss_chunks=settings.loss_chunks)
    mesh = devices.make_mesh()
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
        settings, folder, index, compiled, hyperparameters, mesh, microbatches, shapes, shardings,
        validation=devices.batches_on(mesh, validation),
        tokenizer=get_tokenizer(index.tokenizer, settings.vocabulary_files),
    )  # fmt: skip


def count_microbatches(settings: Settings, config: Config) -> int:
    """How many microbatches make up the token budget of a step; one, if there is no budget."""
    if settings.batch_size % jax.device_count():
        raise ValueError(
            f"--batch-size {settings.batch_size} cannot be divided among {jax.device_count()} devices; choose a "
            "multiple."
        )
    if config.context % settings.loss_chunks:
        raise ValueError(f"--loss-chunks {settings.loss_chunks} does not divide the context, {config.context}.")
    tokens = settings.batch_size * config.context
    if settings.token_budget is None:
        return 1
    if settings.token_budget < tokens or settings.token_budget % tokens:
        raise ValueError(
            f"--token-budget {settings.token_budget:,} is not a multiple of a microbatch, {settings.batch_size} x "
            f"{config.context} = {tokens:,} tokens; change it, or --batch-size."
        )
    return settings.token_budget // tokens


# --- The loop. ---
def train(run: Run, console: Console) -> bool:
    """Trains to the last step, or until Ctrl-C; False in the second case."""
    settings, program = run.settings, run.program
    with Checkpoints(settings.out / "checkpoints") as checkpoints, interruptions(console) as interrupted:
        params, opt_state, step, position = start(run, checkpoints)
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
                is_last = step == settings.steps or bool(interrupted)
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
    finish(run, params, console, is_done=step == settings.steps)
    return step == settings.steps


def start(run: Run, checkpoints: Checkpoints) -> tuple[Any, Any, int, Position]:
    """Parameters, optimizer state, steps done and the loader's position: new ones, or those of a checkpoint."""
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
    # Not asked whether `mpx.is_synced`: of so many weights one may have come so close to zero that it is not, for now.
    params, opt_state = checkpoints.restore(run.shapes, run.shardings)
    return params, opt_state, saved["step"], Position.from_dict(saved["position"])


def save(checkpoints: Checkpoints, run: Run, params: Any, opt_state: Any, step: int, position: Position) -> None:
    """Saves all that the rest of the run depends on."""
    description = {"step": step, "position": position.as_dict(), "identity": run.identity}
    description["data"] = str(run.folder.absolute())
    checkpoints.save(step, (params, opt_state), description)


def report(run: Run, step: int, metrics: Any, opt_state: Any, speed: "Speed") -> Record:
    """Waits for the device, and says how the last step went."""
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


@contextmanager
def interruptions(console: Console) -> Iterator[list[bool]]:
    """A list that has something in it after Ctrl-C. A second one stops at once, as does one of many processes."""
    received: list[bool] = []
    if jax.process_count() > 1:
        yield received
        return

    def receive(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(True)
        console.print("Finishing the step at work, then saving. Another Ctrl-C stops at once and saves nothing.")

    try:
        before = signal.signal(signal.SIGINT, receive)
    except ValueError:  # not in the main thread, to which Ctrl-C does not go anyway
        yield received
        return
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


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
) -> None:
    """Trains a GPT on shards of tokens, in any precision recipe, on all devices."""
    settings = Settings(**locals())
    console = Console(quiet=jax.process_index() != 0)  # the first process speaks for all
    try:
        check(settings)
        run = make_run(settings, prepared_data(settings, console))
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    try:
        finished = train(run, console)
    except (CheckpointError, ShardError, MultipleChoiceError) as error:
        raise typer.BadParameter(str(error)) from error
    if not finished:
        console.print("Stopped; the checkpoint is saved. Go on with --resume.")
        raise typer.Exit(INTERRUPTED)


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
    app()
