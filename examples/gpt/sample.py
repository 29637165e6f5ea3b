"""Sample text from a trained model: continue a prompt token by token.

The model must be causal: what stands after a position must not change its logits. The
window of tokens has one fixed size. There is no cache of keys and values: each new
token costs one pass over the whole window.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Logits = Callable[[Any, jax.Array], jax.Array]


def generate(
    logits_of: Logits,
    params: Any,
    prompt: np.ndarray,
    *,
    count: int,
    context: int,
    key: jax.Array,
    temperature: float = 1.0,
) -> np.ndarray:
    """Continue a prompt of integer tokens (P,), and return `count` new tokens, int32,
    without it.

    `logits_of` goes from `params` and int32 tokens (1, context) to logits (1, context,
    vocabulary) of any dtype, and is compiled once for each function object. Each token
    is drawn from the float32 softmax of the last position's logits divided by
    `temperature`; at temperature 0 it is the most likely one, of equal ones the lowest.
    A logit of -inf is never drawn. A full window loses its oldest token.
    """
    seen = prompt[-context:]
    window = np.zeros(context, np.int32)  # what stands after the prompt is not read
    window[: len(seen)] = seen
    temperature = np.float32(temperature)
    return np.asarray(
        _continue(
            logits_of,
            params,
            window,
            np.int32(len(seen)),
            key,
            temperature,
            count=count,
        )
    )


@functools.partial(jax.jit, static_argnames=("logits_of", "count"))
def _continue(
    logits_of: Logits,
    params: Any,
    window: jax.Array,  # (context,)
    length: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    count: int,
) -> jax.Array:
    """Return new tokens (count,)."""

    def step(
        carry: tuple[jax.Array, jax.Array], key: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        window, length = carry
        logits = logits_of(params, window[None])[0, length - 1].astype(
            jnp.float32
        )  # (vocabulary,)
        # The maximum is subtracted first, so that likely tokens cannot overflow at a
        # small temperature.
        scaled = (logits - logits.max()) / jnp.where(temperature > 0, temperature, 1.0)
        drawn = jax.random.categorical(key, scaled)
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits)).astype(jnp.int32)
        # A full window makes room at its end; otherwise there is room after the last
        # token.
        window = jnp.where(length == len(window), jnp.roll(window, -1), window)
        window = window.at[jnp.minimum(length, len(window) - 1)].set(token)
        return (window, jnp.minimum(length + 1, len(window))), token

    _, tokens = jax.lax.scan(step, (window, length), jax.random.split(key, count))
    return tokens
