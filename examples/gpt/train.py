r"""Train a GPT on tokens of text, in any precision recipe, on all devices.

Run it from the root of the repository:

    python -m examples.gpt.train
    python -m examples.gpt.train --preset gpt2-124m --data tokens --batch-size 16 \
        --microbatches 32 --attention cudnn --loss-chunks 4 --learning-rate 6e-4 \
        --steps 19000

The first trains the tiny model on Python's standard library. The second
is for a GPU and for tokens that `examples.gpt.data` made. The folder of the run
(`--out`) gets `log.jsonl`, `checkpoints`, and `tokens` if the run makes its own.
`examples.gpt.evaluate` looks at it afterwards.

Ctrl-C and SIGTERM finish the current step, save a checkpoint and stop; the same command
with `--resume` goes on from the newest one. A finished run goes on with `--resume` and
more `--steps`: its learning rate then jumps up to where a longer run would be, and
falls again.

Of several processes (`--coordinator-address`, `--num-processes`, `--process-id`, or a
cluster that JAX knows) each reads its own part of every batch; the first one prints and
writes.
"""

import dataclasses
import inspect
import json
import math
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import typer
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from typer import Option

import mpx
from examples.gpt import checkpoints, data, devices
from examples.gpt.model import PRESETS, SIZES, Config, get_preset
from examples.gpt.recipes import RECIPES, get_recipe
from examples.gpt.training import Hyperparameters, Metrics, Program

VALIDATION_BATCHES = 16  # of the size of a microbatch


# --- The options. ---
@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `examples.gpt.train`."""

    preset: Annotated[str, Option(help=f"One of {', '.join(PRESETS)}.")] = "tiny"
    recipe: Annotated[
        str, Option(help=f"One of {', '.join(r.name for r in RECIPES)}.")
    ] = "bf16-split"
    data: Annotated[
        Path | None,
        Option(
            help="Folder of tokens; without it, bytes of Python's standard library."
        ),
    ] = None
    out: Annotated[Path, Option(help="Folder of the run.")] = Path("run")
    resume: Annotated[
        bool, Option(help="Go on from the newest checkpoint in --out.")
    ] = False
    steps: Annotated[int, Option(min=1, help="Updates of the whole run.")] = 400
    batch_size: Annotated[
        int, Option(min=1, help="Sequences of a microbatch, on all devices together.")
    ] = 8
    microbatches: Annotated[int, Option(min=1, help="Microbatches of an update.")] = 1
    learning_rate: Annotated[float, Option(help="Peak of the schedule.")] = 1e-3
    seed: Annotated[
        int,
        Option(
            min=0,
            max=2**31 - 1,
            help="Decides initial weights and the order of the data.",
        ),
    ] = 0
    attention: Annotated[
        Literal["xla", "cudnn"], Option(help="cudnn is flash attention, on a GPU.")
    ] = "xla"
    layers: Annotated[
        Literal["unrolled", "stacked", "scanned"],
        Option(help="A scan compiles one block."),
    ] = "unrolled"
    checkpoint: Annotated[
        Literal["none", "dots", "thin", "full", "8bit"], Option(help="What is kept.")
    ] = "none"
    loss_chunks: Annotated[
        int, Option(min=1, help="Parts in which the loss computes its logits.")
    ] = 1
    mesh: Annotated[
        str | None,
        Option(
            help=(
                "Sizes of data, fsdp and model, like fsdp=4,model=2; without it fsdp"
                " has all devices."
            )
        ),
    ] = None
    report_every: Annotated[
        int, Option(min=1, help="Steps between two lines of the log.")
    ] = 10
    save_every: Annotated[
        int,
        Option(
            min=1, help="Steps between two checkpoints, each with a validation loss."
        ),
    ] = 100
    coordinator_address: Annotated[
        str | None, Option(help="HOST:PORT of the first of several processes.")
    ] = None
    num_processes: Annotated[
        int | None, Option(min=1, help="Number of processes that train together.")
    ] = None
    process_id: Annotated[
        int | None, Option(min=0, help="Number of this process, from 0.")
    ] = None


# --- What is made of them. ---
class Run:
    """A training run, ready to start: everything that is made of the options before
    anything is compiled.
    """

    def __init__(self, settings: Settings, manager: Any) -> None:
        self.settings, self.done = settings, 0
        preset, recipe = get_preset(settings.preset), get_recipe(settings.recipe)
        if settings.attention == "cudnn" and recipe.compute_dtype == "float32":
            raise ValueError(
                "--attention cudnn is a kernel for 16-bit numbers, but"
                f" {settings.recipe} has float32."
            )
        saved: dict[str, Any] = {}
        if settings.resume:
            self.done, saved = checkpoints.newest(manager)
        elif manager.latest_step() is not None:
            raise ValueError(
                f"{settings.out} has a checkpoint of step {manager.latest_step()}; go"
                " on with --resume, or choose another --out."
            )
        self.folder = settings.data or (
            Path(saved["data"]) if saved else own_tokens(settings.out)
        )
        self.index = data.read_index(self.folder)
        self.hyperparameters = Hyperparameters(settings.steps, settings.learning_rate)
        self.config = dataclasses.replace(
            preset,
            vocabulary=data.get_tokenizer(self.index.tokenizer).vocabulary,
            attention=settings.attention,
            attention_dtype=recipe.attention_dtype,
            layers=settings.layers,
            checkpoint=settings.checkpoint,
        )
        if saved:
            check_identity(saved["identity"], self.identity, self.done)
        self.mesh = mesh_of(settings, self.config)
        self.program = Program(
            recipe, self.config, self.hyperparameters, loss_chunks=settings.loss_chunks
        )
        saved_on = saved.get("mesh", self.mesh.shape)
        self.shapes = devices.place(
            self.mesh, devices.shapes_on(saved_on, self.program.init, settings.seed)
        )
        self.batches = data.batches(
            data.Rows(self.folder, "training", self.config.context),
            batch_size=settings.microbatches * settings.batch_size,
            seed=settings.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        if saved:
            self.batches.set_state(saved["position"])
        self.validation = jax.device_put(
            data.validation_batches(
                self.folder,
                VALIDATION_BATCHES,
                settings.batch_size,
                self.config.context,
            ),
            jax.NamedSharding(self.mesh, devices.BATCHES),
        )

    @property
    def tokens_per_step(self) -> int:
        """Return the number of targets of one update."""
        return (
            self.settings.microbatches * self.settings.batch_size * self.config.context
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint and the run that resumes it must have in common."""
        config = {name: getattr(self.config, name) for name in SIZES}
        settings = {
            name: getattr(self.settings, name)
            for name in ("recipe", "seed", "batch_size", "microbatches")
        }
        return (
            config
            | settings
            | dataclasses.asdict(self.hyperparameters)
            | {"tokens": self.index.sha256}
        )

    def next_tokens(self) -> jax.Array:
        """Put this process's rows of the next batch on its devices, as (microbatches,
        B, T + 1).

        A batch has the same rows for any number of processes, but which microbatch has
        a row depends on that number.
        """
        rows = next(self.batches)
        rows = rows.reshape(self.settings.microbatches, -1, rows.shape[-1])
        return jax.make_array_from_process_local_data(
            jax.NamedSharding(self.mesh, devices.BATCHES), rows
        )


def own_tokens(out: Path) -> Path:
    """Return the folder of tokens that a run makes for itself."""
    folder = out / "tokens"
    if jax.process_index() == 0 and not (folder / data.INDEX_NAME).exists():
        say(f"Reading Python's standard library into {folder}.")
        data.prepare(folder)
    multihost_utils.sync_global_devices("tokens")
    return folder


def check_identity(
    before: Mapping[str, Any], now: Mapping[str, Any], done: int
) -> None:
    """Raise if a checkpoint is of another run; one of a finished run may go on to more
    steps.
    """
    if done == before["steps"] < now["steps"]:
        before = {**before, "steps": now["steps"]}
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        differences = "; ".join(
            f"{name} is {now[name]!r}, but was {before.get(name)!r}" for name in changed
        )
        raise ValueError(
            "this is not the run of the checkpoint in --out. Give the same options as"
            " then (more --steps after the last one only), or begin anew in another"
            f" --out: {differences}."
        )


def mesh_of(settings: Settings, config: Config) -> Mesh:
    """Return the mesh of the option; without it all devices are along `fsdp`. JAX
    refuses weights it cannot divide.
    """
    text, count = settings.mesh or f"fsdp={jax.device_count()}", jax.device_count()
    entries = [entry.partition("=") for entry in text.split(",")]
    sizes = {
        name: int(size) for name, _, size in entries if size.isdecimal() and int(size)
    }
    if len(sizes) < len(entries) or not sizes.keys() <= set(devices.AXES):
        raise ValueError(
            f"--mesh {text} is not sizes of {', '.join(devices.AXES)}, like"
            " fsdp=4,model=2."
        )
    data, fsdp, model = shape = tuple(sizes.get(name, 1) for name in devices.AXES)
    if math.prod(shape) != count:
        raise ValueError(
            f"--mesh {text} is for {math.prod(shape)} devices, but there are {count}."
        )
    for what, size, parts in (
        ("--batch-size", settings.batch_size, data * fsdp),
        ("the heads of attention", config.heads, model),
        (
            "the devices of a process, which reads tokens of its own,",
            jax.local_device_count(),
            model,
        ),
    ):
        if size % parts:
            raise ValueError(
                f"--mesh {text} divides {what} by {parts}, but it is {size}."
            )
    return jax.make_mesh(shape, devices.AXES)


# --- The loop. ---
def train(run: Run, manager: Any) -> int:
    """Train to the last step, or until a signal; return the exit code, which is not 0
    in the second case.
    """
    settings, log = run.settings, run.settings.out / "log.jsonl"
    train_step = jax.jit(run.program.train_step, donate_argnums=(0, 1))
    evaluate = jax.jit(run.program.evaluate)
    interruption = Interruption()
    introduce(run)
    state = (
        checkpoints.restore(manager, run.shapes)
        if settings.resume
        else jax.jit(run.program.init)(settings.seed)
    )
    params, opt_state = state
    is_first = jax.process_index() == 0
    if is_first:
        begin_log(log, run.done)
    step, clock = run.done, None
    for step in range(run.done + 1, settings.steps + 1):
        params, opt_state, metrics = train_step(params, opt_state, run.next_tokens())
        # Asked once a step: a later Ctrl-C makes the next step the last one, which is
        # saved as well.
        is_last = interruption.is_due(step) or step == settings.steps
        is_saved = step % settings.save_every == 0 or is_last
        is_reported = step % settings.report_every == 0 or is_saved or step == 1
        if is_reported:
            record = report(run, step, metrics, opt_state, clock)
            if is_saved:
                record["validation_loss"] = float(evaluate(params, run.validation))
            say(line_of(record))
            if is_first:
                with log.open("a") as file:
                    file.write(json.dumps(record) + "\n")
        if is_saved:
            described = {"position": run.batches.get_state(), "identity": run.identity}
            described |= {
                "data": str(run.folder.absolute()),
                "mesh": dict(run.mesh.shape),
            }
            checkpoints.save(manager, params, opt_state, step, described)
        # The first step compiles, and is not timed.
        if is_reported or step == run.done + 1:
            jax.block_until_ready(metrics)
            clock = step, time.perf_counter()
        if is_last:
            break
    if step < settings.steps:
        say("Stopped; the checkpoint is saved. Go on with --resume.")
        return interruption.exit_code
    say(f"Done. Look at it with python -m examples.gpt.evaluate --run {settings.out}")
    return 0


def introduce(run: Run) -> None:
    """Say what is trained, on what, from where to where."""
    settings, parameters = (
        run.settings,
        sum(leaf.size for leaf in jax.tree.leaves(run.shapes[0])),
    )
    say(
        f"{settings.preset}: {parameters:,} parameters, {settings.recipe}, on"
        f" {jax.device_count()} x {jax.devices()[0].device_kind}."
        f" {run.index.training:,} tokens ({run.index.tokenizer}) to train on,"
        f" {run.tokens_per_step:,} a"
        f" step.\n{'Going on from' if settings.resume else 'From'} step {run.done} to"
        f" {settings.steps}."
    )


def report(
    run: Run,
    step: int,
    metrics: Metrics,
    opt_state: Any,
    clock: tuple[int, float] | None,
) -> dict[str, float | None]:
    """Return a line of the log on the step just done. Raise if every step is skipped,
    before that is saved.
    """
    loss = float(metrics.loss)  # waits for the device
    if not isinstance(mpx.get_loss_scale(opt_state), mpx.NoOpLossScale):
        mpx.check_health(opt_state, params=run.shapes[0])
    skipped = int(mpx.skipped_steps(opt_state))
    return {
        "step": step,  # counted from 1
        "loss": loss,  # of this step's tokens, before its update; in nats a token
        # Before the update. A skipped step does not advance the schedule.
        "learning_rate": float(run.hyperparameters.schedule()(step - 1 - skipped)),
        # Before clipping; NaN in a skipped step.
        "gradient_norm": float(metrics.gradient_norm),
        "loss_scale": float(mpx.get_loss_scale(opt_state).loss_scale),  # after the step
        "skipped_steps": skipped,  # so far
        # Since the last report, whose step and time are on the clock.
        "tokens_per_second": (
            clock
            and (step - clock[0])
            * run.tokens_per_step
            / (time.perf_counter() - clock[1])
        ),
        "validation_loss": None,
    }


# --- The log. ---
Record = Mapping[str, float | None]  # a line of the log
SHOWN = {
    "validation_loss": "validation {:.4f}",
    "learning_rate": "lr {:.2e}",
    "gradient_norm": "norm {:.2f}",
    "loss_scale": "scale {:g}",
    "skipped_steps": "{} skipped",
    "tokens_per_second": "{:,.0f} tokens/s",
}


def line_of(record: Record) -> str:
    """Return a record in one line for a terminal, without what is not known, no step
    skipped, and a scale of 1.
    """
    parts = [
        form.format(record[name])
        for name, form in SHOWN.items()
        if record[name] not in (None, 0, 1)
    ]
    return ", ".join([f"step {record['step']}: loss {record['loss']:.4f}", *parts])


def read_log(path: Path) -> list[Record]:
    """Return the lines of a log, none if there is no file. A last line that a kill cut
    off is left out.
    """
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def begin_log(path: Path, done: int) -> None:
    """Begin a log, or go on with one, without the lines of later steps, which the run
    repeats.
    """
    path.write_text(
        "".join(
            f"{json.dumps(line)}\n" for line in read_log(path) if line["step"] <= done
        )
    )


# --- Several processes, and signals. ---
def say(text: str) -> None:
    """Print a text; the first process speaks for all."""
    if jax.process_index() == 0:
        typer.echo(text)


def join(*arguments: Any) -> None:
    """Join the processes of a run, by `jax.distributed.initialize`; no device may be in
    use yet.

    Without arguments JAX looks for a cluster (Slurm, Open MPI, Kubernetes, Cloud TPU).
    If it finds none, this process is alone.
    """
    try:
        jax.distributed.initialize(*arguments)
    except ValueError:
        if any(argument is not None for argument in arguments):
            raise


class Interruption:
    """A request to stop after the step at work; a second signal stops at once.

    One process handles Ctrl-C and SIGTERM itself. Several must agree on the step, and
    JAX has a protocol for it: it tells a SIGTERM to all of them, and
    `reached_preemption_sync_point` names a step that none has taken yet. A process that
    gets a Ctrl-C therefore sends itself a SIGTERM. That takes about a second.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._several = jax.process_count() > 1
        for number in (
            (signal.SIGINT,) if self._several else (signal.SIGINT, signal.SIGTERM)
        ):
            signal.signal(number, self.receive)

    def is_due(self, step: int) -> bool:
        """Return whether this step is the last; all processes must ask once after each
        step.
        """
        if self._several:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """Return the exit code that a shell expects after the signal: 130 for Ctrl-C,
        143 for SIGTERM.
        """
        return 128 + (self._received or signal.SIGTERM)

    def receive(self, number: int, frame: Any = None) -> None:
        """Handle the first signal; the next one ends the process without an exception,
        which threads could crash on.
        """
        del frame
        self._received = number
        signal.signal(number, signal.SIG_DFL)
        say(
            "Finishing the step at work, then saving. Another Ctrl-C stops at once and"
            " saves nothing."
        )
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX handles


# --- The command line. ---
def main(**options: Any) -> None:
    """Train a GPT on tokens of text, in any precision recipe, on all devices."""
    settings = Settings(**options)
    try:
        join(settings.coordinator_address, settings.num_processes, settings.process_id)
        manager = checkpoints.opened(settings.out / "checkpoints", cleans=True)
        run = Run(settings, manager)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    with manager, jax.set_mesh(run.mesh):
        code = train(run, manager)
    raise typer.Exit(code)


# Typer reads the options off the signature: the fields of `Settings`, written once.
main.__signature__ = inspect.signature(Settings)
main.__annotations__ = dict(Settings.__annotations__)
app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command()(main)

if __name__ == "__main__":
    app()
