"""Reinforcement learning in few bits: one autocast for the sampler and for the trainer
(GRPO).

    python -m examples.grpo    # float32 beside two recipes: prints rewards and ratios,
    and plots them

A small transformer learns to repeat digits, from rewards that a program computes. The
sampler computes one token at a time with a cache in 16 bits, the trainer whole
sequences. In the first step on new samples the parameters are the sampler's, so each
ratio of probabilities should be 1: how far it is from that is what sampler and trainer
disagree.
"""

import functools
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from jax import lax

import mpx

WIDTH, HEADS, LAYERS, DIGITS = 64, 4, 2, 10
# Digits of a prompt; answers to each of the prompts; steps on them.
ASKED, GROUP, PROMPTS, INNER_STEPS = (
    8,
    16,
    16,
    2,
)
START = DIGITS  # the token behind a prompt
LENGTH = 2 * ASKED + 1


# --- The model: the same function for sampling and for training. ---
def init_params(key: jax.Array) -> Any:
    """Return float32 parameters."""
    keys = iter(jax.random.split(key, 6 * LAYERS + 3))

    def matrix(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    def layer():
        return {
            **{name: matrix(WIDTH, WIDTH) for name in ("query", "key", "value", "out")},
            **{"up": matrix(WIDTH, 4 * WIDTH), "down": matrix(4 * WIDTH, WIDTH)},
        }

    tables = {"tokens": matrix(DIGITS + 1, WIDTH), "places": matrix(LENGTH, WIDTH)}
    return {
        **tables,
        "layers": [layer() for _ in range(LAYERS)],
        "head": matrix(WIDTH, DIGITS),
    }


def empty_cache(rows: int, dtype: Any) -> Any:
    """Return the keys and values of no token."""
    return [
        (jnp.zeros((rows, LENGTH, HEADS, WIDTH // HEADS), dtype),) * 2
        for _ in range(LAYERS)
    ]


def norm(x: jax.Array) -> jax.Array:
    """Return rows with a root mean square of one."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def logits_and_cache(
    params: Any, tokens: jax.Array, cache: Any, at: Any
) -> tuple[jax.Array, Any]:
    """Return the logits behind tokens (B, T) that start at a place, and the cache with
    their keys and values.
    """
    places = at + jnp.arange(tokens.shape[1])
    x, new_cache = params["tokens"][tokens] + params["places"][places][None], []
    is_seen = (jnp.arange(LENGTH)[None] <= places[:, None])[None, None]
    for w, kept in zip(params["layers"], cache, strict=True):

        def heads(name, w=w, x=x):
            return (norm(x) @ w[name]).reshape(*x.shape[:2], HEADS, -1)

        def write(old, new):
            return lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, 1)

        keys, values = write(kept[0], heads("key")), write(kept[1], heads("value"))
        new_cache.append((keys, values))
        scores = (
            jnp.einsum("bqhd,bkhd->bhqk", heads("query"), keys.astype(x.dtype))
            / (WIDTH / HEADS) ** 0.5
        )
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, values.astype(x.dtype)).reshape(
            x.shape
        )
        x = x + mixed @ w["out"]
        x = x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]
    # A rounding shows most in logits.
    head = mpx.full_precision(lambda x, head: x @ head)
    return head(norm(x), params["head"]), new_cache


def log_probabilities(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return those of tokens (B, T), of logits (B, T, DIGITS)."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[
        ..., 0
    ]


# --- The sampler and the trainer. ---
def sample(
    model: Any, params: Any, prompts: jax.Array, key: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Return answers (B, ASKED) and their log probabilities."""
    logits, cache = model(params, prompts, empty_cache(len(prompts), dtype), 0)

    def step(carry, inputs):
        logits, cache = carry
        key, at = inputs
        token = jax.random.categorical(key, logits)
        after, cache = model(params, token[:, None], cache, at)
        return (after[:, 0], cache), (token, log_probabilities(logits, token))

    inputs = jax.random.split(key, ASKED), ASKED + 1 + jnp.arange(ASKED)
    _, (tokens, log_p) = lax.scan(step, (logits[:, -1], cache), inputs)
    return tokens.T, log_p.T


def loss_fn(
    model: Any, params: Any, batch: Any, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the loss of GRPO, and the mean distance of a ratio from 1."""
    prompts, answers, old, advantages = batch
    tokens = jnp.concatenate([prompts, answers[:, :-1]], axis=1)
    logits, _ = model(params, tokens, empty_cache(len(tokens), dtype), 0)
    ratio = jnp.exp(log_probabilities(logits[:, ASKED:], answers) - old)
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    return -gain.mean(), jnp.abs(ratio - 1).mean()


def make_step(recipe: str, learning_rate: float = 2e-3) -> tuple[Any, Any]:
    """Return the functions that start, and that sample and train once."""
    tx = mpx.mixed_precision(optax.adam(learning_rate), recipe)
    policy = mpx.get_policy(recipe)
    model = mpx.autocast(logits_and_cache, recipe, as_they_are=2)
    loss = functools.partial(loss_fn, model, dtype=policy.compute_dtype)

    def start(key):
        params = policy.cast_to_param(init_params(key))
        return params, tx.init(params)

    @jax.jit(donate_argnums=(0, 1))
    def step(params, opt_state, key):
        for_prompts, for_answers = jax.random.split(key)
        asked = jnp.repeat(
            jax.random.randint(for_prompts, (PROMPTS, ASKED), 0, DIGITS), GROUP, axis=0
        )
        prompts = jnp.concatenate([asked, jnp.full((len(asked), 1), START)], axis=1)
        answers, log_p = sample(
            model, params, prompts, for_answers, policy.compute_dtype
        )
        rewards = jnp.mean(answers == asked, axis=1).reshape(PROMPTS, GROUP)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (
            rewards.std(1, keepdims=True) + 1e-4
        )
        batch = prompts, answers, log_p, advantages.reshape(-1, 1)
        train_step = mpx.train_step(loss, tx, has_aux=True)
        distances = []
        for _ in range(INNER_STEPS):
            params, opt_state, _, distance = train_step(params, opt_state, batch)
            distances.append(distance)
        return params, opt_state, rewards.mean(), distances[0]

    return start, step


def train(recipe: str, steps: int) -> tuple[list[float], list[float]]:
    """Return the mean reward of each step, and how far ratios were from 1 before its
    first update.
    """
    start, step = make_step(recipe)
    params, opt_state = start(jax.random.key(0))
    rewards, distances = [], []
    for number, key in enumerate(jax.random.split(jax.random.key(2), steps)):
        params, opt_state, reward, distance = step(params, opt_state, key)
        rewards.append(float(reward))
        distances.append(float(distance))
        if number % 50 == 49 or number == steps - 1:
            typer.echo(
                f"{recipe}, step {number + 1}: reward {reward:.3f}, ratio off by"
                f" {distance:.1e}"
            )
    return rewards, distances


def main(
    steps: Annotated[int, typer.Option(min=1)] = 150,
    plot: Annotated[Path, typer.Option(help="The file of the plot.")] = Path(
        "grpo.png"
    ),
) -> None:
    """Train by each recipe, and plot rewards and ratios."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (of_rewards, of_ratios) = plt.subplots(
        1, 2, figsize=(10, 4), layout="constrained"
    )
    for recipe in ("f32", "bf16-split", "f16-scaled"):
        rewards, distances = train(recipe, steps)
        of_rewards.plot(rewards, label=recipe)
        of_ratios.semilogy(distances, label=recipe)
    of_rewards.set(xlabel="step", ylabel="reward")
    of_ratios.set(xlabel="step", ylabel="mean |ratio - 1| at the first inner step")
    of_ratios.legend()
    figure.savefig(plot)
    typer.echo(f"The plot is in {plot}.")


if __name__ == "__main__":
    typer.run(main)
