"""Normalizations, and the random numbers of dropout and its kind."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import booleans, key, program, rows

D = 16
X, XY = {"x": rows(8, D)}, {"x": rows(D), "y": rows(D)}
NET = {"a": (D, D), "b": (D,), "c": (D, D)}


@program({**NET, "scale": (D,), "mean": (D,)}, **XY)
def batch_norm_with_running_statistics(p, x, y):
    def layer(x, running):
        mean, var = x.mean(0), jnp.mean(x**2, 0) - jnp.square(x.mean(0))
        running = 0.9 * running + 0.1 * lax.stop_gradient(mean)
        return (x - mean) / jnp.sqrt(var + 1e-3) * (1 + p["scale"]), running

    h, running = layer(jax.nn.relu(x @ p["a"] + p["b"]), lax.stop_gradient(p["mean"]))
    return jnp.square(h @ p["c"] - y).mean() + jnp.square(running).mean()


@program({"v": (D, D), "g": (D,), "b": (D,), "u": (D, D), "start": (D,)}, **XY)
def weight_and_spectral_norm(p, x, y):
    w = p["v"] * (1 + p["g"]) / jnp.linalg.norm(p["v"], axis=0)
    u = lax.stop_gradient(p["start"])
    for _ in range(2):
        v = p["u"] @ u
        u = p["u"].T @ (v := v / jnp.linalg.norm(v))
        u = u / jnp.linalg.norm(u)
    spectral = p["u"] / (lax.stop_gradient(v) @ p["u"] @ lax.stop_gradient(u))
    return jnp.square(jax.nn.leaky_relu(x @ w + p["b"]) @ spectral - y).mean()


@program(
    {**NET, "alpha": (1,), "scale": (D,), "qk": (D, 2 * D), "temperature": ()}, **X
)
def norms_of_queries_and_keys(p, x):
    h = jnp.tanh((1 + p["alpha"]) * x) * (1 + p["scale"])
    q, k = (
        h / jnp.sqrt(jnp.sum(h**2, -1, keepdims=True) + 1e-4)
        for h in jnp.split(h @ p["qk"], 2, -1)
    )
    weights = jax.nn.softmax(jnp.exp(1 + p["temperature"]) * q @ k.swapaxes(1, 2))
    return jnp.square(
        weights @ jax.nn.softplus(h @ p["a"] + p["b"]) @ p["c"] - x
    ).mean()


@program({**NET, "condition": (D, 4 * D), "cb": (4 * D,)}, **XY, pad=booleans())
def adaptive_layer_norm_of_masked_rows(p, x, y, pad):
    mean = jnp.mean(x, -1, keepdims=True, where=~pad[:, None])
    h = jnp.where(pad[:, None], 0.0, x - mean) * lax.rsqrt(
        jnp.where(pad[:, None], 1.0, x.var(-1, keepdims=True))
    )
    scale, shift, gate, last = jnp.split(
        jax.nn.silu(y) @ p["condition"] + p["cb"], 4, axis=-1
    )
    return jnp.square(
        x
        + gate * (jax.nn.gelu((h * (1 + scale) + shift) @ p["a"] + p["b"]) @ p["c"])
        + last
    ).mean()


@program({**NET, "d": (D, D)}, **XY, key=key)
def dropout_between_layers(p, x, y, key):
    def dropout(key, x, rate=0.25):
        return jnp.where(
            jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0
        )

    first, second = jax.random.split(key)
    h = dropout(first, jax.nn.gelu(x @ p["a"] + p["b"]))
    return jnp.square(dropout(second, jnp.tanh(h @ p["c"])) @ p["d"] - y).mean()


@program({"a": (3, D, D), "b": (3, D), "c": (3, D, D)}, **XY, key=key)
def layers_dropped_in_a_scan(p, x, y, key):
    def layer(carry, p):
        x, key = carry
        key, now = jax.random.split(key)
        keep = jax.random.bernoulli(jax.random.fold_in(now, 1), 0.7, (x.shape[0], 1))
        branch = lambda x: jnp.tanh(x @ p["a"] + p["b"]) @ p["c"]
        return (
            x
            + lax.cond(jax.random.uniform(now) < 0.8, branch, jnp.zeros_like, x)
            * keep
            / 0.7,
            key,
        ), None

    return jnp.square(lax.scan(layer, (x, key), p)[0][0] - y).mean()


@program({**NET, "codes": (8, D)}, **XY, key=key)
def gumbel_softmax_and_permutations(p, x, y, key):
    typed = jax.random.wrap_key_data(key)
    logits = jnp.tanh(x @ p["a"] + p["b"]) @ p["c"][:, :8]
    soft = jax.nn.softmax((logits + jax.random.gumbel(typed, logits.shape)) / 0.5)
    hard = jax.nn.one_hot(jnp.argmax(soft, -1), 8)
    code = (soft + lax.stop_gradient(hard - soft)) @ p["codes"]
    return jnp.square(
        code - jax.random.permutation(jax.random.fold_in(typed, 3), y, axis=1)
    ).mean()


@program({"mean": NET, "spread": NET}, **XY, key=key)
def weights_sampled_from_a_posterior(p, x, y, key):
    keys = jax.random.split(key, 3)
    sample = lambda m, s, k: (
        m + 0.1 * jax.nn.softplus(s) * jax.random.normal(k, m.shape)
    )
    w = {
        n: sample(p["mean"][n], p["spread"][n], k)
        for n, k in zip("abc", keys, strict=True)
    }
    loss = jnp.square(jnp.tanh(x @ w["a"] + w["b"]) @ w["c"] - y).mean()
    return loss + 1e-3 * sum(jnp.sum(m**2) for m in p["mean"].values())


@program({**NET, "scale": (D,)}, **XY)
def root_mean_squares_by_products(p, x, y):
    def norm(x):
        return (
            x
            / jnp.sqrt(jnp.einsum("td,td->t", x, x) / D + 1e-3)[:, None]
            * (1 + p["scale"])
        )

    return jnp.square(
        norm(jax.nn.relu(norm(12 * x) @ p["a"] + p["b"]) @ p["c"]) - y
    ).mean()
