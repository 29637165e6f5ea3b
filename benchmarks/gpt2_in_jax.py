"""Answers the jobs of `benchmarks.ladder` and `benchmarks.torch_gpt2` with JAX and mpx, one job in a process.

Programs are compiled ahead. That of a whole step is compiled before there is any array on the device, so that the peak
of memory of compiling, where XLA tries its kernels, is known on its own and is not that of a step. Parameters and
optimizer state are donated. The pool of memory that JAX reserves at its start is left as it is: that is the fastest,
and the peak that the device reports is that of arrays and of a program's temporary arrays in the pool, not the size of
the pool.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpx
from benchmarks.reading import absent_figures, compiled_figures, start_compiler
from benchmarks.timing import conditions, timed
from benchmarks.token_batches import token_batches
from benchmarks.workers import Result, serve, time_rounds
from examples.gpt import meter
from examples.gpt.model import PRESETS, Config
from examples.gpt.recipes import get_recipe
from examples.gpt.training import Hyperparameters, Program, make_program

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
RULES = {"default": mpx.DEFAULT_RULES, "fast": mpx.FAST_RULES}
TRAINING = Hyperparameters(steps=1_000, learning_rate=6e-4)  # for times; curves bring their own
DISTINCT_BATCHES = 8  # on the device before the first step, and then in turn
SINGLE_CALLS = 11  # of a cast that is waited for each time


def answer(job: dict[str, Any]) -> Result:
    """Does one job."""
    return JOBS[job["kind"]](job)


# --- What the jobs share. ---
def make_config(job: dict[str, Any]) -> Config:
    """The model of a job: a preset, changed as the rung says."""
    changes = {name: job[name] for name in ("vocabulary_multiple", "attention", "layers", "checkpoint")}
    attention_dtype = get_recipe(job["recipe"]).attention_dtype
    return dataclasses.replace(PRESETS[job["preset"]], attention_dtype=attention_dtype, **changes)


def program_of(job: dict[str, Any], hyperparameters: Hyperparameters = TRAINING) -> Program:
    """The program of a job."""
    return make_program(
        get_recipe(job["recipe"]),
        make_config(job),
        hyperparameters,
        loss_chunks=job["loss_chunks"],
        rules=RULES[job["rules"]],
    )


def batches_of(job: dict[str, Any], config: Config, count: int, microbatches: int) -> list[jax.Array]:
    """Batches of text on the device."""
    shape = (microbatches, job["batch_size"], config.context + 1)
    return [jax.device_put(batch) for batch in token_batches(config.vocabulary, shape, count=count)]


def compile_ahead(fun: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> tuple[Any, float]:
    """A compiled program, from shapes or arrays, and the seconds that it took to trace and compile it."""
    start = time.perf_counter()
    compiled = jax.jit(fun, donate_argnums=donate).lower(*arguments).compile()
    return compiled, time.perf_counter() - start


def shapes_of(job: dict[str, Any], program: Program) -> tuple[Any, Any, jax.ShapeDtypeStruct]:
    """The shapes of what a training step gets: parameters, optimizer state and tokens."""
    tokens = (job["microbatches"], job["batch_size"], make_config(job).context + 1)
    return *jax.eval_shape(program.init, 0), jax.ShapeDtypeStruct(tokens, jnp.int32)


def tokens_of(job: dict[str, Any]) -> Result:
    """The tokens of a step, and the operations that the model needs for each."""
    config = make_config(job)
    tokens = math.prod((job["microbatches"], job["batch_size"], config.context))
    return {"tokens": tokens, "flops per token": config.flops_per_token}


# --- The device. ---
def measure_device(job: dict[str, Any]) -> Result:
    """Where this runs, and its rate in large products of bfloat16 matrices."""
    del job
    rate = meter.matmul_rate("bfloat16")
    return {"backend": jax.default_backend(), "conditions": conditions(PACKAGES), "matmul FLOP/s": rate}


def time_calls(
    call: Callable, state: Any, inputs: list[Any], job: dict[str, Any], before: int = 0
) -> tuple[Result, Any]:
    """Times of `state = call(state, input)`, with the inputs in turn, and the last state."""
    in_turn = itertools.cycle(inputs)

    def run(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state = call(state, next(in_turn))
        jax.block_until_ready(state)

    run(before)
    return time_rounds(run, steps=job["steps"], rounds=job["rounds"]), state


# --- A training step. ---
def measure_step(job: dict[str, Any]) -> Result:
    """Time, memory and last loss of a training step, from random weights, on text."""
    program, config = program_of(job), make_config(job)
    shapes = shapes_of(job, program)
    step, seconds = compile_ahead(program.train_step, *shapes, donate=(0, 1))
    compiling = meter.device_memory()[1]
    batches = batches_of(job, config, DISTINCT_BATCHES, job["microbatches"])
    # One step before, as in PyTorch, which compiles there: so both end after as many.
    row, (_, _, metrics) = time_calls(
        lambda state, tokens: step(*state[:2], tokens), (*jax.jit(program.init)(0), None), batches, job, before=1
    )
    row |= tokens_of(job) | {"loss": float(metrics.loss), "program": compiled_figures(step, seconds)}
    row |= {"peak bytes": meter.device_memory()[1], "peak bytes before": compiling}
    return row | {"parameters": sum(leaf.size for leaf in jax.tree.leaves(shapes[0]))}


def read_step(job: dict[str, Any]) -> Result:
    """What the program of a training step says that is compiled for a device that need not be here."""
    compiler, program = start_compiler(job["target"]), program_of(job)
    found = absent_figures(program.train_step, *shapes_of(job, program), target=job["target"], donate=(0, 1))
    return {"program": found} | tokens_of(job) | compiler


# --- Parts of a step, at a fixed batch. ---
def measure_passes(job: dict[str, Any]) -> Result:
    """Milliseconds of the forward pass, up to the mean loss, and of the loss and its gradient."""
    program, config = program_of(job), make_config(job)
    batches = [batch[0] for batch in batches_of(job, config, DISTINCT_BATCHES, 1)]
    params, opt_state = jax.jit(program.init)(0)
    forward, _ = compile_ahead(lambda params, tokens: program.token_losses(params, tokens).mean(), params, batches[0])
    gradient, _ = compile_ahead(program.gradients, params, opt_state, batches[0])
    calls = {"forward": lambda _, t: forward(params, t), "gradient": lambda _, t: gradient(params, opt_state, t)}
    return {name: time_calls(call, None, batches, job)[0] for name, call in calls.items()}


def measure_update(job: dict[str, Any]) -> Result:
    """Milliseconds of the optimizer alone: `tx.update` and `optax.apply_updates`, on random gradients."""
    program, config = program_of(job), make_config(job)
    params, opt_state = jax.jit(program.init)(0)
    tokens = jax.ShapeDtypeStruct((job["batch_size"], config.context + 1), jnp.int32)
    _, shapes = jax.eval_shape(program.gradients, params, opt_state, tokens)
    grads = _random_like(shapes)

    def update(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        return program.update(grads, opt_state, params)

    compiled, _ = compile_ahead(update, params, opt_state, grads, donate=(0, 1))
    row, _ = time_calls(lambda state, grads: compiled(*state, grads), (params, opt_state), [grads], job)
    return {"update": row}


def _random_like(shapes: Any) -> Any:
    """Gradients of a model's magnitude."""
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    make = lambda key, leaf: (1e-3 * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)
    return treedef.unflatten([make(key, leaf) for key, leaf in zip(keys, leaves, strict=True)])


def measure_cast(job: dict[str, Any]) -> Result:
    """Milliseconds of `policy.cast_to_param` on all float32 weights, as a user calls it: alone, and waited for."""
    program = program_of(job)
    params = jax.jit(lambda: program.init(0)[0])()
    policy = mpx.get_policy("params=bf16,compute=bf16,output=f32")
    times = [1e3 * timed(policy.cast_to_param, params)[0] for _ in range(SINGLE_CALLS)]
    warm = times[1:]
    return {"cast": {"ms": statistics.median(warm), "ms spread": [min(warm), max(warm)], "first ms": times[0]}}


# --- A loss curve. ---
def measure_curve(job: dict[str, Any]) -> Result:
    """The losses of a whole short training; writes the weights that it begins with, if a file is named for them."""
    training = Hyperparameters(**job["hyperparameters"])
    program, config = program_of(job, training), make_config(job)
    batches = token_batches(config.vocabulary, (1, job["batch_size"], config.context + 1), count=training.steps)
    state = jax.jit(program.init)(0)
    if job.get("weights"):
        np.savez(job["weights"], **weights_for_torch(state[0]))
    step, _ = compile_ahead(program.train_step, *state, jax.eval_shape(jnp.asarray, batches[0]), donate=(0, 1))
    losses = []
    for batch in batches:
        *state, metrics = step(*state, jax.device_put(batch))
        losses.append(metrics.loss)
    return {"losses": [float(loss) for loss in jax.device_get(losses)]}


def weights_for_torch(params: Any) -> dict[str, np.ndarray]:
    """The weights by the names that they have in the PyTorch model, whose modules are called as ours.

    `torch.nn.Linear` has the transpose of our kernel, and calls it and a norm's scale `weight`.

    Args:
        params: of a model with unrolled layers, in float32.
    """
    weights = {}
    for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(params)):
        *modules, name = (str(getattr(entry, "key", getattr(entry, "idx", ""))) for entry in path)
        value = np.asarray(leaf).T if name == "kernel" else np.asarray(leaf)
        name = "weight" if name in ("kernel", "scale") else name
        weights[".".join([*modules, name])] = np.ascontiguousarray(value)
    return weights


JOBS: dict[str, Callable[[dict[str, Any]], Result]] = {
    "device": measure_device,
    "step": measure_step,
    "program": read_step,
    "passes": measure_passes,
    "update": measure_update,
    "cast": measure_cast,
    "curve": measure_curve,
}

if __name__ == "__main__":
    serve(answer)
