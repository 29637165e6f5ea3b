"""Train GPT-2 with JAX and mpx for a few steps, or read its program: what
`benchmarks.ladder` and `on_gpu` call.

Each function answers in a process of its own. The program of a step is compiled before
there is any array on the device, so that the peak of memory of compiling, where XLA
tries its kernels, is known by itself. Parameters and optimizer state are donated. JAX
reserves its pool of memory as it always does, which is the fastest; the peak that the
device reports counts the arrays in the pool, not the size of the pool.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.reading import absent_figures, compiled_figures, start_compiler
from benchmarks.report import Row
from benchmarks.rungs import Rung, Setting
from benchmarks.timing import conditions
from examples.gpt.model import PRESETS, Config
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, Program

TRAINING = Hyperparameters(steps=1_000, learning_rate=6e-4)
DISTINCT_BATCHES = 8  # on the device before the first step, and then in turn
# Rows of the matrices whose product gives the rate.
PRODUCT_SIZES = {
    "cpu": 1024,
    "gpu": 8192,
    "tpu": 8192,
}
PRODUCT_ROUNDS, PRODUCTS = 5, 4
NO_FLASH = "no GPU, no flash attention: as before"


def device() -> Row:
    """Return where this runs, and its rate in large products of bfloat16 matrices."""
    return {"backend": jax.default_backend(), "FLOP/s": matmul_rate()} | conditions()


def matmul_rate() -> float:
    """Return the operations a second of one device in square bfloat16 products; a
    multiply-add counts as two.

    Numbers are random, because products of zeros draw less power and can be faster.
    """
    size = PRODUCT_SIZES[jax.default_backend()]
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    # So that products of products stay of size 1.
    multiply, b = (
        jax.jit(lambda a, b: a @ b),
        b * size**-0.5,
    )

    def run(products: int) -> None:
        nonlocal a
        for _ in range(products):
            a = multiply(a, b)
        jax.block_until_ready(a)

    return (
        2
        * size**3
        / (time_rounds(run, steps=PRODUCTS, rounds=PRODUCT_ROUNDS)["ms"] / 1e3)
    )


def time_rounds(run: Callable[[int], Any], *, steps: int, rounds: int) -> Row:
    """Return milliseconds a step, of several that are enqueued one behind another and
    waited for once.

    A round goes before the others: it brings the GPU to the clocks that it keeps. `run`
    makes so many steps and returns when all is done. The median round is "ms", the
    fastest "low" and the slowest "high".
    """
    run(steps)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run(steps)
        times.append(1e3 * (time.perf_counter() - start) / steps)
    return {"ms": statistics.median(times), "low": min(times), "high": max(times)}


def token_batches(vocabulary: int, shape: Sequence[int], *, count: int) -> np.ndarray:
    """Return random tokens below `vocabulary`, int32 (count, *shape), the same in every
    process.

    A few are common and many are rare, as in a text. Were all common, the gradient of
    the embedding would be a sum into few rows; were none, into many: both have another
    speed than a training.
    """
    return (
        np.random.default_rng(0).zipf(1.2, size=(count, *shape)) % vocabulary
    ).astype(np.int32)


def peak_bytes() -> int | None:
    """Return the largest memory in use so far on the device; None where nothing counts
    it, as on a CPU.
    """
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def flops_per_token(config: Config) -> int:
    """Return the floating-point operations of a training step for one token; a
    multiply-add counts as two.

    A weight of a matrix product takes six, and attention to T positions 12 C T a layer
    (Chowdhery et al., 2022, appendix B). A causal model needs half of that for
    attention; the convention is to count all. Padding and recomputed activations do not
    count.
    """
    weights = 12 * config.depth * config.width**2 + config.vocabulary * config.width
    return 6 * weights + 12 * config.depth * config.width * config.context


class Job(NamedTuple):
    """A rung, ready to be compiled."""

    rung: Rung
    setting: Setting
    config: Config
    program: Program

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the tokens of a step: microbatches, sequences, and
        positions with the last target.
        """
        microbatches = self.setting.microbatches(
            self.rung.accumulate, self.config.context
        )
        return microbatches, self.setting.batch_size, self.config.context + 1

    def shapes(self) -> tuple[Any, Any, jax.ShapeDtypeStruct]:
        """Return the shapes of what a step gets: parameters, optimizer state and
        tokens.
        """
        return *jax.eval_shape(self.program.init, 0), jax.ShapeDtypeStruct(
            self.shape, jnp.int32
        )

    def tokens(self) -> Row:
        """Return the tokens of a step, and the operations that the model needs for
        each.
        """
        microbatches, sequences, _ = self.shape
        tokens = math.prod((microbatches, sequences, self.config.context))
        return {"tokens": tokens, "flops per token": flops_per_token(self.config)}


def make_job(rung: Row, setting: Row) -> Job:
    """Return the job of a rung, whose fields and setting have been JSON."""
    chosen = Rung(**rung)
    recipe = get_recipe(chosen.recipe)
    changes = {
        name: rung[name]
        for name in ("vocabulary_multiple", "attention", "layers", "checkpoint")
    }
    config = dataclasses.replace(
        PRESETS[setting["preset"]], attention_dtype=recipe.attention_dtype, **changes
    )
    return Job(
        chosen,
        Setting(**setting),
        config,
        Program(recipe, config, TRAINING, loss_chunks=chosen.loss_chunks),
    )


def make_job_here(rung: Row, setting: Row) -> tuple[Job, Row]:
    """Return the job of a rung, and a note if this machine runs it another way."""
    note = {}
    if rung["attention"] == "cudnn" and jax.default_backend() != "gpu":
        rung, note = rung | {"attention": "xla"}, {"note": NO_FLASH}
    return make_job(rung, setting), note


def compile_step(job: Job) -> Any:
    """Return the compiled training step, which may overwrite parameters and state."""
    step = jax.jit(job.program.train_step, donate_argnums=(0, 1))
    return step.lower(*job.shapes()).compile()


def training(job: Job, step: Callable[..., Any]) -> Callable[[int], Any]:
    """Return the function that makes so many steps, from random weights, on text. It
    waits for all, and returns the metrics of the last step so far.
    """
    batches = token_batches(job.config.vocabulary, job.shape, count=DISTINCT_BATCHES)
    in_turn = itertools.cycle(list(map(jax.device_put, batches)))
    state = (*jax.jit(job.program.init)(0), None)

    def run(steps: int) -> Any:
        nonlocal state
        for _ in range(steps):
            state = step(*state[:2], next(in_turn))
        return jax.block_until_ready(state)[2]

    return run


def measure_step(rung: Row, setting: Row) -> Row:
    """Return time, memory and last loss of a training step."""
    job, note = make_job_here(rung, setting)
    start = time.perf_counter()
    step = compile_step(job)
    seconds, compiling = time.perf_counter() - start, peak_bytes()
    run = training(job, step)
    row = time_rounds(
        run, steps=job.setting.steps_of(job.shape[0]), rounds=job.setting.rounds
    )
    row |= (
        note
        | job.tokens()
        | {"loss": float(run(0).loss), "program": compiled_figures(step, seconds)}
    )
    return row | {"peak bytes": peak_bytes(), "peak bytes before": compiling}


def read_step(rung: Row, setting: Row, target: str) -> Row:
    """Read the program of a training step that is compiled for a device that need not
    be here.
    """
    compiler, job = start_compiler(target), make_job(rung, setting)
    found = absent_figures(
        job.program.train_step, *job.shapes(), target=target, donate=(0, 1)
    )
    return {"program": found} | job.tokens() | compiler
