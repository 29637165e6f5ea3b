"""Measure what products of 8-bit floats lose, by `mpx.autocast` and by Flax Linen's `Fp8DotGeneralOp`, on any device.

    PYTHONPATH=. python -m benchmarks.fp8_beside_flax
    PYTHONPATH=. python -m benchmarks.fp8_beside_flax --width 512 --seeds 5

A perceptron of four layers in Flax Linen learns a teacher's results with AdamW, in float32. The table has the relative
error of the loss and of the gradient, by the norm of the whole tree, against the same program in float64 on the same
weights and data: at the first step, after training, and on a batch then that is 64 times as large. Flax keeps the
largest magnitudes of the steps before and scales by those: it sees each batch of the training too.
"""

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax.linen import fp8_ops

import mpx
from benchmarks.report import Row, table

LAYERS, LEARNING_RATE, FARTHER = 4, 1e-3, 64.0
OVERWRITTEN = fp8_ops.OVERWRITE_WITH_GRADIENT  # Flax's scales, whose new values come as their gradients
WAYS = {
    "autocast, bf16": "bf16",
    "autocast, fp8": mpx.Fp8(min_extent=0),
}


class Perceptron(nn.Module):
    """Layers of one width, with a residual."""

    width: int
    op: Any = None  # a class that Flax puts in the place of `jax.lax.dot_general`
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the results of inputs."""
        for _ in range(LAYERS):
            layer = nn.Dense(self.width, dot_general_cls=self.op, dtype=self.dtype, param_dtype=self.dtype)
            x = x + nn.gelu(layer(nn.LayerNorm(dtype=self.dtype, param_dtype=self.dtype)(x)))
        return x


def loss_of(model: Perceptron) -> Callable[[Any, Any], jax.Array]:
    """Return the mean squared error of a model, a function of its variables and a batch."""
    return lambda variables, batch: jnp.mean((model.apply(variables, batch[0]) - batch[1]) ** 2)


def batch_of(width: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and a fixed teacher's results."""
    rows, teacher = np.random.default_rng((seed, step)), np.random.default_rng((seed, 2**31))
    x = rows.normal(size=(width, width)).astype(np.float32)
    return x, np.tanh(x @ teacher.normal(size=(width, width)).astype(np.float32) / np.float32(width**0.5))


def points(width: int, seed: int, steps: int) -> dict[str, tuple[Any, Any, Any]]:
    """Return weights, Flax's scales and a batch for each part of the table."""
    batch = functools.partial(batch_of, width, seed)
    params = Perceptron(width).init(jax.random.key(seed), batch(0)[0])["params"]
    in_flax = Perceptron(width, fp8_ops.Fp8DotGeneralOp)
    scales = in_flax.init(jax.random.key(0), batch(0)[0])[OVERWRITTEN]
    found = {"first step": (params, scales, batch(0))}
    tx = optax.adamw(LEARNING_RATE)

    @jax.jit
    def train(params, state, scales, batch):
        scales = jax.grad(loss_of(in_flax))({"params": params, OVERWRITTEN: scales}, batch)[OVERWRITTEN]
        grads = jax.grad(loss_of(Perceptron(width)))({"params": params}, batch)["params"]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, scales

    state = tx.init(params)
    for step in range(steps):
        params, state, scales = train(params, state, scales, batch(step))
    x, y = batch(steps)
    found[f"after {steps} steps"] = params, scales, (x, y)
    found[f"then, inputs times {FARTHER:.0f}"] = params, scales, (x * FARTHER, y * FARTHER)
    return found


def errors(width: int, params: Any, scales: Any, batch: Any) -> dict[str, tuple[float, ...]]:
    """Return, for each way, the relative errors of the loss and of the gradient."""
    exact = value_and_gradient(loss_of(Perceptron(width, dtype=jnp.float64)), {"params": params}, batch, wide=True)
    found = {}
    for name, way in {"float32": "f32", **WAYS}.items():
        found[name] = value_and_gradient(mpx.autocast(loss_of(Perceptron(width)), way), {"params": params}, batch)
    in_flax = loss_of(Perceptron(width, fp8_ops.Fp8DotGeneralOp))
    found["Flax, Fp8DotGeneralOp"] = value_and_gradient(in_flax, {"params": params, OVERWRITTEN: scales}, batch)
    return {
        name: tuple(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(result, exact, strict=True))
        for name, result in found.items()
    }


def value_and_gradient(loss: Any, variables: Any, batch: Any, wide: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return a loss and the gradient of its weights, as vectors of float64."""
    with jax.enable_x64(wide):
        widened = lambda x: jnp.asarray(x, jnp.float64) if wide else x
        value, grads = jax.jit(jax.value_and_grad(loss))(*jax.tree.map(widened, (variables, batch)))
        leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(grads["params"])]
        return np.asarray([value], np.float64), np.concatenate(leaves)


def main(width: int = 256, seeds: int = 3, steps: int = 50) -> None:
    """Print the table: means over the seeds."""
    by_seed = [
        {point: errors(width, *given) for point, given in points(width, seed, steps).items()} for seed in range(seeds)
    ]
    rows: list[Row] = [{"way": way} for way in next(iter(by_seed[0].values()))]
    columns = {" ": "{way}"}
    for point, (i, what) in itertools.product(by_seed[0], enumerate(("loss", "gradient"))):
        columns[f"{point}: {what}"] = f"{{{point}, {what}:.1e}}"
        for row in rows:
            row[f"{point}, {what}"] = statistics.mean(run[point][row["way"]][i] for run in by_seed)
    print(table(rows, columns))


if __name__ == "__main__":
    typer.run(main)
