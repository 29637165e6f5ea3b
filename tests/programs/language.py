"""Language models: attention of many kinds, gated layers, embeddings, masks, losses
over tokens.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import booleans, integers, program, rows

T, D, V = 8, 16, 32  # tokens, width, vocabulary


def norm(x, scale=1.0):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def heads(x, count=2):
    return x.reshape(*x.shape[:-1], count, -1).swapaxes(-2, -3)


def merged(x):
    return x.swapaxes(-2, -3).reshape(*x.shape[:-3], x.shape[-2], -1)


def attend(q, k, v, mask=None):
    logits = jnp.einsum("...qd,...kd->...qk", q, k) / jnp.sqrt(q.shape[-1])
    if mask is not None:
        logits = jnp.where(mask, logits, -1e9)
    return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(logits, axis=-1), v)


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(
        jax.nn.log_softmax(logits), labels[..., None], -1
    ).mean()


CAUSAL = jnp.tril(jnp.ones((T, T), bool))
BLOCK = {
    "qkv": (D, 3 * D),
    "out": (D, D),
    "up": (D, 2 * D),
    "b": (2 * D,),
    "down": (2 * D, D),
}
TOKENS = {"tokens": integers(V, T), "labels": integers(V, T)}


@program({"embed": (V, D), "position": (T, D), "scale": (2, D), **BLOCK}, **TOKENS)
def gpt_block_with_tied_embedding(p, tokens, labels):
    x = p["embed"][tokens] + p["position"]
    q, k, v = jnp.split(norm(x, p["scale"][0]) @ p["qkv"], 3, axis=-1)
    x = x + merged(attend(heads(q), heads(k), heads(v), CAUSAL)) @ p["out"]
    x = x + jax.nn.gelu(norm(x, p["scale"][1]) @ p["up"] + p["b"]) @ p["down"]
    return cross_entropy(x @ p["embed"].T, labels)


def rotary(x):
    angles = jnp.outer(
        jnp.arange(T), 10000 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    )
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [
            a * jnp.cos(angles) - b * jnp.sin(angles),
            b * jnp.cos(angles) + a * jnp.sin(angles),
        ],
        -1,
    )


LLAMA = {
    "q": (D, D),
    "k": (D, D // 2),
    "v": (D, D // 2),
    "o": (D, D),
    "gate_up": (D, 4 * D),
    "down": (2 * D, D),
}


@program({"embed": (V, D), "head": (D, V), **LLAMA}, **TOKENS)
def llama_block_with_grouped_queries(p, tokens, labels):
    x = jnp.take(p["embed"], tokens, axis=0) * D**0.5
    h = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
    q, k, v = heads(h @ p["q"], 4), heads(h @ p["k"], 2), heads(h @ p["v"], 2)
    k, v = jnp.repeat(rotary(k), 2, axis=1), jnp.repeat(v, 2, axis=1)
    x = x + merged(attend(rotary(q), k, v, CAUSAL)) @ p["o"]
    gate, up = jnp.split(x @ p["gate_up"], 2, axis=-1)
    return cross_entropy((x + (jax.nn.silu(gate) * up) @ p["down"]) @ p["head"], labels)


@program(
    {"w": (D, D), "b": (D,), "mask": (D,), "v": (D, V)},
    x=rows(T, D),
    hidden=booleans(T),
    labels=integers(V, T),
)
def masked_token_model(p, x, hidden, labels):
    h = jnp.where(hidden[..., None], p["mask"], jnp.tanh(x @ p["w"] + p["b"]))
    losses = -jnp.take_along_axis(
        jax.nn.log_softmax(h @ p["v"]), labels[..., None], -1
    )[..., 0]
    return jnp.where(hidden, losses, 0.0).sum() / jnp.maximum(hidden.sum(), 1)


@program(
    {"w": (D, D), "b": (D,), "cls": (1, 1, D), "v": (D, D), "head": (D, 4)},
    x=rows(T, D),
    label=integers(4),
)
def class_token_before_a_sequence(p, x, label):
    h = jnp.tanh(x @ p["w"] + p["b"])
    h = (
        jnp.concatenate([jnp.broadcast_to(p["cls"], (x.shape[0], 1, D)), h], axis=1)
        @ p["v"]
    )
    h = h + attend(h, h, h)
    return cross_entropy(h[:, 0] @ p["head"], label)


@program(
    {"prefix": (2, 4, D), "w": (D, 3 * D), "b": (3 * D,), "head": (D, V)},
    x=rows(T, D),
    labels=integers(V, T),
)
def prefix_of_keys_and_values(p, x, labels):
    q, k, v = jnp.split(x @ p["w"] + p["b"], [D, 2 * D], axis=-1)
    before = lambda prefix, h: jnp.concatenate(
        [jnp.tile(prefix, (x.shape[0], 1, 1)), h], axis=1
    )
    return cross_entropy(
        attend(q, before(p["prefix"][0], k), before(p["prefix"][1], v)) @ p["head"],
        labels,
    )


@program(
    {"q": (D, D), "kv": (D, 2 * D), "head": (D, D)},
    x=rows(T, D),
    memory=rows(6, D),
    pad=booleans(6),
)
def cross_attention_with_rows_fully_masked(p, x, memory, pad):
    """Some memories are all padding: then the result is no NaN, and without gradient."""
    pad = pad | (jnp.arange(x.shape[0]) % 4 == 0)[:, None]
    k, v = jnp.split(memory @ p["kv"], 2, axis=-1)
    logits = (
        jnp.einsum("bqd,bkd->bqk", x @ p["q"], k)
        + jnp.where(pad, -1e9, 0.0)[:, None, :]
    )
    weights = jnp.where(pad.all(-1)[:, None, None], 0.0, jax.nn.softmax(logits))
    return jnp.square(x + jax.nn.relu(weights @ v) @ p["head"]).mean()


@program({"qkv": (D, 3 * D), "b": (3 * D,), "o": (D, D)}, x=rows(T, D))
def linear_attention(p, x):
    q, k, v = jnp.split(x @ p["qkv"] + p["b"], 3, axis=-1)
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.cumsum(jnp.einsum("btk,btv->btkv", k, v), axis=1)
    total = jnp.einsum("btk,btk->bt", q, jnp.cumsum(k, axis=1))
    h = jnp.einsum("btk,btkv->btv", q, state) / total[..., None]
    return jnp.square(h @ p["o"] - x).mean()


@program({"w": (D, 2 * D), "b": (2 * D,), "v": (D, D)}, x=rows(T, D))
def gate_beside_an_activation(p, x):
    gate, value = jnp.split(x @ p["w"] + p["b"], 2, axis=-1)
    return (jnp.tanh(gate) @ p["v"]).mean() + jnp.square(value).mean()


@program({"w": (D, 2 * D), "b": (2 * D,), "v": (D, D)}, x=rows(T, D))
def gate_after_an_activation(p, x):
    gate, value = jnp.split(jnp.tanh(x @ p["w"] + p["b"]), 2, axis=-1)
    return jnp.square(gate @ p["v"] + value).mean()


@program(
    {"in": (D, 4 * D + D), "b": (5 * D,), "attn": (D, D), "mlp": (2 * D, D)},
    x=rows(T, D),
)
def parallel_block_of_one_projection(p, x):
    q, k, v, up = jnp.split(norm(x) @ p["in"] + p["b"], [D, 2 * D, 3 * D], axis=-1)
    return jnp.square(
        x + attend(q, k, v, CAUSAL) @ p["attn"] + jax.nn.gelu(up) @ p["mlp"]
    ).mean()


@program(
    {"layers": {"qkv": (3, D, 3 * D), "w": (3, D, D), "b": (3, D), "v": (3, D, D)}},
    x=rows(T, D),
    y=rows(T, D),
)
def scanned_layers_with_a_checkpoint_policy(p, x, y):
    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )
    def layer(x, p):
        q, k, v = jnp.split(norm(x) @ p["qkv"], 3, axis=-1)
        x = x + attend(q, k, v, CAUSAL)
        return x + jax.nn.silu(x @ p["w"] + p["b"]) @ p["v"], None

    return jnp.square(lax.scan(layer, x, p["layers"])[0] - y).mean()


@program({"qkv": (D, 3 * D), "out": (D, D)}, x=rows(T, D))
def online_softmax_over_chunks(p, x):
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
    chunks = lambda h: h.reshape(h.shape[0], 2, T // 2, D).swapaxes(0, 1)

    def step(carry, kv):
        (k, v), (top, total, result) = kv, carry
        logits = jnp.einsum("bqd,bkd->bqk", q, k) / D**0.5
        new = jnp.maximum(top, logits.max(-1))
        weights, decay = jnp.exp(logits - new[..., None]), jnp.exp(top - new)
        return (
            new,
            total * decay + weights.sum(-1),
            result * decay[..., None] + weights @ v,
        ), None

    start = jnp.full(x.shape[:2], -jnp.inf), jnp.zeros(x.shape[:2]), jnp.zeros(x.shape)
    (_, total, result), _ = lax.scan(step, start, (chunks(k), chunks(v)))
    return jnp.square(result / total[..., None] @ p["out"]).mean()


@program(
    {"w": (D, D), "b": (D,), "mix": (D, 3), "experts": (3, D, V)},
    x=rows(D),
    label=integers(V),
)
def mixture_of_softmaxes(p, x, label):
    h = jnp.tanh(x @ p["w"] + p["b"])
    logs = jax.nn.log_softmax(jnp.einsum("bd,edv->bev", h, p["experts"]))
    mixed = jax.nn.logsumexp(jax.nn.log_softmax(h @ p["mix"])[..., None] + logs, axis=1)
    smooth = 0.9 * jax.nn.one_hot(label, V) + 0.1 / V
    return -(smooth * mixed).sum(-1).mean()


@program({"qkv": (3, D, 2, D // 2), "o": (2, D // 2, D)}, x=rows(T, D), pad=booleans(T))
def attention_of_the_library(p, x, pad):
    q, k, v = jnp.einsum("btd,cdhk->cbthk", x, p["qkv"])
    h = jax.nn.dot_product_attention(
        q, k, v, mask=~pad[:, None, None, :] | (jnp.arange(T) == 0)
    )
    return jnp.square(jnp.einsum("bthk,hkd->btd", h, p["o"]) - x).mean()


@program(
    {"embed": (V, D), "w": (D, D), "copy": (D, 1), "head": (D, V)},
    source=integers(V, T),
    label=integers(V),
)
def pointer_network_that_copies(p, source, label):
    h = jnp.tanh(p["embed"][source] @ p["w"])
    weights = jax.nn.softmax((h[:, :1] @ h.swapaxes(1, 2))[:, 0])
    context = jnp.einsum("bt,btd->bd", weights, h)
    copied = (
        jnp.zeros((source.shape[0], V))
        .at[jnp.arange(source.shape[0])[:, None], source]
        .add(weights)
    )
    copies = jax.nn.sigmoid(context @ p["copy"])
    mixed = copies * copied + (1 - copies) * jax.nn.softmax(context @ p["head"])
    return -jnp.log(jnp.take_along_axis(mixed, label[:, None], 1) + 1e-6).mean()


@program(
    {"embed": (V, D), "context": (V, D)},
    center=integers(V),
    near=integers(V),
    far=integers(V, 5),
)
def words_with_negative_samples(p, center, near, far):
    h = p["embed"][center]
    positive = jnp.einsum("bd,bd->b", h, p["context"][near])
    negative = jnp.einsum("bd,bnd->bn", h, p["context"][far])
    return -(
        jax.nn.log_sigmoid(positive).mean()
        + jax.nn.log_sigmoid(-negative).sum(-1).mean()
    )
