"""Fit a function with Equinox and bfloat16 weights: plain bfloat16 stalls, Kahan
summation and split masters do not.

    python -m examples.equinox_regression

Adam's updates begin at about 0.0003 here and fall to zero. A bfloat16 weight of 0.25
has its neighbours 0.001 and 0.002 away, so such an update is lost in rounding. Only
weights are bfloat16: all recipes compute in float32. After 3,000 steps (10 seconds on
two cores of an AMD EPYC, jax 0.10.2) the test losses are 0.0021 for float32 weights,
0.0359 for plain bfloat16, 0.0021 for bfloat16 with split masters, and 0.0023 for
bfloat16 with Kahan summation, whose moments are bfloat16 too.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from rich.console import Console
from rich.table import Table

import mpx

STEPS = 3000
BATCH_SIZE = 128
WIDTH, DEPTH = 64, 3
LEARNING_RATE = 3e-4  # falls to zero along a cosine
REPORTS = 5  # how many times in a training the test loss is taken


def recipes(steps: int) -> dict[str, tuple[DTypeLike, optax.GradientTransformation]]:
    """Return the recipes: dtypes of the weights, and optimizers, whose rule is Adam in
    all of them.
    """
    adam = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    in_16_bits = mpx.low_precision_state(adam, {"mu|nu": "bf16"}, min_size=0)
    return {
        "f32": (jnp.float32, adam),
        "bf16-naive": (jnp.bfloat16, adam),
        "bf16-kahan": (jnp.bfloat16, optax.chain(in_16_bits, mpx.kahan_summation())),
        "bf16-split": (jnp.bfloat16, mpx.master_weights(adam, storage="split")),
    }


def sample(key: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Return points of a square (n, 2) and the function to learn (n,)."""
    x = jax.random.uniform(key, (n, 2), jnp.float32, -1.0, 1.0)
    return x, jnp.sin(3 * x[:, 0]) * jnp.cos(2 * x[:, 1])


def train(
    dtype: DTypeLike, tx: optax.GradientTransformation, steps: int
) -> list[float]:
    """Train one model, and return its test losses at even distances."""
    model = eqx.nn.MLP(
        2, "scalar", WIDTH, DEPTH, activation=jax.nn.tanh, key=jax.random.key(0)
    )
    # `mpx.cast` takes a whole module, since it casts arrays only; Optax takes a tree of
    # arrays.
    params, static = eqx.partition(mpx.cast(model, dtype), eqx.is_inexact_array)
    opt_state = tx.init(params)

    def loss_fn(params: eqx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
        model = eqx.combine(mpx.cast_to_full(params), static)
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def step(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, opt_state = carry
        # Gradients in the dtype of the weights, as those of `jax.grad`: plain Optax
        # gets what it would get without mpx.
        grads = mpx.grad(loss_fn, grad_dtype=None)(params, *sample(key, BATCH_SIZE))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    @jax.jit(donate_argnums=(0, 1))  # or old and new weights and state are held at once
    def run(
        params: eqx.Module, opt_state: Any, keys: jax.Array
    ) -> tuple[eqx.Module, Any, jax.Array]:
        (params, opt_state), _ = jax.lax.scan(step, (params, opt_state), keys)
        return params, opt_state, loss_fn(params, *sample(jax.random.key(2), 2000))

    losses = []
    for keys in jnp.split(jax.random.split(jax.random.key(1), steps), REPORTS):
        params, opt_state, loss = run(params, opt_state, keys)
        losses.append(float(loss))
    return losses


def main(steps: int = STEPS) -> dict[str, float]:
    """Train every recipe, print its test losses, and return the last ones."""
    after = [f"{steps * (i + 1) // REPORTS:,}" for i in range(REPORTS)]
    table = Table("weights", *after, title="test loss after so many steps")
    last = {}
    for name, (dtype, tx) in recipes(steps).items():
        losses = train(dtype, tx, steps)
        table.add_row(name, *(f"{loss:.4f}" for loss in losses))
        last[name] = losses[-1]
    Console().print(table)
    return last


if __name__ == "__main__":
    main()
