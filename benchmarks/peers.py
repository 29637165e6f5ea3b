"""Set a step of mpx beside what JAX users have for the same end, Optax alone and
flashoptim-jax: programs for a GPU.

    PYTHONPATH=. python -m benchmarks.peers --target h200

AdamW in each, on the 148 tensors of GPT-2 124M: bytes, kernels and compile time of one
step, read off the program for a GPU that need not be here (`pip install -e
".[cuda12]"`). Parameters and state are donated; gradients have the dtype of the
parameters. Nothing runs, and each program has a process of its own. An optimizer that
cannot be read says why.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import typer

import mpx
from benchmarks.optimizer_step import make_shapes
from benchmarks.reading import absent_figures, start_compiler
from benchmarks.report import Row, Sheet
from benchmarks.workers import run_worker
from mpx._recipes import RECIPES

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 1e-4
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
TIMEOUT = 900.0  # seconds for one process
COLUMNS = {
    "AdamW": "{name}",
    "bytes a parameter kept between steps": "{kept:.2f}",
    "held in a step": "{peak:.2f}",
    "temporary": "{temporary:.2f}",
    "moved": "{moved:.2f}",
    "kernels": "{kernels:,}",
    "bound, ms": "{bound ms:.3f}",
    "compiled in, s": "{compile s:.1f}",
    "why not": "{failed}",
}


class Optimizer(NamedTuple):
    """AdamW as a library offers it.

    Attributes:
        dtype: of parameters and gradients.
        init: makes the state from parameters.
        step: makes new parameters and a new state from gradients, state and parameters.
    """

    dtype: Any
    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]


def make_optimizer(peer: str) -> Optimizer:
    """Return the AdamW of a row."""
    if peer in FLASH_BITS:
        # Only where it is read: it need not be installed.
        from flashoptim_jax import (
            flash_adamw,
        )

        flash = flash_adamw(
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            master_weight_bits=FLASH_BITS[peer],
        )
        return Optimizer(
            jnp.bfloat16,
            flash.init,
            lambda grads, state, params: flash.step(params, state, grads),
        )
    dtype = jnp.float32 if peer == "optax-f32" else jnp.bfloat16
    tx = optax.adamw(
        LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        mu_dtype=dtype if peer.startswith("optax") else None,
    )
    recipe = RECIPES.get(peer)
    if recipe is not None:
        tx = mpx.mixed_precision(tx, peer)
    # Kernels are for moments in blocks; without them they gain nothing.
    if recipe is not None and recipe.moments is not None:
        return Optimizer(dtype, tx.init, mpx.fused_update(tx))

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Optimizer(dtype, tx.init, step)


def read(peer: str, target: str, scale: int) -> Row:
    """Return what the program for a target says; bytes are for each parameter."""
    start_compiler(target)
    optimizer, shapes = make_optimizer(peer), make_shapes("gpt2", scale)
    params = {
        name: jax.ShapeDtypeStruct(shape, optimizer.dtype)
        for name, shape in shapes.items()
    }
    state, count = (
        jax.eval_shape(optimizer.init, params),
        sum(map(math.prod, shapes.values())),
    )
    step = lambda params, state, grads: optimizer.step(grads, state, params)
    found = absent_figures(step, params, state, params, target=target, donate=(0, 1))
    kept = (
        sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state))
        )
        / count
    )
    return (
        found
        | {"kept": kept}
        | {
            what: 1e9 * found[f"{what} GB"] / count
            for what in ("moved", "peak", "temporary")
        }
    )


def main(
    peers: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(NAMES),
    target: Annotated[
        str, typer.Option(help="The device: a100, h100, h200, b200.")
    ] = "h200",
    scale: Annotated[
        int,
        typer.Option(
            min=1, help="What the rows of the optimizer's tensors are divided by."
        ),
    ] = 1,
) -> None:
    """Read all programs and print the table."""
    rows = []
    for peer in peers.split(","):
        (found,) = run_worker(
            "benchmarks.peers:read",
            {"peer": peer, "target": target, "scale": scale},
            timeout=TIMEOUT,
        )
        rows.append({"name": NAMES[peer]} | found)
        print(f"{peer}: {found.get('failed', 'done')}", flush=True)
    print(
        Sheet(
            f"one AdamW step of GPT-2's tensors, compiled for one {target}",
            rows,
            COLUMNS,
        ).markdown()
    )


app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command()(main)

if __name__ == "__main__":
    app()
