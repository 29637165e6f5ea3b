"""Mixtures of experts: routing by largest logits, capacities, sorted tokens, grouped
products.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import program, rows

D, E = 16, 4
XY = {"x": rows(D), "y": rows(D)}
SEQUENCES = {"x": rows(4, D), "y": rows(4, D)}
EXPERTS = {"gate": (D, E), "up": (E, D, D), "b": (E, 1, D), "down": (E, D, D)}


@program(EXPERTS, **XY)
def two_best_experts(p, x, y):
    weights, chosen = lax.top_k(x @ p["gate"], 2)
    combine = jnp.einsum(
        "bk,bke->be", jax.nn.softmax(weights), jax.nn.one_hot(chosen, E)
    )
    h = jax.nn.relu(jnp.einsum("bd,edf->ebf", x, p["up"]) + p["b"])
    out = jnp.einsum("ebd,be->bd", jnp.einsum("ebf,efd->ebd", h, p["down"]), combine)
    share = (combine > 0).mean(0) @ jax.nn.softmax(x @ p["gate"]).mean(0)
    return jnp.square(out - y).mean() + 0.01 * E * share


@program(EXPERTS, **XY)
def switch_with_a_capacity(p, x, y):
    probs = jax.nn.softmax(x @ p["gate"])
    best = jax.nn.one_hot(jnp.argmax(probs, -1), E)
    place = (jnp.cumsum(best, axis=0) * best - 1).astype(jnp.int32)
    dispatch = jax.nn.one_hot(place, 8) * best[..., None]
    h = jnp.einsum("bec,bd->ecd", dispatch, x)
    h = jax.nn.gelu(h @ p["up"] + p["b"]) @ p["down"]
    out = jnp.einsum("bec,ecd->bd", dispatch * probs.max(-1)[:, None, None], h)
    return jnp.square(x + out - y).mean()


@program(EXPERTS, **XY)
def tokens_chosen_by_experts(p, x, y):
    weights, chosen = lax.top_k(jax.nn.softmax(x @ p["gate"]).T, 8)
    h = jax.nn.silu(x[chosen] @ p["up"] + p["b"]) @ p["down"]
    return jnp.square(
        jnp.zeros_like(x).at[chosen].add(h * weights[..., None]) - y
    ).mean()


@program(EXPERTS, **XY)
def sorted_tokens_in_grouped_products(p, x, y):
    expert = jnp.argmax(x @ p["gate"], -1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=E).astype(jnp.int32)
    h = jax.nn.gelu(lax.ragged_dot(x[order], p["up"], sizes))
    out = lax.ragged_dot(h, p["down"], sizes)[jnp.argsort(order)]
    return jnp.square(
        out * jax.nn.sigmoid(x @ p["gate"]).max(-1, keepdims=True) - y
    ).mean()


@program({"keys": (2, 8, D // 2), "values": (64, D), "q": (D, D), "b": (D,)}, **XY)
def memory_of_product_keys(p, x, y):
    halves = jnp.split(x @ p["q"] + p["b"], 2, -1)
    (s, i), (t, j) = (
        lax.top_k(h @ keys.T, 3) for h, keys in zip(halves, p["keys"], strict=True)
    )
    scores, best = lax.top_k((s[:, :, None] + t[:, None, :]).reshape(-1, 9), 4)
    index = jnp.take_along_axis(
        (i[:, :, None] * 8 + j[:, None, :]).reshape(-1, 9), best, 1
    )
    return jnp.square(
        jnp.einsum("bk,bkd->bd", jax.nn.softmax(scores), p["values"][index]) - y
    ).mean()


@program(EXPERTS, **XY)
def places_by_products(p, x, y):
    """Each token's place at its expert is a sum of products with the rows of one-hot
    masks, as in Mesh TensorFlow.
    """
    probs = jax.nn.softmax(x @ p["gate"])
    mask = jax.nn.one_hot(jnp.argmax(probs, -1), E)
    place = jnp.einsum("te,te->t", jnp.cumsum(mask, 0) * mask, mask) - 1
    gate = jnp.einsum("te,te->t", probs, mask) * (place < 8)
    combine = jnp.einsum(
        "t,te,tc->tec", gate, mask, jax.nn.one_hot(place.astype(jnp.int32), 8)
    )
    h = (
        jax.nn.relu(
            jnp.einsum("tec,td->ecd", (combine > 0).astype(x.dtype), x) @ p["up"]
            + p["b"]
        )
        @ p["down"]
    )
    balance = E * jnp.vdot(mask.mean(0), probs.mean(0))
    return jnp.square(jnp.einsum("tec,ecd->td", combine, h) - y).mean() + 0.01 * balance


@program(EXPERTS, **SEQUENCES)
def experts_of_sequences(p, x, y):
    weights = jax.nn.softmax(x @ p["gate"])
    h = jax.nn.gelu(jnp.einsum("btd,edf->ebtf", x, p["up"]) + p["b"][:, None])
    out = jnp.einsum("ebtf,efd->ebtd", h, p["down"])
    return jnp.square(jnp.einsum("ebtd,bte->btd", out, weights) - y).mean()


@program(EXPERTS, **SEQUENCES)
def experts_mapped_over_sequences_in_groups(p, x, y):
    """Of four axes: a vmap over experts of products of groups, and one between other
    axes.
    """
    groups = x.reshape(x.shape[0], 2, -1, D) * jax.nn.softmax(x @ p["gate"])[
        ..., :1
    ].reshape(x.shape[0], 2, -1, 1)
    h = jax.vmap(jnp.matmul, in_axes=(None, 0))(groups, p["up"])
    h = jnp.moveaxis(jax.nn.silu(h + p["b"][:, None, None]), 0, 3)
    return jnp.square(
        jnp.einsum("bgtek,ekd->bgted", h, p["down"]).mean(3).reshape(x.shape) - y
    ).mean()
