"""Compute the cross-entropy of the next token: in closed form, and without the logits
of a whole batch.

The float32 logits of 16 sequences of 1,024 GPT-2 tokens take 3.3 GB, and what is done
with them decides what a step moves. Two things keep it small.

The form: a target is found by comparison with an iota and not by a look-up, whose
gradient is a scatter into an array of the size of the logits. The gradient is softmax
minus one-hot, one pass over the logits, and under autocast no float32 logits are ever
in memory. The largest logit and the sum of the exponentials are one reduction of pairs,
so that the forward pass reads the logits once.

The chunks: the positions are cut into parts, and the logits of only one part exist at a
time. A chunk's gradient is computed with its loss, so that no logit is computed twice,
as it would be with `jax.checkpoint`; what is kept for the backward pass has the size of
the features, and of the embedding once for each chunk (the idea of Liger-Kernel, Hsu et
al., 2024). Chunks are unrolled, so that their gradients of the embedding are added up
in one pass: two to four are enough, and more make the program longer.

A chunk's losses are summed, and divided by the number of tokens at the end, in float32:
the softmax's error enters the products as a number near 1, which float16 can hold. In
float16 the embedding's gradient of a chunk must stay below 65,504: no loss scale acts
on it, but more chunks make it smaller.
"""

import jax
import jax.numpy as jnp

from examples.gpt.model import masked_logits


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the cross-entropy (...) of floating logits (..., V) and targets (...), in
    float32 and nats.
    """
    logits = logits.astype(jnp.float32)
    return log_sum_exp(logits) - target_logits(logits, targets)


def target_logits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the logits of the targets, or 0 where they have no such target."""
    # A comparison with an iota.
    is_target = jax.nn.one_hot(targets, logits.shape[-1], dtype=bool)
    return jnp.where(is_target, logits, 0).sum(-1)


@jax.custom_jvp
def log_sum_exp(logits: jax.Array) -> jax.Array:
    """Return the logarithm of the sum of the exponentials of logits (..., V)."""
    top, total = _largest_and_sum(logits)
    return top + jnp.log(total)


@log_sum_exp.defjvp
def _log_sum_exp_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    result = log_sum_exp(*primals)
    return result, (jnp.exp(primals[0] - result[..., None]) * tangents[0]).sum(-1)


def _largest_and_sum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest of float32 logits (..., V), and the sum of exp(logits -
    largest), from one pass over them.
    """

    def join(a: tuple, b: tuple) -> tuple:
        top = jnp.maximum(a[0], b[0])
        return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)

    # Not from minus infinity, which the logits of padding rows are: its difference from
    # itself is not a number.
    nothing = (jnp.finfo(jnp.float32).min, jnp.float32(0))
    return jax.lax.reduce(
        (logits, jnp.ones_like(logits)), nothing, join, (logits.ndim - 1,)
    )


def token_losses(
    features: jax.Array,
    embedding: jax.Array,
    targets: jax.Array,
    *,
    vocabulary: int,
    chunks: int = 1,
) -> jax.Array:
    """Return the cross-entropy of each token in nats, for evaluation: a derivative of
    it would keep all logits.

    From features (B, T, C) of any floating dtype, the embedding (V, C) with its padding
    rows, and targets (B, T) below `vocabulary`, to float32 losses (B, T). The T
    positions are cut into `chunks` equal parts.
    """
    if chunks == 1:
        return _losses(features, embedding, targets, vocabulary)
    parts = (jnp.stack(_cut(features, chunks)), jnp.stack(_cut(targets, chunks)))
    losses = jax.lax.map(
        lambda part: _losses(part[0], embedding, part[1], vocabulary), parts
    )
    return jnp.concatenate(list(losses), axis=1)


def mean_loss(
    features: jax.Array,
    embedding: jax.Array,
    targets: jax.Array,
    *,
    vocabulary: int,
    chunks: int = 1,
) -> jax.Array:
    """Return the mean of `token_losses`, a float32 scalar, for training: with chunks
    its derivative keeps no logits.

    Arguments are the same as in `token_losses`. The gradient of the embedding is summed
    in float32.
    """
    if chunks == 1:
        return _losses(features, embedding, targets, vocabulary).mean()
    # The gradients are computed here, so nothing below is to be differentiated.
    fixed_features, fixed_embedding = jax.lax.stop_gradient((features, embedding))

    def total(features, embedding, targets):
        return _losses(features, embedding, targets, vocabulary).sum()

    loss, of_features, of_embedding = (
        jnp.float32(0),
        [],
        jnp.zeros(embedding.shape, jnp.float32),
    )
    for part, labels in zip(
        _cut(fixed_features, chunks), _cut(targets, chunks), strict=True
    ):
        # A chunk begins when the one before it is done, or XLA would hold the logits of
        # both.
        if of_features:
            part, of_features[-1] = jax.lax.optimization_barrier(
                (part, of_features[-1])
            )
        chunk_loss, gradients = jax.value_and_grad(total, (0, 1))(
            part, fixed_embedding, labels
        )
        loss += chunk_loss
        of_features.append(gradients[0])
        of_embedding += gradients[1].astype(jnp.float32)
    gradients = (
        jnp.concatenate(of_features, axis=1),
        of_embedding.astype(embedding.dtype),
    )
    return _with_gradients(loss, (features, embedding), gradients) / targets.size


def _losses(
    features: jax.Array, embedding: jax.Array, targets: jax.Array, vocabulary: int
) -> jax.Array:
    return cross_entropy(masked_logits(features, embedding, vocabulary), targets)


def _cut(x: jax.Array, chunks: int) -> list[jax.Array]:
    """Return (B, T, ...) as arrays (B, T / chunks, ...): a chunk has a part of each
    sequence, so of each device.
    """
    return jnp.split(x, chunks, axis=1)


@jax.custom_vjp
def _with_gradients(value: jax.Array, arguments: tuple, gradients: tuple) -> jax.Array:
    """Return `value`, a float32 scalar, whose derivatives with respect to `arguments`
    are `gradients`.
    """
    del arguments, gradients
    return value


def _forward(
    value: jax.Array, arguments: tuple, gradients: tuple
) -> tuple[jax.Array, tuple]:
    del arguments
    return value, gradients


def _backward(gradients: tuple, cotangent: jax.Array) -> tuple:
    def scale(gradient):
        return (cotangent * gradient.astype(jnp.float32)).astype(gradient.dtype)

    return (
        cotangent,
        jax.tree.map(scale, gradients),
        jax.tree.map(jnp.zeros_like, gradients),
    )


_with_gradients.defvjp(_forward, _backward)
