"""A run, made ready: what the command line says, checked and built, before anything is compiled."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from examples.gpt import devices, evaluate, shards
from examples.gpt.loader import validation_batches
from examples.gpt.model import PRESETS, Config
from examples.gpt.recipes import get_recipe
from examples.gpt.tokenizers import Tokenizer, get_tokenizer
from examples.gpt.training import Hyperparameters, Program, make_program


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
