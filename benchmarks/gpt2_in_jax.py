"""Train GPT-2 with JAX and mpx for a few steps, or read its program: what `benchmarks.ladder` and `on_gpu` call.

Each function answers in a process of its own. Programs are compiled ahead. The program of a step is compiled before
there is any array on the device, so that the peak of memory of compiling, where XLA tries its kernels, is known by
itself. Parameters and optimizer state are donated. JAX reserves its pool of memory as it always does, which is the
fastest; the peak that the device reports counts the arrays in the pool, not the size of the pool.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import mpx
from benchmarks.reading import absent_figures, compiled_figures, start_compiler
from benchmarks.report import Row
from benchmarks.rungs import Rung, Setting
from benchmarks.timing import conditions, timed
from benchmarks.token_batches import token_batches
from benchmarks.workers import time_rounds
from examples.gpt import meter
from examples.gpt.model import PRESETS, Config
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, Program

RULES = {"default": mpx.DEFAULT_RULES, "fast": mpx.FAST_RULES}
TRAINING = Hyperparameters(steps=1_000, learning_rate=6e-4)
DISTINCT_BATCHES = 8  # on the device before the first step, and then in turn
SINGLE_CALLS = 11  # of a cast that is waited for each time
NO_FLASH = "no GPU, no flash attention: as before"


def device() -> Row:
    """Return where this runs, and its rate in large products of bfloat16 matrices."""
    return {"backend": jax.default_backend(), "FLOP/s": meter.matmul_rate("bfloat16")} | conditions()


class Job(NamedTuple):
    """A rung, ready to be compiled."""

    rung: Rung
    setting: Setting
    config: Config
    program: Program

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the tokens of a step: microbatches, sequences, and positions with the last target."""
        microbatches = self.setting.microbatches(self.rung.accumulate, self.config.context)
        return microbatches, self.setting.batch_size, self.config.context + 1

    def shapes(self) -> tuple[Any, Any, jax.ShapeDtypeStruct]:
        """Return the shapes of what a step gets: parameters, optimizer state and tokens."""
        return *jax.eval_shape(self.program.init, 0), jax.ShapeDtypeStruct(self.shape, jnp.int32)

    def batches(self) -> list[jax.Array]:
        """Return batches of text on the device."""
        return list(map(jax.device_put, token_batches(self.config.vocabulary, self.shape, count=DISTINCT_BATCHES)))

    def tokens(self) -> Row:
        """Return the tokens of a step, and the operations that the model needs for each."""
        microbatches, sequences, _ = self.shape
        tokens = math.prod((microbatches, sequences, self.config.context))
        return {"tokens": tokens, "flops per token": self.config.flops_per_token}

    def times(self, call: Callable, state: Any, inputs: list[Any], before: int = 0) -> tuple[Row, Any]:
        """Time `state = call(state, input)`, with the inputs in turn; return the times and the last state."""
        in_turn = itertools.cycle(inputs)

        def run(steps: int) -> None:
            nonlocal state
            for _ in range(steps):
                state = call(state, next(in_turn))
            jax.block_until_ready(state)

        run(before)
        return time_rounds(run, steps=self.setting.steps_of(self.shape[0]), rounds=self.setting.rounds), state


def make_job(rung: Row, setting: Row) -> Job:
    """Return the job of a rung, whose fields and setting have been JSON."""
    chosen = Rung(**rung)
    recipe = get_recipe(chosen.recipe)
    changes = {name: rung[name] for name in ("vocabulary_multiple", "attention", "layers", "checkpoint")}
    config = dataclasses.replace(PRESETS[setting["preset"]], attention_dtype=recipe.attention_dtype, **changes)
    options = {"loss_chunks": chosen.loss_chunks, "rules": RULES[chosen.rules]}
    return Job(chosen, Setting(**setting), config, Program(recipe, config, TRAINING, **options))


def compile_ahead(fun: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> tuple[Any, float]:
    """Return a compiled program, from shapes or arrays, and the seconds that it took to trace and compile it."""
    start = time.perf_counter()
    compiled = jax.jit(fun, donate_argnums=donate).lower(*arguments).compile()
    return compiled, time.perf_counter() - start


def measure_step(rung: Row, setting: Row) -> Row:
    """Return time, memory and last loss of a training step, from random weights, on text."""
    note = {}
    if rung["attention"] == "cudnn" and jax.default_backend() != "gpu":
        rung, note = rung | {"attention": "xla"}, {"note": NO_FLASH}
    job = make_job(rung, setting)
    step, seconds = compile_ahead(job.program.train_step, *job.shapes(), donate=(0, 1))
    compiling = meter.device_memory()[1]
    batches = job.batches()
    # One step before, as in PyTorch, which compiles there: so both end after as many.
    call = lambda state, tokens: step(*state[:2], tokens)
    row, (_, _, metrics) = job.times(call, (*jax.jit(job.program.init)(0), None), batches, before=1)
    row |= note | job.tokens() | {"loss": float(metrics.loss), "program": compiled_figures(step, seconds)}
    return row | {"peak bytes": meter.device_memory()[1], "peak bytes before": compiling}


def read_step(rung: Row, setting: Row, target: str) -> Row:
    """Read the program of a training step that is compiled for a device that need not be here."""
    compiler, job = start_compiler(target), make_job(rung, setting)
    found = absent_figures(job.program.train_step, *job.shapes(), target=target, donate=(0, 1))
    return {"program": found} | job.tokens() | compiler


def measure_parts(rung: Row, setting: Row) -> Row:
    """Return times of parts of a step: the gradient, the optimizer, and the cast of all float32 weights to bfloat16.

    The cast is called as a user does: alone, and waited for.
    """
    job = make_job(rung, setting)
    batches = [batch[0] for batch in job.batches()]
    params, opt_state = jax.jit(job.program.init)(0)
    gradient, _ = compile_ahead(job.program.gradients, params, opt_state, batches[0])
    row = {"gradient": job.times(lambda _, tokens: gradient(params, opt_state, tokens), None, batches)[0]}
    if rung["recipe"] == "f32":
        policy = mpx.get_policy("params=bf16,compute=bf16,output=f32")
        times = [1e3 * timed(policy.cast_to_param, params)[0] for _ in range(SINGLE_CALLS)][1:]
        row["cast"] = {"ms": statistics.median(times), "low": min(times), "high": max(times)}
    grads = random_like(gradient(params, opt_state, batches[0])[1])
    update, _ = compile_ahead(lambda p, s, g: job.program.update(g, s, p), params, opt_state, grads, donate=(0, 1))
    row["update"], _ = job.times(lambda state, grads: update(*state, grads), (params, opt_state), [grads])
    return row


def random_like(tree: Any) -> Any:
    """Return random gradients of a model's magnitude."""
    return jax.tree.map(lambda leaf: (1e-3 * jax.random.normal(jax.random.key(0), leaf.shape)).astype(leaf.dtype), tree)
