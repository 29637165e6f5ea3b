"""Prepare a training run: its options, checked and made into a program, before anything is compiled."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console
from typer import Option

from examples.gpt import data, devices, evaluate, meter, multiple_choice, output, shards
from examples.gpt.checkpoints import Checkpoints
from examples.gpt.loader import validation_batches
from examples.gpt.model import PRESETS, Config
from examples.gpt.recipes import RECIPES, get_recipe
from examples.gpt.tokenizers import Tokenizer, get_tokenizer
from examples.gpt.training import Hyperparameters, Program, make_program


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
    layers: Annotated[Literal["unrolled", "scanned"], Option(help="A scan compiles one block.")] = "unrolled"
    checkpoint: Annotated[Literal["none", "dots", "full"], Option(help="What the backward pass recomputes.")] = "none"
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
    budget = tokens if settings.token_budget is None else settings.token_budget
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
    if not (math.isfinite(settings.learning_rate) and settings.learning_rate > 0):
        raise ValueError(f"--learning-rate must be positive, but is {settings.learning_rate}.")
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
