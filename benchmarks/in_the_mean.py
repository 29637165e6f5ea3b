"""Whether moments in few bits follow float32 in the mean, where rounding to nearest
stands still.

    PYTHONPATH=. python -m benchmarks.in_the_mean

Weights whose gradients stop, and rows that are seen rarely, beside others in the same
blocks. Adam and SGD run on random gradients; there is no model. On a CPU in a minute.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
from benchmarks.report import Row, table

RATE = 1e-3
ROWS, COLUMNS = 16, 64  # four rows in a block of 256
EVERY = 250  # steps between two gradients of a rare row
SETTLES = 300  # steps after which nothing of a gradient is left in a float32 moment


# Formats of first and second moments, and how they are rounded.
WAYS: Mapping[str, tuple[Any, Any, Any]] = {
    "float32": ("f32", "f32", None),
    "8 bits": (mpx.Blockwise8bit(), mpx.Blockwise8bit(), None),
    "8 bits, nearest": (mpx.Blockwise8bit(), mpx.Blockwise8bit(), "nearest"),
    "4 and 8 bits": (mpx.Blockwise4bit(), mpx.Blockwise8bit(), None),
    "bfloat16, at random": ("bf16", "bf16", "stochastic"),
    "bfloat16, nearest": ("bf16", "bf16", None),
}


def kept(way: str, rule: Any) -> Any:
    """Return a rule with its moments kept in a way."""
    first, second, rounding = WAYS[way]
    formats = {"first moment": first, "second moment": second}
    return mpx.low_precision_state(rule, formats, rounding=rounding, min_size=0)


class Run(NamedTuple):
    """What a run leaves behind."""

    weights: np.ndarray  # after `SETTLES` steps without gradients, and at the end
    state: Any


def run(
    tx: Any, gradient: Callable[[jax.Array, jax.Array], jax.Array], steps: int
) -> Run:
    """Apply updates to weights of 0.125 for some steps; `gradient` takes the number of
    the step, and normal numbers.
    """
    params = {"w": jnp.full((ROWS, COLUMNS), 0.125, jnp.float32)}

    @jax.jit
    def step(carry, number):
        params, state, settled = carry
        noise = jax.random.normal(
            jax.random.fold_in(jax.random.key(1), number), (ROWS, COLUMNS), jnp.float32
        )
        updates, state = tx.update({"w": gradient(number, noise)}, state, params)
        params = optax.apply_updates(params, updates)
        settled = jnp.where(number < 2 * SETTLES, params["w"], settled)
        return (params, state, settled), None

    carry = params, tx.init(params), params["w"]
    (params, state, settled), _ = jax.lax.scan(step, carry, jnp.arange(steps))
    return Run(np.stack([settled, params["w"]]), state)


def gradients_stop(number: jax.Array, noise: jax.Array) -> jax.Array:
    """Every second column has no gradient from step `SETTLES` on."""
    is_dead = (jnp.arange(COLUMNS) % 2 == 0) & (number >= SETTLES)
    return jnp.where(is_dead, 0.0, noise)


def gradients_are_rare(number: jax.Array, noise: jax.Array) -> jax.Array:
    """Every fourth row has a gradient near 1 in one of 250 steps.

    Not the same in all columns: equal numbers are rounded alike.
    """
    is_rare = jnp.arange(ROWS)[:, None] % 4 == 0
    return jnp.where(is_rare, jnp.where(number % EVERY == 0, 1 + noise / 8, 0.0), noise)


def drift(tx: Any, steps: int = 1000) -> np.ndarray:
    """Return how far each weight goes in some steps, long after its gradients have
    stopped.
    """
    found = run(tx, gradients_stop, 2 * SETTLES + steps)
    return np.abs(found.weights[1] - found.weights[0])[:, ::2]


def rare_rows(tx: Any, steps: int = 4000) -> tuple[float, float]:
    """Return how far the weights of rare rows go, and their second moment."""
    found = run(tx, gradients_are_rare, steps)
    second = optax.tree.get(found.state, "nu")["w"]
    second = getattr(second, "decode", lambda: second)()
    way = found.weights[1] - 0.125
    return float(way[::4].mean()), float(second[::4].astype(jnp.float32).mean())


def measured(way: str) -> Row:
    """Return a row of the table."""
    way_of_rare, second = rare_rows(kept(way, optax.adam(RATE)))
    drifts = {
        "usual": drift(kept(way, optax.adam(RATE, 0.9, 0.95))),
        "slow": drift(kept(way, optax.adam(RATE, 0.95, 0.95))),
        "sgd": drift(kept(way, optax.sgd(RATE, 0.98)), 2000),
    }
    figures = {name: f"{x.mean():.1e}, {x.max():.1e}" for name, x in drifts.items()}
    return {"way": way, "rare": way_of_rare, "second": second} | figures


COLUMNS_OF_TABLE = {
    "moments": "{way}",
    "Adam (0.9, 0.95): mean and largest way": "{usual}",
    "Adam (0.95, 0.95)": "{slow}",
    "SGD, momentum 0.98": "{sgd}",
    "way of a rare row": "{rare:.3f}",
    "its second moment": "{second:.4f}",
}


if __name__ == "__main__":
    print(table([measured(way) for way in WAYS], COLUMNS_OF_TABLE))
