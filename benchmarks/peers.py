"""Set mpx beside what JAX users have for the same end: Optax alone, and flashoptim-jax (`pip install -e ".[peers]"`).

    PYTHONPATH=. python -m benchmarks.peers --target h200

AdamW in each, measured four ways:

1. Bytes, kernels and compile time of one step on the 148 tensors of GPT-2 124M, read off the program for a GPU that
   need not be here (`pip install -e ".[cuda12]"`). Parameters and state are donated; gradients have the dtype of the
   parameters. Nothing runs.
2. The distance of the masters from float32's after 2,000 steps on three small problems, from the same start, which
   bfloat16 holds exactly, and with the same batches: the norm of the difference, divided by the norm of the way that
   float32 went. Loss and gradients are computed in float32 from the parameters as stored, so rows differ by their
   optimizers alone.
3. The validation loss of the small GPT of `examples.gpt.compare`, from seed 0.
4. Of torchao and bitsandbytes, which are for PyTorch, only what torchao publishes.

flashoptim-jax runs as its kernels, interpreted: without them it adds an update in bfloat16 to a parameter, which may
miss the new one. Each measurement has a process of its own. An optimizer that cannot be measured says why.
"""

import dataclasses
import functools
import importlib.util
import math
import unittest.mock
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.experimental import pallas

import mpx
from benchmarks.optimizer_step import make_shapes
from benchmarks.reading import absent_figures, start_compiler
from benchmarks.report import Row, Sheet
from benchmarks.small_problems import PROBLEMS, Problem
from benchmarks.workers import run_worker
from examples.gpt import compare
from examples.gpt.recipes import BF16, Recipe, get_recipe, plain
from examples.gpt.training import Hyperparameters, Program
from mpx.tools.plan.recipes import STANDARD_RECIPES

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 1e-4
GPT_LEARNING_RATE = 3e-4  # the default of `examples.gpt.compare`
FLASH_BITS = {"flashoptim-24": 24, "flashoptim-32": 32}
NAMES = {
    "optax-f32": "Optax, float32",
    "optax-bf16": 'Optax, bfloat16 parameters, `mu_dtype="bfloat16"`',
    "flashoptim-24": "flashoptim-jax, 24-bit masters",
    "flashoptim-32": "flashoptim-jax, 32-bit masters",
    "bf16-split": "mpx, `bf16-split`",
    "bf16-split-8bit": "mpx, `bf16-split-8bit`",
    "bf16-split24-8bit": "mpx, `bf16-split24-8bit`",
    "bf16-split24-4bit": "mpx, `bf16-split24-4bit`",
}
NOT_INSTALLED = 'flashoptim-jax is not installed: pip install -e ".[peers]"'
TIMEOUT = 900.0  # seconds for one process
COLUMNS = {
    "AdamW": "{name}",
    "bytes a parameter kept between steps": "{program[kept]:.2f}",
    "held in a step": "{program[peak]:.2f}",
    "temporary": "{program[temporary]:.2f}",
    "moved": "{program[moved]:.2f}",
    "kernels": "{program[kernels]:,}",
    "compiled in, s": "{program[compile s]:.1f}",
    **{f"distance, {name}": f"{{distances[{name}]:.1e}}" for name in PROBLEMS},
    "loss of the small GPT": "{gpt[loss]:.4f}",
    "why not": "{failed}",
}

PUBLISHED = [
    {"name": "PyTorch, fused, unquantized", "vit": "12.23, 41.9, 94.52", "llama": "51.6, 3,200"},
    {"name": "bitsandbytes, 8-bit", "vit": "8.32, 43.6, 94.54", "llama": "39.3, 3,000"},
    {"name": "torchao, 8-bit", "vit": "8.33, 42.5, 94.30", "llama": "39.1, 2,900"},
    {"name": "torchao, e4m3", "vit": "8.33, 43.2, 94.13"},
    {"name": "torchao, 4-bit", "vit": "7.72, 42.4, 94.13", "llama": "33.2, 2,900"},
]
PUBLISHED_COLUMNS = {
    "AdamW": "{name}",
    "ViT-H: peak GB, images/s, accuracy": "{vit}",
    "Llama 2 7B: peak GB, tokens/s": "{llama}",
}
SOURCE = "Both from torchao's `torchao/optim/README.md` (PyTorch 2.4; a 4070 Ti SUPER, an A100): not measured here."


class Optimizer(NamedTuple):
    """AdamW as a library offers it.

    Attributes:
        dtype: of parameters and gradients.
        init: makes the state from parameters.
        step: makes new parameters and a new state from gradients, state and parameters.
        masters: makes float32 values from parameters and state.
    """

    dtype: Any
    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]
    masters: Callable[[Any, Any], Any] = mpx.master_params


def make_optimizer(peer: str, learning_rate: Any = LEARNING_RATE) -> Optimizer:
    """Return the AdamW of a row."""
    if peer in FLASH_BITS:
        return flash_optimizer(peer, learning_rate=learning_rate, weight_decay=WEIGHT_DECAY)
    dtype = jnp.float32 if peer == "optax-f32" else jnp.bfloat16
    tx = optax.adamw(learning_rate, weight_decay=WEIGHT_DECAY, mu_dtype=dtype if peer.startswith("optax") else None)
    recipe = STANDARD_RECIPES.get(peer)
    tx = recipe.wrap(tx) if recipe else tx
    if recipe and recipe.formats_moments:  # kernels are for moments in blocks; without them they gain nothing
        return Optimizer(dtype, tx.init, mpx.fused_update(tx))

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Optimizer(dtype, tx.init, step)


def flash_optimizer(peer: str, **options: Any) -> Optimizer:
    """Return the AdamW of flashoptim-jax."""
    from flashoptim_jax import flash_adamw, reconstruct_weights

    tx = flash_adamw(master_weight_bits=FLASH_BITS[peer], **options)
    step = lambda grads, state, params: tx.step(params, state, grads)
    return Optimizer(jnp.bfloat16, tx.init, step, lambda params, state: reconstruct_weights(params, state.ecc))


def interpreted(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step whose kernels of Pallas run without a GPU."""

    def run(*args: Any) -> Any:
        on_a_cpu = functools.partial(pallas.pallas_call, interpret=True)
        with unittest.mock.patch.object(pallas, "pallas_call", on_a_cpu):
            return step(*args)

    return run


# --- The program of a step. ---
def read_program(peer: str, target: str, scale: int) -> Row:
    """Return what the program for a target says; bytes are for each parameter."""
    start_compiler(target)
    optimizer, shapes = make_optimizer(peer), make_shapes("gpt2", scale)
    params = {name: jax.ShapeDtypeStruct(shape, optimizer.dtype) for name, shape in shapes.items()}
    state, count = jax.eval_shape(optimizer.init, params), sum(map(math.prod, shapes.values()))
    step = lambda params, state, grads: optimizer.step(grads, state, params)
    found = absent_figures(step, params, state, params, target=target, donate=(0, 1))
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state))) / count
    return found | {"kept": kept} | {what: 1e9 * found[f"{what} GB"] / count for what in ("moved", "peak", "temporary")}


# --- Distances of masters. ---
def train(optimizer: Optimizer, problem: Problem, steps: int) -> Any:
    """Return the masters after so many steps."""

    def step(carry: tuple[Any, Any], number: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, state = carry
        batch = problem.batch(jax.random.fold_in(jax.random.key(7), number))
        grads = jax.grad(lambda params: problem.loss(mpx.cast(params, "f32"), batch))(params)
        return interpreted(optimizer.step)(grads, state, params), None

    def run(params: Any) -> Any:
        carry, _ = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(steps))
        return optimizer.masters(*carry)

    params = mpx.cast(problem.params, optimizer.dtype)
    return jax.jit(run, compiler_options=compare.COMPILER_OPTIONS)(params)


def measure_distances(peer: str, steps: int) -> Row:
    """Return the distance from float32's masters for each problem."""
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps, alpha=0.1)
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    row: Row = {}
    for name, make_problem in PROBLEMS.items():
        problem = make_problem()
        ours, theirs = (flat(train(make_optimizer(row, schedule), problem, steps)) for row in (peer, "optax-f32"))
        row[name] = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - flat(problem.params)))
    return row


# --- The small GPT. ---
class FlashProgram(Program):
    """The program of `examples.gpt` whose optimizer is flashoptim-jax; all else is that of the recipes of mpx."""

    def __init__(self, peer: str, hyperparameters: Any) -> None:
        super().__init__(Recipe(peer, BF16, plain), compare.CONFIG, hyperparameters)
        no_decay = {
            "params": lambda path, leaf: leaf.ndim < 2,
            "weight_decay": 0.0,
        }  # biases and norms, as in `decayed`
        self.clip = optax.clip_by_global_norm(hyperparameters.clip_norm)
        self.optimizer = flash_optimizer(
            peer, learning_rate=hyperparameters.schedule(), b1=hyperparameters.b1, b2=hyperparameters.b2,
            weight_decay=hyperparameters.weight_decay, param_groups=[no_decay],
        )  # fmt: skip
        self.tx = optax.GradientTransformation(self.optimizer.init, lambda *args: None)  # no `update`, only the step

    def update(self, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        """Return new parameters and optimizer state."""
        grads, _ = self.clip.update(grads, self.clip.init(params))
        return interpreted(self.optimizer.step)(grads, opt_state, params)


def make_program(peer: str, hyperparameters: Any) -> Program:
    """Return the program of a row."""
    if peer in FLASH_BITS:
        return FlashProgram(peer, hyperparameters)
    recipe = get_recipe({"optax-f32": "f32", "optax-bf16": "bf16-naive"}.get(peer, peer))
    if peer == "optax-bf16":
        recipe = dataclasses.replace(recipe, adamw=functools.partial(optax.adamw, mu_dtype="bfloat16"))
    return Program(recipe, compare.CONFIG, hyperparameters)


def measure_gpt(peer: str, steps: int) -> Row:
    """Return the validation loss of the small GPT from seed 0."""
    program = make_program(peer, Hyperparameters(steps, GPT_LEARNING_RATE))
    compiled = functools.partial(jax.jit, compiler_options=compare.COMPILER_OPTIONS)
    train_step = compiled(program.train_step, donate_argnums=(0, 1))
    text, held_out = compare.split(compare.read_text(None))
    params, opt_state = program.init(0)
    for batch in compare.random_batches(text, seed=0, count=steps):
        params, opt_state, _ = train_step(params, opt_state, batch[None])
    return {"loss": float(compiled(program.evaluate)(params, jax.device_put(compare.fixed_batches(held_out))))}


# --- The command. ---
def measure(peer: str, jobs: dict[tuple[str, str], Row]) -> Row:
    """Return the row of an optimizer; each job is a function of this module and its arguments."""
    row: Row = {"name": NAMES[peer]}
    if peer in FLASH_BITS and importlib.util.find_spec("flashoptim_jax") is None:
        return row | {"failed": NOT_INSTALLED}
    for (key, function), arguments in jobs.items():
        (found,) = run_worker(f"benchmarks.peers:{function}", {"peer": peer} | arguments, timeout=TIMEOUT)
        row |= {"failed": f"{key}: {found['failed']}"} if "failed" in found else {key: found}
    print(f"{peer}: {row.get('failed', 'done')}", flush=True)
    return row


def main(
    peers: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(NAMES),
    target: Annotated[str, typer.Option(help="The device: a100, h100, h200, b200; empty for no programs.")] = "h200",
    steps: Annotated[int, typer.Option(min=1, help="Of each small problem.")] = 2000,
    gpt_steps: Annotated[int, typer.Option(min=0, help="Of the small GPT; 0 leaves it out.")] = 300,
    scale: Annotated[int, typer.Option(min=1, help="What the rows of the optimizer's tensors are divided by.")] = 1,
) -> None:
    """Measure all rows and print the tables."""
    jobs: dict[tuple[str, str], Row] = {("distances", "measure_distances"): {"steps": steps}}
    if target:
        jobs["program", "read_program"] = {"target": target, "scale": scale}
    if gpt_steps:
        jobs["gpt", "measure_gpt"] = {"steps": gpt_steps}
    rows = [measure(peer, jobs) for peer in peers.split(",")]
    title = f"one AdamW step of GPT-2's tensors, masters after {steps:,} steps, the small GPT after {gpt_steps:,}"
    published = Sheet("published figures", PUBLISHED, PUBLISHED_COLUMNS, SOURCE)
    print("\n\n".join([Sheet(title, rows, COLUMNS).markdown(), published.markdown()]))


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
