"""A small GPT in Flax NNX whose matrix products run in a dtype of choice, and everything else in float32.

Weights are made in float32; how they are stored is not the model's business (`policy.cast_to_param`). At its place of
use each weight of a matrix product is cast to the compute dtype. The sums that a 16-bit format would spoil stay in
float32: the residual stream, the norms, softmax and the loss. So do the sums of the backward pass over all the places
where a token or a position occurs, since both are widened before they are looked up. There are no biases but those
of the norms: the gradient of a bias is one more sum over all tokens.

Shapes: B sequences, T bytes each, C = width, H heads of size D = C / H.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

VOCABULARY = 256  # bytes
HEAD_SIZE = 32


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, width: int, compute_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.heads = width // HEAD_SIZE
        self.query_key_value = nnx.Linear(width, 3 * width, use_bias=False, dtype=compute_dtype, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, dtype=compute_dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C)
        """Mixes each position with those before it; the result has the compute dtype."""
        batch, length, width = x.shape
        joined = self.query_key_value(x).reshape(batch, length, 3, self.heads, HEAD_SIZE)
        query, key, value = joined[:, :, 0], joined[:, :, 1], joined[:, :, 2]  # (B, T, H, D)
        if query.dtype == jnp.float16 and jax.default_backend() == "cpu":
            # XLA on CPU refuses float16 products with float32 sums, which the next call asks for.
            query, key, value = (operand.astype(jnp.float32) for operand in (query, key, value))
        # Takes its products in the dtype of its operands, and its softmax in float32.
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)  # (B, T, H, D)
        return self.out(mixed.reshape(batch, length, width))  # (B, T, C)


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each after a norm and added to the residual stream."""

    def __init__(self, width: int, compute_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(width, dtype=jnp.float32, rngs=rngs)
        self.attention = Attention(width, compute_dtype, rngs)
        self.mlp_norm = nnx.LayerNorm(width, dtype=jnp.float32, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, use_bias=False, dtype=compute_dtype, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, use_bias=False, dtype=compute_dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, C) float32
        """The residual stream after this block."""
        # 16-bit results are widened by the sum: the residual stream stays float32.
        x = x + self.attention(self.attention_norm(x)).astype(jnp.float32)
        hidden = nnx.gelu(self.expand(self.mlp_norm(x)))  # (B, T, 4C)
        return x + self.contract(hidden).astype(jnp.float32)


class GPT(nnx.Module):
    """Logits of the next byte, for each byte of each sequence."""

    def __init__(self, *, width: int, depth: int, context: int, compute_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(0.02)
        self.token_embedding = nnx.Param(normal(rngs.params(), (VOCABULARY, width)))
        self.position_embedding = nnx.Param(normal(rngs.params(), (context, width)))
        self.blocks = nnx.List([Block(width, compute_dtype, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, dtype=jnp.float32, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, use_bias=False, dtype=compute_dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # (B, T) integers
        """The logits of each following byte."""
        x = self.token_embedding[...].astype(jnp.float32)[tokens]  # (B, T, C)
        x = x + self.position_embedding[...].astype(jnp.float32)[None, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, 256) in the compute dtype


def next_byte_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats a byte; a float32 scalar, whatever the dtype of the logits."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()
