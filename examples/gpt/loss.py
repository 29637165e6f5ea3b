"""Compute the cross-entropy of the next token without the logits of a whole batch.

The float32 logits of 16 sequences of 1,024 GPT-2 tokens take 3.3 GB, and their gradient the same again. The positions
are therefore cut into chunks, and the logits of only one chunk exist at a time. A chunk's gradient is computed with its
loss, so that no logit is computed twice, as it would be with `jax.checkpoint`; what is kept for the backward pass has
the size of the features and the embedding (the idea of Liger-Kernel, Hsu et al., 2024).

A chunk's losses are summed, and divided by the number of tokens at the end, in float32: the softmax's error enters the
products as a number near 1, which float16 can hold. In float16 the embedding's gradient of a chunk must stay below
65,504: no loss scale acts on it, but more chunks make it smaller.
"""

import jax
import jax.numpy as jnp
import optax

from examples.gpt.model import masked_logits


def token_losses(
    features: jax.Array, embedding: jax.Array, targets: jax.Array, *, vocabulary: int, chunks: int = 1
) -> jax.Array:
    """Return the cross-entropy of each token in nats, for evaluation: a derivative of it would keep all logits.

    From features (B, T, C) of any floating dtype, the embedding (V, C) with its padding rows, and targets (B, T) below
    `vocabulary`, to float32 losses (B, T). The T positions are cut into `chunks` equal parts.
    """
    if chunks == 1:
        return _losses(features, embedding, targets, vocabulary)
    parts = (_cut(features, chunks), _cut(targets, chunks))
    return _join(jax.lax.map(lambda part: _losses(part[0], embedding, part[1], vocabulary), parts))


def mean_loss(
    features: jax.Array, embedding: jax.Array, targets: jax.Array, *, vocabulary: int, chunks: int = 1
) -> jax.Array:
    """Return the mean of `token_losses`, a float32 scalar, for training: with chunks its derivative keeps no logits.

    Arguments and errors are those of `token_losses`. The gradient of the embedding is summed in float32.
    """
    if chunks == 1:
        return _losses(features, embedding, targets, vocabulary).mean()
    # The scan below computes the gradients, so it must not be differentiated itself.
    fixed_features, fixed_embedding = jax.lax.stop_gradient((features, embedding))

    def add_chunk(sums: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array]):
        loss_of = lambda features, embedding: _losses(features, embedding, part[1], vocabulary).sum()
        loss, (features_gradient, embedding_gradient) = jax.value_and_grad(loss_of, (0, 1))(part[0], fixed_embedding)
        return (sums[0] + loss, sums[1] + embedding_gradient.astype(jnp.float32)), features_gradient

    zeros = (jnp.zeros((), jnp.float32), jnp.zeros(embedding.shape, jnp.float32))
    (loss, embedding_gradient), features_gradient = jax.lax.scan(
        add_chunk, zeros, (_cut(fixed_features, chunks), _cut(targets, chunks))
    )
    gradients = (_join(features_gradient), embedding_gradient.astype(embedding.dtype))
    return _with_gradients(loss, (features, embedding), gradients) / targets.size


def _losses(features: jax.Array, embedding: jax.Array, targets: jax.Array, vocabulary: int) -> jax.Array:
    logits = masked_logits(features, embedding, vocabulary).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def _cut(x: jax.Array, chunks: int) -> jax.Array:
    """Return (B, T, ...) as (chunks, B, T / chunks, ...): a chunk has a part of each sequence, so of each device."""
    batch, length = x.shape[:2]
    if length % chunks:
        raise ValueError(f"next-token loss: {length} positions cannot be cut into `chunks` = {chunks} equal parts.")
    return jnp.moveaxis(x.reshape(batch, chunks, length // chunks, *x.shape[2:]), 1, 0)


def _join(x: jax.Array) -> jax.Array:
    """Invert `_cut`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


@jax.custom_vjp
def _with_gradients(value: jax.Array, arguments: tuple, gradients: tuple) -> jax.Array:
    """Return `value`, a float32 scalar, whose derivatives with respect to `arguments` are `gradients`."""
    del arguments, gradients
    return value


def _forward(value: jax.Array, arguments: tuple, gradients: tuple) -> tuple[jax.Array, tuple]:
    del arguments
    return value, gradients


def _backward(gradients: tuple, cotangent: jax.Array) -> tuple:
    scale = lambda gradient: (cotangent * gradient.astype(jnp.float32)).astype(gradient.dtype)
    return cotangent, jax.tree.map(scale, gradients), jax.tree.map(jnp.zeros_like, gradients)


_with_gradients.defvjp(_forward, _backward)
