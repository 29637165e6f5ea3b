"""Measure what a model's loss and gradient lose in accuracy under `mpx.autocast`, and cast by hand.

The relative error of the loss, and of the gradient by the norm of the whole tree, against the same program in float64
on the same weights: mean and largest of 5 seeds, at the initial weights and after 50 steps of AdamW. The model and its
data are the same on all machines. Gradients are taken at a loss scale of 4,096, for float16's sake. By hand in float16
on a CPU, attention runs in float32: XLA refuses there what it asks for. XLA may leave out roundings to 16 bits, as it
may for users.
"""

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
from benchmarks.autocast_forms import DTYPES, HAND, HAND_STREAM, Dtypes, Size, make_form, make_loss, make_params
from benchmarks.report import Row

ACCURACY_SIZE = Size(width=128, layers=3, heads=4, context=64, vocabulary=256, batch=8)
ACCURACY_DTYPES = (("f32", "bf16"), ("bf16", "bf16"), ("f32", "f16"), ("f16", "f16"))  # parameters, products
ACCURACY_FORMS = ("f32", HAND, HAND_STREAM, "autocast")
SEEDS, TRAINED_STEPS, LOSS_SCALE = 5, 50, 2.0**12
LEARNING_RATE = 1e-3
SUCCESSORS = 4  # tokens that may follow a token in the data that is learned


def make_text(size: Size, seed: int) -> Callable[[int], jax.Array]:
    """Return batches that can be learned: each token is followed by one of a few."""
    successors = np.random.default_rng(seed).integers(size.vocabulary, size=(size.vocabulary, SUCCESSORS))

    def batch(i: int) -> jax.Array:
        rng = np.random.default_rng((seed, i))
        tokens = [rng.integers(size.vocabulary, size=size.batch)]
        for _ in range(size.context):
            tokens.append(successors[tokens[-1], rng.integers(SUCCESSORS, size=size.batch)])
        return jnp.asarray(np.stack(tokens, axis=1), jnp.int32)

    return batch


def trained_params(size: Size, seeds: int, steps: int) -> list[tuple[Any, jax.Array]]:
    """Return, for each seed, weights after some steps of float32 training, and a batch that they have not seen."""
    tx, loss = optax.adamw(LEARNING_RATE), make_loss(size, Dtypes())

    @jax.jit
    def train(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(loss)(params, tokens), state, params)
        return optax.apply_updates(params, updates), state

    points = []
    for seed in range(seeds):
        text, params = make_text(size, seed), make_params(size, jnp.float32, seed)
        state = tx.init(params)
        for i in range(steps):
            params, state = train(params, state, text(i))
        points.append((params, text(steps)))
    return points


def flat(value_and_grads: tuple[Any, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a loss and the leaves of its gradient in float64 on the host."""
    return jax.tree.map(
        lambda x: np.asarray(x).astype(np.float64), (value_and_grads[0], jax.tree.leaves(value_and_grads[1]))
    )


def relative_errors(found: tuple[Any, list[np.ndarray]], exact: tuple[Any, list[np.ndarray]]) -> tuple[float, float]:
    """Return the error of the loss, and of the gradient as one vector."""
    norm = lambda arrays: np.sqrt(sum(float(np.sum(a * a)) for a in arrays))
    difference = [a - b for a, b in zip(found[1], exact[1], strict=True)]
    return float(abs(found[0] - exact[0]) / abs(exact[0])), float(norm(difference) / norm(exact[1]))


def measure_accuracy(
    params: str, compute: str, size: Size = ACCURACY_SIZE, seeds: int = SEEDS, trained_steps: int = TRAINED_STEPS
) -> list[Row]:
    """Return errors of the loss and the gradient, at the initial weights and at trained ones, over seeds.

    `params` and `compute` are the names of the dtypes of parameters and of products.
    """
    with jax.enable_x64(True):
        wide = jax.jit(jax.value_and_grad(make_loss(size, Dtypes(jnp.float64, jnp.float64))))
    scale, rows = mpx.StaticLossScale(LOSS_SCALE), []
    names = ACCURACY_FORMS if compute == "bf16" else ACCURACY_FORMS[1:]  # float32 does not depend on it
    gradients = {name: jax.jit(mpx.value_and_grad(make_form(name, size, DTYPES[compute]), scale)) for name in names}
    for steps in dict.fromkeys((0, trained_steps)):
        errors: dict[str, list[tuple[float, float]]] = {name: [] for name in gradients}
        for weights, tokens in trained_params(size, seeds, steps):
            weights = jax.tree.map(lambda p: p.astype(DTYPES[params]), weights)
            with jax.enable_x64(True):
                exact = flat(wide(jax.tree.map(lambda p: p.astype(jnp.float64), weights), tokens))
            for name, gradient in gradients.items():
                value, grads = gradient(weights, tokens)
                errors[name].append(relative_errors(flat((value, scale.unscale(grads))), exact))
        about = {"compute": compute, "params": params, "steps": steps}
        rows += [{"form": name} | about | summary(errors[name]) for name in errors]
    return rows


def summary(errors: list[tuple[float, float]]) -> Row:
    """Return the mean and the largest error over seeds."""
    loss, gradient = zip(*errors, strict=True)
    of_loss = {"loss mean": statistics.mean(loss), "loss max": max(loss)}
    return of_loss | {"gradient mean": statistics.mean(gradient), "gradient max": max(gradient)}


ERRORS = {what: f"{{{what}:.1e}}" for what in ("loss mean", "loss max", "gradient mean", "gradient max")}
COLUMNS = {"compute": "{compute}", "parameters": "{params}", "after steps": "{steps}", "form": "{form}"} | ERRORS
