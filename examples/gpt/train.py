"""Train a GPT on tokens of text, in any precision recipe, on all devices.

Run it from the root of the repository:

    python -m examples.gpt.train
    python -m examples.gpt.train --preset gpt2-124m --data tokens --batch-size 16 --token-budget 524288 --attention
        cudnn --loss-chunks 8 --learning-rate 6e-4 --steps 19000

The first trains the tiny model on Python's standard library. The second, on one line, is for a GPU and for tokens that
`examples.gpt.data` made. The folder of the run (`--out`) gets `log.jsonl`, `loss.png`, `checkpoints`, and `tokens` if
the run makes its own.

Ctrl-C and SIGTERM finish the current step, save a checkpoint and stop; the same command with `--resume` goes on from
the newest one. A finished run goes on with `--resume` and more `--steps`: its learning rate then jumps up to where a
longer run would be, and falls again.

Of several processes (`--coordinator-address`, `--num-processes`, `--process-id`, or a cluster that JAX knows) each
reads its own part of every batch; the first one prints and writes.
"""

import dataclasses
import functools
import inspect
import math
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import typer
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from typer import Option

import mpx
from examples.gpt import checkpoints, data, devices, evaluate, meter, output
from examples.gpt.data import VocabularyOption
from examples.gpt.model import PRESETS, Config
from examples.gpt.recipes import RECIPES, get_recipe
from examples.gpt.training import Hyperparameters, Program


# --- The options. ---
@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `examples.gpt.train`."""

    preset: Annotated[str, Option(help=f"One of {', '.join(PRESETS)}.")] = "tiny"
    recipe: Annotated[str, Option(help=f"One of {', '.join(r.name for r in RECIPES)}.")] = "bf16-split"
    data: Annotated[Path | None, Option(help="Folder of tokens; without it, bytes of Python's standard library.")] = (
        None
    )
    vocabulary_files: VocabularyOption = None
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
    mesh: Annotated[
        str | None, Option(help="Sizes of data, fsdp and model, like fsdp=4,model=2; without it fsdp has all devices.")
    ] = None
    report_every: Annotated[int, Option(min=1, help="Steps between two lines of the log.")] = 10
    evaluate_every: Annotated[int, Option(min=1, help="Steps between two validation losses.")] = 100
    validation_batches: Annotated[int, Option(min=1, help="Batches of a validation loss.")] = 16
    save_every: Annotated[int, Option(min=1, help="Steps between two checkpoints.")] = 200
    prompt: evaluate.PromptOption = "def "
    sample_tokens: evaluate.SampleOption = 200
    coordinator_address: Annotated[str | None, Option(help="HOST:PORT of the first of several processes.")] = None
    num_processes: Annotated[int | None, Option(min=1, help="Number of processes that train together.")] = None
    process_id: Annotated[int | None, Option(min=0, help="Number of this process, from 0.")] = None


# --- What is made of them. ---
class Run:
    """A training run, ready to start: everything that is made of the options before anything is compiled."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        if settings.preset not in PRESETS:
            raise ValueError(f"no model is called {settings.preset!r}; there are {', '.join(PRESETS)}.")
        self.recipe = get_recipe(settings.recipe)
        if settings.attention == "cudnn" and self.recipe.compute_dtype == "float32":
            raise ValueError(f"--attention cudnn is a kernel for 16-bit numbers, but {settings.recipe} has float32.")
        settings.out.mkdir(parents=True, exist_ok=True)
        self.saved = saved_description(settings)
        self.folder = tokens_of(settings, self.saved)
        self.index = data.read_index(self.folder)
        self.tokenizer = data.get_tokenizer(self.index.tokenizer, settings.vocabulary_files)
        self.hyperparameters = Hyperparameters(settings.steps, settings.learning_rate)
        self.config = dataclasses.replace(
            PRESETS[settings.preset],
            vocabulary=self.index.vocabulary,
            attention=settings.attention,
            attention_dtype=self.recipe.attention_dtype,
            layers=settings.layers,
            checkpoint=settings.checkpoint,
        )
        self.microbatches = count_microbatches(settings, self.config.context)
        self.mesh = mesh_of(settings, self.config)
        self.program = Program(self.recipe, self.config, self.hyperparameters, loss_chunks=settings.loss_chunks)
        saved_on = self.saved.get("mesh", self.mesh.shape)
        self.shapes = devices.place(self.mesh, devices.shapes_on(saved_on, self.program.init, settings.seed))
        self.init = jax.jit(self.program.init)
        self.train_step = jax.jit(self.program.train_step, donate_argnums=(0, 1))
        self.evaluate = jax.jit(self.program.evaluate)
        self.rows = data.Rows(self.folder, "training", self.config.context)
        validation = data.validation_batches(
            self.folder,
            count=settings.validation_batches,
            batch_size=settings.batch_size,
            context=self.config.context,
        )
        self.validation = jax.device_put(validation, jax.NamedSharding(self.mesh, devices.BATCHES))

    @property
    def tokens_per_step(self) -> int:
        """Return the number of targets of one update."""
        return self.microbatches * self.settings.batch_size * self.config.context

    @functools.cached_property
    def peak_rate(self) -> float:
        """Return the operations a second that all devices can do in matrix products of the compute dtype, measured."""
        return meter.matmul_rate(self.recipe.compute_dtype) * jax.device_count()

    @property
    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint and the run that resumes it must have in common."""
        config = {name: getattr(self.config, name) for name in evaluate.SIZES}
        names = ("recipe", "seed", "batch_size", "token_budget")
        settings = {name: getattr(self.settings, name) for name in names}
        return config | settings | dataclasses.asdict(self.hyperparameters) | {"tokens": self.index.sha256}


def count_microbatches(settings: Settings, context: int) -> int:
    """Return the number of microbatches in the token budget of a step; one, if there is no budget."""
    tokens = settings.batch_size * context
    budget = settings.token_budget or tokens
    if budget % tokens:
        raise ValueError(
            f"--token-budget {budget:,} is not a multiple of a microbatch, {settings.batch_size} x {context} = "
            f"{tokens:,} tokens; change it, or --batch-size."
        )
    return budget // tokens


def mesh_of(settings: Settings, config: Config) -> Mesh:
    """Return the mesh of the option; without it all devices are along `fsdp`."""
    text, count = settings.mesh or f"fsdp={jax.device_count()}", jax.device_count()
    entries = [entry.partition("=") for entry in text.split(",")]
    sizes = {name.strip(): int(size) for name, _, size in entries if size.strip().isdecimal() and int(size)}
    if len(sizes) < len(entries) or not sizes.keys() <= set(devices.AXES):
        raise ValueError(f"--mesh {text} is not sizes of {', '.join(devices.AXES)}, like fsdp=4,model=2.")
    data, fsdp, model = shape = tuple(sizes.get(name, 1) for name in devices.AXES)
    if math.prod(shape) != count:
        raise ValueError(f"--mesh {text} is for {math.prod(shape)} devices, but there are {count}.")
    for what, size, parts in (
        ("--batch-size", settings.batch_size, data * fsdp),
        ("the heads of attention", config.heads, model),
        ("the width", config.width, fsdp * model),
        ("the rows of the embedding", config.padded_vocabulary, fsdp * model),
        ("the context", config.context, fsdp),
        ("the devices of a process, which reads tokens of its own,", jax.local_device_count(), model),
    ):
        if size % parts:
            raise ValueError(f"--mesh {text} divides {what} by {parts}, but it is {size}.")
    return jax.make_mesh(shape, devices.AXES)


def saved_description(settings: Settings) -> Mapping[str, Any]:
    """Return the description of the newest checkpoint, if the run goes on from it."""
    if not settings.resume:
        return {}
    with checkpoints.opened(settings.out / "checkpoints") as manager:
        return checkpoints.newest(manager)[1]


def tokens_of(settings: Settings, saved: Mapping[str, Any]) -> Path:
    """Return the folder of tokens: of the options, of the resumed run, or a new one in the run's folder."""
    if settings.data is not None:
        return settings.data
    if saved:
        return Path(saved["data"])
    folder = settings.out / "tokens"
    if jax.process_index() == 0 and not (folder / data.INDEX_NAME).exists():
        say(f"Reading Python's standard library into {folder}.")
        data.prepare(folder)
    multihost_utils.sync_global_devices("tokens")
    return folder


# --- The loop. ---
def train(run: Run) -> int:
    """Train to the last step, or until a signal; return the exit code, which is not 0 in the second case."""
    settings, log = run.settings, run.settings.out / "log.jsonl"
    is_first = jax.process_index() == 0
    with (
        checkpoints.opened(settings.out / "checkpoints", cleans=True) as manager,
        Interruption() as interruption,
    ):
        params, opt_state, done, batches = start(run, manager)
        if is_first:
            output.begin_log(log, done)
        step, timed_from, since = done, done, None
        for step in range(done + 1, settings.steps + 1):
            tokens = microbatches_on(run.mesh, run.microbatches, next(batches))
            params, opt_state, metrics = run.train_step(params, opt_state, tokens)
            # Asked once a step: a later Ctrl-C makes the next step the last one, which is saved as well.
            is_last = interruption.is_due(step) or step == settings.steps
            is_evaluated = step % settings.evaluate_every == 0 or is_last
            is_reported = step == 1 or step % settings.report_every == 0 or is_evaluated
            is_saved = step % settings.save_every == 0 or is_last
            if is_reported:
                loss = float(metrics.loss)  # waits for the device
                seconds = None if since is None else (time.perf_counter() - since) / (step - timed_from)
                record = report(run, step, loss, float(metrics.gradient_norm), opt_state, seconds)
                if is_evaluated:
                    record["validation_loss"] = float(run.evaluate(params, run.validation))
                if is_first:
                    output.write_log(log, record)
                say(output.line_of(record))
            if is_saved:
                check_health(params, opt_state)
                described = {"position": batches.get_state(), "identity": run.identity}
                described |= {"data": str(run.folder.absolute()), "mesh": dict(run.mesh.shape)}
                checkpoints.save(manager, params, opt_state, step, described)
            if is_reported or is_saved or step == done + 1:  # the first step compiles, and is not timed
                jax.block_until_ready(metrics)
                timed_from, since = step, time.perf_counter()
            if is_last:
                break
    if is_first:
        output.plot_log(settings.out / "loss.png", output.read_log(log), f"{settings.preset}, {settings.recipe}")
    if step < settings.steps:
        say("Stopped; the checkpoint is saved. Go on with --resume.")
        return interruption.exit_code
    if settings.sample_tokens:
        evaluate.show_sample(
            run.program.logits, params, run.tokenizer, say, prompt=settings.prompt, count=settings.sample_tokens,
            context=run.config.context, seed=settings.seed,
        )  # fmt: skip
    return 0


def start(run: Run, manager: Any) -> tuple[Any, Any, int, Any]:
    """Return parameters, optimizer state, steps done and this process's rows of every batch to come."""
    settings, steps = run.settings, run.settings.steps
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.shapes[0]))
    say(
        f"{settings.preset}: {parameters:,} parameters, {settings.recipe}, on {jax.device_count()} x "
        f"{jax.devices()[0].device_kind}. {run.index.training:,} tokens ({run.index.tokenizer}) to train on, "
        f"{run.tokens_per_step:,} a step. MFU is of {run.peak_rate / 1e12:,.2f} TFLOP/s, measured."
    )
    batches = data.batches(
        run.rows,
        batch_size=run.microbatches * settings.batch_size,
        seed=settings.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    if not settings.resume:
        if manager.latest_step() is not None:
            raise checkpoints.CheckpointError(
                f"{settings.out} has a checkpoint of step {manager.latest_step()}; go on with --resume, or choose "
                "another --out."
            )
        say(f"From step 0 to {steps}.")
        return *run.init(settings.seed), 0, batches
    checkpoints.check_identity(manager, run.identity)
    done, _ = checkpoints.newest(manager)
    batches.set_state(run.saved["position"])
    say(f"Going on from step {done} to {steps}.")
    return *checkpoints.restore(manager, run.shapes), done, batches


def microbatches_on(mesh: Mesh, count: int, rows: np.ndarray) -> jax.Array:
    """Put this process's rows of a batch (rows, T + 1) on its devices, as (count, B, T + 1).

    A batch has the same rows for any number of processes, but which microbatch has a row depends on that number.
    """
    rows = rows.reshape(count, -1, rows.shape[-1])
    return jax.make_array_from_process_local_data(jax.NamedSharding(mesh, devices.BATCHES), rows)


def report(
    run: Run, step: int, loss: float, gradient_norm: float, opt_state: Any, seconds: float | None
) -> dict[str, Any]:
    """Stop a run that diverged, and return a line of the log on the step just done; losses are in nats a token."""
    check_health(run.shapes[0], opt_state)
    skipped = int(mpx.skipped_steps(opt_state))
    tokens_per_second = run.tokens_per_step / seconds if seconds else None
    in_use, peak = meter.device_memory()
    return {
        "step": step,  # counted from 1
        "loss": loss,  # of this step's tokens, before its update
        # Before the update. A skipped step does not advance the schedule.
        "learning_rate": float(run.hyperparameters.schedule()(step - 1 - skipped)),
        "gradient_norm": gradient_norm,  # before clipping; NaN in a skipped step
        "loss_scale": float(mpx.get_loss_scale(opt_state).loss_scale),  # after the step
        "skipped_steps": skipped,  # so far
        "seconds_per_step": seconds,  # mean since the last report
        "tokens_per_second": tokens_per_second,
        # The model's own operations as a share of the measured rate of matrix products.
        "mfu": tokens_per_second and tokens_per_second * run.config.flops_per_token / run.peak_rate,
        "memory_bytes": in_use,  # on the first device; None where nothing counts them
        "peak_memory_bytes": peak,
        "validation_loss": None,
    }


def check_health(params: Any, opt_state: Any) -> None:
    """Raise a `mpx.StuckError` if a run with loss scaling skips every step, so that no good checkpoint makes room."""
    if not isinstance(mpx.get_loss_scale(opt_state), mpx.NoOpLossScale):
        mpx.check_health(opt_state, params=params)


# --- Several processes, and signals. ---
def say(text: str) -> None:
    """Print a text; the first process speaks for all."""
    if jax.process_index() == 0:
        typer.echo(text)


def join(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Join the processes of a run, by `jax.distributed.initialize`; no device may be in use yet.

    Without arguments JAX looks for a cluster (Slurm, Open MPI, Kubernetes, Cloud TPU). If it finds none, this process
    is alone.
    """
    arguments = (coordinator_address, num_processes, process_id)
    try:
        jax.distributed.initialize(*arguments)
    except ValueError:
        if arguments != (None, None, None):
            raise


class Interruption:
    """A request to stop after the step at work; a second signal stops at once.

    One process handles Ctrl-C and SIGTERM itself. Several must agree on the step, and JAX has a protocol for it: it
    tells a SIGTERM to all of them, and `reached_preemption_sync_point` names a step that none has taken yet. A process
    that gets a Ctrl-C therefore sends itself a SIGTERM. That takes about a second.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._several = jax.process_count() > 1

    def __enter__(self) -> "Interruption":
        numbers = (signal.SIGINT,) if self._several else (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self.receive) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_due(self, step: int) -> bool:
        """Return whether this step is the last; all processes must ask once after each step."""
        if self._several:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """Return the exit code that a shell expects after the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self._received or signal.SIGTERM)

    def receive(self, number: int, frame: Any = None) -> None:
        """Handle the first signal; the next one ends the process without an exception, which threads could crash on."""
        del frame
        self._received = number
        signal.signal(number, signal.SIG_DFL)
        say("Finishing the step at work, then saving. Another Ctrl-C stops at once and saves nothing.")
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX handles


# --- The command line. ---
def main(**options: Any) -> None:
    """Train a GPT on tokens of text, in any precision recipe, on all devices."""
    settings = Settings(**options)
    try:
        join(settings.coordinator_address, settings.num_processes, settings.process_id)
        run = Run(settings)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    try:
        with jax.set_mesh(run.mesh):
            code = train(run)
    except (checkpoints.CheckpointError, mpx.StuckError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(code)


# Typer reads the options off the signature: the fields of `Settings`, written once.
main.__signature__ = inspect.signature(Settings)
main.__annotations__ = dict(Settings.__annotations__)
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
