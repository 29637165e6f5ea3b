"""Adapters and shared weights: low ranks, tied weights, prompts, pieces of one weight,
frozen parts.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import complexes, program, rows

D = 16
XY = {"x": rows(D), "y": rows(D)}
LOW_RANK = {"frozen": (D, D), "a": (D, 4), "b": (4, D)}


@program({"one": LOW_RANK, "bias": (D,), "two": LOW_RANK}, **XY)
def low_rank_beside_frozen_weights(p, x, y):
    dense = lambda p, x: (
        x @ lax.stop_gradient(p["frozen"]) + 0.5 * (x @ p["a"]) @ p["b"]
    )
    return jnp.square(
        dense(p["two"], jax.nn.gelu(dense(p["one"], x) + p["bias"])) - y
    ).mean()


@program({**LOW_RANK, "size": (D,), "out": (D, D)}, **XY)
def low_rank_merged_into_a_direction(p, x, y):
    w = p["frozen"] + p["a"] @ p["b"]
    w = (1 + p["size"]) * w / jnp.linalg.norm(w, axis=0, keepdims=True)
    return jnp.square(jnp.tanh(x @ w) @ p["out"] - y).mean()


@program({"w": (D, D), "b": (D,), "c": (D,)}, x=rows(D))
def autoencoder_of_one_weight(p, x):
    return jnp.square(
        jax.nn.sigmoid(x @ p["w"] + p["b"]) @ p["w"].T + p["c"] - x
    ).mean()


@program({"all": (D, 3 * D), "b": (3 * D,)}, **XY)
def pieces_of_one_weight(p, x, y):
    (a, b, c), (d, e, f) = jnp.split(p["all"], 3, axis=1), jnp.split(p["b"], 3)
    return jnp.square(jnp.tanh(jnp.tanh(x @ a + d) @ b + e) @ c + f - y).mean()


@program({"w": (D, D), "b": (D,), "down": (3, D, 4), "up": (3, 4, D)}, **XY)
def one_layer_three_times_with_adapters(p, x, y):
    def layer(x, adapter):
        x = jnp.tanh(x @ p["w"] + p["b"])
        return x + jax.nn.relu(x @ adapter["down"]) @ adapter["up"], None

    return jnp.square(
        lax.scan(layer, x, {"down": p["down"], "up": p["up"]})[0] - y
    ).mean()


@program({"w": (2, 4, 4), "b": (D,), "out": (D, D)}, **XY)
def kronecker_product_as_a_weight(p, x, y):
    return jnp.square(
        jnp.tanh(x @ jnp.kron(p["w"][0], p["w"][1]) + p["b"]) @ p["out"] - y
    ).mean()


@program({"flat": (D * D + D,), "spectrum": complexes(D // 2 + 1)}, **XY)
def weights_from_one_vector(p, x, y):
    w, b = lax.split(3 * p["flat"], (D * D, D))
    h = jnp.fft.irfft(jnp.fft.rfft(jnp.tanh(x @ w.reshape(D, D) + b)) * p["spectrum"])
    return jnp.square(h - y).mean()


@program({"stages": [{"w": (D, D), "b": (D,)} for _ in range(3)], "scale": ()}, **XY)
def list_of_layers_reduced(p, x, y):
    layer = jax.checkpoint(lambda x, p: x + jax.nn.mish(x @ p["w"] + p["b"]))
    return jnp.square(
        functools.reduce(layer, p["stages"], x) * (1 + p["scale"]) - y
    ).mean()
