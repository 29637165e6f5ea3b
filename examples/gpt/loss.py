"""The cross-entropy of the next token, without the logits of a whole batch.

For GPT-2 and 16 sequences of 1,024 tokens the float32 logits alone take 3.3 GB, and their gradient as much again. So
the positions are cut into chunks, one after another: only the logits of one chunk exist at a time.

A chunk's gradient is computed beside its loss, while its logits are there: with L the sum of its losses,

    loss = sum of L / tokens,    d loss / d features = dL/d features / tokens,    d loss / d embedding likewise, summed

so that, unlike with `jax.checkpoint`, no logit is computed twice. What is kept for the backward pass is as large as the
features and the embedding (the idea is that of Liger-Kernel's fused linear cross-entropy, Hsu et al., 2024). The sums
are those of losses and not of means: the softmax's error reaches the products as a number near 1, which float16 can
hold, and is divided by the number of tokens in float32. The embedding's gradient, a sum over the tokens of a chunk,
must stay below 65,504 in float16: no loss scale acts on it, but more chunks do.
"""

import jax
import jax.numpy as jnp
import optax

from examples.gpt.model import masked_logits


def token_losses(
    features: jax.Array, embedding: jax.Array, targets: jax.Array, *, vocabulary: int, chunks: int = 1
) -> jax.Array:
    """Cross-entropy in nats of each token; for evaluation, since a derivative of it would keep all logits.

    Args:
        features: (B, T, C), of any floating dtype.
        embedding: (V, C), rows that only pad it included.
        targets: (B, T), integers below `vocabulary`.
        vocabulary: tokens that exist.
        chunks: into how many parts to cut the T positions.

    Returns:
        float32, of shape (B, T).

    Raises:
        ValueError: if T is not a multiple of `chunks`.
    """
    if chunks == 1:
        return _losses(features, embedding, targets, vocabulary)
    parts = (_cut(features, chunks), _cut(targets, chunks))
    return _join(jax.lax.map(lambda part: _losses(part[0], embedding, part[1], vocabulary), parts))


def mean_loss(
    features: jax.Array, embedding: jax.Array, targets: jax.Array, *, vocabulary: int, chunks: int = 1
) -> jax.Array:
    """The mean of `token_losses`, a float32 scalar, for training: derivatives keep no logits if `chunks` is above 1.

    Arguments and errors are those of `token_losses`. The gradient of the embedding is added up in float32.
    """
    if chunks == 1:
        return _losses(features, embedding, targets, vocabulary).mean()
    # What follows computes gradients and is not to be differentiated itself.
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
    """(B, T, ...) to (chunks, B, T / chunks, ...): every chunk has some of every sequence, and so of every device."""
    batch, length = x.shape[:2]
    if length % chunks:
        raise ValueError(f"next-token loss: {length} positions cannot be cut into `chunks` = {chunks} equal parts.")
    return jnp.moveaxis(x.reshape(batch, chunks, length // chunks, *x.shape[2:]), 1, 0)


def _join(x: jax.Array) -> jax.Array:
    """The inverse of `_cut`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


@jax.custom_vjp
def _with_gradients(value: jax.Array, arguments: tuple, gradients: tuple) -> jax.Array:
    """`value` (float32, scalar), whose derivatives with respect to `arguments` are known already."""
    del arguments, gradients
    return value


def _forward(value: jax.Array, arguments: tuple, gradients: tuple) -> tuple[jax.Array, tuple]:
    del arguments
    return value, gradients


def _backward(gradients: tuple, cotangent: jax.Array) -> tuple:
    scale = lambda gradient: (cotangent * gradient.astype(jnp.float32)).astype(gradient.dtype)
    return cotangent, jax.tree.map(scale, gradients), jax.tree.map(jnp.zeros_like, gradients)


_with_gradients.defvjp(_forward, _backward)
