"""Losses: contrastive ones, of boxes, of rankings, by sorting."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import integers, positive, program, rows

D = 16
NET = {"a": (D, D), "b": (D,), "c": (D, D)}
VIEWS = {"x": rows(D), "y": rows(D)}


def embed(p, x):
    return jax.nn.relu(x @ p["a"] + p["b"]) @ p["c"]


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@program({"image": NET, "text": NET, "scale": ()}, **VIEWS)
def pairs_with_a_learned_temperature(p, x, y):
    logits = (
        jnp.exp(p["scale"] + 1)
        * unit(embed(p["image"], x))
        @ unit(embed(p["text"], y)).T
    )
    own = jnp.diagonal(logits)
    return (
        jax.nn.logsumexp(logits, 0) + jax.nn.logsumexp(logits, 1) - 2 * own
    ).mean() / 2


@program(NET, **VIEWS)
def two_views_without_the_diagonal(p, x, y):
    z = unit(jnp.concatenate([embed(p, x), embed(p, x + 0.2 * y)]))
    logits = z @ z.T / 0.5 - 1e9 * jnp.eye(len(z))
    return (
        jax.nn.logsumexp(logits, 1) - jnp.diagonal(jnp.roll(logits, len(x), 1))
    ).mean()


@program(NET, **VIEWS)
def redundancy_between_features(p, x, y):
    standard = lambda z: (z - z.mean(0)) / (z.std(0) + 1e-2)
    c = standard(embed(p, x)).T @ standard(embed(p, x + 0.2 * y)) / len(x)
    return (
        jnp.square(jnp.diag(c) - 1).sum()
        + 0.01 * jnp.square(c - jnp.diag(jnp.diag(c))).sum()
    ) / D


def corners(box):
    center, size = jnp.split(box, 2, -1)
    return center - size / 2, center + size / 2


def overlap(a, b):
    (a0, a1), (b0, b1) = corners(a), corners(b)
    inside = jnp.prod(jax.nn.relu(jnp.minimum(a1, b1) - jnp.maximum(a0, b0)), -1)
    union = jnp.prod(a1 - a0, -1) + jnp.prod(b1 - b0, -1) - inside
    return (
        inside / (union + 1e-6),
        jnp.prod(jnp.maximum(a1, b1) - jnp.minimum(a0, b0), -1),
        union,
    )


@program(
    {"a": (D, D), "b": (D,), "c": (D, 5)},
    x=rows(6, D),
    wanted=positive(6, 4),
    seen=integers(2, 6),
)
def boxes_with_focal_scores(p, x, wanted, seen):
    score, box = jnp.split(embed(p, x), [1], axis=-1)
    iou, hull, union = overlap(jax.nn.sigmoid(box), wanted)
    chance = jax.nn.sigmoid(score[..., 0])
    right = jnp.where(seen == 1, chance, 1 - chance)
    focal = -((1 - right) ** 2) * jnp.log(right + 1e-6)
    return (focal + seen * (1 - iou + (hull - union) / hull)).mean()


@program({"a": (D, D), "b": (D,), "c": (D, 5)}, x=rows(8, D), wanted=positive(4))
def best_anchors_by_overlap(p, x, wanted):
    score, box = jnp.split(embed(p, x), [1], axis=-1)
    iou = overlap(jax.nn.sigmoid(box), wanted[:, None])[0]
    top, chosen = lax.top_k(iou, 3)
    kept = jnp.take_along_axis(jax.nn.log_softmax(score[..., 0]), chosen, 1)
    order = jnp.argsort(-lax.stop_gradient(iou), axis=1)
    gaps = jnp.diff(jnp.take_along_axis(iou, order, 1))
    return (-kept * lax.stop_gradient(top) - top).mean() + jnp.square(gaps).mean()


@program(NET, **VIEWS)
def sorted_values_beside_what_they_carry(p, x, y):
    h = jnp.tanh(embed(p, x))
    keys, carried = lax.sort((h, y), dimension=1, num_keys=1)
    ranks = jnp.cumsum(keys, axis=1) / jnp.arange(1, D + 1)
    return (
        jnp.square(ranks - jnp.sort(y, axis=1)).mean()
        + jnp.square(carried - keys).mean()
    )


@program({**NET, "shift": (D,)}, **VIEWS)
def angles_between_rows(p, x, y):
    """Cosines by products of rows, of a batch that is nearly parallel, and a norm by a
    product of a vector.
    """
    a, b = embed(p, x), embed(p, x + 0.2 * y)
    dot = lambda a, b: jnp.einsum("td,td->t", a, b)
    cosine = dot(a, b) * jax.lax.rsqrt(dot(a, a) * dot(b, b) + 1e-6)
    return (
        jnp.square(cosine - 0.5).mean()
        + jnp.sqrt(jnp.vdot(p["shift"] + 1, p["shift"] + 1)) / D
    )


@program({"a": (D, D), "b": (D,), "c": (D, 4)}, x=rows(D), label=integers(4))
def scores_of_classes_by_counts(p, x, label):
    """A soft F1 score: products of ones and of masks count."""
    chance, wanted = jax.nn.softmax(embed(p, x)), jax.nn.one_hot(label, 4)
    ones = jnp.ones(x.shape[0])
    right = jnp.einsum("be,be->e", chance, wanted)
    return 1 - (2 * right / (ones @ chance + ones @ wanted + 1e-3)).mean()
