"""Train a GPT on shards of tokens, in any precision recipe, on all devices.

Run it from the root of the repository:

    python -m examples.gpt.train
    python -m examples.gpt.train --preset gpt2-124m --data tokens --batch-size 16 --token-budget 524288 --attention
        cudnn --loss-chunks 8 --learning-rate 6e-4 --steps 19000

The first trains the tiny model on Python's standard library. The second, on one line, is for a GPU and for shards that
`examples.gpt.data` made.

The folder of the run (`--out`) gets `log.jsonl`, `loss.png`, `checkpoints`, and `tokens` if the run makes its own.
Ctrl-C and SIGTERM finish the current step, save a checkpoint and stop; the same command with `--resume` goes on from
the newest one. A finished run goes on with `--resume` and more `--steps` than before: the schedule is then that of the
new number of steps, so the learning rate jumps up to where a longer run would be, and falls again.

Of several processes (`--coordinator-address`, `--num-processes`, `--process-id`, or a cluster that JAX knows) each
reads its own part of every batch; the first one prints and writes. `examples.gpt.launch` starts some on one machine.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import typer
from rich.console import Console

import mpx
from examples.gpt import devices, evaluate, meter, processes
from examples.gpt.checkpoints import CheckpointError, Checkpoints, SaveError, check_health, resume, save
from examples.gpt.loader import Loader, Rows, prefetch
from examples.gpt.multiple_choice import MultipleChoiceError
from examples.gpt.processes import interruptions
from examples.gpt.run_log import Record, RunLog, progress_of, read_records, write_plot
from examples.gpt.runs import Run, Settings, make_run
from examples.gpt.shards import ShardError


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
                elif not stopwatch.is_running:  # a resumed run has compiled; its log has the steps of any other run
                    jax.block_until_ready(metrics)
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
    except (CheckpointError, ShardError, MultipleChoiceError) as error:
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
