"""Three small problems to train on for a few seconds: where do an optimizer's masters end?

Each starts from numbers that bfloat16 holds, so that every precision has the same start.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Problem(NamedTuple):
    """Parameters to start from, a loss of parameters and a batch, and what makes a batch from a key."""

    params: dict[str, jax.Array]
    loss: Callable[[dict[str, jax.Array], tuple[jax.Array, jax.Array]], jax.Array]
    batch: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def normal(seed: int, *shape: int) -> jax.Array:
    """Return a random matrix that keeps the magnitude of what it multiplies, in numbers that bfloat16 holds."""
    values = jax.random.normal(jax.random.key(seed), shape) / math.sqrt(shape[0])
    return jax.lax.reduce_precision(values, 8, 7)


def least_squares() -> Problem:
    """Return noisy linear regression with a 256 x 256 matrix."""
    truth = normal(1, 256, 256)

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs, noise = jax.random.normal(key, (2, 64, 256))
        return inputs, inputs @ truth + noise

    loss = lambda params, batch: jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2)
    return Problem({"w": normal(0, 256, 256)}, loss, batch)


def perceptron() -> Problem:
    """Return regression of a random perceptron of 64, 256 and 16 units by another one."""
    shapes = {"w1": (64, 256), "b1": (256,), "w2": (256, 16)}
    make = lambda seed: {name: normal(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    run = lambda params, x: jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]
    truth = make(10)

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = jax.random.normal(key, (64, 64))
        return inputs, run(truth, inputs) + 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (64, 16))

    return Problem(make(0), lambda params, batch: jnp.mean((run(params, batch[0]) - batch[1]) ** 2), batch)


def logistic() -> Problem:
    """Return logistic regression with 256 inputs and 32 classes."""
    truth = 4 * normal(1, 256, 32)

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = jax.random.normal(key, (64, 256))
        return inputs, jax.random.categorical(jax.random.fold_in(key, 1), inputs @ truth)

    def loss(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = batch[0] @ params["w"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return Problem({"w": normal(0, 256, 32)}, loss, batch)


PROBLEMS = {"least squares": least_squares, "perceptron": perceptron, "logistic regression": logistic}
