"""Quantization-aware training and other derivatives of the author's own."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import program, rows

D = 16
XY = {"x": rows(D), "y": rows(D)}
NET = {"a": (D, D), "b": (D,), "c": (D, D)}


def straight(x, rounded):
    return x + lax.stop_gradient(rounded - x)


@program(NET, **XY)
def weights_rounded_straight_through(p, x, y):
    def fake(w):
        scale = lax.stop_gradient(jnp.abs(w).max(0, keepdims=True)) / 7
        return straight(w, jnp.round(w / scale) * scale)

    return jnp.square(jax.nn.relu(x @ fake(p["a"]) + p["b"]) @ fake(p["c"]) - y).mean()


@jax.custom_jvp
def sign(x):
    return jnp.where(x >= 0, 1.0, -1.0)


sign.defjvp(
    lambda primals, tangents: (sign(*primals), tangents[0] * (jnp.abs(primals[0]) < 1))
)


@program(NET, **XY)
def binary_network(p, x, y):
    h = sign(x @ sign(p["a"]) / 4 + p["b"])
    return jnp.square(h @ sign(p["c"]) / 4 - y).mean()


@jax.custom_vjp
def learned_step(x, step):
    return jnp.round(jnp.clip(x / step, -8, 7)) * step


def learned_step_backward(residuals, g):
    x, step = residuals
    inside = (x / step >= -8) & (x / step <= 7)
    of_step = jnp.where(
        inside, jnp.round(x / step) - x / step, jnp.clip(x / step, -8, 7)
    )
    return g * inside, jnp.sum(g * of_step).reshape(step.shape) / D


learned_step.defvjp(
    lambda x, step: (learned_step(x, step), (x, step)), learned_step_backward
)


@program({**NET, "steps": (3,)}, **XY)
def learned_step_sizes(p, x, y):
    steps = 0.2 * jnp.exp(p["steps"])
    h = jax.nn.relu(learned_step(x, steps[0]) @ learned_step(p["a"], steps[1]) + p["b"])
    return jnp.square(h @ learned_step(p["c"], steps[2]) - y).mean()


@jax.custom_vjp
def clipped_and_reversed(x, strength):
    return x, strength * 0


def reversed_backward(strength, cotangents):
    return -strength * jnp.clip(cotangents[0], -0.01, 0.01), None


clipped_and_reversed.defvjp(
    lambda x, strength: (clipped_and_reversed(x, strength), strength), reversed_backward
)


@program({**NET, "domain": (D, 1)}, **XY)
def domain_by_a_reversed_gradient(p, x, y):
    h = jnp.tanh(x @ p["a"] + p["b"])
    back, _ = clipped_and_reversed(h, 0.5)
    return (
        jnp.square(h @ p["c"] - y).mean() + jax.nn.softplus(back @ p["domain"]).mean()
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def safe_norm(x, axis):
    return jnp.sqrt(jnp.sum(x**2, axis, keepdims=True))


@safe_norm.defjvp
def safe_norm_jvp(axis, primals, tangents):
    norm = safe_norm(primals[0], axis)
    return norm, jnp.sum(primals[0] * tangents[0], axis, keepdims=True) / jnp.maximum(
        norm, 1e-6
    )


@program(NET, **XY)
def norm_with_a_derivative_at_zero(p, x, y):
    h = jax.nn.relu(x @ p["a"] + p["b"])
    return jnp.square(h / (1e-3 + safe_norm(h, -1)) @ p["c"] - y).mean()


@jax.custom_vjp
def fused_attention(q, k, v):
    return jax.nn.softmax(q @ k.swapaxes(1, 2) / 4) @ v


def fused_attention_backward(residuals, g):
    q, k, v = residuals
    weights = jax.nn.softmax(q @ k.swapaxes(1, 2) / 4)
    of_weights = g @ v.swapaxes(1, 2)
    of_logits = (
        weights * (of_weights - (of_weights * weights).sum(-1, keepdims=True)) / 4
    )
    return of_logits @ k, of_logits.swapaxes(1, 2) @ q, weights.swapaxes(1, 2) @ g


fused_attention.defvjp(
    lambda q, k, v: (fused_attention(q, k, v), (q, k, v)), fused_attention_backward
)


@program({"qkv": (D, 3 * D), "b": (3 * D,), "out": (D, D)}, x=rows(8, D))
def attention_with_its_own_backward_pass(p, x):
    return jnp.square(
        fused_attention(*jnp.split(x @ p["qkv"] + p["b"], 3, -1)) @ p["out"] - x
    ).mean()


@program(NET, **XY)
def eight_bit_products_by_hand(p, x, y):
    def dot(x, w):
        sx, sw = jnp.abs(x).max() / 127, jnp.abs(w).max() / 127
        codes = [jnp.round(a / s).astype(jnp.int8) for a, s in ((x, sx), (w, sw))]
        product = lax.dot(*codes, preferred_element_type=jnp.int32).astype(
            jnp.float32
        ) * (sx * sw)
        return straight(x @ w, product)

    return jnp.square(dot(jnp.tanh(dot(x, p["a"]) + p["b"]), p["c"]) - y).mean()


@program({"in": (D, 4), "b": (4,), "codes": (1000, D), "c": (D, D)}, **XY)
def finite_scalar_quantization(p, x, y):
    """The index of a code is a product of its digits with the sizes of the digits
    before.
    """
    levels = jnp.array([8, 5, 5, 5])
    half = (levels - 1) / 2
    digits = straight(h := (jnp.tanh(x @ p["in"] + p["b"]) + 1) * half, jnp.round(h))
    index = digits @ jnp.array([1.0, 8.0, 40.0, 200.0])
    code = (
        p["codes"][lax.stop_gradient(index).astype(jnp.int32)] + index[:, None] / 1000
    )
    return jnp.square(code @ p["c"] - y).mean()
