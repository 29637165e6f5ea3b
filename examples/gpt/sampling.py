"""Text from a trained model: a prompt, continued token by token.

The model is any function `logits_of(params, tokens)` from tokens of shape (1, context) to logits of shape
(1, context, vocabulary). It must be causal: what stands after a position must not change its logits. The window of
tokens has one fixed size, so one compiled program serves every prompt, every temperature and all parameters of a run.
There is no cache of keys and values: each new token costs one pass over the whole window.
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
    """Continues a prompt, and returns the new tokens without it.

    Each token is drawn from the softmax, in float32, of the logits at the last position. A token whose logit is -inf,
    as a model sets it for the padding of its vocabulary, is never drawn. Once the window is full, the oldest token
    leaves it for each new one.

    The n-th draw depends on `key` and n alone, so a longer continuation begins with the shorter one.

    Args:
        logits_of: takes `params` and int32 tokens (1, context), and returns logits (1, context, vocabulary) of any
            floating dtype. It is compiled once for each function object: pass the same one again, not a new lambda.
        params: what `logits_of` takes as its first argument; new values do not compile anew.
        prompt: one token or more, of shape (P,), of any integer dtype. Of more than `context` tokens the last count.
        count: how many tokens to add; another count compiles anew.
        context: tokens that the model sees.
        key: of `jax.random`; the same key gives the same tokens.
        temperature: the logits are divided by it. At 0 the most likely token is taken, of equal ones the lowest.
        top_k: draw from this many most likely tokens only, of equal ones from the lowest; another value compiles
            anew. None draws from all.

    Returns:
        int32 tokens of shape (count,).

    Raises:
        ValueError: if an argument is out of its range, the logits have another shape, or they are not numbers.
    """
    prompt = _checked_prompt(prompt)
    if count < 0:
        raise ValueError(f"`generate`: `count` must be 0 or more, but is {count}.")
    if context < 1:
        raise ValueError(f"`generate`: `context` must be 1 or more, but is {context}.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"`generate`: `top_k` must be 1 or more, but is {top_k}; None draws from all tokens.")
    divisor = _float32_temperature(temperature)
    if count == 0:
        return np.zeros(0, np.int32)

    seen = prompt[-context:]
    window = np.zeros(context, np.int32)  # what stands after the prompt is not looked at
    window[: len(seen)] = seen
    tokens, vocabulary, is_finite = _continue(
        logits_of, params, window, np.int32(len(seen)), key, divisor, count=count, top_k=top_k
    )
    if int(seen.max()) >= int(vocabulary):
        raise ValueError(
            f"`generate`: `prompt` has the token {seen.max()}, but the model has {vocabulary} tokens, from 0; was the "
            "prompt encoded with the tokenizer of this model?"
        )
    if not is_finite:
        raise ValueError(
            "`generate`: the largest of the logits is NaN or infinite, so there is nothing to draw from; has the "
            "training of these parameters diverged?"
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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """New tokens, the size of the vocabulary, and whether all logits had a finite maximum.

    The errors raised here are about shapes, which are known when the program is compiled.
    """
    context = len(window)
    shape = jax.eval_shape(logits_of, params, window[None]).shape
    if len(shape) != 3 or shape[:2] != (1, context):
        raise ValueError(
            f"`generate`: `logits_of` must return logits of shape (1, {context}, vocabulary) for tokens of shape "
            f"(1, {context}), but returned {shape}."
        )
    vocabulary = shape[2]
    if top_k is not None and top_k > vocabulary:
        raise ValueError(
            f"`generate`: `top_k` is {top_k}, but the model has only {vocabulary} tokens; None draws from all tokens."
        )

    def step(carry: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
        window, length = carry
        logits = logits_of(params, window[None])[0, length - 1].astype(jnp.float32)  # (vocabulary,)
        token = _draw(logits, jax.random.fold_in(key, index), temperature, top_k)
        # A full window makes room at its end; one that is not has room after its last token.
        window = jnp.where(length == context, jnp.roll(window, -1), window)
        window = window.at[jnp.minimum(length, context - 1)].set(token)
        return (window, jnp.minimum(length + 1, context)), (token, jnp.isfinite(logits.max()))

    steps = jnp.arange(count, dtype=jnp.int32)
    _, (tokens, is_finite) = jax.lax.scan(step, (window, length), steps)
    return tokens, jnp.int32(vocabulary), is_finite.all()


def _draw(logits: jax.Array, key: jax.Array, temperature: jax.Array, top_k: int | None) -> jax.Array:
    """One token; the two ways to find it cost little next to the model, so the temperature need not be static."""
    most_likely = jnp.argmax(logits).astype(jnp.int32)
    if top_k is None:
        kept, tokens = logits, jnp.arange(len(logits), dtype=jnp.int32)
    else:
        kept, tokens = jax.lax.top_k(logits, top_k)  # of equal logits it takes the lowest tokens
    # With the maximum taken off first, no temperature is so small that the likely tokens overflow.
    scaled = (kept - logits.max()) / jnp.where(temperature > 0, temperature, 1.0)
    # The compiler may multiply by the inverse of a temperature instead; that of a huge one is 0, and 0 times -inf NaN.
    scaled = jnp.where(kept == -jnp.inf, kept, scaled)
    drawn = tokens[jax.random.categorical(key, scaled)]
    return jnp.where(temperature > 0, drawn, most_likely)


def _checked_prompt(prompt: np.ndarray) -> np.ndarray:
    prompt = np.asarray(prompt)
    if prompt.ndim != 1:
        raise ValueError(f"`generate`: `prompt` must have one dimension, but has the shape {prompt.shape}.")
    if prompt.size == 0:
        raise ValueError("`generate`: `prompt` is empty; the model needs at least one token to continue.")
    if not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(f"`generate`: `prompt` must hold integers, but is {prompt.dtype}.")
    if prompt.min() < 0:
        raise ValueError(f"`generate`: tokens count from 0, but `prompt` has the token {prompt.min()}.")
    return prompt


def _float32_temperature(temperature: float) -> np.float32:
    """Rounded to what the device can divide by: it takes subnormal numbers for 0, and there is nothing beyond max."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"`generate`: `temperature` must be finite and 0 or more, but is {temperature}.")
    smallest, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    return np.float32(min(temperature, largest) if temperature >= smallest else 0.0)
