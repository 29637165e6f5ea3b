"""Sample text from a trained model: continue a prompt token by token.

The model must be causal: what stands after a position must not change its logits. The window of tokens has one fixed
size, so one compiled program serves every prompt, every temperature and all parameters of a run. There is no cache of
keys and values: each new token costs one pass over the whole window.
"""

import functools
import math
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
    top_k: int | None = None,
) -> np.ndarray:
    """Continue a prompt of integer tokens (P,), and return `count` new tokens, int32, without it.

    `logits_of` goes from `params` and int32 tokens (1, context) to logits (1, context, vocabulary) of any dtype, and is
    compiled once for each function object. Each token is drawn from the float32 softmax of the last position's logits
    divided by `temperature`: from all tokens, or from the `top_k` most likely ones. At temperature 0 it is the most
    likely one, of equal ones the lowest. A logit of -inf is never drawn. A full window loses its oldest token. Draw n
    depends on `key` and n alone.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"`temperature` must be finite and 0 or more, but is {temperature}.")
    if count == 0:
        return np.zeros(0, np.int32)
    # A device takes subnormal numbers for 0, and there is no float32 beyond the largest.
    smallest, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    divisor = np.float32(min(temperature, largest) if temperature >= smallest else 0.0)
    seen = prompt[-context:]
    window = np.zeros(context, np.int32)  # what stands after the prompt is not read
    window[: len(seen)] = seen
    tokens, is_finite = _continue(
        logits_of, params, window, np.int32(len(seen)), key, divisor, count=count, top_k=top_k
    )
    if not is_finite:
        raise ValueError(
            "the largest of the logits is NaN or infinite, so there is nothing to draw from; did the training run "
            "diverge?"
        )
    return np.asarray(tokens)


@functools.partial(jax.jit, static_argnames=("logits_of", "count", "top_k"))
def _continue(
    logits_of: Logits,
    params: Any,
    window: jax.Array,  # (context,)
    length: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    count: int,
    top_k: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Return new tokens, and whether all logits had a finite maximum."""

    def step(carry: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
        window, length = carry
        logits = logits_of(params, window[None])[0, length - 1].astype(jnp.float32)  # (vocabulary,)
        token = _draw(logits, jax.random.fold_in(key, index), temperature, top_k)
        # A full window makes room at its end; otherwise there is room after the last token.
        window = jnp.where(length == len(window), jnp.roll(window, -1), window)
        window = window.at[jnp.minimum(length, len(window) - 1)].set(token)
        return (window, jnp.minimum(length + 1, len(window))), (token, jnp.isfinite(logits.max()))

    steps = jnp.arange(count, dtype=jnp.int32)
    _, (tokens, is_finite) = jax.lax.scan(step, (window, length), steps)
    return tokens, is_finite.all()


def _draw(logits: jax.Array, key: jax.Array, temperature: jax.Array, top_k: int | None) -> jax.Array:
    """Draw one token, or take the most likely one if the temperature is 0."""
    kept, tokens = logits, jnp.arange(len(logits), dtype=jnp.int32)
    if top_k is not None:
        if not 1 <= top_k <= len(logits):
            raise ValueError(f"`top_k` must be from 1 to {len(logits)}, the tokens of the model, but is {top_k}.")
        kept, tokens = jax.lax.top_k(logits, top_k)  # of equal logits it takes the lowest tokens
    # The maximum is subtracted first, so that likely tokens cannot overflow at a small temperature.
    scaled = (kept - logits.max()) / jnp.where(temperature > 0, temperature, 1.0)
    # The compiler may multiply by the inverse of a huge temperature instead, which is 0, and 0 times -inf is NaN.
    scaled = jnp.where(kept == -jnp.inf, kept, scaled)
    drawn = tokens[jax.random.categorical(key, scaled)]
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits).astype(jnp.int32))
