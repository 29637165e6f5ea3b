"""Sequence models: recurrent cells, scans, associative scans, state spaces, filters,
alignments.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.programs import booleans, complexes, integers, program, rows

T, D = 8, 16
X = {"x": rows(T, D)}


@program({"x": (D, 4 * D), "h": (D, 4 * D), "b": (4 * D,), "out": (D, D)}, **X)
def lstm(p, x):
    def cell(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, axis=-1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((x.shape[0], D))
    (_, ys) = lax.scan(cell, (start, start), x.swapaxes(0, 1))
    return jnp.square(ys @ p["out"]).mean()


@program(
    {"x": (D, 3 * D), "h": (D, 2 * D), "n": (D, D), "b": (3 * D,)},
    **X,
    mask=booleans(T),
)
def gru_with_a_mask(p, x, mask):
    def cell(h, inputs):
        x, skip = inputs
        zr, n = jnp.split(x @ p["x"] + p["b"], [2 * D], axis=-1)
        z, r = jnp.split(jax.nn.sigmoid(zr + h @ p["h"]), 2, axis=-1)
        new = (1 - z) * jnp.tanh(n + r * (h @ p["n"])) + z * h
        return jnp.where(skip[:, None], h, new), None

    return jnp.square(
        lax.scan(cell, jnp.zeros((x.shape[0], D)), (x.swapaxes(0, 1), mask.T))[0]
    ).mean()


@program(
    {"log": (D,), "angle": (D,), "b": complexes(D, D), "c": complexes(D, D), "d": (D,)},
    **X,
)
def linear_recurrent_unit(p, x):
    decay = jnp.exp(-jnp.exp(p["log"]) + 1j * jnp.exp(p["angle"]))
    inputs = x.astype(jnp.complex64) @ p["b"] * jnp.sqrt(1 - jnp.abs(decay) ** 2)
    combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
    _, states = lax.associative_scan(
        combine, (jnp.broadcast_to(decay, inputs.shape), inputs), axis=1
    )
    return jnp.square(jax.nn.gelu((states @ p["c"]).real + x * p["d"]) - x).mean()


@program(
    {
        "in": (D, 2 * D),
        "conv": (4, 1, D),
        "bcd": (D, 4 + 4 + D),
        "a": (D, 4),
        "out": (D, D),
    },
    **X,
)
def selective_state_space(p, x):
    h, gate = jnp.split(x @ p["in"], 2, axis=-1)
    h = lax.conv_general_dilated(
        h,
        p["conv"],
        (1,),
        [(3, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=D,
    )
    h = jax.nn.silu(h)
    b, c, step = jnp.split(h @ p["bcd"], [4, 8], axis=-1)
    step = jax.nn.softplus(step)
    decay = jnp.exp(-step[..., None] * jnp.exp(p["a"]))
    combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    _, state = lax.associative_scan(
        combine, (decay, (step * h)[..., None] * b[..., None, :]), axis=1
    )
    return jnp.square(
        jnp.einsum("btdn,btn->btd", state, c) * jax.nn.silu(gate) @ p["out"]
    ).mean()


@program({"log": (4, D), "c": (4, D), "d": (D,), "mix": (D, 2 * D), "b": (2 * D,)}, **X)
def state_space_as_a_convolution(p, x):
    kernel = (
        p["c"][None] * jnp.exp(-jnp.exp(p["log"])[None] * jnp.arange(T)[:, None, None])
    ).sum(1)
    y = jnp.fft.irfft(
        jnp.fft.rfft(x, 2 * T, axis=1) * jnp.fft.rfft(kernel, 2 * T, axis=0),
        2 * T,
        axis=1,
    )[:, :T]
    value, gate = jnp.split(jax.nn.gelu(y + x * p["d"]) @ p["mix"] + p["b"], 2, axis=-1)
    return jnp.square(value * jax.nn.sigmoid(gate)).mean()


@program({"rkv": (D, 3 * D), "decay": (D,), "bonus": (D,), "out": (D, D)}, **X)
def weighted_keys_and_values(p, x):
    r, k, v = jnp.split(x @ p["rkv"], 3, axis=-1)
    decay = -jnp.exp(p["decay"])

    def step(carry, kv):
        (k, v), (a, b, top) = kv, carry
        now = jnp.maximum(top, k + p["bonus"])
        e, f = jnp.exp(top - now), jnp.exp(k + p["bonus"] - now)
        out = (e * a + f * v) / (e * b + f)
        then = jnp.maximum(top + decay, k)
        e, f = jnp.exp(top + decay - then), jnp.exp(k - then)
        return (e * a + f * v, e * b + f, then), out

    zeros = jnp.zeros((x.shape[0], D))
    _, out = lax.scan(
        step, (zeros, zeros, zeros - 1e9), (k.swapaxes(0, 1), v.swapaxes(0, 1))
    )
    return jnp.square(jax.nn.sigmoid(r) * out.swapaxes(0, 1) @ p["out"]).mean()


@program(
    {"enc": (D, D), "h": (2 * D, D), "b": (D,), "out": (D, D)},
    source=rows(T, D),
    target=rows(T, D),
)
def sequence_to_sequence_with_attention(p, source, target):
    memory = jnp.tanh(source @ p["enc"])

    def step(h, y):
        weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", h, memory))
        context = jnp.einsum("bt,btd->bd", weights, memory)
        h = jnp.tanh(jnp.concatenate([y, context], -1) @ p["h"] + p["b"])
        return h, h @ p["out"]

    _, ys = lax.scan(step, memory[:, -1], target.swapaxes(0, 1)[:-1])
    return jnp.square(ys - target.swapaxes(0, 1)[1:]).mean()


@program({"k": (2, 3, D, D), "b": (2, D)}, **X)
def dilated_causal_convolutions(p, x):
    for i, dilation in enumerate((1, 2)):
        pad = [(2 * dilation, 0)]
        options = dict(
            dimension_numbers=("NWC", "WIO", "NWC"), rhs_dilation=(dilation,)
        )
        x = x + jax.nn.relu(
            lax.conv_general_dilated(x, p["k"][i], (1,), pad, **options) + p["b"][i]
        )
    return jnp.square(x).mean()


@program({"f": (4, 4), "h": (4, 4), "q": (4,), "r": (4,)}, y=rows(T, 4))
def kalman_filter(p, y):
    f, h, eye = jnp.tanh(p["f"]), p["h"] + jnp.eye(4), jnp.eye(4)

    def step(carry, y):
        mean, cov = carry
        mean, cov = mean @ f.T, f @ cov @ f.T + jnp.diag(jnp.exp(p["q"]))
        s = h @ cov @ h.T + jnp.diag(jnp.exp(p["r"]))
        gain = jnp.linalg.solve(s, h @ cov).T
        error = y - mean @ h.T
        loss = 0.5 * (
            jnp.linalg.slogdet(s)[1]
            + jnp.einsum("bi,bi->b", error, jnp.linalg.solve(s, error.T).T).mean()
        )
        return (mean + error @ gain.T, (eye - gain @ h) @ cov), loss

    return lax.scan(step, (jnp.zeros(y.shape[::2]), eye), y.swapaxes(0, 1))[1].mean()


@program({"start": (D,), "move": (D, D), "emit": (D, D)}, **X)
def hidden_markov_model(p, x):
    move, emissions = jax.nn.log_softmax(p["move"]), jax.nn.log_softmax(x @ p["emit"])
    step = lambda a, e: (jax.nn.logsumexp(a[:, :, None] + move, axis=1) + e, None)
    start = jax.nn.log_softmax(p["start"]) + emissions[:, 0]
    return -jax.nn.logsumexp(
        lax.scan(step, start, emissions.swapaxes(0, 1)[1:])[0], -1
    ).mean()


@program(
    {"w": (D, D), "b": (D,), "head": (D, 6)},
    x=rows(T, D),
    labels=integers(5, 3),
    pad=booleans(3),
)
def connectionist_temporal_classification(p, x, labels, pad):
    logits = jnp.tanh(x @ p["w"] + p["b"]) @ p["head"]
    label_pads = jnp.cumsum(pad, axis=-1) > 0
    return optax.ctc_loss(
        logits, jnp.zeros(x.shape[:2]), labels + 1, label_pads.astype(jnp.float32)
    ).mean()


@program({"w": (D, D), "u": (D, D), "b": (D,), "halt": (D, 1)}, x=rows(D), y=rows(D))
def adaptive_computation_time(p, x, y):
    def step(i, carry):
        h, left, out = carry
        h = jnp.tanh(h @ p["u"] + x @ p["w"] + p["b"])
        stop = jnp.where(i == 3, left, left * jax.nn.sigmoid(h @ p["halt"]))
        return h, left - stop, out + stop * h

    return jnp.square(
        lax.fori_loop(0, 4, step, (x, jnp.ones((x.shape[0], 1)), jnp.zeros_like(x)))[2]
        - y
    ).mean()


@program({"w": (D, D), "b": (D,), "v": (D, D)}, **X)
def unrolled_cell_in_a_nested_jit(p, x):
    @functools.partial(jax.jit, static_argnames="activation")
    def cell(h, x, activation):
        h, out = activation(x @ p["w"] + h + p["b"]), h @ p["v"]
        return h, out

    h, total = jnp.zeros((x.shape[0], D)), 0.0
    for t in range(3):
        h, out = cell(h, x[:, t], activation=jnp.tanh)
        total = total + jnp.square(out).mean()
    return total


@program({"qkv": (D, 3 * D), "out": (D, D)}, **X)
def decoding_with_a_cache_of_16_bits(p, x):
    """A token at a time; what is in the cache is read in float32 and has no gradient."""

    def step(cache, inputs):
        i, x = inputs
        q, *new = jnp.split(x @ p["qkv"], 3, axis=-1)
        k, v = (x.astype(jnp.float32) for x in cache)
        scores = jnp.where(
            jnp.arange(T)[None] < i, jnp.einsum("bd,btd->bt", q, k) / 4, -1e9
        )
        past = jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), v)
        written = lambda old, x: old.at[:, i].set(
            lax.stop_gradient(x).astype(old.dtype)
        )
        return (
            list(map(written, cache, new)),
            (past + jax.nn.sigmoid(new[0]) * new[1]) @ p["out"],
        )

    cache = [jnp.zeros((x.shape[0], T, D), jnp.bfloat16)] * 2
    _, ys = lax.scan(step, cache, (jnp.arange(T), x.swapaxes(0, 1)))
    return jnp.square(ys.swapaxes(0, 1)[:, :-1] - x[:, 1:]).mean()


@program({"in": (D, 2 * D), "conv": (4, D), "out": (D, D)}, **X)
def decoding_with_a_window_of_inputs(p, x):
    """The window of a causal convolution moves on by one row in each step."""

    def step(window, x):
        h, gate = jnp.split(x @ p["in"], 2, axis=-1)
        window = lax.dynamic_update_slice(
            jnp.roll(window, -1, axis=1), h[:, None], (0, 3, 0)
        )
        return (
            window,
            (jax.nn.silu((window * p["conv"]).sum(1)) * jax.nn.sigmoid(gate))
            @ p["out"],
        )

    _, ys = lax.scan(step, jnp.zeros((x.shape[0], 4, D)), x.swapaxes(0, 1))
    return jnp.square(ys.swapaxes(0, 1)[:, :-1] - x[:, 1:]).mean()


@program({"qkv": (D, 3 * D), "out": (D, D)}, **X, place=integers(64, T, 3))
def attention_with_rotary_angles_of_three_axes(p, x, place):
    """Angles are sums of three products: of frames and pixels with frequencies."""
    frequencies = (
        1
        / 100 ** (jnp.arange(D // 2) / (D // 2))
        * jnp.eye(3)[:, jnp.arange(D // 2) % 3]
    )
    angle = place.astype(jnp.float32) @ frequencies

    def turned(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate(
            [
                a * jnp.cos(angle) - b * jnp.sin(angle),
                a * jnp.sin(angle) + b * jnp.cos(angle),
            ],
            -1,
        )

    q, k, v = jnp.split(x @ p["qkv"], 3, -1)
    weights = jax.nn.softmax(turned(q) @ turned(k).swapaxes(1, 2) / 4)
    return jnp.square(weights @ v @ p["out"] - x).mean()
