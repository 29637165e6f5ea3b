"""Graphs and sets: segment sums, gathers and scatters, equivariant layers, pooling."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import ROWS, integers, program, rows

D = 16
GRAPH = {"x": rows(D), "edges": integers(ROWS, 2)}


@program({"w": (D, D), "from": (D,), "to": (D,), "out": (D, D)}, **GRAPH)
def graph_attention(p, x, edges):
    h, (sender, receiver) = x @ p["w"], edges.T
    logits = jax.nn.leaky_relu((h @ p["from"])[sender] + (h @ p["to"])[receiver])
    top = jax.ops.segment_max(logits, receiver, ROWS)
    weights = jnp.exp(logits - top[receiver])
    weights = weights / jax.ops.segment_sum(weights, receiver, ROWS)[receiver]
    return jnp.square(
        jax.ops.segment_sum(weights[:, None] * h[sender], receiver, ROWS) @ p["out"]
    ).mean()


@program(
    {"message": (3 * D, D), "b": (D,), "update": (2 * D, D)}, **GRAPH, features=rows(D)
)
def messages_of_concatenated_edges(p, x, edges, features):
    for _ in range(2):
        pairs = jnp.concatenate([x[edges[:, 0]], x[edges[:, 1]], features], axis=-1)
        messages = jax.nn.silu(pairs @ p["message"] + p["b"])
        received = jnp.zeros_like(x).at[edges[:, 1]].add(messages)
        x = x + jnp.tanh(jnp.concatenate([x, received], -1) @ p["update"])
    return jnp.square(x).mean()


@program(
    {"edge": (2 * D + 1, D), "b": (D,), "move": (D, 1), "node": (2 * D, D)},
    **GRAPH,
    place=rows(3),
)
def equivariant_graph_network(p, x, edges, place):
    sender, receiver = edges[:, 0], edges[:, 1]
    gap = place[sender] - place[receiver]
    square = jnp.sum(gap**2, -1, keepdims=True)
    m = jax.nn.silu(
        jnp.concatenate([x[sender], x[receiver], square], -1) @ p["edge"] + p["b"]
    )
    place = place + jax.ops.segment_sum(gap * jnp.tanh(m @ p["move"]), receiver, ROWS)
    x = x + jnp.concatenate([x, jax.ops.segment_sum(m, receiver, ROWS)], -1) @ p["node"]
    return jnp.square(place).mean() + jnp.square(x).mean()


@program({"phi": (D, D), "b": (D,), "score": (D, 1), "rho": (D, 4)}, x=rows(8, D))
def attention_pooling_of_the_top_members(p, x):
    h = jax.nn.relu(x @ p["phi"] + p["b"])
    score, chosen = lax.top_k((h @ p["score"])[..., 0], 4)
    h = jnp.take_along_axis(h, chosen[..., None], 1) * jax.nn.sigmoid(score)[..., None]
    return jnp.square(h.sum(1) @ p["rho"]).mean()


@program({"seed": (4, D), "q": (D, D), "kv": (D, 2 * D), "out": (D, D)}, x=rows(8, D))
def inducing_points_of_a_set(p, x):
    def attend(queries, members):
        k, v = jnp.split(members @ p["kv"], 2, -1)
        return jax.nn.softmax(queries @ p["q"] @ k.T) @ v

    hidden = jax.vmap(attend, in_axes=(None, 0))(p["seed"], x)
    return jnp.square(jax.vmap(attend)(x, hidden) @ p["out"]).mean()
